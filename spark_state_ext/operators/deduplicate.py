"""The first row of each key: what Spark's ``dropDuplicates`` and ``dropDuplicatesWithinWatermark`` do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from arrow_schemas.columns import event_times_us, flat
from arrow_schemas.equality import IndexArray
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.operators.arrays import bools
from spark_state_ext.operators.deadlines import due_ms, key_times_us, passed

__all__ = ["EXPIRES_US", "Deduplication"]

# The only state column: when the key may be forgotten, microseconds since 1970 by the watermark; NULL for never.
EXPIRES_US = "expires_us"


@dataclass(frozen=True)
class Deduplication:
    """The vectorised function of a deduplication. Its output is the input's rows, all columns.

    Parameters
    ----------
    key_time
        Key column with the event time; None for none.
    row_time
        Column with the event time, from which a key lives on for `delay_us`; None where it does not go by that.
    delay_us
        The watermark's delay, microseconds.
    """

    key_time: str | None = None
    row_time: str | None = None
    delay_us: int = 0

    def __call__(self, batch: StateBatch) -> pa.Table | None:
        """The first row of each key without state."""
        count, fresh = len(batch), batch.timed_out.false_count
        exists = bools(batch.exists)
        new = ~exists
        new[fresh:] = False
        starts: IndexArray = batch.offsets.to_numpy()[:count][new].astype(np.int64)
        expires_us = self._expires_us(batch, starts, new)
        over = passed(expires_us, batch.watermark_ms)
        # A key that timed out and has no state has had some that expired.
        batch.remove((exists & over) | (~exists & ~new))
        kept = new & ~over
        if kept.any():
            batch.update({EXPIRES_US: expires_us}, where=kept, by_key=False)
            if self.key_time is not None or self.row_time is not None:
                batch.set_timeout(timestamp_ms=due_ms(expires_us), where=kept)
        if not len(starts):
            return None
        return batch.rows if len(starts) == batch.rows.num_rows else batch.rows.take(pa.array(starts))

    def _expires_us(self, batch: StateBatch, starts: IndexArray, new: np.ndarray) -> pa.Array:
        """When each key may be forgotten: as its state says, or its first row."""
        stored = flat(batch.state.column(EXPIRES_US))
        if self.row_time is not None:
            times = event_times_us(flat(batch.rows.column(self.row_time)).take(pa.array(starts)))
            # Spark takes a row without event time for one of 1970.
            values: IndexArray = stored.fill_null(0).to_numpy().copy()
            values[new] = times.fill_null(0).to_numpy() + self.delay_us
            known = new | bools(stored.is_valid())
            return pa.array(values, mask=~known)
        if self.key_time is not None:
            return key_times_us(batch.keys, self.key_time)
        return stored
