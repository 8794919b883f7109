"""Deduplication: the first row of each key, as Spark's ``dropDuplicates`` and ``dropDuplicatesWithinWatermark``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from arrow_schemas.columns import combine_chunks, event_times_us
from arrow_schemas.equality import IndexArray
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.operators.arrays import to_bools
from spark_state_ext.operators.deadlines import compute_timeouts_ms, find_passed, read_key_times_us

__all__ = ["EXPIRES_US", "Deduplication"]

# The only state column: the watermark at which the key may be forgotten, microseconds since 1970; NULL for never.
EXPIRES_US = "expires_us"


@dataclass(frozen=True)
class Deduplication:
    """The vectorised function of a deduplication. It outputs rows of the input with all columns.

    Parameters
    ----------
    key_time
        Key column with the event time; None if there is none.
    row_time
        Column with the event time; a key is remembered for `delay_us` after it. None: keys do not expire that way.
    delay_us
        The watermark's delay, microseconds.
    """

    key_time: str | None = None
    row_time: str | None = None
    delay_us: int = 0

    def __call__(self, batch: StateBatch) -> pa.Table | None:
        """Return the first row of each key that has no state."""
        count, fresh = len(batch), batch.timed_out.false_count
        exists = to_bools(batch.exists)
        is_new = ~exists
        is_new[fresh:] = False
        starts: IndexArray = batch.offsets.to_numpy()[:count][is_new].astype(np.int64)
        expires_us = self._compute_expiry_us(batch, starts, is_new)
        is_expired = find_passed(expires_us, batch.watermark_ms)
        # A key that timed out without state had state that has expired.
        batch.remove((exists & is_expired) | (~exists & ~is_new))
        is_kept = is_new & ~is_expired
        if is_kept.any():
            batch.update({EXPIRES_US: expires_us}, where=is_kept, by_key=False)
            if self.key_time is not None or self.row_time is not None:
                batch.set_timeout(timestamp_ms=compute_timeouts_ms(expires_us), where=is_kept)
        if not len(starts):
            return None
        return batch.rows if len(starts) == batch.rows.num_rows else batch.rows.take(pa.array(starts))

    def _compute_expiry_us(self, batch: StateBatch, starts: IndexArray, is_new: np.ndarray) -> pa.Array:
        """Return when each key may be forgotten, from its state or its first row."""
        stored = combine_chunks(batch.state.column(EXPIRES_US))
        if self.row_time is not None:
            times = event_times_us(combine_chunks(batch.rows.column(self.row_time)).take(pa.array(starts)))
            # Spark treats a missing event time as 1970.
            values: IndexArray = stored.fill_null(0).to_numpy().copy()
            values[is_new] = times.fill_null(0).to_numpy() + self.delay_us
            valid = is_new | to_bools(stored.is_valid())
            return pa.array(values, mask=~valid)
        if self.key_time is not None:
            return read_key_times_us(batch.keys, self.key_time)
        return stored
