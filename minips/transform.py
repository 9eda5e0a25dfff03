"""Re-rotation and mapping of cached branches, in place and in little memory: every token is read, worked on in fp32 and written back once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from .change import Change
from .kv_cache import KVPool, Segment
from .kv_storage import parts
from .mapper import CacheMapper, Coefficients
from .merge_kernels import MergeKernels
from .pieces import Job
from .rope import Rope
from .transform_compiled import SHORTEST, CompiledTransform, has_kernels
from .transform_eager import EagerTransform

SHARE = 0.046  # of the branches' pages: what temporaries may take
STATISTICS = 0.01  # of it, for the kind normalize


class Transform:
    """What a merge does to stored K and V.

    spans: positions that each branch covers; lengths: its kept tokens; twins: the first branch that stands on the very same
    pieces (mostly itself), which alone has jobs. All three are what the map may depend on. kernels: compiled ones, used where they fit.
    """

    def __init__(
        self,
        pool: KVPool,
        rope: Rope,
        mapper: CacheMapper | None = None,
        spans: Sequence[int] = (),
        lengths: Sequence[int] = (),
        twins: Sequence[int] = (),
        kernels: MergeKernels | None = None,
    ):
        self.pool, self.rope, self.lengths, self.twins = pool, rope, lengths, twins
        self.change = Change(pool, mapper, spans)
        self.kernels = kernels if has_kernels(pool, self.change) else None

    def changes(self, delta: int) -> bool:
        """Whether tokens that move by `delta` are written again."""
        return bool(delta) or self.change.maps_keys or self.change.maps_values

    @torch.no_grad()
    def apply(self, jobs: Sequence[Job], timings: dict[str, float]) -> None:
        """Carry out all jobs. With a map, rotation and map are one pass and count as `map`; without, as `rerotate`."""
        started = time.perf_counter()
        change, layers = self.change, range(len(self.pool.keys))
        token = self.pool.keys[0].shape[2:].numel() * min(2, self.pool.keys[0].dtype.itemsize)  # scales of 8-bit codes are not counted
        stored = sum(job.segment.length for job in jobs) * token * 2 * len(layers)
        room = int((SHARE - STATISTICS if change.statistics_needed else SHARE) * stored)
        ways, rest = [], [job for job in jobs if job.segment.length]
        if self.kernels is not None:
            compiled = CompiledTransform(self.pool, self.rope, change, self.kernels, rest, room)
            ways, rest = [compiled] if compiled.runs else [], compiled.rest
        if rest:
            ways.append(EagerTransform(self.pool, self.rope, change, rest, room))
        if change.statistics_needed and ways:
            self._normalize(ways, layers, int(STATISTICS * stored))
        else:
            for way in ways:
                way.apply(layers)
        self.pool.settle()
        timings["map" if change.maps_keys or change.maps_values else "rerotate"] = time.perf_counter() - started

    def _normalize(self, ways: list[CompiledTransform | EagerTransform], layers: range, room: int) -> None:
        """Some layers after the other, because statistics of all would be large beside short branches."""
        one, at_once = 64 * len(self.lengths) * self.pool.keys[0].shape[2:].numel(), max(way.at_once for way in ways)  # bytes a layer, at most
        step = max(1, room // one // at_once) * at_once
        for first in range(layers.start, layers.stop, step):
            some = range(first, min(first + step, layers.stop))
            self.change.first_layer, self.change.coefficients = first, self._coefficients(ways, some)
            for way in ways:
                way.apply(some)

    def _coefficients(self, ways: list[CompiledTransform | EagerTransform], layers: range) -> Coefficients:
        """What mean and variance of each branch's unrotated keys, and of its values, come to in these layers."""
        shape = (2, 2, len(self.lengths), len(layers), *self.pool.keys[0].shape[2:])  # mean and variance, of keys and values
        found, seen = torch.zeros(shape, device=self.pool.device), [0] * len(self.lengths)
        for way in ways:
            for branch, count, new in way.statistics(layers):
                _combine(found[:, :, branch], seen[branch], *new, count)
                seen[branch] += count
        for branch, twin in enumerate(self.twins):
            if twin != branch:
                found[:, :, branch] = found[:, :, twin]
        return self.change.mapper.from_statistics(found[:, 0], found[:, 1], self.lengths)


def _combine(statistics: Tensor, seen: int, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update statistics [2 (mean, variance), ...] of `seen` tokens by those of `count` more (Chan et al.)."""
    if not seen:
        statistics[0], statistics[1] = mean, variance
        return
    total = seen + count
    delta = mean - statistics[0]
    statistics[1] = (statistics[1] * seen + variance * count + delta.square() * (seen * count / total)) / total
    statistics[0] += delta * (count / total)


def compile_ahead(pool: KVPool, rope: Rope, mapper: CacheMapper | None, kernels: MergeKernels) -> None:
    """Compile what merges with this mapper will call, by a merge of two short branches in a pool of their own."""
    _, page_size, *shape = pool.keys[0].shape
    pages = -(-SHORTEST // page_size)
    scratch = KVPool(len(pool.keys), 1 + 2 * pages, page_size, *shape, pool.keys[0].dtype, pool.device)
    for part in (part for store in (*scratch.keys, *scratch.values) for part in parts(store)):
        part.zero_()
    counts = [SHORTEST, SHORTEST]
    transform = Transform(scratch, rope, mapper, counts, counts, range(2), kernels)
    if transform.kernels is not None:
        transform.apply([Job(Segment(scratch.allocate(pages), SHORTEST, 1), 1, branch) for branch in range(2)], {})


def rerotate(pool: KVPool, rope: Rope, segment: Segment, *deltas: int) -> None:
    """Move the keys of one segment by `deltas` positions, in place, and its `start` with them. Several are one move by their sum, because
    each move of 16-bit or 8-bit keys rounds once more."""
    delta = sum(deltas)
    segment.start += delta
    segment.moves += bool(delta)
    Transform(pool, rope).apply([Job(segment, delta, 0)], {})
