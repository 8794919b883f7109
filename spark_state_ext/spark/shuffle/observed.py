"""Numbers in Spark's own progress, by `DataFrame.observe`: columns beside the data that it sums up, and that go no
further.

What the packing stage notes is observed on its output. What a call notes is on the operator's: in rows of output one
more column is NULL, and behind these each call adds a row for each of its numbers, in which it is eight times the
number and the number's place in `NAMES`. Under functions that give pandas frames there are no such rows: Spark joins
the frames of several calls before it converts them, and a row of NULLs among them would change the dtypes of the
user's columns, and so values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

from spark_state_ext.errors import UsageError
from spark_state_ext.worker.metrics import CallMetrics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["NUMBERS_COLUMN", "OTHERS_COLUMN", "number_rows", "with_sizes", "with_start"]

NUMBERS_COLUMN = "__numbers"
OTHERS_COLUMN = "__others"
# As in `CallMetrics`; at most eight.
NAMES = ("state_rows", "state_rows_min", "state_bytes", "delta_bytes")
_PLACE_BITS = 3


def with_sizes(given: DataFrame, operator: str) -> DataFrame:
    """The operator's output, with the sizes of its state in the progress as ``spark_state_ext.<operator>``."""
    column = F.col(NUMBERS_COLUMN)
    place, number = column.bitwiseAND((1 << _PLACE_BITS) - 1), F.shiftright(column, _PLACE_BITS)
    sums = [F.sum(F.when(place == at, number)).alias(name) for at, name in enumerate(NAMES)]
    return given.observe(f"spark_state_ext.{operator}", F.count(F.when(place == 0, column)).alias("buckets"), *sums)


def with_start(packed: DataFrame, operator: str) -> DataFrame:
    """Packed rows without `OTHERS_COLUMN`, which is in the progress as ``spark_state_ext.<operator>.start``.

    Raises
    ------
    UsageError
        When the query has an operator of that name already.
    """
    name = f"spark_state_ext.{operator}.start"
    others = F.max(OTHERS_COLUMN).alias("begun_beside_queries")
    try:
        observed = packed.observe(name, others).drop(OTHERS_COLUMN)
        # Over Connect nothing is looked at before somebody asks.
        observed.schema  # noqa: B018
    except AnalysisException as error:
        # Releases differ in the words and in the name of the error.
        if "metric" not in str(error).lower() or name not in str(error):
            raise
        raise UsageError(
            f"operator {operator!r} is in this query already: operators of one query have different names. Give the "
            "other ArrowState another name, operator=…"
        ) from error
    return observed


def number_rows(call: CallMetrics, column: str) -> pd.DataFrame:
    """The numbers of a call as rows of the operator's output, whose other column is `column`."""
    values = [(int(getattr(call, name)) << _PLACE_BITS) | at for at, name in enumerate(NAMES)]
    nothing = pd.Series([None] * len(values), dtype=object)
    return pd.DataFrame({column: nothing, NUMBERS_COLUMN: pd.Series(values, dtype=object)})
