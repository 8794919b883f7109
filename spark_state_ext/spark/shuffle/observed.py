"""Numbers in Spark's own progress, by `DataFrame.observe`: beside the data that it sums up, and they go no further.

What the packing stage notes is observed on its output, in a column of its own. What a call notes is among the payloads
that the operator gives: each call adds one that is ``b"N"`` and its numbers, 8 bytes each. Under functions that give
pandas frames there is none: Spark joins the frames of several calls before it converts them, and a row of NULLs among
them would change the dtypes of the user's columns, and so values.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pandas as pd
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

from spark_state_ext.errors import UsageError
from spark_state_ext.spark.shuffle.payload import NUMBERS, OUTPUT_COLUMN
from spark_state_ext.worker.metrics import CallMetrics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["OTHERS_COLUMN", "numbers_of", "with_sizes", "with_start"]

OTHERS_COLUMN = "__others"
# As in `CallMetrics`.
NAMES = ("state_rows", "state_rows_min", "state_bytes", "delta_bytes")
_NUMBER = struct.Struct(">q")


def with_sizes(given: DataFrame, operator: str) -> DataFrame:
    """The operator's output, with the sizes of its state in the progress as ``spark_state_ext.<operator>``."""
    payload = F.col(OUTPUT_COLUMN)
    is_numbers = F.substring(payload, 1, 1) == F.lit(NUMBERS)
    sums = [
        F.sum(F.when(is_numbers, F.conv(F.hex(F.substring(payload, at, _NUMBER.size)), 16, 10).cast("long"))).alias(
            name
        )
        for at, name in zip(range(1 + len(NUMBERS), 100, _NUMBER.size), NAMES, strict=False)
    ]
    return given.observe(f"spark_state_ext.{operator}", F.count(F.when(is_numbers, 1)).alias("buckets"), *sums)


def with_start(packed: DataFrame, operator: str) -> DataFrame:
    """Packed rows without `OTHERS_COLUMN`, which is in the progress as ``spark_state_ext.<operator>.start``."""
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


def numbers_of(call: CallMetrics) -> pd.DataFrame:
    """The numbers of a call as a row of the operator's output."""
    payload = NUMBERS + b"".join(_NUMBER.pack(int(getattr(call, name))) for name in NAMES)
    return pd.DataFrame({OUTPUT_COLUMN: pd.Series([payload], dtype=object)})
