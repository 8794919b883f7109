"""Describes for messages why a file cannot be read; Python's own texts would name internal classes and attributes."""

from __future__ import annotations

__all__ = ["describe_damage"]


def describe_damage(error: BaseException) -> str:
    """Return a sentence about the damage that made reading a file's fields raise `error`."""
    if isinstance(error, KeyError) and error.args:
        return f"its field {error.args[0]!r} is missing"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OverflowError):
        return "a number in it is out of range"
    if isinstance(error, (AttributeError, IndexError, KeyError, TypeError)):
        return "one of its fields is missing or has the wrong type"
    return str(error).split("\n")[0] or "its bytes are not what this release writes"
