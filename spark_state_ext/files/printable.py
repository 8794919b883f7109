"""Make text from outside, such as file names, safe to show in a terminal, an error or a report."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Return the text with each character that is not printable written as Python's escape, such as ``\\x1b``.

    Control characters, line ends, marks that change the direction of text, and the bytes of a file name that is not
    UTF-8 are not printable. A space is printable.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
