"""Runs a completed workflow: loads its model, takes its workers through their turns in batches, and answers by its method."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .chat import SUMMARY_PROMPT, text_prompt
from .compiled import CompiledSteps
from .compiling import heard_by
from .config import SamplingParams
from .engine import Engine
from .errors import MinipsError, counted
from .kv_cache import Branch
from .results import TIMING_KEYS, Result, TextStream, WorkerOutput
from .screen import Screen
from .synthesis import Synthesizer
from .weights import number_of_parameters
from .workflow import FORCED_MERGE, TEXT_METHODS, Worker, workers_of

HEADING_TOKENS = 16  # at most, of a "## Finding 12" and the blank lines around it


@dataclass
class Span:
    """One turn of a worker when it is done: what it wrote and how (params None: it was given)."""

    output: WorkerOutput
    params: SamplingParams | None
    mean_logprob: float | None = None  # a token, of method best-of-n


@dataclass
class Outcome:
    """What a run came to. spans: per worker its turns. seconds: by part of the run. counters: the engine's, of this run alone."""

    result: Result
    workers: list[Worker]
    spans: list[list[Span]]
    seconds: dict[str, float]
    counters: dict[str, int]


def load(data: dict, screen: Screen, progress: bool = True) -> tuple[Engine, Synthesizer]:
    """The engine and the synthesizer of a completed workflow; one line on the screen says what was loaded."""
    with heard_by(screen.note):
        started = time.perf_counter()
        engine = Engine.from_pretrained(data["model"], **data["engine"], progress=progress)
        count = number_of_parameters(engine.config)
        name, dtype = data["model"], str(engine.dtype).removeprefix("torch.")
        screen.note(f"{name}: {count / 1e6:.0f}M parameters, {dtype} on {engine.device}, loaded in {time.perf_counter() - started:.1f} s")
        adapter = data["synthesizer"]["adapter"]
        options = {**data["synthesizer"]["merge"], **FORCED_MERGE.get(data["method"], {})}
        synthesizer = Synthesizer(engine, adapter, options=options)
        if adapter:
            kind = synthesizer.mapper.config.kind if synthesizer.mapper is not None else "none"
            pairs = len(synthesizer.adapter.lora.pairs) if synthesizer.adapter.lora else 0
            screen.note(f"adapter {adapter}: mapper {kind}, {pairs} LoRA modules")
        if isinstance(engine.graphs, CompiledSteps):  # now, not in the middle of an answer and its speed
            for model in (engine.model, synthesizer.model):
                engine.graphs.compile_ahead(model)
    return engine, synthesizer


def run_workflow(engine: Engine, synthesizer: Synthesizer, data: dict, screen: Screen, save: str | None = None) -> Outcome:
    """Carry out a completed workflow. Refused before the first forward where it cannot fit; no branch is left open.

    save: a new folder for the workers' branches, written before anything is merged.
    """
    if "load_branches" in data:
        return run_loaded(engine, synthesizer, data, screen)
    started = time.perf_counter()
    before = dict(engine.counters)
    method, asked = data["method"], data["synthesizer"]["prompt"]
    workers = workers_of(with_summaries(data) if method == "summary" else data)
    params = SamplingParams(**data["synthesizer"]["sampling"])
    check_room(synthesizer, data, workers, params)
    branches: list[Branch] = []
    with engine.prefill(data["prefix"], system=data["system"]) as root:
        seconds = {"prefix": time.perf_counter() - started}
        told = sum(turn.params.max_tokens for worker in workers for turn in worker.turns if turn.output is None)
        room = f"up to {counted(told, 'token')} together" if told else "outputs are given"
        screen.note(f"{counted(len(workers), 'worker')}, {counted(root.num_tokens, 'token')} of shared prefix, {room}")
        try:
            mark = time.perf_counter()
            branches += engine.fork(root, [worker.turns[0].prompt for worker in workers])
            spans = run_turns(engine, branches, workers, screen, scored=method == "best-of-n")
            seconds["workers"] = time.perf_counter() - mark
            if save is not None:
                engine.save_branches(branches, save)
                screen.note(f"saved {counted(len(branches), 'branch', 'branches')} in {save}")
            if method == "best-of-n":
                result, figures = vote(spans, workers, screen)
            else:
                kept = counted(kept_tokens(branches, synthesizer.options.keep_turns), "token")
                if method in TEXT_METHODS:
                    for branch in (*branches, root):  # their pages are free for the text
                        branch.close()
                    screen.start_answer(f"synthesizer: reading the text of {counted(len(branches), 'worker')}, {kept}, again")
                    stream = text_stream(engine, data, spans, synthesizer.options.keep_turns, params)
                else:
                    screen.start_answer(f"synthesizer: reading {kept} from {counted(len(branches), 'cache')}")
                    stream = synthesizer.stream_from_caches(branches, asked, params)
                result = show(stream, screen)
                figures = figures_of(method, result)
        finally:
            for branch in branches:
                branch.close()
    result.workers = [row[-1].output for row in spans]
    seconds["total"] = time.perf_counter() - started
    screen.end_answer(figures)
    counters = {name: count - before[name] for name, count in engine.counters.items()}
    return Outcome(result, workers, spans, seconds, counters)


