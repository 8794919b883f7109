"""Event times that the watermark has passed, and timeouts for them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import combine_chunks, event_times_us
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.operators.arrays import to_bools

__all__ = ["compute_timeouts_ms", "read_key_times_us", "find_passed"]


def read_key_times_us(keys: pa.Table, name: str) -> pa.Array:
    """Return the event time of each key, in microseconds."""
    return event_times_us(combine_chunks(keys.column(name)))


def find_passed(times_us: pa.Array, watermark_ms: int | None) -> BoolArray:
    """Return a mask of the times that the watermark has reached, Spark's condition for removal; False for NULL."""
    if watermark_ms is None:
        return np.zeros(len(times_us), dtype=np.bool_)
    return to_bools(pc.fill_null(pc.less_equal(times_us, watermark_ms * 1000), False))


def compute_timeouts_ms(times_us: pa.Array) -> pa.Array:
    """Return timeouts that fire when the watermark has reached a time, in milliseconds since 1970; NULL for NULL.

    A timeout fires when the watermark is past it. So it is a millisecond before the first watermark for which
    `find_passed` is true. (A timeout cannot be 0, so a time in the first millisecond of 1970 fires in the third.)
    """
    values: IndexArray = times_us.fill_null(0).to_numpy()
    timeouts = np.maximum(-(-values // 1000) - 1, 1)
    return pa.array(timeouts, mask=~to_bools(times_us.is_valid())) if times_us.null_count else pa.array(timeouts)
