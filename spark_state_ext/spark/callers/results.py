"""Check the result of a user's function, and format its values for errors."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pyspark.sql.types import StructType

from spark_state_ext.errors import ResultTypeError

__all__ = ["OutputColumns", "check_result", "shorten"]

_CHARACTERS_MAX = 150


@dataclass(frozen=True)
class OutputColumns:
    """The output's columns, as far as a function's results are checked against them.

    Parameters
    ----------
    names
        Names of the columns.
    type
        Spark's type of a row; None: values are not checked, and are never copied.
    strict
        Refuse frames with a column of any other name.
    """

    names: tuple[str, ...]
    type: StructType | None = None
    strict: bool = False


def shorten(value: object) -> str:
    """Format a value for the first line of an error: without line breaks, and cut if it is long."""
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= _CHARACTERS_MAX else f"{text[: _CHARACTERS_MAX - 1]}…"


def check_result(result: Any) -> Iterable[Any]:
    """Return the items of a function's result. It may be what Spark takes or, in addition, a dict of columns."""
    items: Iterable[Any]
    if isinstance(result, pd.DataFrame):
        raise ResultTypeError("the function returned a DataFrame: yield it, or return [frame]")
    if isinstance(result, Mapping):
        return (result,)
    try:
        items = iter(result)
    except TypeError:
        shown = "None" if result is None else f"{shorten(result)} ({type(result).__name__})"
        raise ResultTypeError(
            f"the function returned {shown}: yield rows or frames, or return a list of them ([] for no output)"
        ) from None
    return items
