"""The parts of bench/gpu_check.py: each takes the bench and gives its figures, and under `checks` what has to hold."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from decode import decode_branches, first_divergence
from measure import alternate, say, warm
from models import SHAPES, Ids, branch_context, mapper_of
from ttft import ONE, counts

from minips import Engine, MinipsError, SamplingParams, Synthesizer
from minips.adapter import Adapter
from minips.config import EngineConfig, MergeOptions, ModelConfig
from minips.cuda_graph import DecodeGraphs
from minips.errors import in_one_line
from minips.model import Model
from minips.quantize import quantize, weight_bytes
from minips.sampling import RowSampler
from minips.weights import expected_shapes

TINY = {
    **SHAPES["135m"], "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
EXACT = SamplingParams(max_tokens=24, ignore_eos=True)


@dataclass(frozen=True)
class Plan:
    """Sizes of all parts: of the model that is measured and of the one that is compared, tokens, rows."""

    shape: dict
    exact_shape: dict
    contexts: tuple[int, ...] = (512, 4096)
    rows: tuple[int, ...] = (1, 4, 8, 16, 32)
    tokens: int = 33
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    workers: tuple[int, ...] = (2, 8, 16, 32)
    prompt: int = 128
    repeats: int = 3
    compared: tuple[int, ...] = (*range(1, 10), 32)


SMALL = Plan(TINY, TINY, (16, 40), (1, 4, 32), 4, (16, 32), (2, 32), 8, 1, (1, 3, 9))


@dataclass
class Bench:
    """The device, what was asked for, and the engine of the measured size, which most parts share."""

    device: torch.device
    plan: Plan
    compile: bool
    ids: Ids
    copy_bytes: float = 0.0  # a second
    held: list[Engine] = field(default_factory=list)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def engine(self, shape: dict, dtype: torch.dtype, tokens: int, kind: str = "none", **settings) -> Engine:
        """Seeded random weights, all alike; graphs on CPU are steps that are called instead of captured."""
        config = ModelConfig.from_dict(shape, "gpu_check")
        generator = torch.Generator(self.device).manual_seed(0)
        tensors = {}
        for name, size in expected_shapes(config).items():
            tensor = torch.empty(size, dtype=dtype, device=self.device)
            tensors[name] = tensor.fill_(1) if name.endswith("norm.weight") else tensor.uniform_(-0.03, 0.03, generator=generator)
        model = Model.from_tensors(config, tensors)
        del tensors
        if kind != "none":
            quantize(model, kind)
        room = {} if "max_device_kv_bytes" in settings else {"max_kv_tokens": tokens}
        options = EngineConfig(str(self.device), page_size=64 if self.on_cuda else 4, **room, **settings)
        engine = Engine(model, config, settings=options, compile=self.compile and self.on_cuda)
        if not self.on_cuda:
            engine.graphs = DecodeGraphs(engine.pool, called, compile=self.compile)
        return engine

    def main(self) -> Engine:
        if not self.held:
            plan = self.plan
            longest = max(4 * max(plan.lengths), max(plan.workers) * min(plan.lengths), max(plan.rows) * min(plan.contexts))
            tokens = 2 * longest + 8 * max(plan.contexts) + 64 * 64 + 512
            self.held.append(self.engine(plan.shape, torch.bfloat16, tokens))
        return self.held[0]

    def settle(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


def called(step: Callable[[], torch.Tensor], inputs: object) -> tuple[Callable[[], None], torch.Tensor]:
    """In place of a capture, where there is no CUDA: a replay calls the step."""
    result = step()
    return lambda: result.copy_(step()), result


@contextmanager
def eager(engine: Engine) -> Iterator[None]:
    kept, engine.graphs = engine.graphs, None
    try:
        yield
    finally:
        engine.graphs = kept


def decoded(engine: Engine, rows: Sequence[list[int]], params: object) -> list[list[int]]:
    """The ids of workers with these prompts behind one prefix."""
    with engine.prefill([1, 2, 3, 4, 5, 6, 7, 8]) as prefix:
        branches = engine.fork(prefix, rows)
    try:
        return [list(branch.output_ids) for branch in engine.decode(branches, params)]
    finally:
        for branch in branches:
            branch.close()


def agreement(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> float:
    """Share of tokens before each row's first difference."""
    return sum(first_divergence(ours, theirs)) / max(1, sum(map(len, theirs)))


