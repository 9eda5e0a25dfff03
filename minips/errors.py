"""The one exception type for mistakes that a caller can make, and what its messages are made of."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class MinipsError(ValueError):
    """A refused call or bad input: one clear line that names the file or field, what was found and what was expected."""


class RoomError(MinipsError):
    """What was asked for is right but does not fit the page pool or the model's positions: fewer or shorter ones may."""


def brief(value: object, limit: int = 120) -> str:
    """A value from a file for a message: one line, printable, bounded."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def in_one_line(message: object) -> str:
    """A message for a terminal: line breaks and other controls, which a file's name may hold, as their escapes."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(message))


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and what it counts: 1 worker, 2 workers."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def refuse_unknown(names: Iterable[str], known: Collection[str], where: object, what: str = "field") -> None:
    """MinipsError for the first name that is not known, with the known one that it resembles."""
    for name in names:
        if name not in known:
            raise MinipsError(f"{where}: unknown {what} {brief(name, 60)}; {guess(name, known)}known: {', '.join(known)}")


def guess(name: object, known: Collection[str]) -> str:
    """`did you mean 'x'? `, or nothing where no known name resembles this one."""
    close = difflib.get_close_matches(str(name), known, 1, 0.5)
    return f"did you mean {close[0]!r}? " if close else ""
