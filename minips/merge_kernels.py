"""Re-rotation and mapping through compiled kernels: each reads a run of stored K and V and writes it back, with nothing but matrix
products in between.

On a CPU, for tokens that stand in one run of slots of a float cache; `transform_eager.py` does the rest, and is what these are compared with.
Keys come in as their two halves, each a matrix: only so does Inductor rotate them in place in one pass, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .compiling import new_form, require_compiler

Halves = tuple[Tensor, Tensor]
Tables = tuple[Tensor, Tensor]  # cos, sin fp32 [n or 1, 1, head_dim / 2], of the tokens' positions or of how far all move


class MergeKernels:
    """The compiled forms of an engine. `at_once`: layers that a call takes. MinipsError where there is no C++ compiler.

    keys, values of the methods: of that many layers, each [n, kv_heads, head_dim] with n > 1, changed in place. turn: what keys are rotated
    by before their map: back by [n] positions, or forward by one; place: what they are rotated by behind it, or None. A form takes
    tensors by their places: none may stand for two.
    """

    def __init__(self, num_layers: int):
        require_compiler()
        self.at_once = next(count for count in (3, 2, 1) if num_layers % count == 0)  # hides what a call costs; more take long to compile
        self.calls = 0
        self._forms: dict[tuple, Callable] = {}

    @staticmethod
    def room(dtype: torch.dtype) -> int:
        """Bytes that a call takes for each key of a run, at most, in a cache of `dtype`."""
        return 2 * dtype.itemsize

    def turn(self, keys: list[Tensor], turn: Tables) -> None:
        """Rotate keys."""
        self._call(_turned, keys, [], turn, None)

    def scale(self, keys: list[Tensor], values: list[Tensor], turn: Tables, place: Tables | None, coefficients: Sequence[Tensor]) -> None:
        """x * scale + shift. coefficients: scales and shifts of keys, then of values, each [layers, 1 or kv_heads, 1 or head_dim]."""
        self._call(_scaled, keys, values, turn, place, *coefficients)

    def multiply(
        self, keys: list[Tensor], values: list[Tensor], turn: Tables, place: Tables | None, move: Tables, weight: Tensor, bias: Tensor
    ) -> None:
        """x + x weight + bias. weight [2, layers, head_dim, head_dim] of keys and values, whose dtype products are made in; bias
        [2, layers, head_dim].

        move: both rotations in one. (What stands rotated already is not held as fp32 beside the products.)
        """
        self._call(_multiplied, keys, values, turn, place, move, weight, bias)

    def statistics(self, keys: list[Tensor], values: list[Tensor], turn: Tables) -> Tensor:
        """Mean and variance over n of rotated keys and of values: fp32 [2 (mean, variance), 2 (keys, values), layers, kv_heads, head_dim]."""
        return self._call(_statistics, keys, values, turn, None)

    def _call(
        self, function: Callable, keys: list[Tensor], values: list[Tensor], turn: Tables, place: Tables | None, *more: Tensor | Tables
    ) -> Tensor | None:
        heads = keys[0].shape[1]
        key = (function, heads, len(turn[0]) == 1, place is None, *((part.dtype, part.shape) for part in more if isinstance(part, Tensor)))
        if key not in self._forms:
            self._forms[key] = new_form(function, "re-rotation and mapping", False, _of_tokens)
        self.calls += 1
        return self._forms[key]([k.flatten(0, 1).chunk(2, -1) for k in keys], values, heads, turn, place, *more)


def _of_tokens(
    keys: list[Halves], values: list[Tensor], heads: int, turn: Tables, place: Tables | None, *more: object
) -> Iterable[Tensor]:
    """Arguments whose first size depends on the number of tokens."""
    tables = [part for pair in (turn, place) if pair is not None and len(pair[0]) > 1 for part in pair]
    return [*(half for k in keys for half in k), *values, *tables]


# keys: halves, each [n * kv_heads, head_dim / 2]; values: [n, kv_heads, head_dim]; heads: kv_heads


def _rotated(halves: Halves, heads: int, tables: Tables, back: bool = False) -> Halves:
    first, second = (half.float() for half in halves)
    cos, sin = (t.expand(-1, heads, -1).reshape(-1, t.shape[-1]) if len(t) > 1 else t[0] for t in tables)
    if back:
        return first * cos + second * sin, second * cos - first * sin
    return first * cos - second * sin, second * cos + first * sin


def _turned_first(halves: Halves, heads: int, turn: Tables) -> Halves:
    return _rotated(halves, heads, turn, back=len(turn[0]) > 1)


def _put(halves: Halves, new: Halves) -> None:
    for half, x in zip(halves, new):
        half.copy_(x)


def _turned(keys: list[Halves], values: list[Tensor], heads: int, turn: Tables, place: Tables | None) -> None:
    for k in keys:
        _put(k, _turned_first(k, heads, turn))


def _scaled(
    keys: list[Halves], values: list[Tensor], heads: int, turn: Tables, place: Tables | None,
    key_scale: Tensor, key_shift: Tensor, value_scale: Tensor, value_shift: Tensor,
) -> None:  # fmt: skip
    n, _, dim = values[0].shape
    for layer, (k, v) in enumerate(zip(keys, values)):
        scale, shift = (part[layer].expand(n, heads, dim).reshape(-1, dim).chunk(2, -1) for part in (key_scale, key_shift))
        x = [torch.addcmul(more, half, by) for half, by, more in zip(_turned_first(k, heads, turn), scale, shift)]
        _put(k, x if place is None else _rotated(x, heads, place))
        v.copy_(v.float() * value_scale[layer] + value_shift[layer])


def _multiplied(
    keys: list[Halves], values: list[Tensor], heads: int, turn: Tables, place: Tables | None, move: Tables, weight: Tensor, bias: Tensor
) -> None:
    for layer, k in enumerate(keys):
        x = torch.cat([half.to(weight.dtype) for half in _turned_first(k, heads, turn)], -1)
        change = (torch.mm(x, weight[0, layer]).float() + bias[0, layer]).chunk(2, -1)
        if place is not None:
            change = _rotated(change, heads, place)
        _put(k, [half + more for half, more in zip(_rotated(k, heads, move), change)])
    for layer, v in enumerate(values):
        product = torch.mm(v.flatten(0, 1).to(weight.dtype), weight[1, layer])
        v.copy_(v.float() + product.view(v.shape).float() + bias[1, layer])


def _statistics(keys: list[Halves], values: list[Tensor], heads: int, turn: Tables, place: Tables | None) -> Tensor:
    means, variances = [], []
    shape = values[0].shape
    for x in [torch.cat(_turned_first(k, heads, turn), -1).view(shape) for k in keys] + [v.float() for v in values]:
        mean = x.sum(0) / len(x)
        means.append(mean)
        variances.append((x - mean).square().sum(0) / len(x))
    return torch.stack(means + variances).unflatten(0, (2, 2, -1))
