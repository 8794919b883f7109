"""The row of a run: one key's state in Arrow.

A run is a set of rows sorted by ``key_hash``, with at most one row for each key. Columns, in order:

==================  ==================  ============================================================
``key_hash``        uint64              hash of the key, see `spark_state_ext.spark.shuffle.pack`
``key.<name>``      the key's type      one column for each grouping column
``state.<name>``    the state's type    one column for each state column, NULL if ``defined`` is false
``timeout_ms``      int64, may be NULL  when the key times out, milliseconds since 1970
``defined``         bool                the key has a state value (false: only a timeout is set)
``deleted``         bool                tombstone: the key was removed, its rows in older runs are void
==================  ==================  ============================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.spark_types import normalise_type

__all__ = ["BUCKET", "DEFINED", "DELETED", "EXPIRES_MS", "KEY_HASH", "TIMEOUT_MS", "RowSchema"]

KEY_HASH = "key_hash"
TIMEOUT_MS = "timeout_ms"
DEFINED = "defined"
DELETED = "deleted"
# Column in which readers show the number of a row's bucket.
BUCKET = "bucket"
# The last state column of operators whose state has a time to live; functions do not see it. It says when the row
# expires: milliseconds since 1970 by the clock of the time to live, or NULL for never.
EXPIRES_MS = "__expires_ms"


@dataclass(frozen=True)
class RowSchema:
    """Schema of the runs of one operator.

    Parameters
    ----------
    keys, state
        Arrow fields of the grouping columns and of the state columns, in normal form (`spark_types`).
    """

    keys: tuple[pa.Field, ...]
    state: tuple[pa.Field, ...]

    @cached_property
    def arrow(self) -> pa.Schema:
        """Arrow schema of a run."""
        fields = [pa.field(KEY_HASH, pa.uint64(), nullable=False)]
        fields += [field.with_name(f"key.{field.name}").with_nullable(True) for field in self.keys]
        # A row may have no state (only a timeout, or a tombstone), so no state column can forbid NULL here.
        fields += [field.with_name(f"state.{field.name}").with_nullable(True) for field in self.state]
        fields += [
            pa.field(TIMEOUT_MS, pa.int64()),
            pa.field(DEFINED, pa.bool_(), nullable=False),
            pa.field(DELETED, pa.bool_(), nullable=False),
        ]
        return pa.schema(fields)

    @property
    def expires(self) -> bool:
        """True if rows have the hidden column `EXPIRES_MS`."""
        return bool(self.state) and self.state[-1].name == EXPIRES_MS

    def without_expiry(self) -> RowSchema:
        """Return the schema without the hidden column."""
        return RowSchema(self.keys, self.state[:-1]) if self.expires else self

    def shown_names(self) -> list[str]:
        """Return distinct names of the key and state columns for readers, without the hidden column.

        If several columns share a name, they are called ``key.<name>`` and ``state.<name>``, as in checkpoint files,
        with a number if two keys share it.
        """
        columns = [("key", field.name) for field in self.keys]
        columns += [("state", field.name) for field in self.without_expiry().state]
        uses = Counter([*(name for _, name in columns), TIMEOUT_MS, DEFINED, KEY_HASH, EXPIRES_MS, BUCKET])
        seen: Counter[str] = Counter()
        names = []
        for prefix, name in columns:
            shown = f"{prefix}.{name}" if uses[name] > 1 else name
            seen[shown] += 1
            names.append(shown if seen[shown] == 1 else f"{shown}.{seen[shown]}")
        return names

    @cached_property
    def key_slice(self) -> slice:
        """Positions of the key columns in `arrow`."""
        return slice(1, 1 + len(self.keys))

    @cached_property
    def state_slice(self) -> slice:
        """Positions of the state columns in `arrow`."""
        return slice(1 + len(self.keys), 1 + len(self.keys) + len(self.state))

    def key_columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the key columns of a batch that has this schema."""
        return list(batch.columns[self.key_slice])

    def state_columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the state columns of a batch that has this schema."""
        return list(batch.columns[self.state_slice])

    def normalise_keys(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Return key columns in their stored form: normal types, ``-0.0`` as ``0.0``, all NaNs as one NaN."""
        return [normalise_array(column, field.type) for column, field in zip(columns, self.keys, strict=True)]

    def empty(self) -> pa.RecordBatch:
        """Return a batch without rows."""
        return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in self.arrow], schema=self.arrow)


def normalise_array(column: pa.Array, data_type: pa.DataType) -> pa.Array:
    """Return `column` as `data_type`, with floats in one canonical form, so that equal keys have equal bytes."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if column.type != data_type and normalise_type(column.type) == normalise_type(data_type):
        column = column.cast(data_type)
    elif column.type != data_type:
        # Field names and nullability of nested types may differ; values may not.
        column = column.cast(data_type, safe=True)
    if pa.types.is_floating(data_type):
        # x + 0.0 turns -0.0 into 0.0. `equality` treats all NaNs as equal, whatever their bits.
        return pc.add(column, pa.scalar(0.0, data_type))
    if pa.types.is_struct(data_type) and _holds_floats(data_type):
        mask = column.is_null()
        children = [normalise_array(child, data_type.field(i).type) for i, child in enumerate(column.flatten())]
        return pa.StructArray.from_arrays(
            children, fields=[data_type.field(i) for i in range(data_type.num_fields)], mask=mask
        )
    if pa.types.is_list(data_type) and _holds_floats(data_type):
        values = normalise_array(column.values, data_type.value_type)
        return pa.Array.from_buffers(
            data_type, len(column), column.buffers()[:2], column.null_count, column.offset, [values]
        )
    return column


def _holds_floats(data_type: pa.DataType) -> bool:
    if pa.types.is_floating(data_type):
        return True
    if pa.types.is_struct(data_type):
        return any(_holds_floats(data_type.field(i).type) for i in range(data_type.num_fields))
    return pa.types.is_list(data_type) and _holds_floats(data_type.value_type)
