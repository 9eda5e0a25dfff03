"""Examples become rows: a prefix and m branches each, made once and read by every method, so that all comparisons are paired."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..config import SamplingParams
from ..engine import Engine
from ..kv_cache import Branch
from .agents import Trace, prepare, run_agents
from .example import Example, Task
from .tools import Toolbox


@dataclass
class Row:
    """One example with its open branches. texts: what each branch says (its last turn). seconds: its share of the workers' time."""

    example: Example
    prefix: Branch
    branches: list[Branch]
    texts: list[str] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    seconds: float = 0.0

    def close(self) -> None:
        for branch in (*self.branches, self.prefix):
            branch.close()


def seed_of(*parts: object) -> int:
    """A seed of 63 bits from anything printable: the same in every process, whatever rows run beside it."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def open_rows(engine: Engine, task: Task, examples: Sequence[Example], workers: int, params: SamplingParams, seed: int) -> list[Row]:
    """Prefill, fork and decode (or encode the given passages of) all examples together, as one ragged batch.

    workers: how many workers an example gets that does not say so itself. params: of the workers; each draws from a stream of
    its own, made of (seed, example id, worker).
    """
    started = time.perf_counter()
    boxes: list[Toolbox] = []
    ready = []
    for example in examples:
        if task.agents:
            example, own_boxes = prepare(example, len(example.worker_prompts) or workers)
            boxes += own_boxes
        ready.append(example)
    prefixes = engine.prefill_batch([example.prefix for example in ready], systems=[example.system for example in ready])
    rows = [Row(example, prefix, []) for example, prefix in zip(ready, prefixes)]
    try:
        own = [[""] * len(example.passages) or list(example.worker_prompts) or [""] * workers for example in ready]
        for row, branches in zip(rows, engine.fork_batch(prefixes, own)):
            row.branches = branches
        given = [row for row in rows if row.example.passages]
        engine.encode([b for row in given for b in row.branches], [p for row in given for p in row.example.passages])
        decoded = [row for row in rows if not row.example.passages]
        branches = [branch for row in decoded for branch in row.branches]
        each = [replace(params, seed=seed_of(seed, row.example.id, at)) for row in decoded for at in range(len(row.branches))]
        if task.agents and branches:
            traces = iter(run_agents(engine, branches, boxes, each))
            for row in decoded:
                row.traces = [next(traces) for _ in row.branches]
        elif branches:
            engine.decode(branches, each)
    except BaseException:
        for row in rows:
            row.close()
        raise
    for row in rows:
        row.texts = [branch.text for branch in row.branches]
        row.seconds = (time.perf_counter() - started) / len(rows)
    return rows
