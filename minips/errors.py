"""The one exception type for mistakes that a caller can make."""


class MinipsError(ValueError):
    """A refused call or bad input: one clear line that names the file or field, what was found and what was expected."""
