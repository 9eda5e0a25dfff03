"""The tokens of a merge in pieces that are worked on at once, and the way of a piece's keys to their new place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .kv_cache import KVPool, Segment
from .kv_storage import as_run
from .rope import Rope, apply_rope

LARGEST, SMALLEST = 1024, 32  # tokens times layers worked on at once: what stays in a CPU's cache
LARGEST_CUDA = 1 << 16  # a GPU wants few, large operations
LONG_JOB = 128  # tokens
BACKWARD = 1 << 40  # above all positions


class Job(NamedTuple):
    """A segment that stands at its new place already (`segment.start`), its keys still `delta` positions behind."""

    segment: Segment
    delta: int
    branch: int


# layer, x fp32 [n, kv_heads, head_dim] -> the same shape; or a slice of layers, x [layers, n, kv_heads, head_dim]
Map = Callable[[int | slice, Tensor], Tensor]
Tables = tuple[Tensor, Tensor]


class KeyMove:
    """Takes fp32 keys of n tokens from where they stand to their new place, with the map (if any) in between. Differentiable.

    tables: what makes rotation tables of positions; positions: the new ones; deltas: how far each token moves; both int64 [n].
    bare: the map is of keys without rotation. `steps` are to be taken one after the other; `turn`: the tables of the first.
    """

    def __init__(self, tables: Callable[[Tensor], Tables], positions: Tensor, deltas: Tensor, mapped: Map | None, bare: bool):
        bare = bare and mapped is not None
        turn = self.turn = tables(deltas - positions if bare else deltas)  # takes the old rotation off, or to the new place at once
        self.steps: list[Map] = [lambda layers, x: apply_rope(x, *turn)]
        if mapped is not None:
            self.steps.append(mapped)
        if bare:
            place = tables(positions)
            self.steps.append(lambda layers, x: apply_rope(x, *place))

    def __call__(self, layers: int | slice, keys: Tensor) -> Tensor:
        for step in self.steps:
            keys = step(layers, keys)
        return keys


class Piece(NamedTuple):
    """Tokens at a run of slots (or at any), of `branch` where a map depends on that; move: None where keys stay as they are."""

    branch: int
    run: Tensor | slice
    move: KeyMove | None

    @property
    def count(self) -> int:
        return self.run.stop - self.run.start if isinstance(self.run, slice) else len(self.run)


class Pieces:
    """The tokens of all jobs, cut so that `copies` fp32 copies of what is worked on at once take no more than `room` bytes.

    mapped: the map of keys of a branch, if there is one; bare: it is of keys without rotation; by_branch: a piece is of one branch.
    """

    def __init__(
        self,
        pool: KVPool,
        rope: Rope,
        jobs: Sequence[Job],
        mapped: Callable[[int], Map] | None,
        *,
        bare: bool,
        by_branch: bool,
        room: int,
        copies: int,
    ):
        self.mapped, self.bare, self.device = mapped, bare and mapped is not None, pool.device
        total, width = sum(job.segment.length for job in jobs), pool.keys[0].shape[2:].numel()
        if pool.device.type == "cpu" and total >= LONG_JOB * len(jobs):
            groups = [[job] for job in jobs]  # on a CPU a run of slots needs no copy; short jobs, and all on CUDA, are put together
        elif by_branch:
            groups = [list(group) for _, group in groupby(jobs, key=lambda job: job.branch)]
        else:
            groups = [jobs]
        self.groups = [(group[0].branch, *_tokens(pool, group)) for group in groups]
        turns = [deltas - positions if self.bare else deltas for _, _, positions, deltas in self.groups]
        self.tables = _KnownTables(rope, torch.cat(turns + [group[2] for group in self.groups if self.bare]))
        left = room - sum(part.nbytes for part in self.tables.tables)
        self.most = min(LARGEST if pool.device.type == "cpu" else LARGEST_CUDA, max(SMALLEST, left // (copies * 4 * width)))

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    @cached_property
    def _pieces(self) -> list[Piece]:
        return list(self._cut())

    def _cut(self) -> Iterator[Piece]:
        for branch, *parts in self.groups:
            even = -(-len(parts[0]) // -(-len(parts[0]) // self.most))
            for slots, positions, deltas in zip(*(part.split(even) for part in parts)):
                move = None
                if self.mapped is not None or deltas.any():
                    move = KeyMove(self.tables, positions, deltas, self.mapped and self.mapped(branch), self.bare)
                yield Piece(branch, as_run(slots.to(self.device)), move)

    def layers(self, piece: Piece, layers: range) -> Iterator[slice]:
        """The layers, as many at a time as there is room for with the tokens of the piece."""
        step = max(1, self.most // piece.count)
        for first in range(layers.start, layers.stop, step):
            yield slice(first, min(first + step, layers.stop))


class _KnownTables:
    """Tables of rotations by amounts that are known beforehand, each made once: branches mostly stand at the same positions."""

    def __init__(self, rope: Rope, amounts: Tensor):
        self.keys = _table_keys(amounts).unique()  # sorted
        amounts = torch.where(self.keys < BACKWARD, self.keys, BACKWARD - self.keys)
        self.tables = rope.tables(amounts.to(rope.inv_freq.device))

    def __call__(self, amounts: Tensor) -> Tables:
        """Views where they can be: of amounts that grow or fall by one a token, and of one amount for all tokens."""
        at = torch.searchsorted(self.keys, _table_keys(amounts))
        rows = slice(int(at[0]), int(at[0]) + 1) if bool((at == at[0]).all()) else as_run(at)
        return tuple(part[rows if isinstance(rows, slice) else rows.to(part.device)] for part in self.tables)


def _table_keys(amounts: Tensor) -> Tensor:
    """Such that rotations of consecutive positions are consecutive, forward (0, 1, ...) or backward (-1, -2, ...)."""
    return torch.where(amounts < 0, BACKWARD - amounts, amounts)


def _tokens(pool: KVPool, jobs: Sequence[Job]) -> tuple[Tensor, Tensor, Tensor]:
    """Slot, new position and delta of every token, int64 [n], on the CPU."""
    slots = torch.cat([pool.host_slots(job.segment.pages, job.segment.length) for job in jobs])
    positions = torch.cat([torch.arange(job.segment.start, job.segment.start + job.segment.length) for job in jobs])
    return slots, positions, torch.cat([torch.full((job.segment.length,), job.delta) for job in jobs])
