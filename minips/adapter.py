"""An adapter: mapper + LoRA + the merge options it was trained with, as one folder. Also reads the authors' released form.

Ours: `adapter_config.json` and `adapter_model.safetensors` (PEFT's form), `mapper.safetensors`, `minips.json`.
The release: `cache_mapper.pt`, an optional `cache_mapper_config.json`, and the LoRA in `judger_lora/`; possibly in `latest/` or
`step_checkpoints/latest/` of the folder. It is used with profile official.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .config import MergeOptions, ModelConfig
from .errors import MinipsError, brief, in_one_line, refuse_unknown
from .files import write_folder, write_json
from .lora import LoraAdapter, read_lora
from .mapper import CacheMapper, MapperConfig
from .model import Model
from .reading import is_integer, read_json
from .weights import open_safetensors

FORMAT = 1
PARTS = ("both", "mapper_only", "lora_only", "none")
MARKS = ("minips.json", "cache_mapper.pt", "judger_lora", "adapter_config.json")
TRAINING_RECORDS = ("checkpoint_meta.json", "checkpoint_merge_meta.json")  # of the release
_RELEASE_KEYS = ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")
_MAX_MAPPER_BYTES = 1 << 30


@dataclass
class Adapter:
    """What a synthesizer adds to its base model. info: base fingerprint and name, training record, as stored."""

    name: str
    mapper: CacheMapper | None
    lora: LoraAdapter | None
    options: MergeOptions
    info: dict = field(default_factory=dict)

    @property
    def released_form(self) -> bool:
        return self.options.profile == "official"


def find_components(folder: str | Path) -> Path:
    """The folder itself, its `latest/` or `step_checkpoints/latest/`: the first that holds an adapter of either form."""
    folder = Path(folder)
    for place in (folder, folder / "latest", folder / "step_checkpoints" / "latest"):
        if any((place / name).exists() for name in MARKS):
            return place
    raise MinipsError(
        f"{folder}: no adapter found; expected minips.json, adapter_config.json, cache_mapper.pt or judger_lora/, "
        "here or in latest/ or step_checkpoints/latest/"
    )


def form_of(place: Path) -> str:
    """minips, released or peft (a bare LoRA), of a folder that `find_components` found."""
    if (place / "minips.json").is_file():
        return "minips"
    return "released" if (place / "cache_mapper.pt").exists() or (place / "judger_lora").exists() else "peft"


def load_adapter(folder: str | Path, model: Model, fingerprint: Callable[[], str], *, parts: str = "both", force: bool = False) -> Adapter:
    """Read an adapter for `model`. parts: both, mapper_only, lora_only or none. force: accept other base weights.

    fingerprint: gives the base model's, asked only where the adapter names one.
    """
    if parts not in PARTS:
        raise MinipsError(f"adapter parts is {parts!r}, expected one of {', '.join(PARTS)}")
    place = find_components(folder)
    config, form = model.config, form_of(place)
    with_mapper, with_lora = parts in ("both", "mapper_only"), parts in ("both", "lora_only")
    if form == "minips":
        adapter = _load_ours(place, model, fingerprint, force, with_mapper, with_lora)
    elif form == "released":
        lora = read_lora(place / "judger_lora", model) if with_lora and (place / "judger_lora").exists() else None
        mapper = read_released_mapper(place, config) if with_mapper and (place / "cache_mapper.pt").exists() else None
        adapter = Adapter(str(folder), mapper, lora, MergeOptions(profile="official"), released_record(place))
    else:
        adapter = Adapter(str(folder), None, read_lora(place, model) if with_lora else None, MergeOptions())
    if adapter.mapper is not None:
        adapter.mapper.requires_grad_(False).to(model.lm_head.weight.device)
    return adapter


def _load_ours(place: Path, model: Model, fingerprint: Callable[[], str], force: bool, with_mapper: bool, with_lora: bool) -> Adapter:
    path = place / "minips.json"
    info, mapper_config, options = read_info(place)
    expected, found = model_shape(model.config), info.get("model_shape")
    if found != expected:
        raise MinipsError(f"{path}: the adapter was made for a model of shape {brief(found, 300)}, this one is {expected}")
    if not force and info.get("base_fingerprint") != fingerprint():
        raise MinipsError(
            f"{path}: the adapter was made on weights {brief(info.get('base_fingerprint'))} ({brief(info.get('base_model'))}), "
            f"these are {fingerprint()}; force=True loads it all the same"
        )
    for file, kept, needed in (
        ("mapper.safetensors", mapper_config is not None, "a mapper in minips.json"),
        ("adapter_model.safetensors", (place / "adapter_config.json").is_file(), "adapter_config.json"),
    ):
        if (place / file).exists() and not kept:
            raise MinipsError(f"{place / file}: is there, but {needed} is missing, so it would be ignored")
    mapper = None
    if with_mapper and mapper_config is not None:
        mapper = new_mapper(mapper_config, model.config)
        if mapper.state_dict():
            fill_mapper(mapper, read_safetensors(place / "mapper.safetensors"), place / "mapper.safetensors")
    lora = read_lora(place, model) if with_lora and (place / "adapter_config.json").is_file() else None
    if lora is not None:
        lora.base_rows = info.get("vocab_rows")
    return Adapter(str(place), mapper, lora, options, info)


def read_info(place: Path) -> tuple[dict, MapperConfig | None, MergeOptions]:
    """minips.json, checked: the whole object, and the mapper's shape and the merge options in it."""
    path = place / "minips.json"
    info = read_json(path)
    if info.get("format") != FORMAT:
        raise MinipsError(f"{path}: format is {brief(info.get('format'))}, expected {FORMAT}")
    for name in ("mapper", "merge_options", "training"):
        if not isinstance(info.get(name) or {}, dict):
            raise MinipsError(f"{path}: {name} is {brief(info[name])}, expected an object")
    rows = info.get("vocab_rows")
    if rows is not None and (not is_integer(rows) or rows < 1):
        raise MinipsError(f"{path}: vocab_rows is {brief(rows)}, expected a positive integer or null")
    fields = info.get("mapper") or None
    try:
        refuse_unknown(fields or {}, list(MapperConfig.__dataclass_fields__), "mapper")
        return info, MapperConfig(**fields) if fields else None, MergeOptions.from_dict(info.get("merge_options") or {})
    except MinipsError as error:
        raise MinipsError(f"{path}: {error}") from None


