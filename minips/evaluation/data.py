"""Rows of data sets: read from a data folder, or from the original on the hub where minips can read its form.

A data folder holds `gsm8k/test.jsonl`, `medqa/test.jsonl.gz` and so on: one JSON object a line, plain or gzipped. CSV with a
header line is read too, for flat rows. Every refusal is one line that names the file and, for a row, the line.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from ..errors import MinipsError, brief
from ..reading import is_integer
from .example import Example

SUFFIXES = (".jsonl.gz", ".jsonl", ".csv", ".csv.gz")
_KINDS = {str: "text", dict: "objects", list: "lists"}


@dataclass(frozen=True)
class Source:
    """Where a data set's rows come from.

    files: names below the data folder without their suffix; the first that is there is read. suffix: the usual one, and get:
    how to get that file by hand, for messages. ids: fields that may name a row; the first that is there counts, else the
    row's number. hub: the hub data set whose `hub_files` (all of them, in order) hold the same rows; "" where it has no form
    that minips reads.
    hub_extra: patterns of more files to fetch (attachments). gated: the hub gives it only to those who accepted its terms.
    """

    files: tuple[str, ...]
    get: str
    licence: str
    suffix: str = ".jsonl"
    ids: tuple[str, ...] = ("id",)
    hub: str = ""
    hub_files: tuple[str, ...] = ()
    hub_extra: tuple[str, ...] = ()
    gated: bool = False

    def __str__(self) -> str:
        hub = f"hub data set {self.hub}{' (gated)' if self.gated else ''}, or " if self.hub else ""
        return f"{hub}{self.file} in the data folder: {self.get}. Licence: {self.licence}"

    @property
    def file(self) -> str:
        """The file's usual name below the data folder."""
        return f"{self.files[0]}{self.suffix}"


@dataclass(frozen=True)
class Row:
    """One row of a file. id: unique in the file. place: file and line, for messages. path: the file."""

    fields: dict
    id: str
    place: str
    path: Path

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise the MinipsError for a field that is missing or not as expected."""
        found = f"is {brief(self.fields[name])}" if name in self.fields else "is missing"
        raise MinipsError(f"{self.place}: field {name!r} {found}, expected {expected}")

    def text(self, *names: str) -> str:
        """The first of these fields that is there, as text that is not blank; whole numbers are written out."""
        name = next((name for name in names if name in self.fields), names[0])
        value = self.fields.get(name)
        value = str(value) if is_integer(value) else value
        if not _is_text(value):
            self.refuse(name, "text")
        return value

    def label(self, *names: str) -> str:
        """The first of these fields that holds text or a whole number, or "": for what only sorts and explains."""
        values = (self.fields.get(name) for name in names)
        return next((str(value) for value in values if isinstance(value, str) or is_integer(value)), "")

    def items(self, name: str, kind: type) -> list:
        """A list of at least one value, all of type `kind`; texts must not be blank."""
        value = self.fields.get(name)
        good = isinstance(value, list) and value and all(_is_text(item) if kind is str else isinstance(item, kind) for item in value)
        if not good:
            self.refuse(name, f"a list of {_KINDS[kind]}, at least one")
        return value

    def get(self, name: str, kind: type, expected: str):
        """The field's value, which must be of type `kind`."""
        value = self.fields.get(name)
        if not isinstance(value, kind):
            self.refuse(name, expected)
        return value


