"""Time to live: state that was not written for a given time expires.

A hidden state column holds each row's expiry time. Expired state is never returned, starting with the first batch whose
clock has passed that time. Each batch removes the expired rows of another part of the bucket, so that no batch has to
read all of it (Flink's incremental clean-up; visibility as its ``NeverReturnExpired``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa

from arrow_schemas.equality import BoolArray, IndexArray
from arrow_schemas.row import DEFINED, DELETED, EXPIRES_MS, TIMEOUT_MS, RowSchema
from spark_state_ext.errors import UsageError
from spark_state_ext.store import Lookup

__all__ = ["EXPIRES_COLUMN", "Expiry", "Ttl"]

# Name of the hidden column in stored rows.
EXPIRES_COLUMN = f"state.{EXPIRES_MS}"
_NEVER = 2**63 - 1
# Hundreds of thousands of years; added to the current time, it stays far below 64 bits.
_DURATION_MS_MAX = 2**53


@dataclass(frozen=True)
class Ttl:
    """The time that state lives after its last write.

    Parameters
    ----------
    duration_ms
        State expires when the clock is this many milliseconds past its last write; from 1 to 2 ** 53.
    clock
        ``"processing"``: the batch's processing time. ``"event"``: the time of a write is the latest event time of the
        key's rows in the batch (or the watermark, if that is later), and state expires when the watermark is past that
        time by `duration_ms`; the input needs a watermark.
    refresh
        ``"write"``: only writing state extends its life. ``"read"``: rows of its key extend it too, even if the
        function does not change the state.

    Raises
    ------
    UsageError
        If `duration_ms` is not a whole number from 1 to 2 ** 53, or `clock` or `refresh` is another value.
    """

    duration_ms: int
    clock: Literal["processing", "event"] = "processing"
    refresh: Literal["write", "read"] = "write"

    def __post_init__(self) -> None:
        if type(self.duration_ms) is not int or not 1 <= self.duration_ms <= _DURATION_MS_MAX:
            raise UsageError(
                f"duration_ms of a Ttl must be a whole number from 1 to {_DURATION_MS_MAX}, not {self.duration_ms!r}"
            )
        if self.clock not in ("processing", "event"):
            raise UsageError(f"clock of a Ttl must be 'processing' or 'event', not {self.clock!r}")
        if self.refresh not in ("write", "read"):
            raise UsageError(f"refresh of a Ttl must be 'write' or 'read', not {self.refresh!r}")


@dataclass(frozen=True)
class Expiry:
    """The expiry of one operator's rows in one batch: it converts between stored rows and rows for functions.

    Parameters
    ----------
    stored
        Schema of the stored rows.
    ttl
        The job's time to live; None: state does not expire (or no longer does).
    now_ms
        The ttl's clock, milliseconds since 1970.
    """

    stored: RowSchema
    ttl: Ttl | None
    now_ms: int

    @property
    def hidden(self) -> bool:
        """True if stored rows have the hidden column."""
        return self.stored.expires

    @cached_property
    def shown(self) -> RowSchema:
        """Schema of rows as functions see them."""
        return self.stored.without_expiry()

    def show_lookup(self, lookup: Lookup) -> Lookup:
        """Return a lookup as functions see it, without expired state."""
        live = ~self.find_expired(lookup.rows)
        index = lookup.index
        if not live.all():
            # A timeout may outlive its state; a row without state counts as missing here.
            index = np.where((index >= 0) & live[index], index, -1)
        return Lookup(index, self._drop_hidden(lookup.rows))

    def due(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows whose timeout is over as functions see them: without state if it has expired."""
        expired = self.find_expired(rows)
        shown = self._drop_hidden(rows)
        return _drop_state(shown, self.shown, expired) if expired.any() else shown

    def show_live(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a scan that have state, as functions see them."""
        defined = rows.column(DEFINED).to_numpy(zero_copy_only=False)
        keep = defined & ~self.find_expired(rows)
        shown = self._drop_hidden(rows)
        return shown if keep.all() else shown.filter(pa.array(keep))

    def add_expiry(self, rows: pa.RecordBatch, written_ms: IndexArray | int) -> pa.RecordBatch:
        """Return rows to store for rows that functions changed; `written_ms` is the time of each write, or of all."""
        if not self.hidden:
            return rows
        if self.ttl is None:
            expires = pa.nulls(rows.num_rows, pa.int64())
        else:
            times = np.broadcast_to(np.asarray(written_ms, dtype=np.int64) + self.ttl.duration_ms, rows.num_rows)
            expires = pa.array(times, mask=~rows.column(DEFINED).to_numpy(zero_copy_only=False))
        columns = list(rows.columns)
        columns.insert(self._hidden_at, expires)
        return pa.RecordBatch.from_arrays(columns, schema=self.stored.arrow)

    def extend_life(self, lookup: Lookup, positions: IndexArray, written_ms: IndexArray) -> pa.RecordBatch | None:
        """Return rows to store for keys that a function did not change, if reading extends their life; else None."""
        if self.ttl is None or self.ttl.refresh != "read":
            return None
        at = lookup.index[positions]
        has_row = at >= 0
        if not has_row.any():
            return None
        rows = lookup.rows.take(pa.array(at[has_row]))
        return self.add_expiry(rows, written_ms[positions][has_row])

    def make_removals(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return what to store in place of expired rows: a tombstone, or the timeout alone if there is one."""
        everywhere = np.ones(rows.num_rows, dtype=np.bool_)
        return self.add_expiry(_drop_state(self._drop_hidden(rows), self.shown, everywhere), 0)

    def find_expired(self, rows: pa.RecordBatch) -> BoolArray:
        """Return which stored rows have expired."""
        if self.ttl is None or not self.hidden:
            return np.zeros(rows.num_rows, dtype=np.bool_)
        expires = rows.column(self._hidden_at).fill_null(_NEVER).to_numpy(zero_copy_only=False)
        expired: BoolArray = expires <= self.now_ms
        return expired

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _hidden_at(self) -> int:
        return int(self.stored.state_slice.stop) - 1

    def _drop_hidden(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not self.hidden:
            return rows
        columns = list(rows.columns)
        del columns[self._hidden_at]
        return pa.RecordBatch.from_arrays(columns, schema=self.shown.arrow)


def _drop_state(rows: pa.RecordBatch, schema: RowSchema, which: BoolArray) -> pa.RecordBatch:
    """Remove the state of some rows; a row without a timeout becomes a tombstone."""
    columns: Sequence[pa.Array] = rows.columns
    at = pa.array(np.arange(rows.num_rows), mask=which)
    states = {i: columns[i].take(at) for i in range(schema.state_slice.start, schema.state_slice.stop)}
    has_timeout = rows.column(TIMEOUT_MS).is_valid().to_numpy(zero_copy_only=False)
    defined = rows.column(DEFINED).to_numpy(zero_copy_only=False) & ~which
    deleted = rows.column(DELETED).to_numpy(zero_copy_only=False) | (which & ~has_timeout)
    arrays = [states.get(i, column) for i, column in enumerate(columns)]
    arrays[-2:] = [pa.array(defined), pa.array(deleted)]
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)
