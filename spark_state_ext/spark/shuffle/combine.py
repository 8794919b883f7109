"""Combining: rows of a task are made fewer before the shuffle, where an operator can. Runs in the packing stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from arrow_schemas.columns import flat
from arrow_schemas.equality import HashArray, IndexArray, group_by_key
from arrow_schemas.row import RowSchema
from spark_state_ext.functions.tables import normal_rows
from spark_state_ext.operators.arrays import KeyedRows
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN

__all__ = ["Combine", "Combiner", "Combining", "combined"]

# Rows by key → fewer rows, and for each its key's position, ascending.
Combine = Callable[[KeyedRows], tuple[pa.Table, IndexArray]]

# What is looked at to tell whether it is worth the while, and how many distinct keys it may have for that.
_SAMPLE_ROWS = 65_536
_DISTINCT_SHARE_MAX = 0.5


@dataclass(frozen=True)
class Combining:
    """What an operator asks for.

    Parameters
    ----------
    function
        As of `Combiner`.
    row_type
        The columns that it gives, the keys among them under their own names.
    """

    function: Combine
    row_type: StructType

    def places(self, input_type: StructType, positions: Sequence[int]) -> tuple[int, ...]:
        """Where some of the input's columns are among those that it gives."""
        return tuple(self.row_type.names.index(input_type.names[at]) for at in positions)


@dataclass(frozen=True)
class Combiner:
    """An operator's way to have fewer rows.

    Parameters
    ----------
    function
        It may get each row as a key of its own: then only their form changes.
    columns
        Names of the columns that it gets.
    key_positions
        Which of them are keys.
    """

    function: Combine
    columns: tuple[str, ...]
    key_positions: tuple[int, ...]


def combined(
    table: pa.Table, combiner: Combiner, schema: RowSchema, buckets: IndexArray | None = None
) -> tuple[pa.Table, IndexArray | None]:
    """Rows as they are packed, with their hash at the end, as fewer such rows; and the buckets of these."""
    hashes: HashArray = table.column(HASH_COLUMN).to_numpy().view(np.uint64)
    rows = normal_rows(table.select(list(range(len(combiner.columns)))), combiner.columns)
    if _worth_while(hashes):
        keys = schema.normalise_keys([flat(rows.column(at)) for at in combiner.key_positions])
        order, starts = group_by_key(hashes, keys if buckets is None else [*keys, pa.array(buckets)])
        keyed, hashes = KeyedRows(rows, order, starts), hashes[order[starts]]
        buckets = None if buckets is None else buckets[order[starts]]
    else:
        keyed = KeyedRows(rows, None, np.arange(len(hashes)))
    found, positions = combiner.function(keyed)
    names = [f"c{at}" for at in range(found.num_columns)]
    table = pa.table(
        [*found.columns, pa.array(hashes[positions].view(np.int64))],
        names=[*names, HASH_COLUMN],
    )
    return table, None if buckets is None else buckets[positions]


def _worth_while(hashes: HashArray) -> bool:
    sample = hashes[:_SAMPLE_ROWS]
    return len(np.unique(sample)) <= _DISTINCT_SHARE_MAX * len(sample)
