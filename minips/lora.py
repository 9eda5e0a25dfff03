"""LoRA adapters in PEFT's folder form, read strictly, and folded once into a second set of weights.

Folding is W + scale * B @ A in fp32, rounded once. The folded model shares all other modules with the base, so workers and
synthesizer stand side by side and nothing is ever un-merged.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from .errors import MinipsError, brief, in_one_line
from .model import Model
from .reading import read_json
from .weights import expected_shapes, open_safetensors

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = r"(?:base_model\.model\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?"
_KEY = re.compile(_PREFIX + r"(layers\.\d+\..+)\.lora_(A|B)(?:\.default)?\.weight")
_BASE_ROWS = re.compile(r"(?:base_model\.model\.)?(?:model\.embed_tokens|lm_head)\.weight")
_SAMPLED_ROWS = 1024  # of a cut vocabulary: the published adapter carries 3 GB of them
_UNSUPPORTED = {  # field of adapter_config.json -> the values that change nothing
    "use_dora": (None, False), "bias": (None, "none"), "fan_in_fan_out": (None, False), "lora_bias": (None, False),
    "modules_to_save": (None, []), "layers_to_transform": (None, []), "layer_replication": (None, []),
    "trainable_token_indices": (None, []), "target_parameters": (None, []), "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []), "megatron_config": (None, {}),
}  # fmt: skip
_CHANGES_THE_BASE = ("pissa", "olora", "loftq", "corda")


@dataclass
class LoraAdapter:
    """pairs: Hugging Face module name -> (A [r, in], B [out, r], scale). base_rows: a cut vocabulary's rows, if it carries one."""

    name: str
    pairs: dict[str, tuple[Tensor, Tensor, float]]
    config: dict = field(default_factory=dict)
    base_rows: int | None = None

    @property
    def rank(self) -> int:
        return max((a.shape[0] for a, _, _ in self.pairs.values()), default=0)


def read_lora(folder: str | Path, model: Model) -> LoraAdapter:
    """Read adapter_config.json and adapter_model.safetensors for `model`. Everything is checked before anything is returned.

    Embedding and head rows inside the adapter (a vocabulary that was cut before training) are not loaded: up to 1024 of them,
    evenly spread, are compared with the base model's rows, and anything else than those is refused.
    """
    folder = Path(folder)
    settings = read_json(folder / "adapter_config.json")
    check_lora_config(folder / "adapter_config.json", settings)
    path = folder / "adapter_model.safetensors"
    shapes = {name.removesuffix(".weight"): shape for name, shape in expected_shapes(model.config).items() if len(shape) == 2}
    halves: dict[str, dict[str, Tensor]] = {}
    base_rows, strange = None, []
    try:
        with open_safetensors(path) as file:
            for key in file.keys():
                name, part = split_key(key)
                if name in shapes and name.rsplit(".", 1)[-1] in TARGETS:
                    if part in halves.setdefault(name, {}):
                        raise MinipsError(f"{path}: {name}.lora_{part} is there twice, the second time as {brief(key)}")
                    halves[name][part] = _finite(path, key, file.get_tensor(key))
                elif is_base_rows(key):
                    rows = _check_base_rows(path, key, file.get_slice(key), model, settings.get("base_model_name_or_path"))
                    if base_rows not in (None, rows):
                        raise MinipsError(f"{path}: embedding and head have {base_rows} and {rows} rows, expected the same")
                    base_rows = rows
                else:
                    strange.append(key)
    except FileNotFoundError:
        raise MinipsError(f"{path}: no such file; a LoRA folder holds adapter_config.json and adapter_model.safetensors") from None
    except (SafetensorError, OSError) as error:
        raise MinipsError(f"{path}: not readable as safetensors ({in_one_line(error)[:300]})") from None
    if strange:
        hint = " (modules_to_save is not supported)" if any("modules_to_save" in key for key in strange) else ""
        shown = ", ".join(map(brief, strange[:3]))
        raise MinipsError(f"{path}: {len(strange)} tensors match no module of the model{hint}: {shown}{'...' if strange[3:] else ''}")
    pairs = _check_pairs(path, halves, shapes, settings)
    return LoraAdapter(str(folder), pairs, settings, base_rows)


def split_key(key: str) -> tuple[str, str]:
    """A LoRA tensor's key -> (Hugging Face module name, A or B), whatever its prefix; ("", "") for any other key."""
    match = _KEY.fullmatch(key)
    return (f"model.{match[1]}", match[2]) if match else ("", "")


def is_base_rows(key: str) -> bool:
    """Whether a key is that of whole embedding or head rows, as PEFT saves them for a vocabulary that was resized."""
    return _BASE_ROWS.fullmatch(key) is not None


def _finite(path: Path, key: str, tensor: Tensor) -> Tensor:
    wide = tensor.float()  # first: a large fp64 value is infinite in fp32
    if not tensor.is_floating_point() or tensor.dim() != 2 or not torch.isfinite(wide).all():
        raise MinipsError(f"{path}: {brief(key)} is {tensor.dtype} {list(tensor.shape)}, expected a matrix of finite numbers")
    return wide


