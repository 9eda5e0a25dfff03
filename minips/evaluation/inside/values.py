"""Values that travel between tester and solver as JSON: plain data only, so that nothing of the solver's code comes along."""

from __future__ import annotations

import itertools
import json
import os
import select
import struct
from collections.abc import Callable

MOST_BYTES = 128 << 20  # of one value


class Failed(Exception):
    """The solution could not be run or gave no value."""


PLAIN = {type(None), bool, int, float, str}


def encode(value: object, depth: int = 0) -> object:
    """A value as JSON: plain types with their contents, anything else as its name only. Subclasses become their plain type."""
    if depth > 200:
        raise Failed("a value is nested more than 200 deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) < value < 1 << 63 else {"t": "int", "v": hex(value)}
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        plain = encode(value.tolist(), depth + 1)
        return {"t": "array", "v": plain} if getattr(value, "shape", ()) else plain
    if isinstance(value, list):
        return encode_items(list(value), depth + 1)
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {"t": kind.__name__, "v": encode_items(list(value), depth + 1)}
    if isinstance(value, dict):
        return {"t": "dict", "v": [encode_items(list(value.keys()), depth + 1), encode_items(list(value.values()), depth + 1)]}
    if isinstance(value, (bytes, bytearray)):
        return {"t": "bytes", "v": value.hex()}
    if isinstance(value, complex):
        return {"t": "complex", "v": [value.real, value.imag]}
    if hasattr(value, "__next__"):
        return {"t": "iterator", "v": encode_items(list(itertools.islice(value, 1_000_000)), depth + 1)}
    return {"t": "object", "v": type(value).__name__}


def encode_items(items: list, depth: int) -> object:
    """Many items at once where they are alike: plain ones as they are, lists or tuples as their lengths and one joined list."""
    kinds = set(map(type, items))
    if kinds <= PLAIN and (int not in kinds or all(abs(item) < 1 << 63 for item in items if type(item) is int)):
        return items
    if kinds == {tuple} or kinds == {list}:
        joined = encode_items(list(itertools.chain.from_iterable(items)), depth + 1) if depth <= 200 else encode(items, depth)
        return {"t": "rows", "v": [kinds.pop().__name__, list(map(len, items)), joined]}
    return [encode(item, depth) for item in items]


class Opaque:
    """Stands for a value of the solution that is no plain data; equal only to itself."""

    def __init__(self, kind: str):
        self.kind = kind

    def __repr__(self) -> str:
        return f"<a {self.kind} of the solution>"


def decode(value: object) -> object:
    if isinstance(value, list):
        return value if PLAIN.issuperset(map(type, value)) else [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value["t"], value["v"]
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "object":
        return Opaque(str(content)[:80])
    if kind == "rows":
        row, items = {"tuple": tuple, "list": list}[content[0]], iter(decode(content[2]))
        return [row(itertools.islice(items, length)) for length in content[1]]
    if kind == "dict":
        return dict(zip(decode(content[0]), decode(content[1])))
    if kind == "array":
        import numpy

        return numpy.array(decode(content))
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}[kind](decode(content))


class Channel:
    """Messages (JSON, length in front) between two processes; `alive` says whether the other one still runs."""

    def __init__(self, read: int, write: int, alive: Callable[[], bool] = lambda: True):
        self.read, self.write, self.alive = read, write, alive

    def send(self, message: dict) -> None:
        try:
            data = json.dumps(message).encode()
        except (MemoryError, RecursionError, ValueError) as error:
            data = json.dumps({"error": told(error)}).encode()
        data = struct.pack("!Q", len(data)) + data
        try:
            while data:
                data = data[os.write(self.write, data) :]
        except BrokenPipeError:
            raise Failed("the code ended its process") from None

    def _take(self, count: int) -> bytes:
        parts = []
        while count:
            # A grandchild may hold the pipe open when the solver is gone, so the end of file alone is no proof of life.
            if not select.select([self.read], [], [], 0.2)[0] and self.alive():
                continue
            part = os.read(self.read, min(count, 1 << 20)) if select.select([self.read], [], [], 0)[0] else b""
            if not part:
                raise Failed("the code ended its process")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def receive(self) -> dict:
        size = struct.unpack("!Q", self._take(8))[0]
        if size > MOST_BYTES:
            raise Failed(f"a value takes {size} bytes, at most {MOST_BYTES} are read")
        message = json.loads(self._take(size))
        if not isinstance(message, dict):
            raise Failed("the code wrote into the channel of its values")
        return message


def told(error: BaseException) -> str:
    """An exception in one line of at most 300 characters."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - a hostile exception
        text = ""
    return f"{type(error).__name__}: {text}"[:300].rstrip(": ")
