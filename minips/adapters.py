"""Work on adapters: `python -m minips.adapters merge A B`, `convert DIR`, `info DIR`.

merge is the release's weighted average: key by key in fp32, lora_A with lora_A and lora_B with lora_B, so the product is not
the average of the two updates. The mapper is taken whole from one side, as in the release, or averaged too. The result has A's form.

Exit status: 0 done, 1 refused or failed (one line on stderr), 2 bad usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from . import adapter as files
from .command import command
from .config import DEFAULT_MODEL, MergeOptions, ModelConfig
from .errors import MinipsError, brief, in_one_line
from .hub import resolve_adapter, resolve_model
from .lora import check_lora_config, is_base_rows, split_key
from .mapper import CacheMapper, MapperConfig
from .model import Model
from .reading import read_json
from .weights import (
    STORED_BYTES,
    fingerprint,
    load_weights,
    open_safetensors,
    resolve_dtype,
)

MISSING = ("error", "copy", "zero")
SIDES = ("a", "b", "average", "none")
_SAME_LORA = (
    "peft_type", "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
    "bias", "task_type", "modules_to_save",
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """An adapter as its files: no base model, no tensor read yet. shape: of the model a mapper of ours was made for."""

    name: str
    place: Path
    form: str
    lora_folder: Path | None
    lora_config: dict
    info: dict
    mapper: MapperConfig | None
    options: MergeOptions | None

    @property
    def tensors(self) -> Path:
        return self.lora_folder / "adapter_model.safetensors"


def read_stored(name: str | Path) -> Stored:
    """Find an adapter of any form by folder, name or hub id and read what stands in its JSON files."""
    place = files.find_components(resolve_adapter(str(name)))
    form, info, mapper, options = files.form_of(place), {}, None, None
    lora = place / "judger_lora" if form == "released" else place
    if form == "minips":
        info, mapper, options = files.read_info(place)
    elif form == "released":
        options, info = MergeOptions(profile="official"), files.released_record(place)
        if (place / "cache_mapper.pt").exists():
            mapper = files.released_tensors(place)[0]
    lora = lora if (lora / "adapter_config.json").exists() or (form == "released" and lora.exists()) else None
    settings = read_json(lora / "adapter_config.json") if lora is not None else {}
    if lora is not None:
        check_lora_config(lora / "adapter_config.json", settings)
    return Stored(Path(name).name or str(name), place, form, lora, settings, info, mapper, options)


# merge


def merge_adapters(
    a: str | Path, b: str | Path, out: str | Path, *, weight: float = 0.5, mapper: str = "b", missing: str = "error"
) -> Path:
    """Write weight * A + (1 - weight) * B to the new folder `out`, in A's form. Both must agree in everything else.

    mapper: whose is taken, unchanged: a, b or none. missing: what to do with a tensor that one side lacks: error, copy (take
    the other's), zero (take the other's times its weight).
    """
    if not 0 <= weight <= 1:
        raise MinipsError(f"weight is {weight!r}, expected a number from 0 to 1")
    for name, value, known in (("mapper", mapper, SIDES), ("missing", missing, MISSING)):
        if value not in known:
            raise MinipsError(f"{name} is {value!r}, expected one of {', '.join(known)}")
    one, two = read_stored(a), read_stored(b)
    _check_agreement(one, two, missing)
    source = {"a": one, "b": two, "average": one, "none": None}[mapper]
    if mapper == "average" and (one.form != "minips" or two.form != "minips" or one.mapper is None or one.mapper != two.mapper):
        raise MinipsError(f"{two.name}: its mapper cannot be averaged with that of {one.name}; expected two of minips' form, kind and shape")
    if one.form == "peft" and source is not None and source.mapper is not None:
        raise MinipsError(f"{one.name}: a bare PEFT folder has no place for the mapper of {source.name}; use --mapper none")
    if one.form == "released" and source is not None:
        files.check_released_mapper(source.name, source.mapper)
    notes = {"adapters": [one.name, two.name], "weights": [weight, 1 - weight], "mapper": mapper, "missing": missing}
    record = {"merged": {**notes, "training": [side.info.get("training") for side in (one, two)]}}
    tensors = _average(one, two, weight, missing)
    settings = dict(one.lora_config)
    if isinstance(settings.get("target_modules"), list):
        settings["target_modules"] = list(dict.fromkeys([*settings["target_modules"], *two.lora_config["target_modules"]]))

    def fill(place: Path) -> None:
        folder = place / "judger_lora" if one.form == "released" else place
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        files.write_json(folder / "adapter_config.json", settings)
        _put_mapper(source, one.form, place)
        if mapper == "average":
            _average_mappers(one, two, weight, place / "mapper.safetensors")
        if one.form == "released":
            files.write_json(place / files.TRAINING_RECORDS[1], record)
        elif one.form == "minips":
            config = asdict(source.mapper) if source is not None and source.mapper is not None else None
            files.write_json(place / "minips.json", {**one.info, "mapper": config, "training": record})

    return files.write_folder(out, fill)


def _check_agreement(one: Stored, two: Stored, missing: str) -> None:
    for side in (one, two):
        if side.lora_folder is None:
            raise MinipsError(f"{side.name}: has no LoRA, so there is nothing to average")
    for name in _SAME_LORA:
        first, second = (None if (value := side.lora_config.get(name)) == "none" else value for side in (one, two))
        lists = isinstance(first, list) and isinstance(second, list)
        if name == "target_modules" and lists and (missing != "error" or set(first) == set(second)):
            continue
        if (first or None) != (second or None) and (name, None) not in (("task_type", first), ("task_type", second)):
            raise MinipsError(f"{two.name}: adapter_config.json has {name} {second!r}, {one.name} has {first!r}; expected the same")
    bases = [files.base_name(side.lora_config) for side in (one, two)]
    if all(bases) and bases[0] != bases[1]:
        raise MinipsError(f"{two.name}: was made for {brief(bases[1])}, {one.name} for {brief(bases[0])}; expected the same base model")
    for name in ("base_fingerprint", "model_shape"):
        first, second = one.info.get(name), two.info.get(name)
        if one.form == two.form == "minips" and first and second and first != second:
            found = f"{two.name}: minips.json has {name} {brief(second)}, {one.name} has {brief(first)}"
            raise MinipsError(f"{found}; expected the same base model")
    if None not in (one.options, two.options) and one.options != two.options:
        shown = (", ".join(f"{k}={v}" for k, v in asdict(side.options).items()) for side in (two, one))
        raise MinipsError("{}: merge options are {}, {} has {}; expected the same".format(two.name, next(shown), one.name, next(shown)))


def _average(one: Stored, two: Stored, weight: float, missing: str) -> dict[str, Tensor]:
    """Every tensor of both sides, averaged, under PEFT's names. Base rows are no LoRA: they must be equal, and A's are kept."""
    (left, rows), (right, other_rows) = _tensors(one), _tensors(two)
    counts = [one.info.get("vocab_rows") or _rows(rows), two.info.get("vocab_rows") or _rows(other_rows)]
    if counts[0] != counts[1]:
        first, second = ("the whole vocabulary" if count is None else f"{count} rows of it" for count in counts)
        raise MinipsError(f"{two.name}: was trained with {second}, {one.name} with {first}; expected the same vocabulary")
    for name in set(rows) & set(other_rows):
        if not torch.equal(rows[name], other_rows[name]):
            raise MinipsError(f"{two.tensors}: {name} differs from that of {one.name}, expected the rows of one base model")
    out = dict(rows)
    for key in [*left, *(key for key in right if key not in left)]:
        first, second = left.get(key), right.get(key)
        if first is None or second is None:
            if missing == "error":
                lacking = one if first is None else two
                raise MinipsError(f"{lacking.tensors}: {key} is missing (--missing copy or zero goes on without it)")
            present, own = (second, 1 - weight) if first is None else (first, weight)
            out[key] = present.clone() if missing == "copy" else (present.float() * own).to(present.dtype)
            continue
        if first.shape != second.shape:
            raise MinipsError(f"{two.tensors}: {key} is {list(second.shape)}, {one.name} has {list(first.shape)}")
        mean = weight * first.float() + (1 - weight) * second.float()
        out[key] = first.clone() if torch.equal(first, second) else mean.to(first.dtype)
    return out


def _rows(tensors: dict[str, Tensor]) -> int | None:
    return max(map(len, tensors.values()), default=None)


def _tensors(side: Stored) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """LoRA tensors, and base rows, under PEFT's names."""
    lora: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    try:
        with open_safetensors(side.tensors) as file:
            for key in file.keys():
                module, part = split_key(key)
                if not module and not is_base_rows(key):
                    raise MinipsError(f"{side.tensors}: {brief(key)} is no LoRA tensor of a decoder layer")
                target, name = (lora, f"base_model.model.{module}.lora_{part}.weight") if module else (rows, key)
                target[name] = file.get_tensor(key)
                if target[name].dim() != 2 or module and not (
                    target[name].is_floating_point() and torch.isfinite(target[name].float()).all()
                ):
                    raise MinipsError(f"{side.tensors}: {brief(key)} is no matrix of finite numbers")
    except FileNotFoundError:
        raise MinipsError(f"{side.tensors}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise MinipsError(f"{side.tensors}: not readable as safetensors ({in_one_line(error)[:300]})") from None
    for key, tensor in lora.items():
        a, b = (lora.get(f"{key.removesuffix('.weight')[:-1]}{part}.weight") for part in "AB")
        if a is None or b is None or not len(a) or a.shape[0] != b.shape[1]:
            raise MinipsError(f"{side.tensors}: {brief(key)} is {list(tensor.shape)}; expected lora_A [r, in] beside lora_B [out, r]")
    return lora, rows


def _put_mapper(source: Stored | None, form: str, place: Path) -> None:
    """The mapper's files of `source` in the wanted form; copied byte for byte where it has that form already."""
    if source is None or source.mapper is None:
        return
    if source.form == "released":
        files.fill_mapper(CacheMapper(source.mapper, 1, 1, 2), files.released_tensors(source.place)[1], source.place / "cache_mapper.pt")
    if source.form == form:
        for name in ("cache_mapper.pt", "cache_mapper_config.json", "mapper.safetensors"):
            if (source.place / name).exists():
                shutil.copyfile(source.place / name, place / name)
        return
    mapper = CacheMapper(source.mapper, 1, 1, 2)  # an affine mapper does not depend on the model's shape
    if source.form == "released":
        tensors = files.released_tensors(source.place)[1]
    else:
        tensors = files.read_safetensors(source.place / "mapper.safetensors")
    files.fill_mapper(mapper, tensors, source.place)
    (files.write_mapper if form == "minips" else files.write_released_mapper)(mapper, place)


def _average_mappers(one: Stored, two: Stored, weight: float, out: Path) -> None:
    first, second = (files.read_safetensors(side.place / "mapper.safetensors") for side in (one, two))
    for name in first.keys() | second.keys():
        if name not in first or name not in second or first[name].shape != second[name].shape:
            raise MinipsError(f"{two.name}: mapper.safetensors does not agree with that of {one.name} on {name}")
    save_file({name: torch.lerp(second[name].float(), first[name].float(), weight) for name in first}, out)


# convert


def convert_adapter(source: str | Path, out: str | Path, *, to: str, model: str = DEFAULT_MODEL, force: bool = False) -> Path:
    """Write an adapter in our form (to='minips') or the authors' (to='released'), after loading it for its base model."""
    folder = resolve_model(model)
    config = ModelConfig.from_folder(folder)
    base = Model.from_tensors(config, load_weights(folder, config, dtype=resolve_dtype("auto", config)))
    adapter = files.load_adapter(resolve_adapter(str(source)), base, lambda: fingerprint(folder, config), force=force)
    declared = files.base_name(adapter.lora.config) if adapter.lora is not None else ""
    if declared and declared != folder.resolve().name.lower() and not force:
        raise MinipsError(f"{source}: was made for {brief(declared)}, the model is {folder.name!r}; --force goes on all the same")
    if to == "released":
        if files.form_of(files.find_components(resolve_adapter(str(source)))) == "peft":
            adapter.options = MergeOptions(profile="official")  # a bare LoRA says nothing of its own
        return files.save_released_form(adapter, out, base)
    name = Path(model).name if Path(model).is_dir() else model
    return files.save_adapter(adapter, out, config, base_fingerprint=fingerprint(folder, config), base_model=name)


# info


def describe(name: str | Path) -> dict:
    """What an adapter is, from its JSON files and the headers of its tensor files."""
    side = read_stored(name)
    lora, rows, settings = None, None, side.lora_config
    if side.lora_folder is not None:
        header = _header(side.tensors)
        pairs = {key: entry for key, entry in header.items() if split_key(key)[0]}
        rows = {key: shape for key, (shape, _) in header.items() if is_base_rows(key)} or None
        lora = {
            "rank": settings.get("r"),
            "alpha": settings.get("lora_alpha"),
            "use_rslora": bool(settings.get("use_rslora")),
            "targets": sorted({split_key(key)[0].rsplit(".", 1)[-1] for key in pairs}),
            "modules": len({split_key(key)[0] for key in pairs}),
            **_size(pairs.values()),
        }
    mapper = None
    if side.mapper is not None:
        mapper = {name: value for name, value in asdict(side.mapper).items() if name in _FIELDS[side.mapper.kind]}
        if side.form == "released":
            tensors = files.released_tensors(side.place)[1].values()
            mapper["parameters"] = sum(t.numel() for t in tensors)
            mapper["megabytes"] = sum(t.numel() * t.element_size() for t in tensors) / 1e6
        else:
            stored = side.place / "mapper.safetensors"
            has_tensors = side.mapper.kind not in ("none", "normalize")
            mapper.update(_size(_header(stored).values() if has_tensors else ()))
    return {
        "name": str(name),
        "form": side.form,
        "mapper": mapper,
        "lora": lora,
        "base_model": side.info.get("base_model") or settings.get("base_model_name_or_path"),
        "base_fingerprint": side.info.get("base_fingerprint"),
        "model_shape": side.info.get("model_shape"),
        "merge_options": asdict(side.options) if side.options is not None else None,
        "training": side.info.get("training"),
        "vocab_rows": side.info.get("vocab_rows") or (max(shape[0] if shape else 0 for shape in rows.values()) if rows else None),
        "base_tensors": rows,
    }


_FIELDS = {
    "none": ("kind", "key_space"),
    "normalize": ("kind", "key_space"),
    "affine": ("kind", "key_space", "hidden_dim", "metadata_features"),
    "linear": ("kind", "key_space", "per_head"),
    "low_rank": ("kind", "key_space", "rank", "per_head"),
}


def _header(path: Path) -> dict[str, tuple[list[int], int]]:
    """Name -> shape and bytes of every tensor of a safetensors file; the tensors themselves are not read."""
    try:
        with open_safetensors(path) as file:
            slices = {key: file.get_slice(key) for key in file.keys()}
            return {
                key: (entry.get_shape(), math.prod(entry.get_shape()) * STORED_BYTES.get(entry.get_dtype(), 1))
                for key, entry in slices.items()
            }
    except FileNotFoundError:
        raise MinipsError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise MinipsError(f"{path}: not readable as safetensors ({in_one_line(error)[:300]})") from None


def _size(entries: Iterable[tuple[list[int], int]]) -> dict:
    stored = list(entries)
    return {"parameters": sum(math.prod(shape) for shape, _ in stored), "megabytes": sum(size for _, size in stored) / 1e6}


def render(found: dict) -> str:
    """`describe` as lines to read."""
    lines = [f"form: {found['form']}"]
    for part in ("mapper", "lora"):
        fields = dict(found[part] or {})
        size = f"{fields.pop('parameters'):,} parameters, {fields.pop('megabytes'):.3f} MB" if fields else ""
        shown = [f"{name} {' '.join(value) if isinstance(value, list) else value}" for name, value in fields.items()]
        lines.append(f"{part}: {', '.join([*shown, size]) if fields else 'none'}")
    for name in ("base_model", "base_fingerprint", "vocab_rows"):
        if found[name] is not None:
            lines.append(f"{name}: {found[name]}")
    for name in ("model_shape", "merge_options", "training", "base_tensors"):
        if found[name]:
            lines.append(f"{name}: {json.dumps(found[name], ensure_ascii=False)}")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minips.adapters", description="Average, convert and inspect adapters.")
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", help="weighted average of two adapters, key by key; no base model is needed")
    merge.add_argument("a", metavar="A", help="folder, name or hub id; the result has its form and settings")
    merge.add_argument("b", metavar="B")
    merge.add_argument("--weight", type=float, default=0.5, metavar="W", help="of A; B has 1 - W (default: %(default)s)")
    merge.add_argument("--out", required=True, metavar="DIR", help="folder to make; must not exist")
    merge.add_argument("--mapper", choices=SIDES, default="b", help="whose mapper is taken, unchanged, or average (default: %(default)s)")
    merge.add_argument("--missing", choices=MISSING, default="error", help="for tensors that one side lacks (default: %(default)s)")
    convert = commands.add_parser("convert", help="between our form and the authors' released one")
    convert.add_argument("dir", metavar="DIR", help="folder, name or hub id")
    convert.add_argument("--to", choices=("minips", "released"), required=True)
    convert.add_argument("--out", required=True, metavar="DIR", help="folder to make; must not exist")
    convert.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME", help="the base model (default: %(default)s)")
    convert.add_argument("--force", action="store_true", help="accept an adapter that was made on other base weights")
    info = commands.add_parser("info", help="what an adapter is; no base model is needed")
    info.add_argument("dir", metavar="DIR", help="folder, name or hub id")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out parsed arguments."""
    if args.command == "merge":
        print(merge_adapters(args.a, args.b, args.out, weight=args.weight, mapper=args.mapper, missing=args.missing))
    elif args.command == "convert":
        print(convert_adapter(args.dir, args.out, to=args.to, model=args.model, force=args.force))
    else:
        found = describe(args.dir)
        print(json.dumps(found, indent=2) if args.json else render(found), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return command(argv, lambda: run(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
