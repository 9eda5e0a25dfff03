"""Branches in awkward hands: callbacks that meddle, failures half-way, wrong types, and the chat state of forks."""

import pytest

from minips import Engine, MinipsError, SamplingParams, Synthesizer
from minips.chat import detect_format
from minips.kv_cache import KVPool
from tests.support import OUTS, OWNS, PREFIX, U, branches_of, random_tensors, tiny_config, tiny_engine
from tests.toy_tokenizers import toy_tokenizer

GREEDY = SamplingParams(max_tokens=6)


def test_a_callback_cannot_change_what_is_being_decoded():
    engine = tiny_engine()
    branches = engine.fork(engine.prefill(PREFIX), OWNS[:2])
    for meddle, message in [
        (lambda *_: branches[1].close(), "cannot be closed while it is being decoded"),
        (lambda *_: engine.extend([branches[1]], [[7, 8]]), "branch 1|branch 0 is being decoded"),
        (lambda *_: engine.close(), "a stream is open or a batch is being decoded"),
        (lambda *_: Synthesizer(engine).merge(branches), "is being decoded just now"),
    ]:
        with pytest.raises(MinipsError, match=message):
            engine.decode(branches, GREEDY, on_token=meddle)
        assert engine.check() and [b.num_cached for b in branches] == [15, 12]
    assert engine.decode(branches, GREEDY)[0].output_ids


def test_check_holds_in_the_middle_of_things():
    engine = tiny_engine()
    branch = engine.prefill(PREFIX)
    engine.decode([branch], GREEDY, on_token=lambda *_: engine.check())
    stream = engine.stream(PREFIX, GREEDY)
    while True:
        try:
            next(stream)
        except StopIteration:
            break
        assert engine.check()
    assert engine.check()


@pytest.mark.parametrize("call", ["merge", "fork", "decode", "extend", "generate"])
def test_a_failure_at_any_allocation_gives_every_page_back(monkeypatch, call):  # FAULTS 45, 46
    plain = KVPool.slots
    for failing in range(1, 12):
        engine = tiny_engine()
        branches = branches_of(engine)
        used = engine.stats()["used_pages"]
        calls = []

        def slots(self, pages, length):
            calls.append(1)
            if len(calls) == failing:
                raise RuntimeError("out of memory")
            return plain(self, pages, length)

        monkeypatch.setattr(KVPool, "slots", slots)
        try:
            {
                "merge": lambda: Synthesizer(engine).merge(branches, consume=False).close(),
                "fork": lambda: [b.close() for b in engine.fork(branches[0], [[1], [2]])],
                "decode": lambda: engine.decode(branches, GREEDY),
                "extend": lambda: engine.extend(branches, [[1], [2], [3]]),
                "generate": lambda: engine.generate(PREFIX, GREEDY),
            }[call]()
        except (RuntimeError, MinipsError):
            assert engine.stats()["used_pages"] == used
        monkeypatch.setattr(KVPool, "slots", plain)
        assert engine.check()
        engine.close()
        assert engine.stats()["used_pages"] == 0


def test_wrong_types_are_refused_not_stumbled_over():
    engine = tiny_engine()
    branches = branches_of(engine)
    synthesizer = Synthesizer(engine)
    for call in (
        lambda: engine.decode(branches, [None] * 3),
        lambda: engine.decode(branches, [{}] * 3),
        lambda: engine.decode(branches, 5),
        lambda: engine.decode(None),
        lambda: engine.generate([1, 2], {"max_tokens": 2}),
        lambda: synthesizer.merge(None),
        lambda: Synthesizer(engine, options="x"),
        lambda: synthesizer.run([1], None, [4]),
        lambda: synthesizer.run([1], 5, [4]),
        lambda: synthesizer.generate(context="x", prompt=[1]),
        lambda: synthesizer.generate_from_caches(branches, U, {"max_tokens": 1}, consume=False),
        lambda: SamplingParams(stop=5),
        lambda: SamplingParams(stop_token_ids="ab"),
        lambda: engine.prefill([1], system="x"),
    ):
        with pytest.raises(MinipsError):
            call()
        assert engine.check()


def test_encode_clears_what_the_last_decode_left():
    engine = tiny_engine()
    branch = engine.decode([engine.prefill(PREFIX)], SamplingParams(max_tokens=3, logprobs=1, return_logits=True))[0]
    assert len(branch.logprobs) == 3 and branch.logits.shape[1] == 97
    engine.encode([branch], [OUTS[0]])
    assert branch.logprobs is None and branch.logits is None and branch.output_ids == OUTS[0]


def test_positions_are_checked_before_the_work():
    engine = tiny_engine(tiny_config(max_position_embeddings=64))
    with pytest.raises(MinipsError, match="the longest worker output and the synthesizer's prompt needs 68 positions"):
        Synthesizer(engine).run([1] * 10, [[2], [3]], [4] * 4, worker_params=SamplingParams(max_tokens=100))
    assert engine.counters["prefilled_tokens"] == 0


def test_two_requests_that_do_not_fit_together_are_not_started():  # FAULTS 41: nothing is over-committed or preempted
    engine = tiny_engine(page_size=16, max_kv_tokens=7 * 16)
    branches = [engine.prefill(list(range(34))), engine.prefill(list(range(1, 35)))]
    with pytest.raises(MinipsError, match="decoding 2 workers needs 6 pages of 16 tokens, 1 of 7 are free"):
        engine.decode(branches, SamplingParams(max_tokens=35))
    branches[1].close()
    assert len(engine.decode(branches[:1], SamplingParams(max_tokens=35))[0].output_ids) == 35


