"""What a user's function gave for a result: whether it can be gone through, and how it is shown in errors."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pyspark.sql.types import StructType

from spark_state_ext.errors import ResultTypeError

__all__ = ["OutputColumns", "checked_result", "short"]

_CHARACTERS_MAX = 150


@dataclass(frozen=True)
class OutputColumns:
    """The output's columns, as far as what a function gives is compared with them.

    Parameters
    ----------
    names
        Their names.
    type
        Spark's type of a row; None: values are not looked at, and cannot be changed.
    strict
        Refuse frames with a column of another name.
    """

    names: tuple[str, ...]
    type: StructType | None = None
    strict: bool = False


def short(value: object) -> str:
    """A value as it stands in the first line of an error: without line breaks, and cut where it is long."""
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= _CHARACTERS_MAX else f"{text[: _CHARACTERS_MAX - 1]}…"


def checked_result(result: Any) -> Iterable[Any]:
    """What the user's function returned, if Spark would take it; and, which Spark would not, a dict of columns."""
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
