"""Time to live: state that nobody has written for so long counts as gone.

When a row expires is kept in a hidden state column beside the user's. Expired state is never returned, from the first
batch on whose clock is past it. It is removed a piece of the bucket a batch, in turn, so that no batch has to look
through all of it (Flink's incremental clean-up; visibility as its ``NeverReturnExpired``).
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

# The hidden column as stored rows have it.
EXPIRES_COLUMN = f"state.{EXPIRES_MS}"
_NEVER = 2**63 - 1
# Hundreds of thousands of years; added to any time of today it stays far from 64 bits.
_DURATION_MS_MAX = 2**53


@dataclass(frozen=True)
class Ttl:
    """How long state lives.

    Parameters
    ----------
    duration_ms
        State is gone when the clock is so many milliseconds past its last write; from 1 to 2 ** 53.
    clock
        ``"processing"``: the batch's processing time. ``"event"``: a write is at the latest event time among the key's
        rows in the batch (or the watermark, if that is later), and state is gone when the watermark is past that by
        `duration_ms`; the input needs a watermark.
    refresh
        ``"write"``: writing state extends its life. ``"read"``: rows of its key do so, even if the function leaves the
        state as it is.

    Raises
    ------
    UsageError
        When `duration_ms` is no whole number from 1 to 2 ** 53, or `clock` or `refresh` is none of these.
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
    """The expiry of one operator's rows in one batch: between rows as they are stored and as functions see them.

    Parameters
    ----------
    stored
        Schema of the stored rows.
    ttl
        What the job asks for; None: nothing expires (any more).
    now_ms
        The ttl's clock, milliseconds since 1970.
    """

    stored: RowSchema
    ttl: Ttl | None
    now_ms: int

    @property
    def hidden(self) -> bool:
        """Whether stored rows have the hidden column."""
        return self.stored.expires

    @cached_property
    def shown(self) -> RowSchema:
        """Schema of rows as functions see them."""
        return self.stored.without_expiry()

    def found(self, lookup: Lookup) -> Lookup:
        """What was looked up, as functions see it."""
        live = ~self.over(lookup.rows)
        index = lookup.index
        if not live.all():
            # A timeout may outlive the state it was set with; a row without state is as good as none here.
            index = np.where((index >= 0) & live[index], index, -1)
        return Lookup(index, self._shown(lookup.rows))

    def due(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows whose timeout is over, as functions see them: without state, where that has expired."""
        over = self.over(rows)
        shown = self._shown(rows)
        return _without_state(shown, self.shown, over) if over.any() else shown

    def live(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of a scan that have state, as functions see them."""
        defined = rows.column(DEFINED).to_numpy(zero_copy_only=False)
        keep = defined & ~self.over(rows)
        shown = self._shown(rows)
        return shown if keep.all() else shown.filter(pa.array(keep))

    def written(self, rows: pa.RecordBatch, written_ms: IndexArray | int) -> pa.RecordBatch:
        """Rows that functions changed, to be stored; `written_ms` says when, for each or for all."""
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

    def read(self, lookup: Lookup, positions: IndexArray, written_ms: IndexArray) -> pa.RecordBatch | None:
        """Rows to store of keys that a function left as they are, where reading extends their life."""
        if self.ttl is None or self.ttl.refresh != "read":
            return None
        at = lookup.index[positions]
        mine = at >= 0
        if not mine.any():
            return None
        rows = lookup.rows.take(pa.array(at[mine]))
        return self.written(rows, written_ms[positions][mine])

    def removed(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """What to store in the place of expired rows: tombstones; where there is a timeout, it alone."""
        everywhere = np.ones(rows.num_rows, dtype=np.bool_)
        return self.written(_without_state(self._shown(rows), self.shown, everywhere), 0)

    def over(self, rows: pa.RecordBatch) -> BoolArray:
        """Which stored rows have expired."""
        if self.ttl is None or not self.hidden:
            return np.zeros(rows.num_rows, dtype=np.bool_)
        expires = rows.column(self._hidden_at).fill_null(_NEVER).to_numpy(zero_copy_only=False)
        over: BoolArray = expires <= self.now_ms
        return over

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _hidden_at(self) -> int:
        return int(self.stored.state_slice.stop) - 1

    def _shown(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if not self.hidden:
            return rows
        columns = list(rows.columns)
        del columns[self._hidden_at]
        return pa.RecordBatch.from_arrays(columns, schema=self.shown.arrow)


def _without_state(rows: pa.RecordBatch, schema: RowSchema, which: BoolArray) -> pa.RecordBatch:
    """The same rows, some of them without state; these are tombstones where they have no timeout either."""
    columns: Sequence[pa.Array] = rows.columns
    at = pa.array(np.arange(rows.num_rows), mask=which)
    states = {i: columns[i].take(at) for i in range(schema.state_slice.start, schema.state_slice.stop)}
    has_timeout = rows.column(TIMEOUT_MS).is_valid().to_numpy(zero_copy_only=False)
    defined = rows.column(DEFINED).to_numpy(zero_copy_only=False) & ~which
    deleted = rows.column(DELETED).to_numpy(zero_copy_only=False) | (which & ~has_timeout)
    arrays = [states.get(i, column) for i, column in enumerate(columns)]
    arrays[-2:] = [pa.array(defined), pa.array(deleted)]
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)