def run_loaded(engine: Engine, synthesizer: Synthesizer, data: dict, screen: Screen) -> Outcome:
    """Answer from saved branches: no worker runs, and reading the files counts as the workers' time."""
    started = time.perf_counter()
    before = dict(engine.counters)
    branches = engine.load_branches(data["load_branches"])
    try:
        seconds = {"prefix": 0.0, "workers": time.perf_counter() - started}
        workers = [Worker(f"worker {index + 1}", ()) for index in range(len(branches))]
        spans = [[Span(WorkerOutput.of(branch), None)] for branch in branches]
        held = {id(segment): segment.length for branch in branches for segment in branch.segments}  # the prefix once
        read, tokens = counted(len(branches), "branch", "branches"), counted(sum(held.values()), "token")
        screen.note(f"read {read}, {tokens} with the prefix, from {data['load_branches']} in {seconds['workers']:.2f} s")
        kept = counted(kept_tokens(branches, synthesizer.options.keep_turns), "token")
        screen.start_answer(f"synthesizer: reading {kept} from {counted(len(branches), 'cache')}")
        params = SamplingParams(**data["synthesizer"]["sampling"])
        result = show(synthesizer.stream_from_caches(branches, data["synthesizer"]["prompt"], params), screen)
    finally:
        for branch in branches:
            branch.close()
    result.workers = [row[-1].output for row in spans]
    seconds["total"] = time.perf_counter() - started
    screen.end_answer(figures_of(data["method"], result))
    return Outcome(result, workers, spans, seconds, {name: count - before[name] for name, count in engine.counters.items()})


def with_summaries(data: dict) -> dict:
    """The workflow with one more turn for each branch, in which it says what it found."""
    branches = []
    for branch in data["branches"]:
        own = {name: branch[name] for name in ("prompt", "output") if name in branch}
        rest = {name: value for name, value in branch.items() if name not in own}
        branches.append({**rest, "turns": [*branch.get("turns", [own]), {"prompt": SUMMARY_PROMPT}]})
    return {**data, "branches": branches}


def check_room(synthesizer: Synthesizer, data: dict, workers: Sequence[Worker], params: SamplingParams) -> None:
    """Refuse what cannot fit the page pool or the positions, everything at its longest."""
    turns = [[(turn.prompt, turn.params if turn.output is None else turn.output) for turn in worker.turns] for worker in workers]
    asked = data["synthesizer"]["prompt"]
    spans = synthesizer.check_turns(data["prefix"], turns, asked, params, system=data["system"])
    if data["method"] in TEXT_METHODS:
        engine = synthesizer.engine
        fixed = engine.prompts.encode(text_turns(data, []), "full", system=data["system"])
        length = len(fixed) + sum(spans) + HEADING_TOKENS * len(spans)
        engine.check_positions(0, length + 1, "the workers' texts at their longest, with the prompt,")
        pages = engine.pool.pages_for
        engine.pool.require(pages(length) + pages(engine.token_limit(length, params)), "reading the workers' texts again")


def run_turns(
    engine: Engine, branches: Sequence[Branch], workers: Sequence[Worker], screen: Screen, scored: bool = False
) -> list[list[Span]]:
    """Take forked branches through their turns: of each turn one batch, in which those take part that have as many."""
    limits = [sum(turn.params.max_tokens for turn in worker.turns if turn.output is None) for worker in workers]
    screen.start_workers([worker.label for worker in workers], limits)
    spans: list[list[Span]] = [[] for _ in workers]
    for depth in range(max(len(worker.turns) for worker in workers)):
        rows = [index for index, worker in enumerate(workers) if len(worker.turns) > depth]
        turns = {index: workers[index].turns[depth] for index in rows}
        if depth:
            engine.extend([branches[index] for index in rows], [turns[index].prompt for index in rows])
        given = [index for index in rows if turns[index].output is not None]
        decoded = [index for index in rows if turns[index].output is None]
        if given:
            engine.encode([branches[index] for index in given], [turns[index].output for index in given])
        if decoded:
            params = [replace(turns[index].params, logprobs=1) if scored else turns[index].params for index in decoded]
            engine.decode([branches[index] for index in decoded], params, on_token=rows_renamed(screen.worker_token, decoded))
        for index in rows:
            branch = branches[index]
            spans[index].append(
                Span(WorkerOutput.of(branch), None if turns[index].output is not None else turns[index].params, mean_logprob(branch))
            )
            if depth + 1 == len(workers[index].turns):
                tokens = sum(len(span.output.token_ids) for span in spans[index])
                screen.worker_end(index, branch.finish_reason, tokens, branch.text)
    screen.end_workers()
    return spans


