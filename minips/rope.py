"""Rotary position embedding, half-split layout: pairs are (i, i + head_dim/2), as in Hugging Face weights.

Angles are computed in fp64 from fp32 frequencies and tables are fp32, so nothing here depends on the model's dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import RopeConfig

BLOCK = 1024  # positions by which kept tables grow


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Frequencies fp32 [head_dim / 2], theta^(-2i/head_dim), with the llama3 scaling of the Llama 3.1 model card if set."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.type == "llama3":
        wavelength = 2 * math.pi / frequencies
        turns = rope.original_max_position_embeddings / wavelength
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)  # 1 keeps a high frequency, 0 divides a low one by the factor
        frequencies = frequencies * (blend + (1 - blend) / rope.factor)
    return frequencies.to(torch.float32)


class Rope:
    """cos and sin tables for any positions, negative ones included (a move of keys by -5 is the rotation of position -5)."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device | str = "cpu"):
        self.inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self._frequencies = self.inv_freq.double()
        self._kept = self._halves(0, 0)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int [T] -> cos and signed sin, fp32 [T, 1, head_dim] (broadcast over heads): (cos, cos) and (-sin, sin). A negated
        sin turns the other way."""
        angles = positions.to(torch.float64)[:, None, None] * self._frequencies
        cos, sin = angles.cos().float(), angles.sin_().float()
        del angles  # in fp64, beside long tables a lot
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


    def kept(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions `first` on, fp32 [count, 1, head_dim / 2]: rows of tables that are kept from call to call."""
        if count == 1:
            return self._halves(first, 1)
        if first + count > len(self._kept[0]):
            rows = -(-max(first + count, 2 * len(self._kept[0])) // BLOCK) * BLOCK
            blocks = [self._kept, *(self._halves(start, BLOCK) for start in range(len(self._kept[0]), rows, BLOCK))]
            self._kept = tuple(torch.cat(parts) for parts in zip(*blocks))
        cos, sin = (part[first : first + count] for part in self._kept)
        return cos, sin

    def _halves(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables(torch.arange(first, first + count, device=self.inv_freq.device))
        half = len(self.inv_freq)
        return cos[..., half:].clone(), sin[..., half:].clone()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, head_dim] by tables [T or 1, 1, head_dim]; fp32 inside, rounded once to x's dtype."""
    wide = x.float()
    return wide.roll(x.shape[-1] // 2, -1).mul_(sin).addcmul_(wide, cos).to(x.dtype)