# The parts


def bandwidth(bench: Bench) -> dict:
    size = 1 << (31 if bench.on_cuda else 22)
    source = torch.ones(size // 4, dtype=torch.float32, device=bench.device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(8):
        bench.settle()
        started = time.perf_counter()
        target.copy_(source)
        bench.settle()
        best = min(best, time.perf_counter() - started)
    bench.copy_bytes = 2 * size / best  # read and written
    return {"copy_gb_s": bench.copy_bytes / 1e9}


def equality(bench: Bench) -> dict:
    """fp32 tokens of few and many rows, greedy and sampled, of different lengths; after a merge; bf16 by share.

    So are rows with top_p: they pick by rank, and among 49,152 nearly equal tokens neighbours change ranks with the last digit of a logit.
    """
    plan, checks, shares, ranked = bench.plan, {}, {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = bench.engine(plan.exact_shape, dtype, 20_000)
        for count in plan.compared:
            rows = [bench.ids(3 + 5 * at) for at in range(count)]
            params = [
                replace(EXACT, max_tokens=8 + at % 17, temperature=(0.0, 1.0)[at % 2], top_p=(1.0, 0.9)[at // 2 % 2], seed=at)
                for at in range(count)
            ]
            before = engine.graphs.eager_steps
            ours = decoded(engine, rows, params)
            with eager(engine):
                theirs = decoded(engine, rows, params)
            if dtype == torch.float32:
                exact, picked = ([at for at in range(count) if (params[at].top_p == 1) is plain] for plain in (True, False))
                checks[f"{count} rows"] = [ours[at] for at in exact] == [theirs[at] for at in exact] and engine.graphs.eager_steps == before
                if picked:
                    ranked[str(count)] = agreement([ours[at] for at in picked], [theirs[at] for at in picked])
            else:
                shares[str(count)] = agreement(ours, theirs)
        if dtype == torch.float32:
            rows = [bench.ids(20 + at) for at in range(4)]
            answers = [answer_of_merged(bench, engine, rows, graphs) for graphs in (True, False)]
            checks["after a merge"] = answers[0] == answers[1]
    return {"checks": checks, "bf16_share": shares, "top_p_share": ranked}


def answer_of_merged(bench: Bench, engine: Engine, rows: Sequence[list[int]], graphs: bool) -> list[int]:
    with nullcontext() if graphs else eager(engine):
        with engine.prefill([9] * 20) as prefix:
            branches = engine.decode(engine.fork(prefix, rows), EXACT)
        return synthesizer_of(bench, engine).generate_from_caches(branches, [5, 4, 3], EXACT).token_ids


def synthesizer_of(bench: Bench, engine: Engine) -> Synthesizer:
    mapper = mapper_of(engine.config, "low_rank").to(bench.device)
    return Synthesizer(engine, Adapter("gpu_check", mapper, None, MergeOptions()))


def captures(bench: Bench) -> dict:
    """One capture for each bucket; none for more lengths, and no more memory; no wait for the device inside a step."""
    engine = bench.main()
    graphs, first = engine.graphs, engine.graphs.captures
    started = time.perf_counter()
    for count in bench.plan.rows:
        decoded(engine, [bench.ids(4) for _ in range(count)], EXACT)
    bench.settle()
    seconds, made = time.perf_counter() - started, graphs.captures - first
    decoded(engine, [bench.ids(50) for _ in range(4)], replace(EXACT, max_tokens=4))  # a capture gives back what prefills had reserved
    memory = torch.cuda.memory_reserved(bench.device) if bench.on_cuda else 0
    for length in range(1, 51):
        decoded(engine, [bench.ids(length) for _ in range(4)], replace(EXACT, max_tokens=4))
    grown = torch.cuda.memory_reserved(bench.device) - memory if bench.on_cuda else 0
    checks = {
        "one capture a bucket": made == len(bench.plan.rows),
        "none for 50 lengths": graphs.captures - first == made,
        "no memory for 50 lengths": grown <= 1 << 26,
        "no wait inside a step": steps_watched(bench, engine),
    }
    return {"checks": checks, "captures": made, "seconds": seconds, "grown_bytes": grown}


def steps_watched(bench: Bench, engine: Engine) -> bool:
    """Two steps with sampling while torch raises at every call that waits for the device."""
    sampler = RowSampler(replace(EXACT, temperature=1.0, top_p=0.9), None, [], engine.config.vocab_size, engine.valid_vocab)
    with engine.prefill(bench.ids(21)) as branch:
        slots = engine.pool.slots(branch.segments[0].pages, engine.pool.page_size * len(branch.segments[0].pages))
        logits = branch.next_logits[None]
        for watched in ("default", "error"):  # the first round captures
            if bench.on_cuda:
                torch.cuda.set_sync_debug_mode(watched)
            try:
                for length in (22, 23):  # into the rest of the prompt's last page
                    tokens = engine.graphs.choose(logits, [sampler]).tokens
                    logits = engine.graphs.step(engine.model, tokens, [length - 1], [length], [slots])
            finally:
                if bench.on_cuda:
                    torch.cuda.set_sync_debug_mode("default")
    return bool(torch.isfinite(logits).all())


def decode(bench: Bench) -> dict:
    """Milliseconds a step, graphs against eager in turns, and the bytes that a step must read over the card's bandwidth."""
    plan = bench.plan
    most = max(plan.rows) * min(plan.contexts)
    shapes = [(m, context) for context in plan.contexts for m in plan.rows if m * context <= most]
    return {"cases": [step_case(bench, bench.main(), *shape) for shape in shapes]}


def step_bytes(engine: Engine, m: int, attended: float) -> float:
    """Bytes that a step must read: all weights but the embedding where the head has a form of its own, and the attended K/V."""
    embedding, head = engine.model.model.embed_tokens.weight, engine.model.head
    tied = engine.config.tie_word_embeddings and head is None
    return weight_bytes(engine.model) - (0 if tied else embedding.nbytes) + m * attended * engine.kv_bytes_per_token


def step_case(bench: Bench, engine: Engine, m: int, context: int, both: bool = True) -> dict:
    plan = bench.plan

    def once(graphs: bool) -> dict[str, float]:
        with nullcontext() if graphs else eager(engine):
            branches = [engine.prefill(bench.ids(context)) for _ in range(m)]
            bench.settle()
            figures, _ = decode_branches(engine, branches, plan.tokens)
        return {"step": figures["decode"] / (plan.tokens - 1)}

    calls = {"graphs": lambda _: once(True), **({"eager": lambda _: once(False)} if both else {})}
    found = {name: warm(kept, "step") for name, kept in alternate(calls, plan.repeats, 20).items()}
    read = step_bytes(engine, m, context + plan.tokens / 2)
    reached = read / found["graphs"]["median"]
    say(f"  m = {m}, {context} tokens: {found['graphs']['median'] * 1000:.2f} ms a step, {reached / 1e9:.0f} GB/s")
    return {"m": m, "context": context, "bytes": read, "steps": found, "gb_s": reached / 1e9, "share": reached / bench.copy_bytes}


def ttft(bench: Bench) -> dict:
    plan, engine = bench.plan, bench.main()
    synthesizer = synthesizer_of(bench, engine)
    shapes = [(4, length) for length in plan.lengths] + [(m, min(plan.lengths)) for m in plan.workers]
    return {"cases": [ttft_case(bench, engine, synthesizer, m, length) for m, length in shapes]}


def ttft_case(bench: Bench, engine: Engine, synthesizer: Synthesizer, m: int, length: int) -> dict:
    u = bench.plan.prompt

    def parallel(_: int) -> dict[str, float]:
        with engine.prefill(bench.ids(16)) as root:
            branches = engine.fork(root, [bench.ids(branch_context(j)) for j in range(m)])
        engine.encode(branches, [bench.ids(length) for _ in range(m)])
        bench.settle()
        result = synthesizer.generate_from_caches(branches, bench.ids(u), ONE)
        return {"ttft": result.ttft, **{name: result.timings[name] for name in ("rerotate", "map", "prefill", "first_token")}}

    def text(_: int) -> dict[str, float]:
        ids = bench.ids(16 + m * length + u)
        bench.settle()
        return {"ttft": engine.generate(ids, ONE).ttft}

    calls = {"parallel": parallel}
    if 16 + m * length + u < engine.config.max_position_embeddings:
        calls["text"] = text
    found = {name: warm(kept, "ttft") for name, kept in alternate(calls, bench.plan.repeats, 20).items()}
    said = ", ".join(f"{name} {values['median'] * 1000:.1f} ms" for name, values in found.items())
    say(f"  m = {m}, {length} tokens a branch: {said}")
    return {"m": m, "length": length, "u": u, "limit": counts(engine, m, length, u)["limit"], "ttft": found}


def forms(bench: Bench) -> dict:
    """Weights of 8 and 4 bits, pages of 8 bits: a step's time, and the share of tokens that are those of bf16."""
    plan, cases = bench.plan, []
    context, rows = min(plan.contexts), [bench.ids(24) for _ in range(4)]
    expected, found = None, {}
    settings = {"bf16": {}, "int8 weights": {"kind": "int8"}, "int4 weights": {"kind": "int4"}}
    settings |= {"int8 pages": {"kv_dtype": "int8"}, "fp8 pages": {"kv_dtype": "fp8"}}
    for name, own in settings.items():
        release(bench)
        try:
            engine = bench.engine(plan.shape, torch.bfloat16, 8 * (context + 256), **own)
            ours = decoded(engine, rows, EXACT)
            with eager(engine):
                theirs = decoded(engine, rows, EXACT)
            expected = expected or ours
            found[name] = {"graph_eager": agreement(ours, theirs), "as_bf16": agreement(ours, expected)}
            cases += [{"form": name, **step_case(bench, engine, m, context, both=False)} for m in (1, 4)]
            del engine
        except (MinipsError, RuntimeError, NotImplementedError) as error:
            found[name] = {"refused": in_one_line(error)}
            say(f"  {name}: {in_one_line(error)}")
    return {"forms": found, "cases": cases}


def offload(bench: Bench) -> dict:
    """A cache that holds a third of the branches: the same tokens, parked in pinned memory and brought back."""
    plan = bench.plan
    context, rows = min(plan.contexts), [bench.ids(min(plan.contexts)) for _ in range(6)]
    wide = bench.engine(plan.exact_shape, torch.float32, 8 * (context + 256))
    room = 3 * (context + 2 * wide.pool.page_size) * wide.kv_bytes_per_token
    tight = bench.engine(plan.exact_shape, torch.float32, 0, max_device_kv_bytes=room)
    outputs, seconds, parked = [], {}, 0
    for name, engine in (("all on the device", wide), ("a part of them", tight)):
        branches = [engine.prefill(row) for row in rows]
        parked = max(parked, engine.stats()["parked_pages"])
        bench.settle()
        started = time.perf_counter()
        for branch in branches:
            engine.decode([branch], replace(EXACT, max_tokens=4))
        seconds[name] = time.perf_counter() - started
        outputs.append([list(branch.output_ids) for branch in branches])
    moved = parked * tight.pool.page_size * tight.kv_bytes_per_token
    pinned = all(part.is_pinned() for branch in branches for s in branch.segments if s.host is not None for part in s.host)
    checks = {"the same tokens": outputs[0] == outputs[1], "something was parked": parked > 0, "books": tight.check()}
    if bench.on_cuda:
        checks["in pinned memory"] = pinned
    return {"checks": checks, "seconds": seconds, "parked_bytes": moved}


def release(bench: Bench) -> None:
    bench.held.clear()
    gc.collect()
    if bench.on_cuda:
        torch.cuda.empty_cache()


PARTS = (bandwidth, equality, captures, decode, ttft, offload, forms)
