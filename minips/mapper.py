"""The cache mapper: per layer, a small map of a branch's keys and one of its values (arXiv 2606.14672, equation 14).

Kinds: affine (four scalars a branch and layer from a tiny MLP, as the authors released it), low_rank (x + x A B^T), linear
(x W + b), normalize (no training: each branch's mean and variance are brought to the mean over branches), none.
Keys are mapped as they stand (`rotated`), or with their rotation taken off for the map (`unrotated`). All of it in fp32, but for what
`Increments` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import MinipsError, brief
from .reading import is_integer

KINDS = ("none", "affine", "linear", "low_rank", "normalize")
KEY_SPACES = ("unrotated", "rotated")
FEATURES = {"both": 3, "length": 2, "num_agents": 2, "none": 1}  # of the affine kind: metadata_features -> inputs
MIN_VARIANCE = 1e-12


@dataclass(frozen=True)
class MapperConfig:
    """kind and shape of a mapper. key_space None takes the kind's default: rotated for affine, else unrotated."""

    kind: str = "none"
    key_space: str | None = None
    rank: int = 16  # low_rank
    per_head: bool = False  # low_rank and linear: one map a KV head instead of one for all
    hidden_dim: int = 32  # affine
    metadata_features: str = "both"  # affine

    def __post_init__(self) -> None:
        if self.key_space is None:
            object.__setattr__(self, "key_space", "rotated" if self.kind == "affine" else "unrotated")
        for name, good, expected in (
            ("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}"),
            ("key_space", self.key_space in KEY_SPACES, f"one of {', '.join(KEY_SPACES)}"),
            ("rank", is_integer(self.rank) and 1 <= self.rank <= 4096, "an integer of at least 1"),
            ("per_head", isinstance(self.per_head, bool), "true or false"),
            ("hidden_dim", is_integer(self.hidden_dim) and 1 <= self.hidden_dim <= 65536, "a positive integer"),
            ("metadata_features", self.metadata_features in tuple(FEATURES), f"one of {', '.join(FEATURES)}"),
        ):
            if not good:
                raise MinipsError(f"mapper: {name} is {brief(getattr(self, name))}, expected {expected}")
        if self.kind == "normalize" and self.key_space != "unrotated":
            raise MinipsError("mapper: kind normalize works on unrotated keys; key_space 'rotated' cannot be combined with it")


@dataclass(frozen=True)
class Coefficients:
    """x * scale + shift by branch and layer; each tensor fp32 [branches, layers, 1 or kv_heads, 1 or head_dim]."""

    key_scale: Tensor
    key_shift: Tensor
    value_scale: Tensor
    value_shift: Tensor


