"""Text and JSON files, read with one clear line for whatever is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

from .errors import MinipsError

MAX_TEXT = 256 << 20  # bytes, far above any file that is not made to fill the memory


def read_text(path: Path) -> str:
    """The text of a plain file (a pipe would wait, a device never end); MinipsError names what cannot be read."""
    try:
        if not (plain := Path(path).is_file()) and ("\0" in str(path) or Path(path).exists()) or Path(path).stat().st_size > MAX_TEXT:
            raise MinipsError(f"{path}: is {f'larger than {MAX_TEXT >> 20} MiB' if plain else 'no file'}")
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MinipsError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MinipsError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Only a newline ends one: JSON may hold the other characters at which `str.splitlines` cuts."""
    lines = read_text(path).split("\n")
    return lines if lines[-1] else lines[:-1]


def read_json(path: Path) -> dict:
    """Read a JSON object from `path`; a missing, unreadable or malformed file is a MinipsError that names it."""
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MinipsError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(data, dict):
        raise MinipsError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def is_integer(value: object) -> bool:
    """True for an int that is no bool (JSON's true is an int in Python)."""
    return isinstance(value, int) and not isinstance(value, bool)