def check_lora_config(path: Path, settings: dict) -> None:
    """Refuse what is not implemented, and fields that are not what they should be; needs no model."""
    if settings.get("peft_type") != "LORA":
        raise MinipsError(f"{path}: peft_type is {brief(settings.get('peft_type'))}, expected LORA")
    for name, harmless in _UNSUPPORTED.items():
        if settings.get(name) not in harmless:
            raise MinipsError(f"{path}: {name} is {brief(settings[name])}, which is not supported")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        raise MinipsError(f"{path}: init_lora_weights is {brief(start)}, which changes the base weights and is not supported")
    for name in ("r", "lora_alpha"):
        if not _is_positive(settings.get(name)):
            raise MinipsError(f"{path}: {name} is {brief(settings.get(name))}, expected a positive number")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(name) or {}
        numbers = isinstance(patterns, dict) and all(map(_is_positive, patterns.values()))
        if not numbers or not all(_is_pattern(pattern) for pattern in patterns):
            found = brief(settings[name])
            raise MinipsError(f"{path}: {name} is {found}, expected an object of plain module name patterns with positive numbers")
    targets = settings.get("target_modules")
    if not isinstance(targets, (str, type(None))) and not (isinstance(targets, list) and all(isinstance(t, str) for t in targets)):
        raise MinipsError(f"{path}: target_modules is {brief(targets)}, expected a list of module names")
    if not isinstance(settings.get("use_rslora", False), (bool, type(None))):
        raise MinipsError(f"{path}: use_rslora is {brief(settings['use_rslora'])}, expected true or false")


def _check_base_rows(path: Path, key: str, rows, model: Model, base: object) -> int:
    """Number of rows, if they are the first rows of the base's embedding or head; an evenly spread sample is compared."""
    weight = model.lm_head.weight if "lm_head" in key else model.model.embed_tokens.weight
    shape = rows.get_shape()
    if len(shape) != 2 or shape[1] != weight.shape[1] or shape[0] > weight.shape[0]:
        raise MinipsError(
            f"{path}: {key} is {shape}, the model has {list(weight.shape)}; a replaced embedding or head "
            f"(modules_to_save or a resized vocabulary) is not supported; the adapter was made for {brief(base)}"
        )
    count = min(shape[0], _SAMPLED_ROWS)
    for row in sorted({at * (shape[0] - 1) // max(count - 1, 1) for at in range(count)}):
        if not torch.equal(rows[row : row + 1][0].to(weight.device, weight.dtype), weight[row]):
            raise MinipsError(
                f"{path}: row {row} of {key} differs from the base model's; a replaced embedding or head (modules_to_save) is not supported"
            )
    return shape[0]


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < 1e9


def _is_pattern(pattern: str) -> bool:
    """Names, dots, alternatives, numbers and at most two `.*`: a stranger's regular expression could run for ever."""
    if len(pattern) > 300 or pattern.count(".*") > 2 or not re.fullmatch(r"\^?(?:[\w\-.|()]|\.\*|\\\.|\\d\+)+\$?", pattern):
        return False
    try:
        return bool(re.compile(rf"(.*\.)?({pattern})$"))
    except re.error:
        return False


def _pattern(patterns: dict, name: str, default):
    """PEFT's rule: a pattern matches a module name from its end, at a dot."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _check_pairs(path: Path, halves: dict, shapes: dict, settings: dict) -> dict[str, tuple[Tensor, Tensor, float]]:
    wanted = settings.get("target_modules")
    if isinstance(wanted, list):
        missing = [target for target in wanted if not any(f".{name}".endswith(f".{target}") for name in halves)]
        if missing:
            raise MinipsError(f"{path}: target_modules names {brief(', '.join(sorted(missing)))}, but the file has no tensors for it")
    if not halves:
        raise MinipsError(f"{path}: no LoRA tensors found for this model")
    problems, pairs = [], {}
    for name, half in halves.items():
        out_size, in_size = shapes[name]
        if set(half) != {"A", "B"}:
            raise MinipsError(f"{path}: {name} has lora_{''.join(half)} only, expected lora_A and lora_B")
        rank = half["A"].shape[0]
        if not rank:
            raise MinipsError(f"{path}: {name}.lora_A is {list(half['A'].shape)}, expected at least one row")
        for part, expected in (("A", (rank, in_size)), ("B", (out_size, rank))):
            if tuple(half[part].shape) != expected:
                problems.append(f"{name}.lora_{part} is {list(half[part].shape)}, expected {list(expected)}")
        declared = _pattern(settings.get("rank_pattern"), name, settings["r"])
        if rank != declared:
            problems.append(f"{name} has rank {rank}, adapter_config.json says {declared}")
        alpha = _pattern(settings.get("alpha_pattern"), name, settings["lora_alpha"])
        pairs[name] = (half["A"], half["B"], alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank)
    if problems:
        base = settings.get("base_model_name_or_path")
        raise MinipsError(f"{path}: {problems[0]} ({len(problems)} such faults; the adapter was made for {brief(base)})")
    return pairs


@torch.no_grad()
def fold(model: Model, adapter: LoraAdapter) -> Model:
    """A second model with the adapter folded in; the modules that it does not touch are the base's own."""
    tensors = {}
    for name, (a, b, scale) in adapter.pairs.items():
        weight = model.get_submodule(name).weight
        delta = (b.to(weight.device) @ a.to(weight.device)) * scale
        tensors[f"{name}.weight"] = folded = (weight.float() + delta).to(weight.dtype)
        if not torch.isfinite(folded).all():
            raise MinipsError(f"{adapter.name}: folding {name} gives values that are not finite; the adapter is broken")
    return model.with_weights(tensors)


class LoRALinear(nn.Module):
    """A frozen linear layer plus scale * (x A^T) B^T in fp32, for training. A random, B zero: starts as the base."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        out_size, in_size = base.weight.shape
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, in_size, device=device))
        self.lora_B = nn.Parameter(torch.zeros(out_size, rank, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        update = (x.float() @ self.lora_A.T) @ self.lora_B.T
        return self.base(x) + (update * self.scale).to(x.dtype)
