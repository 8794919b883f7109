"""Sessions, compared with a merge in plain Python."""

from __future__ import annotations

import statistics
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import TIME, at, make_sessions, seconds

from spark_state_ext import Agg
from spark_state_ext.errors import StateValueError

SCHEMA = pa.schema([("key", pa.string()), ("end", TIME), ("value", pa.int64())])
GAP_S = 5
AGGREGATES = {
    "n": Agg.count(),
    "total": Agg.sum("value"),
    "least": Agg.min("value"),
    "spread": Agg.variance("value"),
    "first": Agg.first("value"),
    "last": Agg.last("value"),
    "known": Agg.last("value", ignore_nulls=True),
}
STEPS = st.lists(
    st.tuples(
        st.lists(
            st.tuples(
                st.sampled_from(["a", "b"]), st.integers(0, 120).map(lambda n: n / 2), st.none() | st.integers(0, 9)
            ),
            max_size=12,
        ),
        st.integers(0, 8),
    ),
    min_size=1,
    max_size=7,
)


def make_batch(rows: list[tuple[str, float, int | None]]) -> Any:
    ends = pa.array([at(time + GAP_S) for _, time, _ in rows], TIME)
    return pa.table(
        [pa.array([key for key, *_ in rows], pa.string()), ends, pa.array([value for *_, value in rows], pa.int64())],
        schema=SCHEMA,
    )


def compute_results(values: list[int | None]) -> tuple[Any, ...]:
    known = [value for value in values if value is not None]
    spread = statistics.variance(known) if len(known) > 1 else None
    return (
        *(len(values), sum(known) if known else None, min(known, default=None)),
        *(None if spread is None else round(spread, 6), values[0], values[-1], known[-1] if known else None),
    )


@settings(max_examples=120)
@given(STEPS)
def test_sessions_merge_and_end_as_in_the_model(steps: list[tuple[list[Any], int]]) -> None:
    """The batches have several open sessions of a key, late rows, rows that join sessions, and sessions that touch."""
    bucket = make_sessions(SCHEMA, ["key"], "end", GAP_S, AGGREGATES)
    state: dict[str, list[tuple[float, float, list[Any]]]] = {}
    watermark = 0
    for rows, by in [*steps, ([], 200)]:
        late, watermark = watermark, watermark + by
        for key, time, value in rows:
            if time + GAP_S > late:
                state.setdefault(key, []).append((time, time + GAP_S, [value]))
        expected = []
        for key in list(state):
            merged: list[tuple[float, float, list[Any]]] = []
            # The sort is stable: stored sessions come first, then rows in their order.
            for start, end, values in sorted(state[key], key=lambda session: session[0]):
                if merged and start <= merged[-1][1]:
                    merged[-1] = merged[-1][0], max(merged[-1][1], end), merged[-1][2] + values
                else:
                    merged.append((start, end, values))
            expected += [
                (key, start, end, *compute_results(values)) for start, end, values in merged if end <= watermark
            ]
            state[key] = [session for session in merged if session[1] > watermark]
        state = {key: sessions for key, sessions in state.items() if sessions}
        output = bucket.step(make_batch(rows), watermark * 1000)
        actual = [
            (
                *(row["key"], seconds(row["session_window"]["start"]), seconds(row["session_window"]["end"])),
                *(round(row[name], 6) if isinstance(row[name], float) else row[name] for name in AGGREGATES),
            )
            for row in output
        ]
        assert sorted(actual, key=repr) == sorted(expected, key=repr)
        stored_starts = {
            row["key"]: [seconds(one["session_start"]) for one in held["sessions"]]
            for row, held, _ in bucket.stored.values()
            if held
        }
        assert stored_starts == {key: [start for start, _, _ in sessions] for key, sessions in state.items()}


def test_open_sessions_continue_with_another_gap() -> None:
    """The gap may change while sessions are open; stored sessions keep their ends."""
    bucket = make_sessions(SCHEMA, ["key"], "end", GAP_S, {"n": Agg.count()})
    bucket.step(make_batch([("a", 10, 1), ("a", 12, 1), ("a", 30, 1)]))
    bucket.function = make_sessions(SCHEMA, ["key"], "end", 20, {"n": Agg.count()}).function
    rows = make_batch([("a", 18, 1), ("a", 16, 1)])
    ends = pa.array([at(38), at(36)], TIME)
    output = bucket.step(rows.set_column(1, "end", ends), 0) + bucket.step(make_batch([]), 100_000)
    assert [
        (seconds(row["session_window"]["start"]), seconds(row["session_window"]["end"]), row["n"]) for row in output
    ] == [(10, 38, 5)]


def test_the_error_of_a_sum_beyond_a_long_names_the_key() -> None:
    bucket = make_sessions(SCHEMA, ["key"], "end", GAP_S, {"total": Agg.sum("value")})
    with pytest.raises(StateValueError, match=r"'total' of the key \{'key': 'b'\} exceeds the range of int64"):
        bucket.step(make_batch([("a", 1, 1), ("a", 20, 2), ("b", 1, 2**62), ("b", 2, 2**62)]))
    bucket.step(make_batch([("a", 1, 1), ("a", 20, 2), ("b", 1, 2**62), ("b", 8, 2**62)]))
    with pytest.raises(StateValueError, match=r"'total' of the key \{'key': 'b'\} exceeds the range of int64"):
        bucket.step(make_batch([("a", 1, 1), ("b", 5, 0)]))


def test_the_error_of_a_decimal_mean_beyond_its_type_names_the_key() -> None:
    """Only some of the sessions end."""
    schema = SCHEMA.set(2, pa.field("value", pa.decimal128(38, 2)))
    bucket = make_sessions(schema, ["key"], "end", GAP_S, {"n": Agg.count(), "m": Agg.mean("value")})
    rows = [("z", 90, 1), ("a", 1, 1), ("c", 80, 1), ("b", 70, 1), ("b", 2, 10**35), ("d", 90, 10**35)]
    columns = [[key for key, *_ in rows], pa.array([at(time + GAP_S) for _, time, _ in rows], TIME)]
    values = pa.array([Decimal(value) for *_, value in rows], schema.field("value").type)
    bucket.step(pa.table([*columns, values], schema=schema))
    with pytest.raises(
        StateValueError, match=r"'m' of the key \{'key': 'b'\} exceeds the range of decimal128\(38, 6\)"
    ):
        bucket.step(schema.empty_table(), 60_000)