def rows_renamed(on_token: Callable, names: Sequence[int]) -> Callable:
    """A callback whose row i is called names[i]: the rows of a batch that holds some of the workers."""
    return lambda row, token, text: on_token(names[row], token, text)


def mean_logprob(branch: Branch) -> float | None:
    """Mean log-probability a token of what a branch decoded, where it was asked for."""
    if not branch.logprobs:
        return None
    return sum(entry[token] for entry, token in zip(branch.logprobs, branch.output_ids)) / len(branch.output_ids)


def kept_tokens(branches: Sequence[Branch], keep_turns: str) -> int:
    """Tokens of the workers that the synthesizer reads, for the line that says so."""
    if keep_turns == "final":
        return sum(len(branch.output_ids) for branch in branches)
    own = [segment for branch in branches for segment in branch.segments[0 if keep_turns == "full" else branch.fork_depth :]]
    return sum(segment.length for segment in own if keep_turns in ("all", "full") or segment.role == "output")


# Answering from text


def text_turns(data: dict, texts: Sequence[str]) -> str | list[dict]:
    """The synthesizer's conversation of method `text`: one user turn, behind the prefix's own turns where it has some."""
    prefix, asked = data["prefix"], data["synthesizer"]["prompt"]
    if isinstance(prefix, str):
        return text_prompt(prefix, texts, asked)
    return [*prefix, {"role": "user", "content": text_prompt("", texts, asked)}]


def text_stream(engine: Engine, data: dict, spans: Sequence[Sequence[Span]], keep_turns: str, params: SamplingParams) -> TextStream:
    """The answer to the workers' text; of a worker of several turns what `keep_turns` keeps of its outputs."""
    if data["method"] == "summary" or keep_turns == "final":
        spans = [row[-1:] for row in spans]
    texts = ["\n\n".join(span.output.text for span in row) for row in spans]
    return engine.stream(text_turns(data, texts), params, system=data["system"])


def vote(spans: Sequence[Sequence[Span]], workers: Sequence[Worker], screen: Screen) -> tuple[Result, str]:
    """The answer that most workers gave, up to case and white space; among equals the likeliest a token, then the first."""
    last = [row[-1] for row in spans]
    words = [" ".join(span.output.text.split()).casefold() for span in last]
    votes = Counter(words)
    chances = [float("-inf") if span.mean_logprob is None else span.mean_logprob for span in last]
    best = max(range(len(last)), key=lambda index: (bool(words[index]), votes[words[index]], chances[index]))
    if not words[best]:
        raise MinipsError("best-of-n: no worker wrote anything, so there is nothing to vote on")
    screen.start_answer(f"best-of-n: the votes of {counted(len(last), 'worker')}, {counted(len(votes), 'different answer')}")
    chosen = last[best].output
    screen.answer(chosen.text)
    seconds = dict.fromkeys(TIMING_KEYS, 0.0)
    tokens = [len(span.output.token_ids) for span in last]
    result = Result(chosen.text, list(chosen.token_ids), chosen.finish_reason, 0.0, seconds, len(last), tokens)
    result.seed = last[best].params.seed
    figures = f"best-of-n: the answer of {workers[best].label}, {votes[words[best]]} of {len(last)} votes"
    return result, f"{figures}, {chances[best]:.2f} nats a token"


# Showing


def show(stream: TextStream, screen: Screen) -> Result:
    """Put the pieces on the screen as they come."""
    with stream:
        for piece in stream:
            screen.answer(piece)
        return stream.result


def figures_of(method: str, result: Result) -> str:
    """The one line of figures."""
    tokens, decode = len(result.token_ids), result.timings["decode"]
    rate = f", {(tokens - 1) / decode:.0f} tokens/s" if tokens > 1 and decode > 0 else ""
    read = f"{result.prefilled_tokens} prefilled, {result.reused_tokens} from caches"
    return f"{method}: {counted(tokens, 'token')}{rate}, TTFT {result.ttft * 1000:.0f} ms, {read}"
