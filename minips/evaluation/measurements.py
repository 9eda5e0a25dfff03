"""What else a run folder may hold besides its rows, read and checked for the report and the plots.

sweep.json: [{m, branch_tokens, method, ttft {median, p95, n}, end_to_end, peak_mb, kv_mb}], times in seconds.
attention.json: {model, sweep: [{m, prefix [layer], self [layer], branches [layer][branch], entropy [layer], max_entropy}]}, shares of 1.
self_check.json: {model, adapter, cases: [{m, rows, positions, kl_mean, kl_max, top1, mark, passed}]}, a case may have a name and a bound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from ..errors import MinipsError, brief
from ..reading import is_integer, read_json

SWEEP, ATTENTION, SELF_CHECK = "sweep.json", "attention.json", "self_check.json"


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_number, value))


_KINDS: dict[str, Callable[[object], bool]] = {
    "an integer": is_integer,
    "a number": _number,
    "a number or null": lambda value: value is None or _number(value),
    "a string": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "a list of numbers": _numbers,
    "lists of numbers": lambda value: isinstance(value, list) and bool(value) and all(map(_numbers, value)),
    "an object with a number as median": lambda value: isinstance(value, dict) and _number(value.get("median")),
}
_SWEEP = {
    "m": "an integer", "branch_tokens": "an integer", "method": "a string", "ttft": "an object with a number as median",
    "end_to_end": "a number or null", "peak_mb": "a number or null",
    "kv_mb": "a number or null",
}  # fmt: skip
_ATTENTION = {
    "m": "an integer", "prefix": "a list of numbers", "self": "a list of numbers", "branches": "lists of numbers",
    "entropy": "a list of numbers", "max_entropy": "a number",
}  # fmt: skip
_CASE = {
    "m": "an integer", "rows": "an integer", "positions": "an integer", "kl_mean": "a number", "kl_max": "a number", "top1": "a number",
    "mark": "a number", "passed": "true or false",
}  # fmt: skip


def read_sweep(folder: Path) -> list[dict] | None:
    """The entries of sweep.json (none where nothing fitted), None without it. An end_to_end given with its median is taken as that."""
    path = folder / SWEEP
    if not path.exists():
        return None
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MinipsError(f"{path}: not readable as JSON ({error})") from None
    if isinstance(entries, list):
        entries = [_with_median(entry) for entry in entries]
    return _checked(entries, _SWEEP, path, "the file")


def read_attention(folder: Path) -> dict | None:
    """attention.json, None without it."""
    path = folder / ATTENTION
    if not path.exists():
        return None
    data = read_json(path)
    for at, entry in enumerate(_checked(data.get("sweep"), _ATTENTION, path, "sweep")):
        sizes = {name: len(entry[name]) for name in ("prefix", "self", "branches", "entropy")}
        if len({*sizes.values()}) > 1 or len({*map(len, entry["branches"])}) > 1:
            raise MinipsError(f"{path}: sweep[{at}] has different numbers of layers or branches ({sizes}), expected the same everywhere")
    return data


def read_self_check(folder: Path) -> dict | None:
    """self_check.json, None without it."""
    path = folder / SELF_CHECK
    if not path.exists():
        return None
    data = read_json(path)
    _checked(data.get("cases"), _CASE, path, "cases")
    return data


def _with_median(entry: object) -> object:
    end = entry.get("end_to_end") if isinstance(entry, dict) else None
    return {**entry, "end_to_end": end.get("median")} if isinstance(end, dict) else entry


def _checked(entries: object, fields: dict[str, str], path: Path, where: str) -> list[dict]:
    """A list of objects with these fields, or a refusal naming the entry and the field."""
    if not isinstance(entries, list):
        raise MinipsError(f"{path}: {where} is {brief(entries)}, expected a list")
    for at, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise MinipsError(f"{path}: {where}[{at}] is {brief(entry)}, expected an object")
        for name, kind in fields.items():
            if not _KINDS[kind](entry.get(name)):
                raise MinipsError(f"{path}: {where}[{at}].{name} is {brief(entry.get(name))}, expected {kind}")
    return entries
