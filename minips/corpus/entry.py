"""What a training data set is: a name, a builder of examples, and where its rows come from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..training.encoding import Example

MOST_BRANCHES = 8
Build = Callable[[Path | None, tuple[int, int], int], Iterable[Example]]


@dataclass(frozen=True)
class DataSet:
    """build(folder, branches, seed): examples, each with between branches[0] and branches[1] branches where its row allows that.

    kind: 1 parallel context, 2 multi-source synthesis, 3 distillation. source: where the rows come from, and their licence.
    """

    name: str
    kind: int
    build: Build
    source: str


def count_of(branches: tuple[int, int], seed: int, row_id: str) -> int:
    """How many branches a row is to have: drawn by (seed, id), so that it is the same whatever rows are chosen."""
    return random.Random(f"{seed} branches {row_id}").randint(*branches)


def cut(items: Sequence[str], count: int, joint: str = "\n\n") -> tuple[str, ...]:
    """Items in their order, cut into at most `count` runs of nearly equal number."""
    count = min(count, len(items))
    edges = [len(items) * part // count for part in range(count + 1)]
    return tuple(joint.join(items[first:last]) for first, last in pairwise(edges))
