"""How the K or V of one layer is stored: a plain tensor of floats, or 8-bit codes with one scale for each token and KV head.

A `Store` has the shape [num_pages, page_size, kv_heads, head_dim]. Everything that touches stored K/V goes through `read` and
`write` (which convert) or through `parts` (the raw tensors, for copies that must not change a bit).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .errors import MinipsError
from .weights import DTYPES

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: 448.0}  # the code of the largest value of a token and head
SCALE_BYTES = 4
NAMES = {"int8": torch.int8, "fp8": FP8}


class Quantized:
    """x = code * scale, where scale = absmax / 127 (int8) or absmax / 448 (fp8 e4m3) of one token and KV head.

    codes: int8, or the bits of fp8 as uint8 (which every torch build can copy by index), [num_pages, page_size, kv_heads,
    head_dim]. scales: [num_pages, page_size, kv_heads, 1], in fp32: in fp16 they would save 3% of the memory, and a token whose
    absmax is below 0.008 (fp16 has no smaller normal number than 6e-5) would lose its precision.
    Below 2^-10 of the largest code's value fp8 has no code but 0. Values that are not finite stay so: their scale is not finite.

    mixed: a few channels, of keys above all, are far larger than the rest and would leave those one or two codes. So the channels
    are mixed by a Hadamard matrix first (it is its own inverse); attention mixes its queries and its outputs
    instead of mixing keys and values back.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, mixed: bool):
        self.dtype, self.shape = dtype, torch.Size(shape)
        self.mixing = hadamard(shape[-1], torch.device(device)) if mixed else None
        self.codes = torch.empty(shape, dtype=torch.int8 if dtype == torch.int8 else torch.uint8, device=device)
        self.scales = torch.empty((*shape[:-1], 1), dtype=torch.float32, device=device)


Store = Tensor | Quantized


@lru_cache
def hadamard(channels: int, device: torch.device) -> Tensor:
    """Orthonormal, symmetric, all of one magnitude: fp32 [n, n], n the largest power of two that divides `channels`."""
    matrix = torch.ones(1, 1)
    while channels % (2 * len(matrix)) == 0:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / len(matrix) ** 0.5).to(device)


def mix(x: Tensor, matrix: Tensor | None = None) -> Tensor:
    """Mix the channels of x [..., head_dim] by the Hadamard matrix, in fp32; a second time brings x back."""
    matrix = hadamard(x.shape[-1], x.device) if matrix is None else matrix
    return (x.float().unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)


def new_store(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", *, mixed: bool) -> Store:
    """Room for the keys or the values of one layer; only its page 0 is defined: zeros."""
    with torch.inference_mode(False), torch.no_grad():  # tensors of that mode could not be written outside of it
        store = Quantized(shape, dtype, device, mixed=mixed) if dtype in LARGEST else torch.empty(shape, dtype=dtype, device=device)
        for part in parts(store):
            part[0].zero_()
    return store


def parts(store: Store) -> tuple[Tensor, ...]:
    """The raw tensors, each [num_pages, page_size, kv_heads, ...]: copying the same pages of all of them copies K/V bit for bit."""
    return (store.codes, store.scales) if isinstance(store, Quantized) else (store,)


def mixed_as(store: Store, x: Tensor) -> Tensor:
    """x [..., head_dim] with its channels mixed, or mixed back, in fp32, if the store mixes them; else x itself."""
    return mix(x, store.mixing) if isinstance(store, Quantized) and store.mixing is not None else x


def read(store: Store, slots: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """The tokens at flat slots int64 [n], or of a slice of slots -> [n, kv_heads, head_dim]; a view where nothing is converted."""
    return mixed_as(store, read_mixed(store, slots, torch.float32 if isinstance(store, Quantized) else dtype)).to(dtype)


def read_mixed(store: Store, slots: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """As `read`, channels mixed as they are stored: for queries that are mixed too, and outputs that are mixed back (`mixed_as`)."""
    if isinstance(store, Quantized):
        return dequantise(_take(store.codes, slots), _take(store.scales, slots), store.dtype).to(dtype)
    return _take(store, slots).to(dtype)


def as_run(slots: Tensor) -> Tensor | slice:
    """The same slots, as a slice if they are one run (on the CPU; elsewhere asking would wait for the device)."""
    if slots.device.type != "cpu" or not len(slots):
        return slots
    first = int(slots[0])
    return slice(first, first + len(slots)) if torch.equal(slots, torch.arange(first, first + len(slots))) else slots


def write(store: Store, slots: Tensor | slice, values: Tensor) -> None:
    """Store values [n, kv_heads, head_dim] at flat slots int64 [n], or of a slice of slots, rounded to the store's dtype."""
    if isinstance(slots, slice):
        if not isinstance(store, Quantized):
            store.flatten(0, 1)[slots] = values
            return
        slots = torch.arange(slots.start, slots.stop)
    if isinstance(store, Quantized):
        write_parts(store, slots, quantise(mixed_as(store, values.float()), store.dtype))
    else:
        store.flatten(0, 1).index_copy_(0, slots, values.to(store.dtype))


def read_parts(store: Store, slots: Tensor) -> tuple[Tensor, ...]:
    """As stored, gathered: one tensor [n, kv_heads, ...] a part."""
    return tuple(_take(part, slots) for part in parts(store))


def write_parts(store: Store, slots: Tensor, values: tuple[Tensor, ...]) -> None:
    """What `read_parts` (of a store of this dtype) or `quantise` gave, bit for bit."""
    for part, value in zip(parts(store), values):
        part.flatten(0, 1).index_copy_(0, slots, value)


def quantise(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """values [..., head_dim] -> codes (int8, or fp8's bits) and scales fp32 [..., 1]; a row of zeros has scale 1."""
    wide, largest = values.float(), LARGEST[dtype]
    absmax = wide.abs().amax(-1, keepdim=True)
    scales = (absmax / largest).clamp_min(torch.finfo(torch.float32).tiny)  # no division by a scale that underflowed
    scales = torch.where(absmax == 0, torch.ones_like(scales), scales)
    wide = (wide / scales).clamp_(-largest, largest)  # rounding may have carried the largest value just past the last code
    return (wide.round_().to(torch.int8) if dtype == torch.int8 else wide.to(FP8).view(torch.uint8)), scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantise` gave for `dtype` -> fp32 [..., head_dim]."""
    return (codes if dtype == torch.int8 else codes.view(FP8).float()) * scales


def bytes_per_token(dtype: torch.dtype, kv_heads: int, head_dim: int) -> int:
    """Of K or V of one layer, the scales counted."""
    return kv_heads * (head_dim * dtype.itemsize + (SCALE_BYTES if dtype in LARGEST else 0))


def resolve_kv_dtype(name: str, weights: torch.dtype, device: torch.device) -> torch.dtype:
    """auto (the weights' dtype), a float dtype's name, int8 or fp8; fp8 is refused where it cannot be converted to and back."""
    dtype = weights if name == "auto" else {**DTYPES, **NAMES}.get(name)
    if dtype is None:
        raise MinipsError(f"kv_dtype is {name!r}, expected one of auto, {', '.join((*DTYPES, *NAMES))}")
    if dtype == FP8:
        try:
            torch.ones(1, device=device).to(FP8).float()
        except (RuntimeError, TypeError) as error:
            raise MinipsError(f"kv_dtype fp8: torch cannot convert e4m3 numbers on {device} ({error}); use int8") from None
    return dtype


def _take(tensor: Tensor, slots: Tensor | slice) -> Tensor:
    flat = tensor.flatten(0, 1)
    return flat[slots] if isinstance(slots, slice) else flat.index_select(0, slots)
