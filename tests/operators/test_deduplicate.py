"""Deduplication, compared with a model of Spark's own operator in plain Python."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import TIME, at, make_deduplication

SCHEMA = pa.schema([("key", pa.string()), ("at", TIME), ("value", pa.int64())])
STEPS = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.sampled_from(["a", "b", None]), st.none() | st.integers(0, 40).map(lambda n: n / 2 + 0.0004)),
            max_size=8,
        ),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=7,
)
KINDS = ["no watermark", "key", "key and time", "within watermark"]
DELAY_S = 4


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(steps=STEPS)
def test_the_output_has_the_first_row_of_each_key(kind: str, steps: list[tuple[list[Any], int]]) -> None:
    keys = ["key", "at"] if kind == "key and time" else ["key"]
    within = kind == "within watermark"
    bucket = make_deduplication(SCHEMA, keys, None if kind == "no watermark" else "at", DELAY_S if within else None)
    state: dict[Any, float | None] = {}
    watermark, number = 0, 0
    for rows, by in [*steps, ([], 60)]:
        late, watermark = watermark, watermark + by
        expected, numbered = [], []
        for key, time in rows:
            number += 1
            numbered.append((key, at(time), number))
            if kind != "no watermark" and time is not None and time <= late:
                continue
            group = (key, time) if kind == "key and time" else key
            if group not in state:
                # Within the watermark, Spark's operator treats a row without a time as one of 1970.
                state[group] = (time or 0) + DELAY_S if within else time if kind == "key and time" else None
                expected.append(number)
        state = {group: time for group, time in state.items() if time is None or time > watermark}
        table = pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in numbered], schema=SCHEMA)
        output = bucket.step(table, watermark * 1000)
        assert sorted(row["value"] for row in output) == expected
        by_value = {value: (key, time) for key, time, value in numbered}
        assert all(by_value[row["value"]] == (row["key"], row["at"]) for row in output)
        assert len(bucket.stored) == len(state)


def test_a_timeout_without_state_is_cleared() -> None:
    """A `Ttl` removes a state but leaves its timeout."""
    bucket = make_deduplication(SCHEMA, ["key"], "at", DELAY_S)
    rows = pa.table({"key": ["a"], "at": pa.array([at(10)], TIME), "value": [1]}, schema=SCHEMA)
    bucket.step(rows)
    ((key, (row, _, timeout)),) = bucket.stored.items()
    bucket.stored[key] = row, None, timeout
    assert bucket.step(rows.slice(0, 0), 20_000) == []
    assert not bucket.stored


def test_a_key_may_have_the_name_of_a_state_column() -> None:
    """The state is stored by the positions of the keys, not by their names."""
    schema = pa.schema([("expires_us", pa.int64()), ("at", TIME)])
    bucket = make_deduplication(schema, ["expires_us"], "at", DELAY_S)
    rows = pa.table([[3, 1, 3], pa.array([at(1), at(2), at(3)], TIME)], schema=schema)
    assert sorted(row["expires_us"] for row in bucket.step(rows)) == [1, 3]
    assert bucket.step(rows) == []
    assert len(bucket.stored) == 2
