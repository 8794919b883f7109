"""When the watermark has passed an event time, and the timeout that says so."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import event_times_us, flat
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.operators.arrays import bools

__all__ = ["due_ms", "key_times_us", "passed"]


def key_times_us(keys: pa.Table, name: str) -> pa.Array:
    """Event time of each key."""
    return event_times_us(flat(keys.column(name)))


def passed(times_us: pa.Array, watermark_ms: int | None) -> BoolArray:
    """Which times the watermark has reached; never those that are NULL. Spark's condition for what is removed."""
    if watermark_ms is None:
        return np.zeros(len(times_us), dtype=np.bool_)
    return bools(pc.fill_null(pc.less_equal(times_us, watermark_ms * 1000), False))


def due_ms(times_us: pa.Array) -> pa.Array:
    """Timeouts that fire when the watermark has reached a time, milliseconds since 1970; NULL for none.

    A timeout fires when the watermark is past it, and so lies a millisecond before the first one at which `passed`
    holds. (None can be set at 0, so what ends in the first millisecond of 1970 is removed in the third.)
    """
    values: IndexArray = times_us.fill_null(0).to_numpy()
    due = np.maximum(-(-values // 1000) - 1, 1)
    return pa.array(due, mask=~bools(times_us.is_valid())) if times_us.null_count else pa.array(due)
