"""What a merge does to keys and values besides moving them: the mapper, made ready for the branches of one merge."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import MinipsError
from .kv_cache import KVPool
from .mapper import CacheMapper, Coefficients, Increments


class Change:
    """spans: positions that each branch covers, which the map may depend on. A map that is the identity is skipped, so that it changes no bit.

    maps_keys, maps_values: whether they are changed; bare: keys are, without their rotation; by_increments: bf16 values are by products in
    bf16; by_branch: the map is not the same for all branches; statistics_needed: coefficients are to be
    made of the branches' keys and values first, some layers after the other, and are of layers from `first_layer` on.
    """

    def __init__(self, pool: KVPool, mapper: CacheMapper | None, spans: Sequence[int]):
        self.mapper = mapper
        self.coefficients: Coefficients | None = None
        self.increments: Increments | None = None
        self.maps_keys = self.maps_values = False
        self.first_layer = 0
        self.statistics_needed = mapper is not None and mapper.config.kind == "normalize" and len(spans) > 1
        if self.statistics_needed:
            self.maps_keys = self.maps_values = True
        elif mapper is not None:
            with torch.no_grad():
                self.coefficients = mapper.coefficients(spans)
            if self.coefficients is not None and not all(bool(torch.isfinite(part).all()) for part in vars(self.coefficients).values()):
                raise MinipsError("mapper: its coefficients are not finite numbers; the adapter is broken")
            keys_same, values_same = mapper.is_identity(self.coefficients)
            self.maps_keys, self.maps_values = not keys_same, not values_same
            self.increments = increments_for(pool, mapper)
        self.by_increments = pool.keys[0].dtype == torch.bfloat16 and self.increments is not None and self.increments.small[1]
        self.bare = self.maps_keys and mapper.bare
        self.by_branch = self.coefficients is not None or self.statistics_needed

    def map(self, part: str, layers: slice, x: Tensor, branch: int) -> Tensor:
        """Keys or values (`part` key or value) of tokens of one branch, x fp32 [layers, n, kv_heads, head_dim]."""
        return self.mapper.map(part, self._ours(layers), x, self.coefficients, branch)

    def scales_and_shifts(self, layers: slice, branch: int) -> list[Tensor]:
        """Of keys, then of values, each [layers, 1 or kv_heads, 1 or head_dim]."""
        return [part[branch, self._ours(layers)] for part in vars(self.coefficients).values()]

    def _ours(self, layers: slice) -> slice:
        """Their place in `coefficients`."""
        return slice(layers.start - self.first_layer, layers.stop - self.first_layer)


@torch.no_grad()
def increments_for(pool: KVPool, mapper: CacheMapper) -> Increments | None:
    """What a mapper keeps for the caches of a pool, made when this is first called."""
    dtype = pool.keys[0].dtype
    return mapper.increments(dtype) if dtype.is_floating_point and dtype.itemsize > 1 else None