def released_record(place: Path) -> dict:
    """What the release's own notes say of the training or merge; notes that cannot be read are passed over."""
    record: dict = {}
    for name in TRAINING_RECORDS:
        try:
            record.update(read_json(place / name))
        except MinipsError:
            continue
    return {"training": record} if record else {}


def new_mapper(config: MapperConfig, model: ModelConfig) -> CacheMapper:
    """A fresh (identity) mapper for a model's shape."""
    return CacheMapper(config, model.num_hidden_layers, model.num_key_value_heads, model.head_dim)


def model_shape(config: ModelConfig) -> dict:
    """What a mapper depends on besides the weights: layers, KV heads, head_dim, RoPE."""
    return {
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope": asdict(config.rope),
    }


def fill_mapper(mapper: CacheMapper, tensors: dict[str, Tensor], path: Path) -> None:
    """Copy tensors into a mapper; names, shapes and finiteness are checked one by one first."""
    wanted = mapper.state_dict()
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra:
        raise MinipsError(f"{path}: mapper tensors missing: {brief(missing)}; unknown: {brief(extra)}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise MinipsError(f"{path}: {name} is {list(tensor.shape)}, expected {list(wanted[name].shape)}")
        if not tensor.is_floating_point() or not torch.isfinite(tensor.float()).all():
            raise MinipsError(f"{path}: {name} holds values that are not finite numbers")
    mapper.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def base_name(settings: dict) -> str:
    """The last part of the base model's name that a LoRA's adapter_config.json declares, in lower case; "" for none."""
    return str(settings.get("base_model_name_or_path") or "").rstrip("/").split("/")[-1].lower()


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with open_safetensors(path) as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise MinipsError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise MinipsError(f"{path}: not readable as safetensors ({in_one_line(error)[:300]})") from None


def read_released_mapper(place: Path, config: ModelConfig) -> CacheMapper:
    """The release's `cache_mapper.pt` for a model's shape; every tensor is checked."""
    fields, tensors = released_tensors(place)
    mapper = new_mapper(fields, config)
    fill_mapper(mapper, tensors, place / "cache_mapper.pt")
    return mapper


def released_tensors(place: Path) -> tuple[MapperConfig, dict[str, Tensor]]:
    """What `cache_mapper.pt` holds, tensors only; without cache_mapper_config.json it is hidden 32, features both."""
    path, settings = place / "cache_mapper.pt", {}
    if (place / "cache_mapper_config.json").is_file():
        settings = read_json(place / "cache_mapper_config.json")
    fields = {"hidden_dim": settings.get("hidden_dim", 32), "metadata_features": settings.get("metadata_features", "both")}
    try:
        fields = MapperConfig("affine", **fields)
    except MinipsError as error:
        raise MinipsError(f"{place / 'cache_mapper_config.json'}: {error}") from None
    try:
        size = path.stat().st_size
    except OSError as error:
        raise MinipsError(f"{path}: cannot be read ({error.strerror or error})") from None
    if size > _MAX_MAPPER_BYTES or not path.is_file():
        raise MinipsError(f"{path}: is {f'{size} bytes, far more than' if path.is_file() else 'no file, which'} a cache mapper has")
    _check_archive(path, size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd pickles; they fail anyway
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise MinipsError(f"{path}: holds something else than tensors, or is broken; expected a tensor-only checkpoint") from None
    except Exception as error:  # garbage makes the unpickler fail in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise MinipsError(f"{path}: not readable as a tensor-only checkpoint ({reason})") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.layout == torch.strided
        for name, tensor in tensors.items()
    ):
        raise MinipsError(f"{path}: expected a dictionary of the tensors {', '.join(_RELEASE_KEYS)}")
    return fields, dict(tensors)


def _check_archive(path: Path, size: int) -> None:
    """Refuse a zip whose records are compressed or hold more than the file has: torch.load would unpack them into memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return  # torch.load says what is wrong, or reads its older form, which is no zip
    if any(record.compress_type != zipfile.ZIP_STORED for record in records) or sum(record.file_size for record in records) > size:
        raise MinipsError(f"{path}: holds compressed records, expected a checkpoint as torch.save writes it")


def save_adapter(adapter: Adapter, folder: str | Path, config: ModelConfig, *, base_fingerprint: str, base_model: str = "") -> Path:
    """Write our form; built beside and renamed, so that a half-written folder is never seen. The folder must not exist."""
    info = {
        **{key: value for key, value in adapter.info.items() if key == "training"},
        "format": FORMAT,
        "base_fingerprint": base_fingerprint,
        "base_model": base_model,
        "model_shape": model_shape(config),
        "mapper": asdict(adapter.mapper.config) if adapter.mapper is not None else None,
        "merge_options": asdict(adapter.options),
        "vocab_rows": adapter.lora.base_rows if adapter.lora is not None else None,  # of a vocabulary cut before training
    }

    def fill(place: Path) -> None:
        write_json(place / "minips.json", info)
        if adapter.mapper is not None:
            write_mapper(adapter.mapper, place)
        if adapter.lora is not None:
            write_lora(adapter.lora, place)

    return write_folder(folder, fill)


def save_released_form(adapter: Adapter, folder: str | Path, model: Model | None = None) -> Path:
    """Write the authors' form. It knows only a mapper of kind affine on rotated keys, and the merge options of profile official.

    model: the base, whose first rows go along where the adapter was trained with a cut vocabulary.
    """
    check_released_mapper(adapter.name, adapter.mapper.config if adapter.mapper is not None else None)
    if adapter.options != MergeOptions(profile="official"):
        raise MinipsError(
            f"{adapter.name}: its merge options (profile {adapter.options.profile}) have no released form, "
            "which is always used with profile official and that one's defaults"
        )
    if adapter.lora is not None and adapter.lora.base_rows and model is None:
        raise MinipsError(f"{adapter.name}: the released form of a cut vocabulary holds base rows, so it needs the base model")

    def fill(place: Path) -> None:
        if adapter.mapper is not None:
            write_released_mapper(adapter.mapper, place)
        if adapter.lora is not None:
            (place / "judger_lora").mkdir()
            write_lora(adapter.lora, place / "judger_lora", model)
        if adapter.info.get("training"):
            write_json(place / TRAINING_RECORDS[0], adapter.info["training"])

    return write_folder(folder, fill)


def check_released_mapper(name: str, config: MapperConfig | None) -> None:
    """Refuse a mapper that `cache_mapper.pt` cannot hold."""
    if config is not None and (config.kind, config.key_space) != ("affine", "rotated"):
        raise MinipsError(
            f"{name}: a mapper of kind {config.kind!r} on {config.key_space} keys has no released form, only affine on rotated keys has"
        )


def write_mapper(mapper: CacheMapper, place: Path) -> None:
    """mapper.safetensors in fp32; nothing for a kind without parameters."""
    if mapper.state_dict():
        tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in mapper.state_dict().items()}
        save_file(tensors, place / "mapper.safetensors")


def write_released_mapper(mapper: CacheMapper, place: Path) -> None:
    """cache_mapper.pt and cache_mapper_config.json."""
    tensors = OrderedDict((name, tensor.detach().cpu().clone()) for name, tensor in mapper.state_dict().items())
    torch.save(tensors, place / "cache_mapper.pt")
    write_json(place / "cache_mapper_config.json", {name: getattr(mapper.config, name) for name in ("hidden_dim", "metadata_features")})


def write_lora(lora: LoraAdapter, place: Path, model: Model | None = None) -> None:
    """PEFT's two files, LoRA tensors in fp32. model: the base, whose first rows a cut vocabulary takes along."""
    tensors = {}
    for name, (a, b, _) in lora.pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.detach().float().cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.detach().float().cpu().contiguous()
    if model is not None and lora.base_rows:
        for name, weight in (("model.embed_tokens", model.model.embed_tokens.weight), ("lm_head", model.lm_head.weight)):
            tensors[f"base_model.model.{name}.weight"] = weight[: lora.base_rows].detach().cpu().clone()
    save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})
    write_json(place / "adapter_config.json", lora.config)
