"""Re-rotation and mapping through compiled kernels: each reads a run of stored K and V and writes it back, with nothing but matrix
products in between.

On a CPU, for tokens that stand in one run of slots of a float cache; `transform_eager.py` does the rest, and is what these are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .compiling import new_form, require_compiler


class Rotation(NamedTuple):
    """cos, sin fp32 [n or 1, 1, 1, head_dim / 2] and [[-1], [1]], or, to turn the other way, [[1], [-1]]."""

    cos: Tensor
    sin: Tensor
    sign: Tensor


class MergeKernels:
    """The compiled forms of an engine. `at_once`: layers that a call takes. MinipsError where there is no C++ compiler.

    keys, values of the methods: of that many layers, each [n, kv_heads, head_dim] with n > 1, changed in place; turn, place: the rotations of keys before
    and behind their map, or None.
    """

    def __init__(self, num_layers: int):
        require_compiler()
        self.at_once = next(count for count in (3, 2, 1) if num_layers % count == 0)  # hides what a call costs; more take long to compile
        self.calls = 0
        self._forms: dict[tuple, Callable] = {}
        self._sign = torch.tensor([[-1.0], [1.0]])

    @staticmethod
    def room(dtype: torch.dtype, products: bool) -> int:
        """Bytes that a call takes for each key of a run, at most, in a cache of `dtype`; products: it is `multiply`."""
        return (3 if products else 2) * dtype.itemsize

    def rotation(self, tables: tuple[Tensor, Tensor], back: bool = False) -> Rotation:
        """By positions that `tables` (`Rope.kept`) are of, or back by them."""
        return Rotation(*tables, -self._sign if back else self._sign)

    def turn(self, keys: list[Tensor], turn: Rotation) -> None:
        """Rotate keys."""
        self._call(_turned, keys, [], turn, None)

    def scale(self, keys: list[Tensor], values: list[Tensor], turn: Rotation, place: Rotation | None, coefficients: Sequence[Tensor]) -> None:
        """x * scale + shift. coefficients: scales and shifts of keys, then of values, each [layers, 1 or kv_heads, 1 or head_dim]."""
        self._call(_scaled, keys, values, turn, place, *coefficients)

    def multiply(
        self, keys: list[Tensor], values: list[Tensor], turn: Rotation, place: Rotation | None, weight: Tensor, bias: Tensor
    ) -> None:
        """x + x weight + bias. weight [2, layers, head_dim, head_dim] of keys and values, whose dtype products are made in; bias [2, layers, head_dim]."""
        self._call(_multiplied, keys, values, turn, place, weight, bias)

    def statistics(self, keys: list[Tensor], values: list[Tensor], turn: Rotation) -> Tensor:
        """Mean and variance over n of rotated keys and of values: fp32 [2 (mean, variance), 2 (keys, values), layers, kv_heads, head_dim]."""
        return self._call(_statistics, keys, values, turn, None)

    def _call(
        self, function: Callable, keys: list[Tensor], values: list[Tensor], turn: Rotation, place: Rotation | None, *more: Tensor
    ) -> Tensor | None:
        key = (function, len(turn.cos) == 1, place is None, *((part.dtype, part.shape) for part in more))
        if key not in self._forms:
            self._forms[key] = new_form(function, "re-rotation and mapping", False, _of_tokens)
        self.calls += 1
        return self._forms[key](keys, values, turn, place, *more)


def _of_tokens(keys: list[Tensor], values: list[Tensor], turn: Rotation, place: Rotation | None, *more: Tensor) -> list[Tensor]:
    """Arguments whose first size is the number of tokens."""
    return [*keys, *values, *(turn[:2] if len(turn.cos) > 1 else ()), *(place[:2] if place is not None else ())]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: Tensor) -> Tensor:
    """x [n, kv_heads, head_dim] -> fp32. Halves are exchanged by `flip`: of `roll` Inductor makes slow code, of `cat` copies."""
    wide = x.float().unflatten(-1, (2, -1))
    return (wide * cos + wide.flip(-2) * (sin * sign)).flatten(-2)


def _turned(keys: list[Tensor], values: list[Tensor], turn: Rotation, place: Rotation | None) -> None:
    for k in keys:
        k.copy_(_rotated(k, *turn))


def _scaled(
    keys: list[Tensor], values: list[Tensor], turn: Rotation, place: Rotation | None,
    key_scale: Tensor, key_shift: Tensor, value_scale: Tensor, value_shift: Tensor,
) -> None:  # fmt: skip
    for layer, (k, v) in enumerate(zip(keys, values)):
        x = _rotated(k, *turn) * key_scale[layer] + key_shift[layer]
        k.copy_(x if place is None else _rotated(x, *place))
        v.copy_(v.float() * value_scale[layer] + value_shift[layer])


def _multiplied(keys: list[Tensor], values: list[Tensor], turn: Rotation, place: Rotation | None, weight: Tensor, bias: Tensor) -> None:
    x = torch.stack([_rotated(k, *turn).to(weight.dtype) for k in keys])
    product = torch.bmm(x.flatten(1, 2), weight[0]).view(x.shape)
    for layer, k in enumerate(keys):
        y = _rotated(k, *turn) + product[layer].float() + bias[0, layer]
        k.copy_(y if place is None else _rotated(y, *place))
    x = torch.stack(values).to(weight.dtype)
    product = torch.bmm(x.flatten(1, 2), weight[1]).view(x.shape)
    for layer, v in enumerate(values):
        v.copy_(v.float() + product[layer].float() + bias[1, layer])


def _statistics(keys: list[Tensor], values: list[Tensor], turn: Rotation, place: Rotation | None) -> Tensor:
    means, variances = [], []
    for x in [_rotated(k, *turn) for k in keys] + [v.float() for v in values]:
        mean = x.sum(0) / len(x)
        means.append(mean)
        variances.append((x - mean).square().sum(0) / len(x))
    return torch.stack(means + variances).unflatten(0, (2, 2, -1))
