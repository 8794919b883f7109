"""The default `StateBatch` of tests: three keys with rows, and one that timed out."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from batch_driver import Stored, made, outcome_of

from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.testing.model import canonicalise

KEYS = pa.schema([("name", pa.string()), ("x", pa.float64())])
STATE = pa.schema([("n", pa.int64()), ("note", pa.string())])
ROWS = pa.schema([("name", pa.string()), ("x", pa.float64()), ("value", pa.int64())])
EVENT_TIME, PROCESSING_TIME = "EventTimeTimeout", "ProcessingTimeTimeout"
Key = tuple[Any, ...]

A, B, C, D = ("a", 1.0), ("b", float("nan")), (None, 0.0), ("d", None)
NAMES = [A, B, C, D]
MASK = [False, True, False, True]


def batch_of(
    with_rows: list[Key] | None = None,
    due: list[Key] | None = None,
    known: dict[Key, tuple[Any, ...]] | None = None,
    values: list[list[int | None]] | None = None,
    **options: Any,
) -> StateBatch:
    """Return a batch, by default of three keys with rows and one that timed out; two of them have state."""
    with_rows = [A, B, C] if with_rows is None else with_rows
    values = [[*range(at + 1)] for at in range(len(with_rows))] if values is None else values
    rows = [(*key, value) for key, key_values in zip(with_rows, values, strict=True) for value in key_values]
    return made(
        KEYS,
        STATE,
        pa.Table.from_pylist([dict(zip(ROWS.names, row, strict=True)) for row in rows], schema=ROWS),
        with_rows,
        [len(key_values) for key_values in values],
        [D] if due is None else due,
        {A: (10, "ten"), D: (40, None)} if known is None else known,
        **options,
    )


KNOWN = {A: Stored((10, "ten")), D: Stored((40, None), 5)}


def after(batch: StateBatch) -> dict[Key, Stored]:
    """Return the states and timeouts after the default batch."""
    return outcome_of(batch, KNOWN)


def key(one: Key) -> Key:
    return tuple(canonicalise(one))
