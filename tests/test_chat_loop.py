"""The chat loop: turns build on each other's K/V, errors and Ctrl-C leave the conversation as it was, commands and exit codes."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest

from minips import MinipsError, SamplingParams, Synthesizer
from minips.chat import default_prompt
from minips.chat_loop import ChatSettings, Conversation, chat
from minips.kv_cache import Branch
from minips.screen import Screen

from .support import chat_engine

SHORT = ChatSettings(
    workers=3,
    worker_params=SamplingParams(max_tokens=9, temperature=1.0, seed=4),
    params=SamplingParams(max_tokens=8, ignore_eos=True),
    system="Be brief.",
)
QUESTIONS = ["hi, why?", "and user 2?", "so\u00e9 what"]


def silent():
    return Screen(io.StringIO(), io.StringIO())


def reader(lines):
    """What a person types; an exception is raised where one stands."""
    left = iter(lines)

    def read(prompt):
        line = next(left, EOFError)
        if isinstance(line, (BaseException, type)):
            raise line
        return line

    return read


def messages_of(questions, answers):
    turns = [("user", q, "assistant", a) for q, a in zip(questions, answers)]
    return [{"role": turn[i], "content": turn[i + 1]} for turn in turns for i in (0, 2)]


@pytest.mark.parametrize("kind", ["chatml", "llama3"])
@pytest.mark.parametrize("prompts", [(), ("Say it.", "", "Say it.")])
def test_the_root_is_the_conversation_as_messages(kind, prompts):
    engine = chat_engine(kind)
    settings = ChatSettings(3, prompts, SHORT.worker_params, SHORT.params, SHORT.system)
    answers = []
    with Conversation(engine, Synthesizer(engine), settings) as conversation:
        for count, question in enumerate(QUESTIONS, 1):
            answers.append(conversation.ask(question, silent()).text.strip())
            rendered = engine.prompts.encode(messages_of(QUESTIONS, answers), "prefix", system=SHORT.system)
            closing = engine.prompts.encode("", "branch", open_turn=True)
            assert rendered[: conversation.root.num_tokens] == conversation.root.token_ids
            assert 0 < len(rendered) - conversation.root.num_tokens < len(closing)  # only the answer's end is open
            assert conversation.turns == count and len(conversation.workers) == 3
            assert engine.check() and engine.stats()["open_branches"] == 1
    assert engine.stats()["used_pages"] == 0


def test_only_the_new_turn_is_prefilled():
    engine = chat_engine()
    with Conversation(engine, Synthesizer(engine), SHORT) as conversation:
        grown = []
        for question in QUESTIONS:
            before, had = engine.stats()["prefilled_tokens"], conversation.root.num_tokens if conversation.root else 0
            conversation.ask(question, silent())
            u = len(engine.prompts.encode(default_prompt(question), "continuation"))
            assert engine.stats()["prefilled_tokens"] - before == conversation.root.num_tokens - had + u  # each new token once, and u
            grown.append(conversation.root.num_tokens)
        assert grown[0] < grown[1] < grown[2]


def test_a_turn_answers_as_the_same_steps_on_a_fresh_prefill():
    engine = chat_engine()
    with Conversation(engine, Synthesizer(engine), SHORT) as conversation:
        first = conversation.ask(QUESTIONS[0], silent()).text.strip()
        found = conversation.ask(QUESTIONS[1], silent())
    with Conversation(engine, Synthesizer(engine), SHORT) as conversation:  # the same two turns, prefilled at once as messages
        ids = engine.prompts.encode(messages_of(QUESTIONS, [first]), "prefix", system=SHORT.system)
        end = engine.prompts.encode("", "branch", open_turn=True)[:2]  # the answer's end, which the next question writes
        assert ids[-2:] == end
        conversation.root = engine.prefill(ids[:-2])
        conversation.root.turn = "assistant"
        assert conversation.ask(QUESTIONS[1], silent()).token_ids == found.token_ids


def test_the_answer_is_streamed_and_the_figures_follow():
    engine, out, err = chat_engine(), io.StringIO(), io.StringIO()
    code = chat(engine, Synthesizer(engine), SHORT, Screen(out, err), reader(["hi", "  ", "why?", "/exit", "never"]))
    lines = err.getvalue().splitlines()
    assert code == 0 and out.getvalue().endswith("\n") and engine.check() and engine.stats()["used_pages"] == 0
    assert sum(line.startswith("  worker ") for line in lines) == 6 and sum(line.startswith("turn ") for line in lines) == 2
    with Conversation(engine, Synthesizer(engine), SHORT) as conversation:
        assert out.getvalue() == "".join(conversation.ask(question, silent()).text + "\n" for question in ("hi", "why?"))


def test_commands():
    engine, out, err = chat_engine(), io.StringIO(), io.StringIO()
    lines = ("/workers", "/help", "/nonsense", "hi", "/workers", "/reset", "/workers", "hi", "/usr/bin is what?")
    assert chat(engine, Synthesizer(engine), SHORT, Screen(out, err), reader(lines)) == 0
    told = err.getvalue()
    assert told.count("no workers have written") == 2 and "/reset    a new" in told and "/nonsense is no command" in told
    assert told.count("\nworker 1: ") == 1 and told.count("turn 1: ") == 2 and told.count("turn 2: ") == 1
    answers = out.getvalue()
    first = answers[: answers.index("\n", len(answers) // 4)]
    assert answers.count(first) >= 2  # after /reset the same question has the same answer


def test_ctrl_c_at_the_prompt_and_during_an_answer():
    engine, out, err = chat_engine(), io.StringIO(), io.StringIO()
    assert chat(engine, Synthesizer(engine), SHORT, Screen(out, err), reader(["hi", KeyboardInterrupt, "why?"])) == 130

    class Interrupting(Screen):
        where = None

        def worker_token(self, *token):
            super().worker_token(*token)
            self.interrupt("worker_token")

        def answer(self, piece):
            super().answer(piece)
            self.interrupt("answer")

        def end_answer(self, figures):
            super().end_answer(figures)
            self.interrupt("end_answer")

        def interrupt(self, where):
            if where == self.where:
                raise KeyboardInterrupt

    screen = Interrupting(out, err)
    with Conversation(engine, Synthesizer(engine), SHORT) as conversation:
        expected = [conversation.ask(question, silent()).text for question in ("hi", "why?")]
    before_and_after = []

    def person(where):
        yield "hi"
        for screen.where in (where, None):  # "break" is interrupted there
            before_and_after.append((engine.check(), engine.stats()["used_pages"], engine.stats()["open_branches"]))
            yield "break" if screen.where else "why?"

    for where in ("worker_token", "answer", "end_answer"):
        out.seek(0), out.truncate()
        before_and_after.clear()
        assert chat(engine, Synthesizer(engine), SHORT, screen, reader(person(where))) == 0
        assert before_and_after[0] == before_and_after[1] and before_and_after[0][2] == 1, where
        assert out.getvalue().startswith(expected[0]) and out.getvalue().endswith(expected[1] + "\n")
    assert err.getvalue().count("as if this had not been asked") == 3 and engine.stats()["used_pages"] == 0


@pytest.mark.parametrize("limits, message", [({"max_kv_tokens": 340}, "KV cache"), ({"max_position_embeddings": 330}, "the model's limit")])
def test_a_full_context_is_one_line_and_reset_helps(limits, message):
    engine, out, err = chat_engine(**limits), io.StringIO(), io.StringIO()
    after = []

    def person():
        while "minips: error" not in err.getvalue():
            yield "hi"
        after.append((engine.check(), engine.stats()["open_branches"]))
        yield from ("/reset", "hi")

    assert chat(engine, Synthesizer(engine), SHORT, Screen(out, err), reader(person())) == 0
    (line,) = [line for line in err.getvalue().splitlines() if "minips: error" in line]
    assert message in line and line.endswith("(/reset starts a new conversation)") and after == [(True, 1)]
    assert "a new conversation\n" in err.getvalue() and err.getvalue().rstrip().splitlines()[-1].startswith("turn 1: ")


@pytest.mark.parametrize("setting", [{"workers": 0}, {"workers": 2.5}, {"workers": 2, "worker_prompts": ("a",)}])
def test_bad_settings(setting):
    with pytest.raises(MinipsError, match="ChatSettings: workers is"):
        ChatSettings(**setting)


def test_a_model_without_a_chat_format_is_refused():
    engine = chat_engine()
    engine.chat = None
    with pytest.raises(MinipsError, match="chat format is unknown"):
        chat(engine, Synthesizer(engine), SHORT, silent(), reader(["hi"]))


def test_questions_on_stdin(monkeypatch):
    engine = chat_engine()
    for text, code, errors in ((b"hi\n\nwhy?", 0, 0), (b"bad \xff\xfe\nhi\n", 1, 1), (b"", 0, 0)):
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))
        assert chat(engine, Synthesizer(engine), SHORT, Screen(out, err)) == code
        assert err.getvalue().count("minips: error: the question is not valid text: 'bad \\udcff\\udcfe'\n") == errors
        assert err.getvalue().count("> hi\n") == text.count(b"hi") and "/help" not in err.getvalue()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(MinipsError, match="stdin is closed"):
        chat(engine, Synthesizer(engine), SHORT, silent())


def test_quiet_still_tells_errors_and_what_was_asked_for():
    engine, out, err = chat_engine(max_position_embeddings=96), io.StringIO(), io.StringIO()
    assert chat(engine, Synthesizer(engine), SHORT, Screen(out, err, quiet=True), reader(["x" * 200, "/nonsense"])) == 0
    assert err.getvalue().splitlines()[1:] == ["/nonsense is no command; /help lists them", ""] and "limit is 96" in err.getvalue()


LOOP = """
import sys
from tests.test_chat_loop import SHORT, chat_engine, chat
from minips import SamplingParams, Synthesizer
from minips.chat_loop import ChatSettings
from minips.screen import open_screen
engine = chat_engine()
endless = ChatSettings(2, (), SamplingParams(max_tokens=1500, temperature=1.0, seed=1, ignore_eos=True), SHORT.params)
with open_screen() as screen:
    code = chat(engine, Synthesizer(engine), endless, screen)
