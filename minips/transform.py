"""Re-rotation and mapping of cached branches, in place and in one pass: read a page run, work in fp32, write back once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import MinipsError
from .kv_cache import KVPool, Segment
from .kv_storage import as_run, read, write
from .mapper import CacheMapper, Coefficients
from .rope import Rope, apply_rope

LARGEST_CHUNK = 1024  # tokens worked on at once
SMALLEST_CHUNK = 32


class Job(NamedTuple):
    """A segment that stands at its new place already (`segment.start`), its keys still `delta` positions behind."""

    segment: Segment
    delta: int
    branch: int


class KeyMove:
    """Takes fp32 keys of n tokens from where they stand to their new place, with the map (if any) in between. Differentiable.

    positions: the new ones; deltas: how far each token moves; branches: whose token each is; all int64 [n].
    """

    def __init__(
        self, rope: Rope, positions: Tensor, deltas: Tensor, branches: Tensor, mapper: CacheMapper | None, coefficients: Coefficients | None
    ):
        bare = mapper is not None and mapper.config.key_space == "unrotated"
        turn = rope.tables(positions - deltas if bare else deltas)
        self.turn = (turn[0], -turn[1]) if bare else turn  # takes the old rotation off
        self.place = rope.tables(positions) if bare else None
        self.mapper, self.coefficients, self.branches = mapper, coefficients, branches

    def __call__(self, layer: int, keys: Tensor) -> Tensor:
        """keys fp32 [n, kv_heads, head_dim] of one layer."""
        keys = apply_rope(keys, *self.turn)
        if self.mapper is not None:
            keys = self.mapper.map("key", layer, keys, self.coefficients, self.branches)
        return keys if self.place is None else apply_rope(keys, *self.place)


class Transform:
    """What a merge does to stored K and V. A map that is the identity is skipped, so that it changes no bit.

    spans: positions that each branch covers; lengths: its kept tokens; twins: the first branch that stands on the very same
    pieces (mostly itself), which alone has jobs. All three are what the map may depend on.
    """

    def __init__(
        self,
        pool: KVPool,
        rope: Rope,
        mapper: CacheMapper | None = None,
        spans: Sequence[int] = (),
        lengths: Sequence[int] = (),
        twins: Sequence[int] = (),
    ):
        self.pool, self.rope, self.mapper, self.lengths, self.twins = pool, rope, mapper, lengths, twins
        self.coefficients: Coefficients | None = None
        self.maps_keys = self.maps_values = False
        self.statistics_needed = mapper is not None and mapper.config.kind == "normalize" and len(lengths) > 1
        if self.statistics_needed:
            self.maps_keys = self.maps_values = True
        elif mapper is not None:
            with torch.no_grad():
                self.coefficients = mapper.coefficients(spans)
            if self.coefficients is not None and not all(bool(torch.isfinite(part).all()) for part in vars(self.coefficients).values()):
                raise MinipsError("mapper: its coefficients are not finite numbers; the adapter is broken")
            keys_same, values_same = mapper.is_identity(self.coefficients)
            self.maps_keys, self.maps_values = not keys_same, not values_same

    def changes(self, delta: int) -> bool:
        """Whether tokens that move by `delta` are written again."""
        return bool(delta) or self.maps_keys or self.maps_values

    @torch.no_grad()
    def apply(self, jobs: Sequence[Job], timings: dict[str, float]) -> None:
        """Carry out all jobs. With a map, rotation and map are one pass and count as `map`; without, as `rerotate`."""
        started = time.perf_counter()
        if jobs:
            if self.statistics_needed:
                self.coefficients = self._statistics(jobs)
            chunk = self._chunk(sum(job.segment.length for job in jobs))
            slots, positions, deltas, branches = self._tokens(jobs)
            for first in range(0, len(slots), chunk):
                part = slice(first, first + chunk)
                run = as_run(slots[part])
                self._keys(run, positions[part], deltas[part], branches[part])
                if self.maps_values:
                    for layer, store in enumerate(self.pool.values):
                        values = read(store, run, torch.float32)
                        write(store, run, self.mapper.map("value", layer, values, self.coefficients, branches[part]))
            if self.pool.device.type == "cuda":
                torch.cuda.synchronize(self.pool.device)
        timings["map" if self.maps_keys or self.maps_values else "rerotate"] = time.perf_counter() - started

    def _chunk(self, tokens: int) -> int:
        """So many tokens that fp32 temporaries of one layer stay below 5% of the pages they belong to."""
        stored = min(2, self.pool.keys[0].dtype.itemsize)
        share = 520 if self.statistics_needed or stored < 2 else 320  # statistics and 8-bit codes need more temporaries
        return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, tokens * len(self.pool.keys) * stored // share))

    def _tokens(self, jobs: Sequence[Job]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slot, new position, delta and branch of every token, int64 [n]."""
        device = self.pool.device
        slots = torch.cat([self.pool.slots(job.segment.pages, job.segment.length) for job in jobs])
        positions = torch.cat([torch.arange(job.segment.start, job.segment.start + job.segment.length) for job in jobs])
        deltas = torch.cat([torch.full((job.segment.length,), job.delta) for job in jobs])
        branches = torch.cat([torch.full((job.segment.length,), job.branch) for job in jobs])
        return slots, positions.to(device), deltas.to(device), branches.to(device)

    def _keys(self, slots: Tensor | slice, positions: Tensor, deltas: Tensor, branches: Tensor) -> None:
        if not self.maps_keys and not deltas.any():
            return
        move = KeyMove(self.rope, positions, deltas, branches, self.mapper if self.maps_keys else None, self.coefficients)
        for layer, store in enumerate(self.pool.keys):
            write(store, slots, move(layer, read(store, slots, torch.float32)))

    def _statistics(self, jobs: Sequence[Job]) -> Coefficients:
        """Mean and variance of each branch's unrotated keys and of its values, chunk by chunk."""
        pool, count = self.pool, len(self.lengths)
        shape = (2, count, len(pool.keys), *pool.keys[0].shape[2:])
        keys, values = (torch.zeros(shape, device=pool.device) for _ in range(2))
        seen = [0] * count
        chunk = self._chunk(sum(job.segment.length for job in jobs))
        for job in jobs:
            slots, positions, deltas, _ = self._tokens([job])
            for first in range(0, len(slots), chunk):
                part = slice(first, first + chunk)
                cos, sin = self.rope.tables(positions[part] - deltas[part])
                run = as_run(slots[part])
                for layer in range(len(pool.keys)):
                    k = apply_rope(read(pool.keys[layer], run, torch.float32), cos, -sin)
                    v = read(pool.values[layer], run, torch.float32)
                    _accumulate(keys[:, job.branch, layer], k, seen[job.branch])
                    _accumulate(values[:, job.branch, layer], v, seen[job.branch])
                seen[job.branch] += len(slots[part])
        for branch, twin in enumerate(self.twins):
            if twin != branch:
                keys[:, branch], values[:, branch] = keys[:, twin], values[:, twin]
        return self.mapper.from_statistics(keys, values, self.lengths)


def _accumulate(statistics: Tensor, x: Tensor, seen: int) -> None:
    """Update mean and variance [2, kv_heads, head_dim] of `seen` tokens by more, x [n, kv_heads, head_dim] (Chan et al.)."""
    count = len(x)
    variance, mean = torch.var_mean(x, 0, correction=0)
    total = seen + count
    delta = mean - statistics[0]
    statistics[1] = (statistics[1] * seen + variance * count + delta.square() * (seen * count / total)) / total
    statistics[0] += delta * (count / total)


def rerotate(pool: KVPool, rope: Rope, segment: Segment, *deltas: int) -> None:
    """Move the keys of one segment by `deltas` positions, in place, and its `start` with them. Several are one move by their sum, because
    each move of 16-bit or 8-bit keys rounds once more."""
    delta = sum(deltas)
    segment.start += delta
    segment.moves += bool(delta)
    Transform(pool, rope).apply([Job(segment, delta, 0)], {})
