"""A conversation in which every question fans out to workers and is synthesized from their caches.

The conversation is one growing branch, the root. A question is prefilled once behind it, as an open user turn; the workers fork
from there, and the synthesizer answers from their K/V. Then the root goes on with the answer as one plain assistant turn. Earlier
turns are never prefilled again. The answer is, once, with the base weights: the K/V that the synthesizer made for it
stands behind the merged workers, at other positions, and may come from adapted weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .chat import default_prompt, require_format
from .config import SamplingParams
from .errors import MinipsError, counted, in_one_line
from .reading import is_integer
from .results import Result, WorkerOutput
from .screen import Screen

if TYPE_CHECKING:  # torch is loaded by whoever brings an engine
    from .engine import Engine
    from .kv_cache import Branch
    from .synthesis import Synthesizer

PROMPT = "> "
HELP = """Each line is a question; it is answered by workers and a synthesizer, and the conversation goes on from there.
  /workers  what the workers said last
  /reset    a new conversation
  /help     these lines
  /exit     the end, as Ctrl-D; Ctrl-C stops an answer"""


@dataclass(frozen=True)
class ChatSettings:
    """How each question is answered.

    workers: how many. worker_prompts: what each is told besides the question, one a worker; empty: nothing. worker_params and
    params: sampling of the workers and of the answer. system: the conversation's system text, None for the model's own.
    """

    workers: int = 4
    worker_prompts: tuple[str, ...] = ()
    worker_params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.7, top_p=0.95, seed=0))
    params: SamplingParams = field(default_factory=lambda: SamplingParams(repetition_penalty=1.05))
    system: str | None = None

    def __post_init__(self) -> None:
        if not is_integer(self.workers) or self.workers < 1:
            raise MinipsError(f"ChatSettings: workers is {self.workers!r}, expected an integer of at least 1")
        if self.worker_prompts and len(self.worker_prompts) != self.workers:
            found = len(self.worker_prompts)
            raise MinipsError(f"ChatSettings: workers is {self.workers}, but there are {found} worker_prompts, expected one each or none")

    @property
    def prompts(self) -> list[str]:
        """One prompt a worker."""
        return list(self.worker_prompts) or [""] * self.workers


class Conversation:
    """The root and what belongs to it; a context manager, whose end returns all pages."""

    def __init__(self, engine: Engine, synthesizer: Synthesizer, settings: ChatSettings):
        require_format(engine.chat)
        self.engine, self.synthesizer, self.settings = engine, synthesizer, settings
        self.root: Branch | None = None  # ends in an assistant turn; None before the first question
        self.turns = 0
        self.workers: list[WorkerOutput] = []  # of the last question

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        spent, self.root, self.turns, self.workers = self.root, None, 0, []
        if spent is not None:
            spent.close()

    def ask(self, question: str, screen: Screen) -> Result:
        """Answer one question on the screen and let the conversation go on from there.

        An error or Ctrl-C leaves the conversation as it was before the question, with every other page given back.
        """
        if any(0xD800 <= ord(character) < 0xE000 for character in question):
            raise MinipsError(f"the question is not valid text: {ascii(question)[:60]}")
        engine = self.engine
        before = engine.counters["prefilled_tokens"]
        with ExitStack() as held:
            opened = held.enter_context(self._open(question))
            branches = engine.fork(opened, [*self.settings.prompts, ""])  # the last one is where the answer will stand
            for branch in branches:
                held.enter_context(branch)
            *workers, reply = branches
            prompt = default_prompt(question)
            limits = self._check_room(opened, workers, prompt)
            self._decode(workers, limits, screen)
            tokens = counted(sum(len(worker.output_ids) for worker in workers), "token")
            screen.start_answer(f"synthesizer: reading {tokens} from {counted(len(workers), 'cache')}")
            with self.synthesizer.stream_from_caches(workers, prompt, self.settings.params) as stream:
                for piece in stream:
                    screen.answer(piece)
            result = stream.result
            answer = engine.prompts.output(self._turn_text(result.text))
            prefilled = engine.counters["prefilled_tokens"] - before + len(answer)
            screen.end_answer(self._figures(result, prefilled))
            engine.encode([reply], [answer])
            root = reply.child()
        spent, self.root, self.turns = self.root, root, self.turns + 1
        if spent is not None:  # closed last: Ctrl-C takes effect at its end
            spent.close()
        return result

    def _open(self, question: str) -> Branch:
        """A branch that ends in an open user turn holding the question, for the workers to go on with."""
        engine = self.engine
        if self.root is None:
            return engine.prefill(question, system=self.settings.system)
        turn = engine.prompts.encode(question, "continuation")
        end = engine.prompts.encode("", "branch", open_turn=True)  # closes the turn and opens the assistant's
        assert turn[-len(end) :] == end
        (opened,) = engine.fork(self.root, [turn[: -len(end)]])
        opened.turn = "open"
        return opened

    def _check_room(self, opened: Branch, workers: list[Branch], prompt: str) -> list[int]:
        """Refuse before the first worker's token what cannot fit at its longest -> each worker's token limit."""
        engine, settings, options = self.engine, self.settings, self.synthesizer.options
        pages = engine.pool.pages_for
        for worker in workers:
            engine.check_positions(worker.next_position, 1, "a worker")
        limits = [engine.token_limit(worker.next_position, settings.worker_params) for worker in workers]
        u = len(engine.prompts.encode(prompt, "continuation"))
        start = opened.next_position + (sum(limits) if options.layout == "sequential" else max(limits))
        if not options.rerotate:
            start = max(worker.next_position + limit for worker, limit in zip(workers, limits))
        engine.check_positions(start, u + 1, "the conversation, the longest worker output and the synthesizer's prompt")
        needed = sum(map(pages, limits)) + pages(u) + pages(engine.token_limit(start + u, settings.params))
        engine.pool.require(needed, f"a turn of {counted(len(workers), 'worker')} and a synthesizer")
        return limits

    def _decode(self, workers: list[Branch], limits: list[int], screen: Screen) -> None:
        screen.start_workers([f"worker {index + 1}" for index in range(len(workers))], limits)
        self.engine.decode(workers, self.settings.worker_params, on_token=screen.worker_token)
        self.workers = [WorkerOutput.of(worker) for worker in workers]
        for index, worker in enumerate(self.workers):
            screen.worker_end(index, worker.finish_reason, len(worker.token_ids), worker.text)
        screen.end_workers()

    def _turn_text(self, text: str) -> str:
        """The answer as it stands in a conversation: without thoughts where the model's format drops those of earlier turns."""
        return (text.split("</think>")[-1] if self.engine.chat.drops_thinking else text).strip()

    def _figures(self, result: Result, prefilled: int) -> str:
        tokens, decode = len(result.token_ids), result.timings["decode"]
        rate = f", {(tokens - 1) / decode:.0f} tokens/s" if tokens > 1 and decode > 0 else ""
        figures = f"turn {self.turns + 1}: {counted(tokens, 'token')}{rate}, TTFT {result.ttft * 1000:.0f} ms"
        return f"{figures}, {prefilled} prefilled, {result.reused_tokens} from the cache"