assert engine.check() and engine.stats()["used_pages"] == 0
sys.exit(code)
"""


def test_ctrl_c_at_a_terminal_returns_to_the_prompt():
    pty = pytest.importorskip("pty")
    parent, child = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP], stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True
    )
    os.close(child)
    seen = b""

    def wait_for(text, times=1):
        nonlocal seen
        end = time.time() + 60
        while seen.count(text) < times:
            assert time.time() < end, seen
            seen += os.read(parent, 4096)

    wait_for(b"> ")
    os.write(parent, b"hi\n")
    wait_for(b"writing")
    process.send_signal(signal.SIGINT)
    wait_for(b"had not been asked\r\n")
    wait_for(b"> ", 2)
    os.write(parent, b"\x04")
    assert process.wait(60) == 0 and b"Traceback" not in seen
    os.close(parent)


def test_ctrl_c_while_the_old_root_is_closed_leaves_a_conversation(monkeypatch):
    """It takes effect at the end of that close; the next question must find a root that is open."""
    engine = chat_engine()
    with Conversation(engine, Synthesizer(engine), SHORT) as conversation:
        conversation.ask(QUESTIONS[0], silent())
        old, plain = conversation.root, Branch.close

        def close(branch):
            plain(branch)
            if branch is old:
                raise KeyboardInterrupt

        monkeypatch.setattr(Branch, "close", close)
        with pytest.raises(KeyboardInterrupt):
            conversation.ask(QUESTIONS[1], silent())
        monkeypatch.undo()
        assert conversation.ask(QUESTIONS[2], silent()).token_ids and conversation.turns == 3
        assert engine.check() and engine.stats()["open_branches"] == 1
    assert engine.stats()["used_pages"] == 0