def _is_text(value: object) -> bool:
    """Text that is not blank and can be written as UTF-8 (JSON can hold halves of surrogate pairs)."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= char <= "\udfff" for char in value)


def read(source: Source, folder: Path | None) -> list[Row]:
    """All rows in the file's order, from the data folder, or from the hub where `folder` is None.

    Raises MinipsError where the file is missing (with how to get it), is not readable, has no row, or a line is broken.
    """
    rows: list[Row] = []
    taken: set[str] = set()
    for path in _find(source, Path(folder)) if folder is not None else _fetch(source):
        for line, fields in _lines(path):
            named = next((fields[name] for name in source.ids if fields.get(name) not in (None, "")), len(rows))
            name = unique = str(named)
            copies = 1
            while unique in taken:
                copies += 1
                unique = f"{name}#{copies}"
            taken.add(unique)
            rows.append(Row(fields, unique, f"{path}, line {line}", path))
        if not rows:
            raise MinipsError(f"{path}: holds no rows")
    return rows


def loader(source: Source, build: Callable[[Row, int], Example]) -> Callable[[Path | None, int, int], list[Example]]:
    """The `load` of a task whose examples come from one row each: build(row, seed)."""

    def load(folder: Path | None, workers: int, seed: int) -> list[Example]:
        return [build(row, seed) for row in read(source, folder)]

    return load


def select(examples: Sequence[Example], rows: int | None, seed: int) -> list[Example]:
    """A reproducible sample of `rows` examples in their own order; all of them where `rows` is None or more than there are.

    A larger sample of the same seed holds the smaller one, so that a run can be extended. MinipsError: rows below 1.
    """
    if rows is None:
        return list(examples)
    if not is_integer(rows) or rows < 1:
        raise MinipsError(f"rows is {brief(rows)}, expected a whole number of at least 1")
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    return [examples[index] for index in sorted(order[:rows])]


HELD_OUT = 4  # one key in four


def held_out(task: str, example: Example) -> bool:
    """Whether a row is in the fixed part of a data set that is never trained on: by the hash of its id, or of what rows share.

    A task whose data set is small, and whose training rows are made up, is held out as a whole.
    """
    key = example.meta.get("family", example.id)
    return key == "" or int.from_bytes(hashlib.sha256(f"{task} {key}".encode()).digest()[:8], "big") % HELD_OUT == 0


def row_random(seed: int, row_id: str) -> random.Random:
    """Random numbers of one row: the same whatever other rows are there or chosen."""
    return random.Random(f"{seed} {row_id}")  # text is hashed with SHA-512: the same in every process


# Files


def _find(source: Source, folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise MinipsError(f"{folder}: {'is not a folder' if folder.exists() else 'no such folder'}, expected the data folder")
    for stem in source.files:
        for suffix in SUFFIXES:
            if (path := folder / f"{stem}{suffix}").is_file():
                return [path]
    raise MinipsError(f"{folder}: has no {source.file}, plain or as .gz; to get it: {source.get}")


def _fetch(source: Source) -> list[Path]:
    """The hub original's files, fetched into the hub's cache folder."""
    by_hand = f"put {source.file} into a folder and name that folder with --data; to get it: {source.get}"
    if not source.hub:
        raise MinipsError(f"{source.files[0]}: the hub has it in no form that minips reads; {by_hand}")
    import huggingface_hub
    from huggingface_hub.utils import GatedRepoError

    wanted = [*source.hub_files, *source.hub_extra]
    try:
        home = Path(huggingface_hub.snapshot_download(source.hub, repo_type="dataset", allow_patterns=wanted))
    except GatedRepoError:
        raise MinipsError(
            f"{source.hub}: gated; accept its terms on its hub page, then set HF_TOKEN or run `hf auth login`, and try again; or {by_hand}"
        ) from None
    except Exception as error:  # HTTP, file system, and the library's own errors
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise MinipsError(f"{source.hub}: cannot be fetched from the hub ({reason}); or {by_hand}") from None
    paths = [home / name for name in source.hub_files]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise MinipsError(f"{source.hub}: the hub data set holds no {', '.join(missing)}; {by_hand}")
    return paths


def _lines(path: Path) -> Iterator[tuple[int, dict]]:
    """Line number (from 1) and fields of each row."""
    opener = gzip.open if path.suffix == ".gz" else open
    line = 0
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            for line, fields in (_csv if ".csv" in path.suffixes else _jsonl)(file, path):
                yield line, fields
    except UnicodeDecodeError as error:
        raise MinipsError(f"{path}, after line {line}: is no UTF-8 text ({error.reason})") from None
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise MinipsError(f"{path}, after line {line}: not readable ({getattr(error, 'strerror', None) or error})") from None


def _jsonl(file: TextIO, path: Path) -> Iterator[tuple[int, dict]]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MinipsError(f"{path}, line {line}: not readable as JSON ({brief(str(error))})") from None
        if not isinstance(fields, dict):
            raise MinipsError(f"{path}, line {line}: is {brief(fields)}, expected a JSON object")
        yield line, fields


def _csv(file: TextIO, path: Path) -> Iterator[tuple[int, dict]]:
    reader = csv.DictReader(file, strict=True)
    for fields in reader:
        if None in fields or None in fields.values():
            raise MinipsError(f"{path}, line {reader.line_num}: expected {len(reader.fieldnames or ())} cells as in the header line")
        yield reader.line_num, fields
