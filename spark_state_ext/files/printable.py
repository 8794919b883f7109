"""Text from outside, such as names of files, as it may be shown: in a terminal, in an error, in a report."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return the text with each character that is not printable written as Python's escape, such as ``\\x1b``.

    Not printable are control characters, line ends, marks that turn the direction of text, and the bytes of a name of
    a file that is not UTF-8. A space is printable.
    """
    if text.isprintable():
        return text
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in text)
