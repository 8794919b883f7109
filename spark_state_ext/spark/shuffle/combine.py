"""Combining a task's rows into fewer rows before the shuffle, if the operator can. Runs in the packing stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from arrow_schemas.columns import combine_chunks
from arrow_schemas.equality import HashArray, IndexArray, group_by_key
from arrow_schemas.row import RowSchema
from spark_state_ext.functions.tables import normalise_rows
from spark_state_ext.operators.arrays import KeyedRows
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN

__all__ = ["Combine", "Combiner", "Combining", "combine_rows"]

# Rows by key → fewer rows, and for each the position of its key, ascending.
Combine = Callable[[KeyedRows], tuple[pa.Table, IndexArray]]

# Rows that are sampled to decide whether combining is worthwhile, and the largest share of distinct keys for that.
_SAMPLE_ROWS = 65_536
_DISTINCT_SHARE_MAX = 0.5


@dataclass(frozen=True)
class Combining:
    """An operator's way to combine rows, and the columns of the result.

    Parameters
    ----------
    function
        As in `Combiner`.
    row_type
        The columns of the combined rows, with the keys under their own names.
    """

    function: Combine
    row_type: StructType

    def places(self, input_type: StructType, positions: Sequence[int]) -> tuple[int, ...]:
        """Return the positions of some input columns among the columns of the combined rows."""
        return tuple(self.row_type.names.index(input_type.names[position]) for position in positions)


@dataclass(frozen=True)
class Combiner:
    """An operator's way to combine rows, with the columns that it gets in the packing stage.

    Parameters
    ----------
    function
        Combines rows by key. It may get each row as a separate key, and then only changes the rows' form.
    columns
        Names of the columns that the function gets.
    key_positions
        Positions of the keys among these columns.
    """

    function: Combine
    columns: tuple[str, ...]
    key_positions: tuple[int, ...]


def combine_rows(
    table: pa.Table, combiner: Combiner, schema: RowSchema, buckets: IndexArray | None = None
) -> tuple[pa.Table, IndexArray | None]:
    """Return packed rows, hash last, combined into fewer such rows; and the buckets of these."""
    hashes: HashArray = table.column(HASH_COLUMN).to_numpy().view(np.uint64)
    rows = normalise_rows(table.select(list(range(len(combiner.columns)))), combiner.columns)
    if _is_worthwhile(hashes):
        keys = schema.normalise_keys([combine_chunks(rows.column(position)) for position in combiner.key_positions])
        order, starts = group_by_key(hashes, keys if buckets is None else [*keys, pa.array(buckets)])
        keyed, hashes = KeyedRows(rows, order, starts), hashes[order[starts]]
        buckets = None if buckets is None else buckets[order[starts]]
    else:
        keyed = KeyedRows(rows, None, np.arange(len(hashes)))
    output, positions = combiner.function(keyed)
    names = [f"c{position}" for position in range(output.num_columns)]
    table = pa.table(
        [*output.columns, pa.array(hashes[positions].view(np.int64))],
        names=[*names, HASH_COLUMN],
    )
    return table, None if buckets is None else buckets[positions]


def _is_worthwhile(hashes: HashArray) -> bool:
    sample = hashes[:_SAMPLE_ROWS]
    return len(np.unique(sample)) <= _DISTINCT_SHARE_MAX * len(sample)
