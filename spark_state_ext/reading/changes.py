"""What became of keys between two batches: inserted, updated, deleted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_schemas.equality import group_by_key, rows_equal
from arrow_schemas.row import DEFINED, KEY_HASH, TIMEOUT_MS, RowSchema
from spark_state_ext.errors import UsageError
from spark_state_ext.reading.state import OpenState
from spark_state_ext.store.runs import joined

__all__ = ["CHANGE", "DELETE", "INSERT", "UPDATE", "changes_of_bucket", "changes_schema"]

CHANGE = "_change"
INSERT, UPDATE, DELETE = "insert", "update", "delete"
_KINDS = pa.array([INSERT, UPDATE, DELETE])
_INSERTED, _UPDATED, _DELETED = 0, 1, 2
_SAME = -1


def changes_schema(state: OpenState) -> pa.Schema:
    """The schema of changes: the columns of the state, and ``_change``."""
    if CHANGE in state.schema.names:
        raise UsageError(f"operator {state.operator!r} has a column {CHANGE!r}, so its changes cannot be told")
    return state.schema.append(pa.field(CHANGE, pa.string()))


def changes_of_bucket(before: OpenState, after: OpenState, bucket: int) -> Iterator[pa.RecordBatch]:
    """What became of the keys of a bucket. Both states of the bucket are in memory at once."""
    if before.checkpoints.get(bucket) == after.checkpoints.get(bucket):
        return
    schema, fields = after.files.operator.row_schema(), changes_schema(after)
    rows, is_new = _together(before.rows(bucket), after.rows(bucket), schema)
    if not rows.num_rows:
        return
    # Rows of a key stand in the order given: before, then after.
    hashes = rows.column(rows.schema.get_field_index(KEY_HASH)).to_numpy()
    order, starts = group_by_key(hashes, schema.key_columns(rows))
    ends = np.append(starts[1:], len(order))
    first, last = order[starts], order[ends - 1]
    kinds = np.where(is_new[first], _INSERTED, np.where(is_new[last], _UPDATED, _DELETED))
    both = np.flatnonzero(kinds == _UPDATED)
    kinds[both[_equal(rows, first[both], last[both], schema)]] = _SAME
    kept = np.flatnonzero(kinds != _SAME)
    found = after.columns.of(rows.take(pa.array(last[kept])), after.schema, bucket)
    told = _KINDS.take(pa.array(kinds[kept]))
    yield pa.RecordBatch.from_arrays([*found.columns, told], schema=fields)


def _together(
    before: Iterable[pa.RecordBatch], after: Iterable[pa.RecordBatch], schema: RowSchema
) -> tuple[pa.RecordBatch, npt.NDArray[np.bool_]]:
    old, new = list(before), list(after)
    rows = joined([*old, *new]) if old or new else schema.empty()
    return rows, np.arange(rows.num_rows) >= sum(batch.num_rows for batch in old)


def _equal(
    rows: pa.RecordBatch, left: npt.NDArray[np.int64], right: npt.NDArray[np.int64], schema: RowSchema
) -> npt.NDArray[np.bool_]:
    if not len(left):
        return np.empty(0, dtype=np.bool_)
    compared = [*range(schema.state_slice.start, schema.state_slice.stop)]
    compared += [rows.schema.get_field_index(name) for name in (TIMEOUT_MS, DEFINED)]
    columns = [_without_maps(rows.column(at)) for at in compared]
    return rows_equal([it.take(pa.array(left)) for it in columns], [it.take(pa.array(right)) for it in columns])


def _without_maps(column: pa.Array) -> pa.Array:
    """A column with lists of entries for maps, which have no equality; entries in another order count as a change."""
    plain = _plain_type(column.type)
    return column if plain == column.type else column.cast(plain)


def _plain_type(data_type: pa.DataType) -> pa.DataType:
    if pa.types.is_map(data_type):
        key = pa.field("key", _plain_type(data_type.key_type), nullable=False)
        value = data_type.item_field.with_type(_plain_type(data_type.item_type)).with_name("value")
        return pa.list_(pa.field("entries", pa.struct([key, value]), nullable=False))
    if pa.types.is_list(data_type):
        return pa.list_(data_type.value_field.with_type(_plain_type(data_type.value_type)))
    if pa.types.is_struct(data_type):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in data_type])
    return data_type
