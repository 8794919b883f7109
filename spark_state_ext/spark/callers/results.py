"""What a user's function gave for a result: whether it can be gone through, and how it is shown in errors."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from spark_state_ext.errors import ResultTypeError

__all__ = ["checked_result", "short"]

_CHARACTERS_MAX = 150


def short(value: object) -> str:
    """A value as it stands in the first line of an error: without line breaks, and cut where it is long."""
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= _CHARACTERS_MAX else f"{text[: _CHARACTERS_MAX - 1]}…"


def checked_result(result: Any) -> Iterable[Any]:
    """What the user's function returned, if Spark would take it; and, which Spark would not, a dict of columns.

    Raises
    ------
    ResultTypeError
        When it cannot be gone through, or is one frame.
    """
    items: Iterable[Any]
    if isinstance(result, pd.DataFrame):
        raise ResultTypeError("the function returned a DataFrame: yield it, or return [frame]")
    if isinstance(result, Mapping):
        return (result,)
    try:
        items = iter(result)
    except TypeError:
        what = "None" if result is None else f"{short(result)} ({type(result).__name__})"
        raise ResultTypeError(
            f"the function returned {what}: yield rows or frames, or return a list of them ([] for none)"
        ) from None
    return items