def chat(engine: Engine, synthesizer: Synthesizer, settings: ChatSettings, screen: Screen, read: Callable[[str], str] | None = None) -> int:
    """Read questions and answer them until the end -> exit code 0 (/exit, Ctrl-D, end of stdin) or 130 (Ctrl-C at the prompt).

    read: called with the prompt, returns a line or raises EOFError, as `input` does; None reads stdin. A refused question gives
    one line, and the loop goes on. Ctrl-C stops an answer; the conversation then stands as before the question. Where stdin is no
    terminal, each of its lines is a question, Ctrl-C ends the loop, and the code is 1 if a question was refused. MinipsError if
    the model's chat format is unknown or stdin is closed.
    """
    present = read is not None or sys.stdin is not None and sys.stdin.isatty()  # a person
    read = read or stdin_reader()
    code = 0
    with Conversation(engine, synthesizer, settings) as conversation:
        if present:
            screen.note("Ask a question. /help lists the commands, Ctrl-D ends.")
        while True:
            try:
                line = read(PROMPT).strip()
            except (EOFError, KeyboardInterrupt) as end:
                if present:
                    screen.say("")  # the prompt's line has no end yet
                return 130 if isinstance(end, KeyboardInterrupt) else code
            if line == "/exit":
                return code
            if not line:
                continue
            if line.startswith("/") and line.split()[0][1:].isalpha():
                _command(line, conversation, screen)
                continue
            if not present:
                screen.note(PROMPT + line)
            try:
                conversation.ask(line, screen)
            except MinipsError as error:
                screen.stop()
                screen.say(f"minips: error: {error}" + (" (/reset starts a new conversation)" if conversation.root is not None else ""))
                code = code if present else 1
            except KeyboardInterrupt:
                screen.stop()
                if not present:
                    return 130
                screen.say("stopped; the conversation goes on as if this had not been asked")


def _command(line: str, conversation: Conversation, screen: Screen) -> None:
    if line == "/reset":
        conversation.reset()
        screen.note("a new conversation")
    elif line == "/workers":
        for index, worker in enumerate(conversation.workers):
            screen.say(f"worker {index + 1}: {counted(len(worker.token_ids), 'token')} ({worker.finish_reason})\n{worker.text.strip()}\n")
        if not conversation.workers:
            screen.say("no workers have written anything yet")
    elif line == "/help":
        screen.say(HELP)
    else:
        screen.say(f"{in_one_line(line)} is no command; /help lists them")


def stdin_reader() -> Callable[[str], str]:
    """How to read lines from stdin: with line editing and history at a terminal, without a prompt elsewhere."""
    if sys.stdin is None:
        raise MinipsError("stdin is closed; the chat loop reads its questions from there, one a line")
    if hasattr(sys.stdin, "reconfigure"):  # a byte that is no text must not end the loop
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        return lambda prompt: input()
    if sys.stdout is not None and sys.stdout.isatty():
        try:
            import readline  # noqa: F401  (its import gives `input` line editing and history)
        except ImportError:
            pass
        return input

    def read(prompt: str) -> str:
        print(prompt, end="", file=sys.stderr, flush=True)  # stdout holds the answers alone
        return input()

    return read
