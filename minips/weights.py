"""Strict reading of a model folder: exactly the tensors that the config implies, straight to the wanted device and dtype.

Only safetensors are read. All headers are checked before the first tensor is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .errors import MinipsError, brief, in_one_line
from .reading import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LFS_POINTER = b"version https://git-lfs"
STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# RoPE tables that old checkpoints carry; they are always computed afresh in fp32.
_POSITION_BUFFER = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|rope\.freqs")
_JOINED = re.compile(r"(?:[qkv]|gate|up)_proj(\.\w+)$")  # of one module: they read the same input
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".npz")
_COSMETIC = ("dtype", "eos_token_ids", "bos_token_id", "max_position_embeddings")  # no part of the maths
_CHUNK = 1 << 24


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `dtype` in safetensors' spelling, `start` and `size` in bytes of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def resolve_dtype(name: str, config: ModelConfig, setting: str = "dtype") -> torch.dtype:
    """'auto' (the stored dtype), float32, bfloat16, float16, or fp32, bf16, fp16 -> torch.dtype."""
    found = DTYPES.get(config.dtype if name == "auto" else name)
    if found is None:
        raise MinipsError(f"{setting} is {name!r}, expected one of auto, {', '.join(DTYPES)}")
    return found


def resolve_device(name: str) -> torch.device:
    """'auto' (CUDA where there is one), or a device as torch names it, which has to exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise MinipsError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda") or device.type == "cpu" and device.index:
        raise MinipsError(f"device {name!r} is not supported; supported: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MinipsError(f"device is {name!r}, but this machine has {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cpu") if device.type == "cpu" else device


def open_safetensors(path: str | Path) -> safe_open:
    """A safetensors file, opened on the CPU. OSError also where it is no plain file: a pipe would wait for ever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "is no file")
    with open(path, "rb") as file:
        refuse_other_forms(path, file.read(64))
    return safe_open(path, framework="pt", device="cpu")


def refuse_other_forms(path: str | Path, begin: bytes) -> None:
    """MinipsError where a file begins as what is often found in place of safetensors."""
    if begin.startswith(LFS_POINTER):
        raise MinipsError(f"{path}: is a Git LFS pointer, the real weights were not downloaded (git lfs pull)")
    if begin.startswith(b"PK\x03\x04"):
        raise MinipsError(f"{path}: is a zip archive, as torch.save writes, expected safetensors")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every parameter, in the model's order; no lm_head.weight where it is tied."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    rows = {"q": config.num_attention_heads * dim, "k": config.num_key_value_heads * dim, "v": config.num_key_value_heads * dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for name, size in rows.items():
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (size, hidden)
            if config.attention_bias:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, rows["q"])
        if config.output_bias:
            shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (dim,)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def number_of_parameters(config: ModelConfig) -> int:
    """Of the model as it is stored, whatever form the weights are held in; a tied head counts once."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def load_weights(
    folder: str | Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Read every tensor of `expected_shapes` from `folder` in `dtype` on `device`; nothing else is read.

    MinipsError: files that are missing, broken or no safetensors, tensors that are missing, unknown or mis-shaped, a stored
    head that differs from the embedding of a tied model, values that overflow float16. All but the last two come before any load.
    """
    stored = _checked(Path(folder), config)
    by_file: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        by_file.setdefault(tensor.path, []).append(name)
    loaded = _allocate(config, dtype, device, Path(folder))
    for path, names in by_file.items():
        try:
            with open_safetensors(path) as file:
                for name in names:
                    # Copied in any case: views of the mapped file would be unaligned and would change with the file.
                    loaded[name].copy_(file.get_tensor(name))
                    if dtype == torch.float16 and not torch.isfinite(loaded[name]).all():
                        raise MinipsError(f"{path}: {name} does not fit float16, use bfloat16 or float32")
        except (SafetensorError, OSError) as error:
            raise MinipsError(f"{path}: cannot be read ({_first_line(error)})") from None
    return loaded


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device | str, folder: Path) -> dict[str, torch.Tensor]:
    """Room for every expected tensor; q, k and v of a layer lie behind each other in memory, and so do gate and up."""
    groups: dict[str, list[str]] = {}
    shapes = expected_shapes(config)
    for name in shapes:
        groups.setdefault(_JOINED.sub(r"\1", name), []).append(name)
    room = {}
    try:
        for names in groups.values():
            rows, rest = [shapes[name][0] for name in names], shapes[names[0]][1:]
            room.update(zip(names, torch.empty((sum(rows), *rest), dtype=dtype, device=device).split(rows)))
    except (torch.cuda.OutOfMemoryError, RuntimeError, MemoryError):
        raise MinipsError(f"{folder}: the weights do not fit in the memory of {device}") from None
    return {name: room[name] for name in shapes}


def fingerprint(folder: str | Path, config: ModelConfig) -> str:
    """Hex digest of the config fields that change the maths and of the expected tensors as they are stored.

    Independent of how the tensors are spread over files and of their order there.
    """
    fields = {name: value for name, value in asdict(config).items() if name not in _COSMETIC}
    digest = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(_checked(Path(folder), config).items()):
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode())
        for block in _blocks(tensor):
            digest.update(block)
    return digest.hexdigest()


# Which tensors lie where


def _checked(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """The expected tensors; everything that headers can show to be wrong is refused here."""
    source, found = _find_tensors(folder)
    shapes = expected_shapes(config)
    missing = [name for name in shapes if name not in found]
    if missing:
        hint = ""
        if missing == ["lm_head.weight"]:
            hint = "; the config does not tie it to the embedding (tie_word_embeddings)"
        raise MinipsError(f"{source}: {len(missing)} tensor(s) missing: {_some(missing)}{hint}")
    head = found.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    extra = [name for name in found if name not in shapes and not _POSITION_BUFFER.fullmatch(name)]
    if extra:
        raise MinipsError(f"{source}: {len(extra)} tensor(s) that a {config.model_type} of this config does not have: {_some(extra)}")
    wrong = [
        f"{name} in {found[name].path.name}: expected {list(shape)}, found {list(found[name].shape)}"
        for name, shape in shapes.items()
        if found[name].shape != shape
    ]
    if wrong:
        raise MinipsError(f"{source}: {len(wrong)} tensor(s) of another shape than the config implies: {_some(wrong, 10, '; ')}")
    odd = [f"{name} is {found[name].dtype}" for name in shapes if found[name].dtype not in STORED_BYTES]
    if odd:
        raise MinipsError(f"{source}: {len(odd)} tensor(s) of an unsupported dtype: {_some(odd)}; supported: {', '.join(STORED_BYTES)}")
    if head is not None and not _same_content(head, found["model.embed_tokens.weight"]):
        raise MinipsError(f"{head.path}: lm_head.weight differs from the embedding, although the config ties them (tie_word_embeddings)")
    return {name: found[name] for name in shapes}


def _find_tensors(folder: Path) -> tuple[Path, dict[str, StoredTensor]]:
    """-> the file to name in messages, and every tensor of the index's files, or of the single file."""
    index = folder / INDEX
    if not index.is_file():
        single = folder / SINGLE
        if not single.is_file():
            raise _no_weights(folder)
        return single, _read_header(single)
    files = _shards(index)
    absent = [name for name in sorted(set(files.values())) if not (folder / name).is_file()]
    if absent:
        raise MinipsError(f"{folder}: {len(absent)} weight file(s) missing, is the download incomplete? {_some(absent, 10)}")
    headers = {name: _read_header(folder / name) for name in sorted(set(files.values()))}
    found = {name: tensor for header in headers.values() for name, tensor in header.items()}
    lacking = [f"{name} ({file})" for name, file in files.items() if name not in headers[file]]
    if lacking:
        raise MinipsError(f"{index}: {len(lacking)} tensor(s) are not in the file that the index names: {_some(lacking)}")
    found.update({name: headers[file][name] for name, file in files.items()})
    return index, found


def _shards(index: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise MinipsError(f"{index}: field weight_map is missing or broken, expected tensor names with file names")
    for name in files.values():
        if not name.endswith(".safetensors") or len(name) > 200 or any(part in name for part in ("/", "\\", "..", ":", "\0")):
            raise MinipsError(f"{index}: file name {brief(name)} is not allowed, expected a *.safetensors file in the same folder")
    return files


def _no_weights(folder: Path) -> MinipsError:
    if not folder.is_dir():
        return MinipsError(f"{folder}: no such folder")
    seen = sorted(file.name for file in folder.iterdir() if file.suffix in _WEIGHT_SUFFIXES)
    stray = any(name.endswith(".safetensors") for name in seen)
    problem = f"neither {SINGLE} nor {INDEX} was found" if stray else "no *.safetensors file was found"
    return MinipsError(f"{folder}: {problem}; weight files seen: {_some(seen, 10) if seen else 'none'}")


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file: 8 bytes of header length, a JSON header, then the data."""
    try:
        total = path.stat().st_size
        with open(path, "rb") as file:
            begin = file.read(64)
            refuse_other_forms(path, begin)
            length = int.from_bytes(begin[:8], "little")
            if len(begin) < 8 or length > total - 8:
                raise MinipsError(f"{path}: is not a safetensors file, or is cut short ({total} bytes)")
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise MinipsError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if not all(type(size) is int and size >= 0 for size in (start, end, *shape)) or not isinstance(entry["dtype"], str):
                raise ValueError(f"tensor {brief(name)} has an impossible shape, offset or dtype")
            tensors[name] = StoredTensor(path, entry["dtype"], shape, 8 + length + start, end - start)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MinipsError(f"{path}: broken safetensors header ({_first_line(error)})") from None
    for name, tensor in tensors.items():
        if tensor.size != math.prod(tensor.shape) * STORED_BYTES.get(tensor.dtype, -1) and tensor.dtype in STORED_BYTES:
            raise MinipsError(f"{path}: broken safetensors header (tensor {name}: {tensor.size} bytes for shape {list(tensor.shape)})")
        if tensor.start + tensor.size > total:
            raise MinipsError(f"{path}: is cut short, tensor {name} ends at byte {tensor.start + tensor.size} of {total}")
    return tensors


# Content


def _blocks(tensor: StoredTensor):
    """The bytes of a tensor, piece by piece."""
    left = tensor.size
    try:
        with open(tensor.path, "rb") as file:
            file.seek(tensor.start)
            while left:
                block = file.read(min(left, _CHUNK))
                if not block:
                    raise MinipsError(f"{tensor.path}: is cut short")
                left -= len(block)
                yield block
    except OSError as error:
        raise MinipsError(f"{tensor.path}: cannot be read ({error.strerror or error})") from None


def _same_content(one: StoredTensor, other: StoredTensor) -> bool:
    return (one.dtype, one.shape, one.size) == (other.dtype, other.shape, other.size) and all(
        a == b for a, b in zip(_blocks(one), _blocks(other), strict=True)
    )


def _some(names: list[str], limit: int = 5, separator: str = ", ") -> str:
    return separator.join(in_one_line(name)[:300] for name in names[:limit]) + (f"{separator}..." if len(names) > limit else "")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
