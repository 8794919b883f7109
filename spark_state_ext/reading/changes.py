"""Computes which keys were inserted, updated and deleted between two batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_schemas.equality import group_by_key, rows_equal
from arrow_schemas.row import DEFINED, KEY_HASH, TIMEOUT_MS, RowSchema
from spark_state_ext.errors import UsageError
from spark_state_ext.reading.state import OpenState
from spark_state_ext.store.runs import join_batches

__all__ = ["CHANGE", "DELETE", "INSERT", "UPDATE", "find_changes", "make_changes_schema"]

CHANGE = "_change"
INSERT, UPDATE, DELETE = "insert", "update", "delete"
_KINDS = pa.array([INSERT, UPDATE, DELETE])
_INSERTED, _UPDATED, _DELETED = 0, 1, 2
_SAME = -1


def make_changes_schema(state: OpenState) -> pa.Schema:
    """Return the schema of changes: the columns of the state, and ``_change``."""
    if CHANGE in state.schema.names:
        raise UsageError(f"operator {state.operator!r} has a column {CHANGE!r}, so its changes cannot be listed")
    return state.schema.append(pa.field(CHANGE, pa.string()))


def find_changes(before: OpenState, after: OpenState, bucket: int) -> Iterator[pa.RecordBatch]:
    """Yield the changed keys of a bucket; both of its states are in memory at once."""
    if before.checkpoints.get(bucket) == after.checkpoints.get(bucket):
        return
    schema, fields = after.files.operator.row_schema(), make_changes_schema(after)
    rows, is_new = _concat_states(before.rows(bucket), after.rows(bucket), schema)
    if not rows.num_rows:
        return
    # The grouping is stable: of each key the old row comes before the new one.
    hashes = rows.column(rows.schema.get_field_index(KEY_HASH)).to_numpy()
    order, starts = group_by_key(hashes, schema.key_columns(rows))
    ends = np.append(starts[1:], len(order))
    first, last = order[starts], order[ends - 1]
    kinds = np.where(is_new[first], _INSERTED, np.where(is_new[last], _UPDATED, _DELETED))
    in_both = np.flatnonzero(kinds == _UPDATED)
    kinds[in_both[_compare_rows(rows, first[in_both], last[in_both], schema)]] = _SAME
    changed = np.flatnonzero(kinds != _SAME)
    columns = after.columns.of(rows.take(pa.array(last[changed])), after.schema, bucket)
    change_names = _KINDS.take(pa.array(kinds[changed]))
    yield pa.RecordBatch.from_arrays([*columns.columns, change_names], schema=fields)


def _concat_states(
    before: Iterable[pa.RecordBatch], after: Iterable[pa.RecordBatch], schema: RowSchema
) -> tuple[pa.RecordBatch, npt.NDArray[np.bool_]]:
    old, new = list(before), list(after)
    rows = join_batches([*old, *new]) if old or new else schema.empty()
    return rows, np.arange(rows.num_rows) >= sum(batch.num_rows for batch in old)


def _compare_rows(
    rows: pa.RecordBatch, left: npt.NDArray[np.int64], right: npt.NDArray[np.int64], schema: RowSchema
) -> npt.NDArray[np.bool_]:
    if not len(left):
        return np.empty(0, dtype=np.bool_)
    compared = [*range(schema.state_slice.start, schema.state_slice.stop)]
    compared += [rows.schema.get_field_index(name) for name in (TIMEOUT_MS, DEFINED)]
    columns = [_replace_maps(rows.column(index)) for index in compared]
    return rows_equal(
        [column.take(pa.array(left)) for column in columns], [column.take(pa.array(right)) for column in columns]
    )


def _replace_maps(column: pa.Array) -> pa.Array:
    """Return the column with maps as lists of entries: Arrow cannot compare maps. A reordered map is a change."""
    plain = _replace_map_types(column.type)
    return column if plain == column.type else column.cast(plain)


def _replace_map_types(data_type: pa.DataType) -> pa.DataType:
    if pa.types.is_map(data_type):
        key = pa.field("key", _replace_map_types(data_type.key_type), nullable=False)
        value = data_type.item_field.with_type(_replace_map_types(data_type.item_type)).with_name("value")
        return pa.list_(pa.field("entries", pa.struct([key, value]), nullable=False))
    if pa.types.is_list(data_type):
        return pa.list_(data_type.value_field.with_type(_replace_map_types(data_type.value_type)))
    if pa.types.is_struct(data_type):
        return pa.struct([field.with_type(_replace_map_types(field.type)) for field in data_type])
    return data_type
