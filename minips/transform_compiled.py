"""`Transform` by compiled kernels, on a CPU: for jobs whose tokens stand in one run of slots of a float cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .change import Change
from .kv_cache import KVPool
from .kv_storage import as_run
from .merge_kernels import MergeKernels, Tables
from .pieces import Job
from .rope import Rope

SHORTEST, LONGEST = 32, 4096  # tokens: of a run from which it is worth a call, and of a call


def has_kernels(pool: KVPool, change: Change) -> bool:
    """Whether there are kernels for what is done to keys and values."""
    if not isinstance(pool.keys[0], Tensor):
        return False
    if not (change.maps_keys and change.maps_values):
        return not (change.maps_keys or change.maps_values)
    if change.increments is not None:
        return pool.keys[0].dtype == torch.float32 or all(change.increments.small)
    return change.by_branch


class Run(NamedTuple):
    """Tokens of a branch in one run of slots, `first` the position that they move to, from `delta` positions before."""

    branch: int
    slots: slice
    first: int
    delta: int

    @property
    def count(self) -> int:
        return self.slots.stop - self.slots.start

    def cut(self, most: int) -> Iterator[Run]:
        """In parts of about the same number of tokens, at most `most` or `SHORTEST`."""
        count, at = -(-self.count // max(most, SHORTEST)), 0
        for part in range(count):
            step = self.count // count + (part < self.count % count)
            slots = slice(self.slots.start + at, self.slots.start + at + step)
            yield self._replace(slots=slots, first=self.first + at)
            at += step


class CompiledTransform:
    """`runs` are what it does, `rest` the jobs that it leaves. room: bytes that temporaries may take."""

    def __init__(self, pool: KVPool, rope: Rope, change: Change, kernels: MergeKernels, jobs: Sequence[Job], room: int):
        self.pool, self.rope, self.change, self.kernels, self.at_once = pool, rope, change, kernels, kernels.at_once
        bytes_each = kernels.room(pool.keys[0].dtype) * pool.keys[0].shape[2:].numel()
        most = min(LONGEST, room // (bytes_each * kernels.at_once))
        self.runs: list[Run] = []
        self.rest: list[Job] = []
        for job in jobs:
            slots = as_run(pool.slots(job.segment.pages, job.segment.length))
            if isinstance(slots, slice) and job.segment.length >= SHORTEST:
                self.runs += Run(job.branch, slots, job.segment.start, job.delta).cut(most)
            else:
                self.rest.append(job)

    def apply(self, layers: range) -> None:
        """Move and map keys, map values."""
        change, kernels = self.change, self.kernels
        for run in self.runs:
            turn, place, move = self._rotations(run)
            for some in self._layers(layers):
                keys, values = self._views(some, run.slots)
                if not change.maps_keys:
                    kernels.turn(keys, turn)
                elif change.coefficients is None:
                    kernels.multiply(keys, values, turn, place, move, change.increments.weight[:, some], change.increments.bias[:, some])
                else:
                    kernels.scale(keys, values, turn, place, change.scales_and_shifts(some, run.branch))

    def statistics(self, layers: range) -> Iterator[tuple[int, int, Tensor]]:
        """As `EagerTransform.statistics`, of each run."""
        for run in self.runs:
            turn, *_ = self._rotations(run)
            parts = [self.kernels.statistics(*self._views(some, run.slots), turn) for some in self._layers(layers)]
            yield run.branch, run.count, torch.cat(parts, 2)

    def _layers(self, layers: range) -> Iterator[slice]:
        return (slice(first, first + self.at_once) for first in range(layers.start, layers.stop, self.at_once))

    def _views(self, layers: slice, run: slice) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values as they are stored."""
        keys, values = ([store.flatten(0, 1)[run] for store in stores[layers]] for stores in (self.pool.keys, self.pool.values))
        return keys, values

    def _rotations(self, run: Run) -> tuple[Tables, Tables | None, Tables]:
        """What comes before the map of keys, what behind it, and both in one."""
        if not self.change.bare:
            return self._move(run.delta), None, self._move(run.delta)
        return self.rope.kept(run.first - run.delta, run.count), self.rope.kept(run.first, run.count), self._move(run.delta)

    def _move(self, delta: int) -> Tables:
        cos, sin = self.rope.kept(abs(delta), 1)
        return cos, -sin if delta < 0 else sin
