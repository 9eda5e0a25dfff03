"""Re-rotation and mapping of cached branches, in place and in one pass: read a page run, work in fp32, write back once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
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
LONG_JOB = 128  # tokens
LAYERS_AT_ONCE = 6  # of the kind normalize


class Job(NamedTuple):
    """A segment that stands at its new place already (`segment.start`), its keys still `delta` positions behind."""

    segment: Segment
    delta: int
    branch: int


Map = Callable[[int, Tensor], Tensor]  # layer, x fp32 [n, kv_heads, head_dim] -> the same shape


class KeyMove:
    """Takes fp32 keys of n tokens from where they stand to their new place, with the map (if any) in between. Differentiable.

    positions: the new ones; deltas: how far each token moves; both int64 [n]. bare: the map is of keys without rotation.
    """

    def __init__(self, rope: Rope, positions: Tensor, deltas: Tensor, mapped: Map | None, bare: bool):
        bare = bare and mapped is not None
        turn = rope.tables(positions - deltas if bare else deltas)
        self.turn = (turn[0], -turn[1]) if bare else turn  # takes the old rotation off
        self.place = rope.tables(positions) if bare else None
        self.mapped = mapped

    def __call__(self, layer: int, keys: Tensor) -> Tensor:
        """keys fp32 [n, kv_heads, head_dim] of one layer."""
        keys = apply_rope(keys, *self.turn)
        if self.mapped is not None:
            keys = self.mapped(layer, keys)
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
        self.first_layer = 0  # of those that `coefficients` are of
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
                self._normalize(jobs)
            else:
                for piece in self._pieces(jobs):
                    for layer in range(len(self.pool.keys)):
                        self._change(piece, layer)
            if self.pool.device.type == "cuda":
                torch.cuda.synchronize(self.pool.device)
        timings["map" if self.maps_keys or self.maps_values else "rerotate"] = time.perf_counter() - started

    def _normalize(self, jobs: Sequence[Job]) -> None:
        """Some layers after the other, because statistics of all would be large beside short branches."""
        for self.first_layer in range(0, len(self.pool.keys), LAYERS_AT_ONCE):
            layers = range(self.first_layer, min(self.first_layer + LAYERS_AT_ONCE, len(self.pool.keys)))
            self.coefficients = self._statistics(jobs, layers)
            for piece in self._pieces(jobs):
                for layer in layers:
                    self._change(piece, layer)

    def _change(self, piece: _Piece, layer: int) -> None:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        if piece.move is not None:
            write(keys, piece.run, piece.move(layer, read(keys, piece.run, torch.float32)))
        if self.maps_values:
            write(values, piece.run, self._map("value", piece.branch)(layer, read(values, piece.run, torch.float32)))

    def _map(self, part: str, branch: int) -> Map:
        """The map of keys or values of tokens of one branch."""
        return lambda layer, x: self.mapper.map(part, layer - self.first_layer, x, self.coefficients, branch)

    def _chunk(self, tokens: int) -> int:
        """So many tokens that fp32 temporaries of one layer stay below 5% of the pages they belong to."""
        stored = min(2, self.pool.keys[0].dtype.itemsize)
        share = 520 if stored < 2 else 240  # 8-bit codes need more temporaries
        return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, tokens * len(self.pool.keys) * stored // share))

    def _pieces(self, jobs: Sequence[Job]) -> Iterator[_Piece]:
        """The tokens of the jobs in pieces that are worked on at once.

        On a CPU long jobs are cut by themselves, because a run of slots needs no copy; short ones, and all on CUDA, are put together.
        """
        total = sum(job.segment.length for job in jobs)
        most = self._chunk(total)
        if self.pool.device.type == "cpu" and total >= LONG_JOB * len(jobs):
            groups = [[job] for job in jobs]
        elif self.coefficients is not None or self.statistics_needed:
            groups = [list(group) for _, group in groupby(jobs, key=lambda job: job.branch)]
        else:
            groups = [jobs]
        bare = self.mapper is not None and self.mapper.bare
        for group in groups:
            parts = self._tokens(group)
            even = -(-len(parts[0]) // -(-len(parts[0]) // most))
            for slots, positions, deltas in zip(*(part.split(even) for part in parts)):
                branch, move = group[0].branch, None
                if self.maps_keys or deltas.any():
                    move = KeyMove(self.rope, positions, deltas, self._map("key", branch) if self.maps_keys else None, bare)
                yield _Piece(branch, as_run(slots), move)

    def _tokens(self, jobs: Sequence[Job]) -> tuple[Tensor, Tensor, Tensor]:
        """Slot, new position and delta of every token, int64 [n]."""
        device = self.pool.device
        slots = torch.cat([self.pool.slots(job.segment.pages, job.segment.length) for job in jobs])
        positions = torch.cat([torch.arange(job.segment.start, job.segment.start + job.segment.length) for job in jobs])
        deltas = torch.cat([torch.full((job.segment.length,), job.delta) for job in jobs])
        return slots, positions.to(device), deltas.to(device)

    def _statistics(self, jobs: Sequence[Job], layers: range) -> Coefficients:
        """What mean and variance of each branch's unrotated keys, and of its values, come to in these layers."""
        pool, count = self.pool, len(self.lengths)
        keys, values = (torch.zeros(2, count, len(layers), *pool.keys[0].shape[2:], device=pool.device) for _ in range(2))
        seen = [0] * count
        for branch, run, move in self._pieces(jobs):
            for at, layer in enumerate(layers):
                _accumulate(keys[:, branch, at], apply_rope(read(pool.keys[layer], run, torch.float32), *move.turn), seen[branch])
                count = _accumulate(values[:, branch, at], read(pool.values[layer], run, torch.float32), seen[branch])
            seen[branch] += count
        for branch, twin in enumerate(self.twins):
            if twin != branch:
                keys[:, branch], values[:, branch] = keys[:, twin], values[:, twin]
        return self.mapper.from_statistics(keys, values, self.lengths)


class _Piece(NamedTuple):
    """Tokens at a run of slots (or at any), of `branch` where a map depends on that; move: None where keys stay as they are."""

    branch: int
    run: Tensor | slice
    move: KeyMove | None


def _accumulate(statistics: Tensor, x: Tensor, seen: int) -> int:
    """Update mean and variance [2, kv_heads, head_dim] of `seen` tokens by more, x [n, kv_heads, head_dim] (Chan et al.); returns n."""
    count, first = len(x), x[0].clone()
    x = (x - first).flatten(1)  # sums of what is left lose few digits, and products are many times faster than var_mean on a CPU
    one = x.new_full((1, count), 1 / count)
    mean = (one @ x)[0]
    variance = (one @ x.mul_(x))[0].sub_(mean.square()).clamp_min_(0).view_as(first)
    mean = mean.view_as(first) + first
    total = seen + count
    delta = mean - statistics[0]
    statistics[1] = (statistics[1] * seen + variance * count + delta.square() * (seen * count / total)) / total
    statistics[0] += delta * (count / total)
    return count


def rerotate(pool: KVPool, rope: Rope, segment: Segment, *deltas: int) -> None:
    """Move the keys of one segment by `deltas` positions, in place, and its `start` with them. Several are one move by their sum, because
    each move of 16-bit or 8-bit keys rounds once more."""
    delta = sum(deltas)
    segment.start += delta
    segment.moves += bool(delta)
    Transform(pool, rope).apply([Job(segment, delta, 0)], {})
