"""What is wrong with a file that cannot be read, for messages: Python's own texts name its classes and attributes."""

from __future__ import annotations

__all__ = ["damage_in"]


def damage_in(error: BaseException) -> str:
    """Say what keeps fields of a file from being read."""
    if isinstance(error, KeyError) and error.args:
        return f"it lacks {error.args[0]!r}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OverflowError):
        return "a number in it is out of range"
    if isinstance(error, (AttributeError, IndexError, KeyError, TypeError)):
        return "a field of it is of another type, or missing"
    return str(error).split("\n")[0] or "its bytes are others than this release writes"
