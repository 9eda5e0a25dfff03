"""`Transform` by torch's own operations: pieces of all jobs, some layers at a time. On any device, for any cache, at any slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .change import Change
from .kv_cache import KVPool
from .kv_storage import Store, read, write
from .pieces import Job, Map, Piece, Pieces
from .rope import Rope, apply_rope


class EagerTransform:
    """room: bytes that temporaries may take."""

    at_once = 1  # layers: any number of them can be asked for

    def __init__(self, pool: KVPool, rope: Rope, change: Change, jobs: Sequence[Job], room: int):
        self.pool, self.change = pool, change
        copies = 2 if pool.keys[0].dtype.itemsize > 1 else 6  # in fp32, of keys or values; 8-bit codes need more
        copies += change.mapper is not None and change.mapper.config.per_head
        mapped = self._mapped_keys if change.maps_keys else None
        self.pieces = Pieces(pool, rope, jobs, mapped, bare=change.bare, by_branch=change.by_branch, room=room, copies=copies)

    def apply(self, layers: range) -> None:
        """Move and map keys, map values."""
        for piece in self.pieces:
            for some in self.pieces.layers(piece, layers):
                if piece.move is not None:
                    x = self._read(self.pool.keys, some, piece)
                    for step in piece.move.steps:  # each lets go of what it was given, so there are two copies at a time
                        x = step(some, x)
                    self._write(self.pool.keys, some, piece.run, x)
                if self.change.maps_values and self.change.by_increments:
                    self._add_increments(some, piece.run)
                elif self.change.maps_values:
                    x = self._read(self.pool.values, some, piece)
                    x = self.change.map("value", some, x, piece.branch)
                    self._write(self.pool.values, some, piece.run, x)

    def statistics(self, layers: range) -> Iterator[tuple[int, int, Tensor]]:
        """Of each piece its branch, its number of tokens, and mean and variance over them: fp32 [2 (mean, variance), 2 (unrotated keys,
        values), layers, kv_heads, head_dim]."""
        for piece in self.pieces:
            parts = []
            for some in self.pieces.layers(piece, layers):
                keys = _mean_and_variance(apply_rope(self._read(self.pool.keys, some, piece), *piece.move.turn))
                parts.append(torch.stack((keys, _mean_and_variance(self._read(self.pool.values, some, piece))), 1))
            yield piece.branch, piece.count, torch.cat(parts, 2)

    def _mapped_keys(self, branch: int) -> Map:
        return lambda layers, x: self.change.map("key", layers, x, branch)

    def _add_increments(self, layers: slice, run: Tensor | slice) -> None:
        _, weights = self.change.increments.weight
        _, biases = self.change.increments.bias
        for store, weight, bias in zip(self.pool.values[layers], weights[layers], biases[layers]):
            x = read(store, run, store.dtype)  # a view, where it is a run
            x += torch.addmm(bias.to(x.dtype), x.flatten(0, 1), weight).view(x.shape)
            if not isinstance(run, slice):
                write(store, run, x)

    def _read(self, stores: list[Store], layers: slice, piece: Piece) -> Tensor:
        """fp32 [layers, n, kv_heads, head_dim]."""
        if layers.stop - layers.start == 1:
            return read(stores[layers.start], piece.run, torch.float32)[None]
        x = torch.empty(layers.stop - layers.start, piece.count, *stores[0].shape[2:], device=self.pool.device)
        for at, layer in enumerate(stores[layers]):
            x[at] = read(layer, piece.run, layer.dtype if isinstance(layer, Tensor) else torch.float32)
        return x

    def _write(self, stores: list[Store], layers: slice, run: Tensor | slice, x: Tensor) -> None:
        for store, one in zip(stores[layers], x):
            write(store, run, one)


def _mean_and_variance(x: Tensor) -> Tensor:
    """Of x [layers, n, kv_heads, head_dim] over n, in one tensor."""
    mean = x.sum(1) / x.shape[1]
    return torch.stack((mean, (x - mean[:, None]).square_().sum(1) / x.shape[1]))