@dataclass(frozen=True)
class Increments:
    """x + x D + b. weight: D [2 (keys, values), layers, head_dim, head_dim]; bias: b fp32 [2, layers, head_dim].

    small: for keys and for values, whether |D| is at most 0.5 (spectral norm) in all layers. Then x D may be made in bf16, which is faster:
    what it is rounded by is small beside what x + x D is, as it would not be where D nearly takes x away.
    """

    weight: Tensor
    bias: Tensor
    small: list[bool]

    @classmethod
    def empty(cls, layers: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Increments:
        """Zeros, to be filled."""
        weight = torch.zeros(2, layers, head_dim, head_dim, dtype=dtype, device=device)
        return cls(weight, torch.zeros(2, layers, head_dim, device=device), [True, True])


def joined(parts: Sequence[Coefficients | None]) -> Coefficients | None:
    """Coefficients of several merges as those of all their branches, one behind the other."""
    if not parts or parts[0] is None:
        return None
    return Coefficients(*map(torch.cat, zip(*(vars(part).values() for part in parts))))


class CacheMapper(nn.Module):
    """Maps K and V of merged branches. Starts as the exact identity; `normalize` and `none` have no parameters."""

    def __init__(self, config: MapperConfig, num_layers: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.config, self.num_layers, self.kv_heads, self.head_dim = config, num_layers, kv_heads, head_dim
        self._increments: tuple[tuple, Increments] | None = None  # of which dtype and weights, and what they come to
        maps = (num_layers, kv_heads if config.per_head else 1)
        if config.kind == "affine":
            inputs = FEATURES[config.metadata_features]
            self.net = nn.Sequential(nn.Linear(inputs, config.hidden_dim), nn.SiLU(), nn.Linear(config.hidden_dim, 4))
            nn.init.zeros_(self.net[2].weight)
            nn.init.zeros_(self.net[2].bias)
        for part in ("key", "value") if config.kind in ("low_rank", "linear") else ():
            if config.kind == "low_rank":
                setattr(self, f"{part}_a", nn.Parameter(torch.zeros(*maps, head_dim, config.rank)))
                setattr(self, f"{part}_b", nn.Parameter(torch.randn(*maps, head_dim, config.rank) / math.sqrt(config.rank)))
            else:
                setattr(self, f"{part}_weight", nn.Parameter(torch.eye(head_dim).repeat(*maps, 1, 1)))
                setattr(self, f"{part}_bias", nn.Parameter(torch.zeros(*maps, head_dim)))

    @property
    def bare(self) -> bool:
        """Whether keys are mapped without their rotation."""
        return self.config.key_space == "unrotated"

    def coefficients(self, spans: Sequence[int]) -> Coefficients | None:
        """What the affine kind makes of the branches' position spans; None for kinds that need none (or statistics first)."""
        if self.config.kind != "affine":
            return None
        count, layers = len(spans), self.num_layers
        length = torch.log1p(torch.tensor(spans, dtype=torch.float32).clamp(min=1))[:, None].expand(count, layers)
        number = torch.log1p(torch.tensor(float(max(count, 1)))).expand(count, layers)
        place = (torch.arange(layers) / max(layers - 1, 1)).expand(count, layers)
        used = {"both": (length, number, place), "length": (length, place), "num_agents": (number, place), "none": (place,)}
        weight = self.net[0].weight
        raw = self.net(torch.stack(used[self.config.metadata_features], -1).to(weight.device)).float()
        bounded = 0.1 * torch.tanh(raw)[..., None, None]  # [branches, layers, 4, 1, 1]
        return Coefficients(1 + bounded[:, :, 0], bounded[:, :, 1], 1 + bounded[:, :, 2], bounded[:, :, 3])

    def from_statistics(self, keys: Tensor, values: Tensor, counts: Sequence[int]) -> Coefficients:
        """The normalize kind. keys, values fp32 [2, branches, layers, kv_heads, head_dim]: mean and variance of each branch.

        A one-token branch stays as it is and has no say in the target; a channel without variance is only shifted.
        """
        several = torch.tensor([count > 1 for count in counts], device=keys.device)

        def scale_and_shift(statistics: Tensor) -> tuple[Tensor, Tensor]:
            mean, variance = statistics
            if not several.any():
                return torch.ones_like(mean), torch.zeros_like(mean)
            target_mean, target_variance = mean[several].mean(0), variance[several].mean(0)
            usable = (variance > MIN_VARIANCE) & several[:, None, None, None]
            scale = torch.where(usable, (target_variance / variance.clamp(min=MIN_VARIANCE)).sqrt(), 1.0)
            shift = torch.where(several[:, None, None, None], target_mean - mean * scale, 0.0)
            return scale, shift

        return Coefficients(*scale_and_shift(keys), *scale_and_shift(values))

    def is_identity(self, coefficients: Coefficients | None = None) -> tuple[bool, bool]:
        """Whether keys and values come out exactly as they went in; such a map is skipped, so that nothing is rounded."""
        if coefficients is not None:
            c = coefficients
            return tuple(
                bool((scale == 1).all() and (shift == 0).all())
                for scale, shift in ((c.key_scale, c.key_shift), (c.value_scale, c.value_shift))
            )
        if self.config.kind == "low_rank":
            pairs = ((self.key_a, self.key_b), (self.value_a, self.value_b))
            return tuple(not bool(a.any() and b.any()) for a, b in pairs)
        if self.config.kind == "linear":
            unit = torch.eye(self.head_dim, device=self.key_weight.device)
            pairs = ((self.key_weight, self.key_bias), (self.value_weight, self.value_bias))
            return tuple(bool((weight == unit).all() and not bias.any()) for weight, bias in pairs)
        return True, True

    def map(self, part: str, layers: int | slice, x: Tensor, coefficients: Coefficients | None, branch: int | Tensor) -> Tensor:
        """Map keys or values (`part` key or value) x fp32 [n, kv_heads, head_dim] of a layer, or [layers, n, ...] of a slice of them.

        branch: whose token each of the n is (int [n]), or all are.
        """
        if not isinstance(layers, slice):
            return self.map(part, slice(layers, layers + 1), x[None], coefficients, branch)[0]
        if coefficients is not None:
            scale, shift = (getattr(coefficients, f"{part}_{name}")[branch][..., layers, :, :] for name in ("scale", "shift"))
            if isinstance(branch, int):
                scale, shift = scale[:, None], shift[:, None]
            else:
                scale, shift = scale.transpose(0, 1), shift.transpose(0, 1)
            return torch.addcmul(shift, x, scale)
        if self.config.kind in ("none", "normalize"):
            return x
        if self.config.per_head:  # one map a head, or one for all rows
            heads = x.transpose(1, 2)
            return self._mapped(part, layers, heads.flatten(0, 1)).view(heads.shape).transpose(1, 2)
        return self._mapped(part, layers, x.flatten(1, 2)).view(x.shape)

    def _mapped(self, part: str, layers: slice, rows: Tensor) -> Tensor:
        """rows fp32 [layers * maps a layer, rows of a map, head_dim]."""
        names = ("a", "b") if self.config.kind == "low_rank" else ("weight", "bias")
        first, second = (getattr(self, f"{part}_{name}")[layers].flatten(0, 1).float() for name in names)
        if self.config.kind == "low_rank":
            return torch.baddbmm(rows, rows @ first, second.transpose(1, 2))
        return torch.baddbmm(second[:, None], rows, first)

    def increments(self, dtype: torch.dtype) -> Increments | None:
        """The maps of all layers as x + x D + b, where one serves all heads of a layer; made anew only when the weights have changed."""
        if self.config.kind not in ("low_rank", "linear") or self.config.per_head:
            return None
        known = [(part.data_ptr(), None if part.is_inference() else part._version) for part in self.parameters()]
        if self._increments is None or self._increments[0] != (dtype, known):
            made = Increments.empty(self.num_layers, self.head_dim, dtype, next(self.parameters()).device)
            for index, part in enumerate(("key", "value")):
                norms = []
                for layer in range(self.num_layers):  # one after the other, as fp32 of all would be large beside short branches
                    change = self._change(part, layer)
                    made.weight[index, layer] = change
                    norms.append(_norm_at_least(change))
                made.small[index] = bool((torch.stack(norms) <= 0.5).all())
                if self.config.kind == "linear":
                    made.bias[index] = getattr(self, f"{part}_bias")[:, 0]
            self._increments = (dtype, known), made
        return self._increments[1]

    def _change(self, part: str, layer: int) -> Tensor:
        """D = W - I of a layer, one for all heads: fp32 [head_dim, head_dim]."""
        if self.config.kind == "low_rank":
            return getattr(self, f"{part}_a")[layer, 0].float() @ getattr(self, f"{part}_b")[layer, 0].float().T
        weight = getattr(self, f"{part}_weight")[layer, 0].to(torch.float32, copy=True)
        weight.diagonal().sub_(1)
        return weight


def _norm_at_least(square: Tensor) -> Tensor:
    """The spectral norm of [n, n] or up to n^(1/16) times it, never less."""
    square = square.T @ square
    for _ in range(2):
        square = square @ square
    return square.norm() ** (1 / 8)