def test_debug_names_the_first_broken_layer():  # FAULTS 66
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = float("nan")
    engine = tiny_engine(config, tensors=tensors)
    with pytest.raises(MinipsError, match="row 0, step 0: the logits are not finite"):
        engine.decode([engine.prefill([1, 2])], GREEDY)
    engine.model.debug = True
    with pytest.raises(MinipsError, match="layer 1: the hidden states are not finite"):
        engine.prefill([1, 2])
    assert engine.check()


# Chat state: with a tokenizer, every fork is one well-formed conversation


@pytest.fixture
def chat_engine():
    config = tiny_config(vocab_size=300, max_position_embeddings=1024)
    base, tokenizer = tiny_engine(config, max_kv_tokens=4000), toy_tokenizer()
    return Engine(base.model, config, tokenizer=tokenizer, chat=detect_format(None, tokenizer), settings=base.settings)


def rendered(branch):
    return branch.owner.tokenizer.decode(branch.token_ids, skip_special=False)


OPEN = "<|im_start|>user\n"
CLOSE = "<|im_end|>\n<|im_start|>assistant\n"


def test_forks_of_every_state_are_well_formed(chat_engine):
    engine = chat_engine
    root = engine.prefill("T")
    assert rendered(root) == OPEN + "T"
    first = engine.fork(root, ["B", ""])
    assert [rendered(b) for b in first] == [OPEN + "T\n\nB" + CLOSE, OPEN + "T" + CLOSE]
    worker = engine.encode([first[0]], ["zz"])[0]
    nexts = engine.fork(worker, ["C", ""])
    assert rendered(nexts[0]) == OPEN + "T\n\nB" + CLOSE + "zz<|im_end|>\n" + OPEN + "C" + CLOSE
    assert rendered(nexts[1]) == OPEN + "T\n\nB" + CLOSE + "zz"
    assert rendered(engine.fork(first[1], [""])[0]) == OPEN + "T" + CLOSE
    assert rendered(engine.extend([worker], ["D"])[0]) == OPEN + "T\n\nB" + CLOSE + "zz<|im_end|>\n" + OPEN + "D" + CLOSE
    assert rendered(engine.fork(engine.prefill(""), ["B"])[0]) == OPEN + "B" + CLOSE
    messages = engine.prefill([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}])
    assert rendered(engine.fork(messages, ["B"])[0]) == OPEN + "Q<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n" + OPEN + "B" + CLOSE


def test_a_root_decoded_itself_is_a_worker(chat_engine):
    for make in (lambda e, b: e.encode([b], ["zz"]), lambda e, b: e.decode([b], SamplingParams(max_tokens=2, ignore_eos=True))):
        root = chat_engine.prefill("T")
        make(chat_engine, root)
        assert rendered(chat_engine.fork(root, ["C"])[0]) == OPEN + "T" + root.text + "<|im_end|>\n" + OPEN + "C" + CLOSE


def test_raw_prompts_stay_raw(chat_engine):
    root = chat_engine.prefill("one two", raw=True)
    branch = chat_engine.fork(root, [" three"])[0]
    assert rendered(branch) == "one two three"
    chat_engine.encode([branch], [" four"])
    encode = chat_engine.tokenizer.encode
    with Synthesizer(chat_engine).merge([branch]) as context:
        assert context.token_ids == encode("one two") + encode(" four")


def test_stop_strings_cut_text_tokens_and_cache(chat_engine):  # FAULTS 25, 26; CONTRACT.md section 4
    engine = chat_engine
    free = engine.decode([engine.prefill("T")], SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3))[0]
    text = free.text
    stop = next(text[i : i + 2] for i in range(4, len(text) - 1) if text.index(text[i : i + 2]) == i and "\ufffd" not in text[i : i + 2])
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3, stop=stop)
    seen = []
    branch = engine.decode([engine.prefill("T")], params, on_token=lambda row, token, piece: seen.append(piece))[0]
    assert branch.text == text[: text.index(stop)] == "".join(seen) and branch.finish_reason == "stop"
    assert branch.output_ids == free.output_ids[: len(branch.output_ids)]
    assert branch.text.startswith(engine.tokenizer.decode(branch.output_ids))
    assert branch.num_cached == branch.num_tokens == len(engine.prompts.encode("T", "prefix")) + len(branch.output_ids)
    assert branch.next_logits is None  # recomputed when it goes on
    assert engine.extend([branch], ["more"])[0].next_logits is not None and engine.check()
    result = engine.generate("T", params)
    assert stop not in result.text


def test_caches_carry_the_generated_ids_not_their_text(chat_engine):  # FAULTS 88
    newline = chat_engine.tokenizer.encode("a\n")[-1:]
    ids = newline * 2
    text = chat_engine.tokenizer.decode(ids)
    assert chat_engine.tokenizer.encode(text) != ids  # the text alone would become one other token
    branch = chat_engine.encode(chat_engine.fork(chat_engine.prefill("T"), ["B"]), [ids])[0]
    assert branch.output_ids == ids and branch.text == text and branch.segments[-1].length == 2
    with Synthesizer(chat_engine).merge([branch]) as context:
        assert context.token_ids[-2:] == ids and context.branch_tokens == [2]
