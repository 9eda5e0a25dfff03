"""Running out of memory, of pages or of positions: one line, nothing changed, and the next request works. FAULTS 36, 40, 45 to 47."""

import gc
import itertools
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

from minips import MinipsError, SamplingParams, Synthesizer
from minips.config import MergeOptions
from minips.errors import RoomError
from tests.support import OUTS, OWNS, PREFIX, U, branches_of, chat_engine, prompt_ids, tiny_config, tiny_engine

PARAMS = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
ANSWER = SamplingParams(max_tokens=6)
ERRORS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.\nSee the manual."),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    "python": MemoryError(),
}


class Layer:
    """Makes the last layer's MLP fail at a given forward pass, as a device without memory does."""

    def __init__(self, engine, error):
        self.mlp, self.error, self.passes, self.failing, self.held = engine.model.model.layers[-1].mlp, error, 0, None, None
        self.plain, self.mlp.forward = self.mlp.forward, self

    def __call__(self, x):
        self.passes += 1
        if self.failing is not None and self.passes >= self.failing:
            activation = torch.zeros(1000)
            self.held = weakref.ref(activation)
            raise self.error
        return self.plain(x)

    def fail_at(self, number):
        self.passes, self.failing = 0, number


def calls(engine, synthesizer, root, branches):
    """Every call that computes -> what it comes to."""

    def context_answer():
        with synthesizer.merge(branches, consume=False) as context:
            return synthesizer.generate(context=context, prompt=U, params=ANSWER).token_ids

    def closed(made):
        found = [branch.output_ids for branch in made]
        for branch in made:
            branch.close()
        return found

    ids = prompt_ids(9, 4)
    return {
        "prefill": lambda: closed([engine.prefill(ids)]),
        "fork": lambda: closed(engine.fork(root, OWNS)),
        "encode": lambda: closed(engine.encode(engine.fork(root, OWNS[:1]), OUTS[:1])),
        "decode": lambda: closed(engine.decode(engine.fork(root, OWNS), PARAMS)),
        "generate": lambda: engine.generate(ids, ANSWER).token_ids,
        "generate_batch": lambda: [r.token_ids for r in engine.generate_batch([ids, PREFIX], ANSWER, targets=[[1, 2], [3, 4]])],
        "score": lambda: engine.score(ids, [5, 6, 7]).greedy,
        "merge and ask": context_answer,
        "text": lambda: synthesizer.generate(text=ids, params=ANSWER).token_ids,
        "run": lambda: synthesizer.run(PREFIX, OWNS, U, worker_params=PARAMS, params=ANSWER).token_ids,
    }


@pytest.mark.parametrize("kind", ERRORS)
def test_out_of_memory_in_any_forward_pass_ends_that_request_alone(kind):
    engine = tiny_engine()
    synthesizer = Synthesizer(engine)
    root, branches = engine.prefill(PREFIX), branches_of(engine)
    layer, before = Layer(engine, ERRORS[kind]), None
    for name, call in calls(engine, synthesizer, root, branches).items():
        gc.collect()
        layer.fail_at(None)
        expected, passes = call(), layer.passes
        before = engine.stats()["used_pages"]
        for failing in {1, passes}:
            layer.fail_at(failing)
            with pytest.raises(MinipsError, match=r"computing \d+ tokens of \d+ sequences? behind \d+ cached .*out of memory") as caught:
                call()
            assert "\n" not in str(caught.value) and ("2.00 GiB" in str(caught.value)) == (kind == "torch"), name
            assert layer.held() is None, f"{name}: the error keeps the tensors of the failed pass"
            del caught  # its frames hold the branches that the call was made with
            assert engine.stats()["used_pages"] == before and engine.check(), name
            layer.fail_at(None)
            assert call() == expected, name
    assert not any(branch.busy or branch.closed for branch in (root, *branches))


def test_out_of_memory_outside_a_forward_pass_is_one_line_too(monkeypatch):
    engine = tiny_engine()
    branches = branches_of(engine)
    plain = torch.stack

    def broken(*arguments, **named):
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch, "stack", broken)
    with pytest.raises(MinipsError, match=r"^decode: out of memory \(CUDA error: out of memory\)"):
        engine.decode(branches, PARAMS)
    monkeypatch.setattr(torch, "stack", plain)
    assert engine.check() and engine.decode(branches, PARAMS)[0].output_ids


