"""The one exception type for mistakes that a caller can make."""


class MinipsError(ValueError):
    """A refused call or bad input: one clear line that names the file or field, what was found and what was expected."""


class RoomError(MinipsError):
    """What was asked for is right but does not fit the page pool or the model's positions: fewer or shorter ones may."""


def brief(value: object, limit: int = 120) -> str:
    """A value from a file for a message: one line, printable, bounded."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
