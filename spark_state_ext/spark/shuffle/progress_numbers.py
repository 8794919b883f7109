"""Numbers in Spark's own query progress, by `DataFrame.observe`. They travel with the data and are removed again.

Numbers of the packing stage are in a column of its output. Numbers of a call are in an extra payload of the operator's
output: ``b"N"`` and the numbers, 8 bytes each. Functions that return pandas frames have no such payload: Spark joins
the frames of several calls before it converts them, and a row of NULLs would change the dtypes of the user's columns,
and so their values.
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

__all__ = ["OTHERS_COLUMN", "encode_numbers", "observe_sizes", "observe_start"]

OTHERS_COLUMN = "__others"
# Fields of `CallMetrics`.
NAMES = ("state_rows", "state_rows_min", "state_bytes", "delta_bytes")
_NUMBER = struct.Struct(">q")


def observe_sizes(output: DataFrame, operator: str) -> DataFrame:
    """Return the operator's output, adding the sizes of its state to the progress as ``spark_state_ext.<operator>``."""
    payload = F.col(OUTPUT_COLUMN)
    is_numbers = F.substring(payload, 1, 1) == F.lit(NUMBERS)
    sums = [
        F.sum(
            F.when(is_numbers, F.conv(F.hex(F.substring(payload, position, _NUMBER.size)), 16, 10).cast("long"))
        ).alias(name)
        for position, name in zip(range(1 + len(NUMBERS), 100, _NUMBER.size), NAMES, strict=False)
    ]
    return output.observe(f"spark_state_ext.{operator}", F.count(F.when(is_numbers, 1)).alias("buckets"), *sums)


def observe_start(packed: DataFrame, operator: str) -> DataFrame:
    """Return packed rows without `OTHERS_COLUMN`, adding it to the progress as ``spark_state_ext.<operator>.start``."""
    name = f"spark_state_ext.{operator}.start"
    others = F.max(OTHERS_COLUMN).alias("begun_beside_queries")
    try:
        observed = packed.observe(name, others).drop(OTHERS_COLUMN)
        # Over Connect the plan is only analysed when something like the schema is requested.
        observed.schema  # noqa: B018
    except AnalysisException as error:
        # The text and the class of the error differ between releases.
        if "metric" not in str(error).lower() or name not in str(error):
            raise
        raise UsageError(
            f"operator {operator!r} is already in this query: the operators of a query must have different names. "
            "Give one ArrowState another name with operator=…"
        ) from error
    return observed


def encode_numbers(call: CallMetrics) -> pd.DataFrame:
    """Return the numbers of a call as a row of the operator's output."""
    payload = NUMBERS + b"".join(_NUMBER.pack(int(getattr(call, name))) for name in NAMES)
    return pd.DataFrame({OUTPUT_COLUMN: pd.Series([payload], dtype=object)})
