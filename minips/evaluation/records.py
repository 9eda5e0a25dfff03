"""The rows of a run, kept in its folder: `run.json` says what was run, `preds.jsonl` holds one example with all its methods a line.

A line is written whole and forced to the disk before `append` returns, so a kill at any moment loses at most the row in work, which
a resume does again. A line cut short by a kill is removed on resume; any other broken line is refused. Nothing here needs torch.

A row: task, id, m (the number of workers asked for), question, group, references, workers, methods, seconds. Each method has
text, extracted, scores (the task's own metric first), nll (mean a token, or null), target_tokens, answer_tokens, finish_reason,
prefilled_tokens, reused_tokens, branch_tokens, seconds. A row that could not be run has an `error` besides.
"""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import MinipsError, brief
from ..files import write_beside
from ..reading import is_integer, read_json

try:
    import fcntl
except ImportError:  # Windows: two processes on one folder go unnoticed there
    fcntl = None

RUN, PREDS = "run.json", "preds.jsonl"
PACKAGES = ("minips", "torch", "tokenizers", "numpy")


def open_records(folder: str | Path, arguments: dict) -> Records:
    """Start a run in `folder`, or go on with the one that is there, if its arguments are these (as JSON; paths count as strings).

    Raises MinipsError where the arguments differ, another process is at work in the folder, or a line of preds.jsonl is broken.
    """
    folder = Path(folder)
    arguments = json.loads(json.dumps(arguments, default=str))  # as they come back from the file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / PREDS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise MinipsError(f"{folder / PREDS}: cannot be written ({error.strerror or error})") from None
    try:
        _lock(file, folder)
        if (folder / RUN).exists():
            _refuse_other(folder / RUN, arguments)
        elif os.fstat(file).st_size:
            raise MinipsError(f"{folder / PREDS}: has rows, but {RUN}, which says how they were made, is missing")
        else:
            run = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "arguments": arguments}
            run |= {"versions": _versions(), "machine": _machine()}
            write_beside(folder / RUN, json.dumps(run, indent=2) + "\n")
        return Records(folder, file)
    except BaseException:
        os.close(file)
        raise


class Records:
    """An open run. done: the (task, id, m) of all rows that are there. A context manager; closing frees the folder for others."""

    def __init__(self, folder: Path, file: int):
        self.folder, self._path, self._file = folder, folder / PREDS, file
        rows, self._size = _parse(self._path)
        if self._size < os.fstat(file).st_size:  # a line that a kill cut short
            os.ftruncate(file, self._size)
        if self._size and os.pread(file, 1, self._size - 1) != b"\n":  # whole but for its newline
            self._write(b"\n")
        self.done = {_key(row) for row in rows}

    def append(self, row: dict) -> None:
        """Add one row: a single write of a whole line, on the disk when this returns. A row that is there already is refused."""
        fault = _fault(row)
        if fault:
            raise MinipsError(f"row {brief(row.get('id') if isinstance(row, dict) else row)}: {fault}")
        key = _key(row)
        if key in self.done:
            raise MinipsError(f"{self._path}: row {brief(key)} is there already")
        try:
            line = json.dumps(row, allow_nan=False)
        except ValueError:
            raise MinipsError(f"row {brief(key)}: a value is not a finite number, expected finite numbers or null") from None
        self._write(line.encode() + b"\n")
        self.done.add(key)

    def rows(self) -> list[dict]:
        """All rows, in the order in which they were added."""
        return _parse(self._path)[0]

    def replace(self, rows: list[dict]) -> None:
        """Put other contents into the same rows (same keys, same order); all of them or none, also under a kill."""
        if [_key(row) for row in rows] != [_key(row) for row in self.rows()]:
            raise MinipsError(f"{self._path}: replace got other rows than there are")
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        write_beside(self._path, data)
        fresh = os.open(self._path, os.O_RDWR | os.O_APPEND)
        _lock(fresh, self.folder)
        os.close(self._file)
        self._file, self._size = fresh, len(data)

    def _write(self, data: bytes) -> None:
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(28, "no space left on the device")
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size)  # no half line stays behind for the next row to be glued to
            raise MinipsError(f"{self._path}: row not written ({error.strerror or error})") from None
        self._size += len(data)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(folder: str | Path) -> list[dict]:
    """The rows of a run folder, also of one that is still running (a line just being written is passed over)."""
    return _parse(Path(folder) / PREDS)[0]


def _lock(file: int, folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system frees it when the process ends, however it ends
    except BlockingIOError:
        raise MinipsError(f"{folder}: another process is writing to this run; wait for it or choose another folder") from None
    except OSError as error:
        raise MinipsError(f"{folder}: cannot be locked against other processes ({error.strerror or error})") from None


def _refuse_other(path: Path, arguments: dict) -> None:
    """Refuse arguments that differ from those in run.json, naming what differs."""
    then = read_json(path).get("arguments")
    if not isinstance(then, dict):
        raise MinipsError(f"{path}: arguments is {brief(then)}, expected an object")
    nothing = object()
    differing = [name for name in sorted({*then, *arguments}) if then.get(name, nothing) != arguments.get(name, nothing)]
    if differing:
        said = "; ".join(
            f"{name} is {brief(arguments[name]) if name in arguments else 'not given'}, "
            f"was {brief(then[name]) if name in then else 'not given'}"
            for name in differing
        )
        raise MinipsError(f"{path}: this run was started with other arguments ({said}); use the same or another folder")


def _parse(path: Path) -> tuple[list[dict], int]:
    """The rows of a file and the number of its bytes that hold them; only its last line may be cut short."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MinipsError(f"{path}: cannot be read ({error.strerror or error})") from None
    rows, size, keys = [], 0, {}
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        last = number == len(lines)  # what stands behind the last newline: nothing, or a line without its end
        if last and not line:
            break
        try:
            row = json.loads(line)
            fault = _fault(row)
        except (ValueError, RecursionError):
            fault = "is not JSON"
        if last and fault:
            break
        if fault:
            raise MinipsError(f"{path}: line {number} is broken: {fault}")
        if (first := keys.setdefault(_key(row), number)) != number:
            raise MinipsError(f"{path}: line {number} is broken: row {brief(_key(row))} stands in line {first} already")
        rows.append(row)
        size += len(line) + (not last)
    return rows, size


def _key(row: dict) -> tuple[str, str, int]:
    return row["task"], row["id"], row["m"]


def _fault(row: object) -> str | None:
    """What keeps this from being a row, in words; None if nothing does."""
    if not isinstance(row, dict):
        return f"expected an object, found {type(row).__name__}"
    for name, good, expected in (
        ("task", lambda value: isinstance(value, str), "a string"),
        ("id", lambda value: isinstance(value, str), "a string"),
        ("m", is_integer, "an integer"),
        ("methods", lambda value: isinstance(value, dict) and all(isinstance(v, dict) for v in value.values()), "an object of objects"),
    ):
        if not good(row.get(name)):
            return f"{name} is {brief(row.get(name))}, expected {expected}"
    return None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            continue
    return found


def _machine() -> dict[str, object]:
    return {"system": platform.platform(), "processor": _processor(), "cpus": os.cpu_count()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
