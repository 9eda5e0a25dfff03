"""Re-rotation and mapping of cached branches, in place and in one pass: read a page run, work in fp32, write back once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import MinipsError
from .kv_cache import KVPool, Segment
from .kv_storage import Store, read, write
from .mapper import CacheMapper, Coefficients
from .pieces import Job, Map, Pieces
from .rope import Rope, apply_rope

SHARE = 0.046  # of the branches' pages: what temporaries may take
STATISTICS = 0.01  # of it, for the kind normalize


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
        self.by_increments = False
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
            with torch.no_grad():
                self.by_increments = self.maps_values and pool.keys[0].dtype == torch.bfloat16 and mapper.has_increments()

    def changes(self, delta: int) -> bool:
        """Whether tokens that move by `delta` are written again."""
        return bool(delta) or self.maps_keys or self.maps_values

    @torch.no_grad()
    def apply(self, jobs: Sequence[Job], timings: dict[str, float]) -> None:
        """Carry out all jobs. With a map, rotation and map are one pass and count as `map`; without, as `rerotate`."""
        started = time.perf_counter()
        jobs = [job for job in jobs if job.segment.length]
        if jobs:
            pieces = self._pieces(jobs)
            if self.statistics_needed:
                self._normalize(pieces)
            else:
                self._change(pieces, range(len(self.pool.keys)))
            if self.pool.device.type == "cuda":
                torch.cuda.synchronize(self.pool.device)
        timings["map" if self.maps_keys or self.maps_values else "rerotate"] = time.perf_counter() - started

    def _pieces(self, jobs: Sequence[Job]) -> Pieces:
        mapper, statistics = self.mapper, self.statistics_needed
        copies = 2 if self.pool.keys[0].dtype.itemsize > 1 else 6  # in fp32, of keys or values; 8-bit codes need more
        copies += mapper is not None and mapper.config.per_head
        return Pieces(
            self.pool,
            self.rope,
            jobs,
            (lambda branch: self._map("key", branch)) if self.maps_keys else None,
            bare=mapper is not None and mapper.bare,
            by_branch=self.coefficients is not None or statistics,
            share=SHARE - STATISTICS if statistics else SHARE,
            copies=copies,
        )

    def _normalize(self, pieces: Pieces) -> None:
        """Some layers after the other, because statistics of all would be large beside short branches."""
        layers, one = len(self.pool.keys), 64 * len(self.lengths) * self.pool.keys[0].shape[2:].numel()  # bytes a layer, at most
        step = max(1, int(STATISTICS * pieces.stored / one))
        for self.first_layer in range(0, layers, step):
            some = range(self.first_layer, min(self.first_layer + step, layers))
            self.coefficients = self._statistics(pieces, some)
            self._change(pieces, some)

    def _change(self, pieces: Pieces, layers: range) -> None:
        for piece in pieces:
            for some in pieces.layers(piece, layers):
                if piece.move is not None:
                    x = self._read(self.pool.keys, some, piece.run)
                    for step in piece.move.steps:  # each lets go of what it was given, so there are two copies at a time
                        x = step(some, x)
                    self._write(self.pool.keys, some, piece.run, x)
                if not self.maps_values:
                    continue
                if self.by_increments:
                    for layer in range(some.start, some.stop):
                        store = self.pool.values[layer]
                        x = read(store, piece.run, store.dtype)  # a view, where it is a run
                        x += self.mapper.value_increment(layer, x.flatten(0, 1)).view(x.shape)
                        if not isinstance(piece.run, slice):
                            write(store, piece.run, x)
                else:
                    x = self._read(self.pool.values, some, piece.run)
                    x = self._map("value", piece.branch)(some, x)
                    self._write(self.pool.values, some, piece.run, x)

    def _read(self, stores: list[Store], layers: slice, run: Tensor | slice) -> Tensor:
        """fp32 [layers, n, kv_heads, head_dim]."""
        if layers.stop - layers.start == 1:
            return read(stores[layers.start], run, torch.float32)[None]
        count = run.stop - run.start if isinstance(run, slice) else len(run)
        x = torch.empty(layers.stop - layers.start, count, *stores[0].shape[2:], device=self.pool.device)
        for at, layer in enumerate(stores[layers]):
            x[at] = read(layer, run, layer.dtype) if isinstance(layer, Tensor) else read(layer, run, torch.float32)
        return x

    def _write(self, stores: list[Store], layers: slice, run: Tensor | slice, x: Tensor) -> None:
        for store, one in zip(stores[layers], x):
            write(store, run, one)

    def _map(self, part: str, branch: int) -> Map:
        """The map of keys or values of tokens of one branch."""

        def mapped(layers: slice, x: Tensor) -> Tensor:
            ours = slice(layers.start - self.first_layer, layers.stop - self.first_layer)
            return self.mapper.map(part, ours, x, self.coefficients, branch)

        return mapped

    def _statistics(self, pieces: Pieces, layers: range) -> Coefficients:
        """What mean and variance of each branch's unrotated keys, and of its values, come to in these layers."""
        pool, count = self.pool, len(self.lengths)
        keys, values = (torch.zeros(2, count, len(layers), *pool.keys[0].shape[2:], device=pool.device) for _ in range(2))
        seen = [0] * count
        for piece in pieces:
            branch = piece.branch
            for some in pieces.layers(piece, layers):
                at = slice(some.start - layers.start, some.stop - layers.start)
                x = self._read(pool.keys, some, piece.run)
                x = apply_rope(x, *piece.move.turn)
                _accumulate(keys[:, branch, at], x, seen[branch])
                x = self._read(pool.values, some, piece.run)
                length = _accumulate(values[:, branch, at], x, seen[branch])
            seen[branch] += length
        for branch, twin in enumerate(self.twins):
            if twin != branch:
                keys[:, branch], values[:, branch] = keys[:, twin], values[:, twin]
        return self.mapper.from_statistics(keys, values, self.lengths)


def _accumulate(statistics: Tensor, x: Tensor, seen: int) -> int:
    """Update mean and variance [2, layers, kv_heads, head_dim] of `seen` tokens by more, x [layers, n, kv_heads, head_dim] (Chan
    et al.); returns n."""
    count = x.shape[1]
    mean = x.sum(1) / count
    variance = (x - mean[:, None]).square_().sum(1) / count
    if not seen:
        statistics[0], statistics[1] = mean, variance
        return count
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
