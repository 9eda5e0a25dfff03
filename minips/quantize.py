"""Weight-only quantisation: int8 with one scale a row, int4 with scale and zero a block of 32, on torch's packed-weight operators.

A step with few rows reads 2 to 4 times fewer bytes. With more rows the operators are slower than bf16 products, so a model whose
bf16 weights take up to 1 GiB keeps them packed beside the codes (the values of the codes, so that both give the same sums), and a
larger one makes do with the codes. Activations, norms, the embedding and the KV cache stay as they are.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import MinipsError
from .matrix import Opaque, Packed, Rows, packable
from .model import Model
from .weights import expected_shapes

BLOCK = 32  # weights with one scale and zero; those of Q4_0 and Q4_1 files, from which the default model comes
FEW_ROWS = {"int8": 2, "int4": 5}  # up to so many rows the codes beat bf16 (measured on Zen 4, one and two threads)
BESIDE = 1 << 30  # bytes of bf16 weights that are kept beside the codes
_STEPS = 15  # between the lowest and the highest of 16 values
_ON_GRID = 0.12  # of a step: bf16 leaves stored grid values at most 0.06 off, other values lie anywhere up to 0.5
_ROWS = 1 << 15  # blocks at once


class Int8(Opaque):
    """codes int8 [out, in], scales [out]: W = codes * scales."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, beside: bool = False):
        super().__init__(weight, bias)
        wide = weight.float()
        scales = (wide.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny).to(weight.dtype)
        self.codes = (wide / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        self.scales = scales
        self.beside = Packed(self.dense(), bias) if beside and packable(weight) else None

    def product(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and len(x) <= FEW_ROWS["int8"]:
            return _plus(torch._weight_int8pack_mm(x, self.codes, self.scales), self.bias)
        if self.beside is not None:
            return self.beside(x)
        return _plus(F.linear(x, self.codes.to(x.dtype)) * self.scales, self.bias)

    def dense(self) -> Tensor:
        return (self.codes.float() * self.scales.float()[:, None]).to(self.scales.dtype)


class Int4(Opaque):
    """codes [out, in] from 0 to 15, and for each block of 32 of a row a scale and a zero: W = (codes - 8) * scale + zero."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, beside: bool = False):
        super().__init__(weight, bias)
        codes, scales, zeros = grids(weight)
        self.on_cpu, self.columns = weight.device.type == "cpu", weight.shape[1]
        if self.on_cpu:
            self.codes = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        else:
            tiles = next(tiles for tiles in (8, 4, 2) if self.columns % (16 * tiles) == 0)  # of 16 inputs: the operator takes whole ones
            self.codes = torch._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).contiguous(), tiles)
        self.scales = torch.stack((scales.T, zeros.T), -1).contiguous()  # [in / 32, out, 2]
        self.beside = Packed(values(codes, scales, zeros), bias) if beside and packable(weight) else None

    def product(self, x: Tensor) -> Tensor:
        if self.beside is not None and len(x) > FEW_ROWS["int4"]:
            return self.beside(x)
        return _plus(self._codes_times(x), self.bias)

    def _codes_times(self, x: Tensor) -> Tensor:
        product = torch._weight_int4pack_mm_for_cpu if self.on_cpu else torch._weight_int4pack_mm
        return product(x.contiguous(), self.codes, BLOCK, self.scales)

    def dense(self) -> Tensor:
        """Without a form beside it by the operator itself, whose codes lie otherwise on each kind of machine: unit vectors in, columns out."""
        if self.beside is not None:
            return self.beside.dense()
        return self._codes_times(torch.eye(self.columns, dtype=self.scales.dtype, device=self.scales.device)).T.contiguous()


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


# Finding scales and zeros


def grids(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in] -> codes uint8 [out, in], scales and zeros [out, in / 32] in its dtype.

    Weights that came from 4-bit blocks lie on a grid of 16 values a block; it is recovered, also where a block does not use both
    ends of it. Other weights are spread from their lowest to their highest.
    """
    blocks = weight.reshape(-1, BLOCK)
    found = [_block_grids(part, weight.dtype) for part in blocks.split(_ROWS)]
    codes, scales, zeros = (torch.cat(parts) for parts in zip(*found))
    return codes.view(weight.shape), scales.view(len(weight), -1), zeros.view(len(weight), -1)


def values(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """What codes, scales and zeros stand for, [out, in] in the dtype of the scales."""
    blocks = codes.float().unflatten(1, (-1, BLOCK)).sub_(8)
    return blocks.mul_(scales.float()[..., None]).add_(zeros.float()[..., None]).flatten(1).to(scales.dtype)


def _block_grids(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    blocks = blocks.float()
    codes, off = _codes(blocks, _STEPS)
    left = (off > _ON_GRID).nonzero().flatten()
    sample = left[:: max(1, len(left) // 256)]
    nearest = torch.stack([_codes(blocks[sample], steps)[1] for steps in range(_STEPS - 1, 3, -1)]) if len(left) else off
    if len(left) and (nearest.amin(0) <= _ON_GRID).float().mean() > 0.5:  # they are on grids, with fewer steps in use
        for steps in range(_STEPS - 1, 3, -1):
            fewer, off = _codes(blocks[left], steps)
            good = off <= _ON_GRID
            codes[left[good]] = fewer[good]
            left = left[~good]
    mean, middle = blocks.mean(1, keepdim=True), codes.mean(1, keepdim=True)  # least squares for scale and zero
    spread = (codes - middle).square_().sum(1, keepdim=True)
    scales = ((codes - middle) * (blocks - mean)).sum(1, keepdim=True) / spread.clamp_min(1e-9)
    zeros = mean + (8 - middle) * scales
    return codes.to(torch.uint8), scales.to(dtype), zeros.to(dtype)


def _codes(blocks: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Codes fp32 [n, 32] on `steps` equal steps from lowest to highest, and how far off the worst value is, in steps [n]."""
    low, high = blocks.aminmax(dim=1, keepdim=True)
    exact = (blocks - low).div_(((high - low) / steps).clamp_min_(torch.finfo(torch.float32).tiny))
    codes = exact.round()
    return codes, exact.sub_(codes).abs_().amax(1)


# A whole model


def quantize(model: Model, kind: str) -> None:
    """Quantise every matrix of a bf16 model. MinipsError where it cannot be done.

    The head (a copy of the embedding where that is tied) to int8 in any case, for its errors go straight into the logits: in int4 they cost
    the default model 10% of its top-1 choices. On CUDA, which widens the codes of int8 in every step (less memory, no less time), int4 leaves it.
    """
    weight = model.model.embed_tokens.weight
    if weight.dtype != torch.bfloat16:
        raise MinipsError(
            f"quantize: {kind} needs bfloat16 weights, these are {str(weight.dtype).removeprefix('torch.')}; set dtype to bfloat16"
        )
    shapes = {name: shape for name, shape in expected_shapes(model.config).items() if len(shape) == 2}
    odd = [name for name, (rows, columns) in shapes.items() if ".layers." in name and (columns % BLOCK or rows % 16)]
    if kind == "int4" and odd:
        raise MinipsError(
            f"quantize: int4 needs inputs in multiples of {BLOCK} and outputs in multiples of 16, {odd[0]} is {list(shapes[odd[0]])}"
        )
    beside = 2 * sum(map(math.prod, shapes.values())) <= BESIDE
    head = partial(Int8, beside=beside) if kind == "int8" or weight.device.type == "cpu" else None
    model.reform(partial(Int8 if kind == "int8" else Int4, beside=beside), head)


def weight_bytes(model: Model) -> int:
    """Bytes of all weights in the forms in which they are kept; what is shared counts once."""
    matrices = [model.head, *(module.matrix for module in model.modules() if isinstance(module, Rows))]
    matrices += [getattr(matrix, "beside", None) for matrix in matrices]
    kept = [*model.parameters(), *(value for matrix in matrices if matrix is not None for value in vars(matrix).values())]
    tensors = {id(tensor): tensor for tensor in kept if isinstance(tensor, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