def test_other_errors_of_a_layer_are_not_renamed():
    engine = tiny_engine()
    layer = Layer(engine, RuntimeError("device lost"))
    layer.fail_at(1)
    with pytest.raises(RuntimeError, match="^device lost$"):
        engine.generate(PREFIX, ANSWER)
    layer.fail_at(None)
    assert engine.generate(PREFIX, ANSWER).token_ids and engine.check() and engine.stats()["used_pages"] == 0


# Positions


def every_merge():
    """Every legal combination of the options that decide positions."""
    values = {
        "profile": ("minips", "official"), "keep_prefix": (True, False), "anchor": ("fork", "zero", "free"),
        "layout": ("parallel", "sequential"), "keep_turns": ("final", "outputs", "compact", "all", "full"), "rerotate": (True, False),
    }  # fmt: skip
    for chosen in itertools.product(*values.values()):
        options = dict(zip(values, chosen))
        try:
            yield MergeOptions(**options)
        except MinipsError:
            continue


def positions_used(engine, work):
    """The highest position that a forward pass computes in `work()`."""
    highest, plain = [-1], engine.model.forward

    def forward(ids, positions, *rest):
        highest.append(int(positions.max()))
        return plain(ids, positions, *rest)

    engine.model.forward = forward
    try:
        work()
    finally:
        del engine.model.forward
    return max(highest)


def trajectories(engine):
    """Workers of two turns and of one, one of which stopped at a token."""
    with engine.prefill(PREFIX) as root:
        branches = engine.encode(engine.fork(root, OWNS), OUTS)
    engine.decode(engine.extend(branches[:2], [prompt_ids(3, 7), prompt_ids(6, 8)]), SamplingParams(max_tokens=5))
    return branches


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_layout_keeps_to_the_models_positions():
    """With a limit of exactly what a merge and its answer need it goes through and uses the last position; with one less it is cut."""
    engine, tried = tiny_engine(max_kv_tokens=2000), 0
    branches, roomy = trajectories(engine), engine.config
    for options in every_merge():
        engine.config = roomy
        synthesizer = Synthesizer(engine, options=options)
        with synthesizer.merge(branches, consume=False) as context:
            end = context.branch.next_position
            assert end >= max(segment.start + segment.length for segment in context.branch.segments), options
        for room in (4, 3):
            limit = end + len(U) + room
            engine.config = replace(roomy, max_position_embeddings=limit)
            with synthesizer.merge(branches, consume=False) as context:
                room = limit - context.branch.next_position - len(U)  # a free anchor goes by the limit
                answers = []
                ask = partial(synthesizer.generate, context=context, prompt=U, params=SamplingParams(max_tokens=room + 9))
                highest = positions_used(engine, lambda made=answers, ask=ask: made.append(ask()))
                assert (len(answers[0].token_ids), answers[0].finish_reason) == (room, "length"), options
                assert highest <= limit - 1, options
                with pytest.raises(RoomError, match=f"positions, the model's limit is {limit}"):
                    synthesizer.generate(context=context, prompt=prompt_ids(room + len(U) + 1), params=ANSWER)
        engine.config = replace(roomy, max_position_embeddings=end - 1)
        if options.anchor != "free" and options.keep_turns != "full":
            with pytest.raises(RoomError, match=f"the merged branches end at position {end}, the model's limit is {end - 1}"):
                synthesizer.merge(branches, consume=False)
        tried += 1
        assert engine.check() and engine.stats()["open_branches"] == len(branches)
    assert tried > 60


def test_the_limit_ends_workers_and_answers_with_length():
    engine = tiny_engine(tiny_config(max_position_embeddings=40))
    branches = engine.fork(engine.prefill(PREFIX), [prompt_ids(5, 1), prompt_ids(25, 2), prompt_ids(30, 3)])
    highest = positions_used(engine, lambda: engine.decode(branches, SamplingParams(max_tokens=100)))
    assert [len(branch.output_ids) for branch in branches] == [25, 5, 0] and highest == 39
    assert {branch.finish_reason for branch in branches} == {"length"} and all(branch.next_position == 40 for branch in branches)
    results = engine.generate_batch([prompt_ids(38), prompt_ids(40)], SamplingParams(max_tokens=9))
    assert [(len(result.token_ids), result.finish_reason) for result in results] == [(2, "length"), (0, "length")]
    with pytest.raises(RoomError, match="41 positions, the model's limit is 40"):
        engine.generate_batch([prompt_ids(3), prompt_ids(41)], ANSWER)
    stream = chat_engine(max_position_embeddings=64).stream(prompt_ids(60), SamplingParams(max_tokens=50))
    assert len(list(stream)) <= 4 and stream.result.finish_reason in ("length", "stop")
    assert engine.check()
