"""The forms in which the weights of linear layers stand in memory, and how they keep their Hugging Face names.

Layers that read the same input are rows of one matrix, so that one product does for all. A matrix is callable on x [T, in], knows
its `bias`, and gives its plain weights back with `dense()`. `Packed` is oneDNN's own layout: the very same sums on a CPU, but the
weights of a step with few rows are read about twice as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn


class Matrix(Protocol):
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> x W^T + b, [T, out]."""

    def dense(self) -> Tensor:
        """W, [out, in]."""


class Stacked:
    """The rows of several plain linear layers, whose parameters become views of one tensor."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.weight = _stack([layer.weight for layer in layers])
        self.bias = _stack([layer.bias for layer in layers]) if layers[0].bias is not None else None
        first = 0
        for layer in layers:
            rows = slice(first, first + layer.out_features)
            layer.weight = nn.Parameter(self.weight[rows], requires_grad=False)
            if self.bias is not None:
                layer.bias = nn.Parameter(self.bias[rows], requires_grad=False)
            first = rows.stop

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def dense(self) -> Tensor:
        return self.weight


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one below the other; no copy where they lie behind each other in memory, as `load_weights` puts them."""
    first = tensors[0].detach()
    end, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or (tensor.storage_offset(), tensor.untyped_storage().data_ptr()) != (end, storage):
            return torch.cat([tensor.detach() for tensor in tensors])
        end += tensor.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


class Opaque:
    """A matrix whose form compilers know nothing of: on a CPU, compiled code calls its `product` by the number of the matrix."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.bias, self.rows, self.number = bias, len(weight), torch.tensor(next(_numbers))
        _opaque[int(self.number)] = self

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and x.device.type == "cpu":
            return torch.ops.minips.product(x, self.number, self.rows)
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError


_numbers = count()
_opaque: WeakValueDictionary[int, Opaque] = WeakValueDictionary()
_library = library.Library("minips", "DEF")
_library.define("product(Tensor x, Tensor number, int rows) -> Tensor")


def _product(x: Tensor, number: Tensor, rows: int) -> Tensor:
    return _opaque[int(number)].product(x)


_library.impl("product", _product, "CPU")
library.register_fake("minips::product", lambda x, number, rows: x.new_empty(*x.shape[:-1], rows), lib=_library)


class Packed(Opaque):
    """A bf16 matrix in oneDNN's blocked layout: no copy of the plain one is kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def dense(self) -> Tensor:
        return self.weight.to_dense()


def packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Rows(nn.Module):
    """Some rows of a matrix that is not plain, in the place and under the name of a linear layer. `weight` and `bias` are made when asked for."""

    def __init__(self, matrix: Matrix, first: int, last: int):
        super().__init__()
        self.matrix, self.first, self.last = matrix, first, last

    @property
    def weight(self) -> Tensor:
        return self.matrix.dense()[self.first : self.last]

    @property
    def bias(self) -> Tensor | None:
        return self.matrix.bias[self.first : self.last] if self.matrix.bias is not None else None

    @property
    def out_features(self) -> int:
        return self.last - self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix(x)[..., self.first : self.last]

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A plain frozen linear layer around tensors."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


Form = Callable[[Tensor, "Tensor | None"], Matrix]


def reform(linear: nn.Linear, form: Form) -> Rows:
    """The same layer with its matrix in another form."""
    return Rows(form(linear.weight.detach(), linear.bias), 0, linear.out_features)


def reform_stacked(module: nn.Module, form: Form) -> None:
    """Put the `fused` matrix of an attention or MLP, whose layers are named in its `parts`, into another form."""
    module.fused = matrix = form(module.fused.dense(), module.fused.bias)
    first = 0
    for part in module.parts:
        last = first + getattr(module, part).out_features
        setattr(module, part, Rows(matrix, first, last))
        first = last
