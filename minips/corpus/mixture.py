"""The examples of a run: rows of several data sets, without what is held out or evaluated, in an order fixed by the seed."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..errors import MinipsError, brief
from ..reading import is_integer, read_lines
from ..training.encoding import Example
from . import context, sources
from .entry import MOST_BRANCHES, DataSet
from .leaks import EvaluationQuestions

DATA_SETS: dict[str, DataSet] = {entry.name: entry for entry in (*context.DATA_SETS, *sources.DATA_SETS)}
FIELDS = ("name", "file", "rows", "branches")


def load_mixture(
    entries: Sequence[dict],
    folder: str | Path | None,
    *,
    seed: int = 0,
    base: Path = Path("."),
    say: Callable[[str], None] = lambda text: None,
) -> list[Example]:
    """Examples of every entry: {"name": data set or "file": JSONL of examples, "rows": how many (default all), "branches": [least, most]}.

    Rows are drawn with the seed; a larger number holds the smaller. Rows that hold a question of an evaluation set are left out and
    counted by `say`. base: where relative files are looked up. MinipsError naming the entry that is wrong.
    """
    if not entries:
        raise MinipsError("data: is empty, expected at least one data set")
    for at, entry in enumerate(entries):
        _check(entry, f"data, entry {at}")
    folder = Path(folder) if folder is not None else None
    if folder is not None and not folder.is_dir():  # or the questions that must not be trained on would be missed in silence
        raise MinipsError(f"{folder}: is no folder, expected the data folder")
    questions = EvaluationQuestions.from_folder(folder)
    examples: list[Example] = []
    for entry in entries:
        name = entry.get("name") or entry["file"]
        found = list(_build(entry, folder, seed, base))
        random.Random(f"{seed} {name}").shuffle(found)
        wanted = entry.get("rows", len(found))
        chosen: list[Example] = []
        leaks = 0
        for example in found:
            if len(chosen) == wanted:
                break
            if questions.leak(example):
                leaks += 1
            else:
                chosen.append(example)
        if len(chosen) < entry.get("rows", 0):
            raise MinipsError(f"data, {name}: has {len(chosen)} rows to train on, {wanted} are wanted")
        say(f"{name}: {len(chosen)} rows" + (f", {leaks} left out that hold an evaluation question" if leaks else ""))
        examples += chosen
    return examples


def _check(entry: object, where: str) -> None:
    if not isinstance(entry, dict) or not set(entry) <= set(FIELDS) or ("name" in entry) == ("file" in entry):
        raise MinipsError(f"{where}: is {brief(entry)}, expected an object with name or file, and perhaps rows and branches")
    name = entry.get("name")
    if "name" in entry and not (isinstance(name, str) and name in DATA_SETS):
        near = difflib.get_close_matches(str(name), DATA_SETS, n=1)
        raise MinipsError(f"{where}: name is {brief(name)}, expected one of {', '.join(near or DATA_SETS)}")
    if "file" in entry and not isinstance(entry["file"], str):
        raise MinipsError(f"{where}: file is {brief(entry['file'])}, expected the path of a JSONL file")
    if "rows" in entry and not (is_integer(entry["rows"]) and entry["rows"] >= 1):
        raise MinipsError(f"{where}: rows is {brief(entry['rows'])}, expected a whole number of at least 1")
    pair = entry.get("branches", [1, 1])
    if not (isinstance(pair, list) and len(pair) == 2 and all(map(is_integer, pair)) and 1 <= pair[0] <= pair[1] <= MOST_BRANCHES):
        raise MinipsError(f"{where}: branches is {brief(pair)}, expected [least, most] within 1 and {MOST_BRANCHES}")


def _build(entry: dict, folder: Path | None, seed: int, base: Path) -> Iterator[Example]:
    if "file" in entry:
        yield from read_examples(base / entry["file"])
    else:
        yield from DATA_SETS[entry["name"]].build(folder, tuple(entry.get("branches", (1, MOST_BRANCHES))), seed)


def read_examples(path: Path) -> Iterator[Example]:
    """Examples of a JSONL file, one object a line: id, prefix, branches, prompt, target; branches and target are texts or lists of token ids."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and row.get("target", "") is None:
            continue  # a distilled row without an answer
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("id", "prefix", "prompt")):
            raise MinipsError(f"{path}, line {number}: expected an object with the texts id, prefix and prompt")
        branches = row.get("branches")
        if not (isinstance(branches, list) and all(map(_is_words, [*branches, row.get("target")]))):
            raise MinipsError(f"{path}, line {number}: expected target, and branches, a list; each text or a list of token ids")
        words = [text if isinstance(text, str) else tuple(text) for text in (*branches, row["target"])]
        yield Example(row["id"], row["prefix"], tuple(words[:-1]), row["prompt"], words[-1])


def _is_words(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(is_integer(item) and item >= 0 for item in value))
