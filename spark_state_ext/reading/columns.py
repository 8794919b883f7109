"""The columns that readers see: keys and state under their own names, and the package's own columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from arrow_schemas.row import BUCKET, DEFINED, EXPIRES_MS, KEY_HASH, TIMEOUT_MS, RowSchema
from spark_state_ext.errors import UsageError
from spark_state_ext.functions.conversion_errors import explain_conversion_error

if TYPE_CHECKING:
    import pyarrow.compute as pc

__all__ = ["BUCKET", "ShownColumns", "filter_rows"]


class ShownColumns:
    """Names of columns, and their positions in a row of a file.

    Columns with the same name are distinguished as in checkpoint files: ``key.<name>`` and ``state.<name>``, with a
    number if key columns share the name.
    """

    def __init__(self, schema: RowSchema) -> None:
        self._schema = schema

    @cached_property
    def key(self) -> pa.Schema:
        """The key columns."""
        return pa.schema([self._field(name) for name in self._names[: len(self._schema.keys)]])

    @cached_property
    def state(self) -> pa.Schema:
        """The state columns."""
        state = self._names[len(self._schema.keys) : len(self._schema.keys) + len(self._visible.state)]
        return pa.schema([self._field(name) for name in state])

    @cached_property
    def default(self) -> pa.Schema:
        """The columns that are read by default: keys, state and ``timeout_ms``."""
        return pa.schema([*self.key, *self.state, pa.field(TIMEOUT_MS, pa.int64())])

    def fields(self, columns: Sequence[str] | None) -> pa.Schema:
        """Return the schema of the named columns; None: the default ones."""
        if columns is None:
            return self.default
        if isinstance(columns, str):
            raise UsageError(f"columns must be a list of names, such as [{columns!r}], not a string")
        unknown = [name for name in columns if name not in self._positions and name != BUCKET]
        if unknown:
            raise UsageError(
                f"there is no column {unknown[0]!r}: the default columns are {', '.join(self.default.names)}; others "
                "that you can name are "
                f"{', '.join(name for name in (*self._positions, BUCKET) if name not in self.default.names)}"
            )
        return pa.schema([self._field(name) for name in columns])

    @cached_property
    def all(self) -> pa.Schema:
        """The schema of all columns."""
        return pa.schema([self._field(name) for name in (*self._positions, BUCKET)])

    def of(self, rows: pa.RecordBatch, fields: pa.Schema, bucket: int) -> pa.RecordBatch:
        """Select columns of rows of a file, without a copy."""
        columns = [
            pa.array(np.full(rows.num_rows, bucket, np.int32))
            if field.name == BUCKET
            else rows.column(self._positions[field.name])
            for field in fields
        ]
        return pa.RecordBatch.from_arrays(columns, schema=fields)

    def _field(self, name: str) -> pa.Field:
        if name == BUCKET:
            return pa.field(BUCKET, pa.int32(), nullable=False)
        return self._schema.arrow.field(self._positions[name]).with_name(name)

    @cached_property
    def _visible(self) -> RowSchema:
        return self._schema.without_expiry()

    @cached_property
    def _names(self) -> list[str]:
        return self._schema.shown_names()

    @cached_property
    def _positions(self) -> dict[str, int]:
        positions = {name: position for position, name in enumerate(self._names, 1)}
        arrow = self._schema.arrow
        positions |= {name: arrow.get_field_index(name) for name in (TIMEOUT_MS, DEFINED, KEY_HASH)}
        if self._schema.expires:
            positions[EXPIRES_MS] = self._schema.state_slice.stop - 1
        return positions


def filter_rows(rows: pa.RecordBatch, condition: pc.Expression) -> pa.Table:
    """Return the rows that fulfil a condition over their columns."""
    try:
        return pa.Table.from_batches([rows]).filter(condition)
    except (pa.ArrowException, TypeError, ValueError, KeyError) as error:
        raise UsageError(
            f"the filter {condition} does not fit the columns: {explain_conversion_error(error)}"
        ) from error
