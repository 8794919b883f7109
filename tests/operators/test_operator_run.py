"""`spark_state_ext.testing.run_operator` runs built-in operators without Spark: compared with models in plain dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import TIME, at, seconds
from test_top_k import rank_rows

from spark_state_ext import Agg, ArrowState, Ttl, aggregate, deduplicate, sessionize, top_k
from spark_state_ext.errors import StateValueError, UnsupportedPlanError, UnsupportedTypeError, UsageError
from spark_state_ext.testing import RunResult, Window, run, run_operator
from tests.helpers.soak import examples

SCHEMA = pa.schema([("number", pa.int64()), ("key", pa.string()), ("at", TIME), ("value", pa.int64())])
# Rows of a key, a time and a value, and how far each batch moves the watermark.
ROWS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.none() | st.integers(0, 40), st.none() | st.integers(-5, 5)),
    max_size=10,
)
STEPS = st.lists(st.tuples(ROWS, st.integers(0, 12)), min_size=1, max_size=4)
RESTARTS = st.sampled_from([False, True, [2]])
SETTINGS = settings(max_examples=examples(12))

Step = tuple[list[dict[str, Any]], int, int]


def make_steps(drawn: list[tuple[list[Any], int]]) -> list[Step]:
    """Return for each batch its numbered rows, the watermark before it and its own, in seconds.

    A last batch ends all groups.

    Only rows move a watermark, so that it stays at 0 until there are some.
    """
    steps, number, watermark = [], 0, 0
    for rows, by in [*drawn, ([], 100)]:
        late, watermark = watermark, watermark + (by if rows or number else 0)
        numbered = []
        for key, time, value in rows:
            number += 1
            numbered.append({"number": number, "key": key, "at": at(time), "value": value})
        steps.append((numbered, late, watermark))
    return steps


def run_steps(steps: list[Step], operator: Callable[..., Any], *arguments: Any, **options: Any) -> RunResult:
    batches = [pa.Table.from_pylist(rows, SCHEMA) for rows, _, _ in steps]
    return run_operator(operator, batches, *arguments, input_schema=SCHEMA, **options)


def make_event_time(steps: list[Step]) -> dict[str, Any]:
    return {"event_time": "at", "watermarks_ms": [1000 * watermark for *_, watermark in steps]}


def second(row: dict[str, Any]) -> int | None:
    return None if row["at"] is None else int(seconds(row["at"]))


def sorted_rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """Return rows in a fixed order."""
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)


def sorted_windows(table: pa.Table, name: str) -> list[tuple[Any, ...]]:
    """Return key, start and end in seconds, and count of windows in a fixed order."""
    return sort_rows(
        (row["key"], int(seconds(row[name]["start"])), int(seconds(row[name]["end"])), row["n"])
        for row in table.to_pylist()
    )


def sort_rows(rows: Any) -> list[Any]:
    return sorted(rows, key=repr)


# -- models ---------------------------------------------------------------------------------------


@SETTINGS
@given(STEPS, RESTARTS, st.sampled_from([1, 3]))
def test_aggregate_equals_a_model_of_totals_by_key(drawn: list[Any], restart: Any, buckets: int) -> None:
    steps = make_steps(drawn)
    totals = {"n": Agg.count(), "total": Agg.sum("value"), "most": Agg.max("value")}
    result = run_steps(steps, aggregate, "key", totals, restart=restart, buckets=buckets)
    seen: dict[Any, list[Any]] = {}
    for (rows, _, _), batch in zip(steps, result.batches, strict=True):
        for row in rows:
            seen.setdefault(row["key"], []).append(row["value"])
        known = {key: [value for value in values if value is not None] for key, values in seen.items()}
        expected = {
            key: (key, len(seen[key]), sum(known[key]) if known[key] else None, max(known[key], default=None))
            for key in {row["key"] for row in rows}
        }
        assert sorted_rows(batch.output) == sort_rows(expected.values())
        assert batch.state.num_rows == len(seen)
        assert batch.watermark_ms is None


@SETTINGS
@given(STEPS, RESTARTS, st.sampled_from(["update", "append"]))
def test_aggregate_equals_a_model_of_totals_by_window(drawn: list[Any], restart: Any, mode: str) -> None:
    steps = make_steps(drawn)
    arguments = [Window("at", 10_000, "span"), "key"], {"n": Agg.count()}, mode
    result = run_steps(steps, aggregate, *arguments, restart=restart, **make_event_time(steps))
    open_groups: dict[Any, int] = {}
    for (rows, late, watermark), batch in zip(steps, result.batches, strict=True):
        touched = set()
        for row in rows:
            time = second(row)
            start = -1 if time is None else 10 * (time // 10)
            if time is not None and start + 10 > late:
                open_groups[start, row["key"]] = open_groups.get((start, row["key"]), 0) + 1
                touched.add((start, row["key"]))
        ended = {group for group in open_groups if group[0] + 10 <= watermark}
        given_groups = ended if mode == "append" else touched
        expected = [(key, start, start + 10, open_groups[start, key]) for start, key in given_groups]
        assert sorted_windows(batch.output, "span") == sort_rows(expected)
        for group in ended:
            del open_groups[group]
        assert batch.state.num_rows == len(open_groups)
    assert not open_groups


@pytest.mark.parametrize("kind", ["no watermark", "key and time", "within watermark"])
@SETTINGS
@given(drawn=STEPS, restart=RESTARTS)
def test_deduplicate_equals_a_model_of_first_rows(kind: str, drawn: list[Any], restart: Any) -> None:
    steps = make_steps(drawn)
    within, timed = kind == "within watermark", kind != "no watermark"
    keys = ["key", "at"] if kind == "key and time" else "key"
    options = {**make_event_time(steps), "delay_ms": 4_000} if timed else {}
    result = run_steps(steps, deduplicate, keys, within_watermark=within, restart=restart, **options)
    remembered: dict[Any, int | None] = {}
    for (rows, late, watermark), batch in zip(steps, result.batches, strict=True):
        expected = []
        for row in rows:
            time = second(row)
            if timed and time is not None and time <= late:
                continue
            group = (row["key"], time) if kind == "key and time" else row["key"]
            if group not in remembered:
                # Within the watermark, Spark's operator treats a row without a time as one of 1970.
                remembered[group] = (time or 0) + 4 if within else time if kind == "key and time" else None
                expected.append(row)
        remembered = {group: time for group, time in remembered.items() if time is None or time > watermark}
        assert batch.output.sort_by("number").to_pylist() == expected
        assert batch.state.num_rows == len(remembered)


@SETTINGS
@given(STEPS, st.sampled_from([1, 3]), st.integers(1, 3), st.booleans(), st.sampled_from(["all", "changed"]))
def test_top_k_equals_a_model_of_the_best_rows(drawn: list[Any], buckets: int, k: int, down: bool, emit: str) -> None:
    steps = make_steps(drawn)
    arguments = "key", ["value", "key"], k
    result = run_steps(steps, top_k, *arguments, descending=[down, True], emit=emit, rank="place", buckets=buckets)
    seen: dict[Any, list[Any]] = {}
    for (rows, _, _), batch in zip(steps, result.batches, strict=True):
        before = {key: rank_rows(key_rows, k, [("value", down)]) for key, key_rows in seen.items()}
        for row in rows:
            seen.setdefault(row["key"], []).append(row)
        after = {key: rank_rows(key_rows, k, [("value", down)]) for key, key_rows in seen.items()}
        expected = {
            (number, key, place)
            for key, ranked in after.items()
            if ranked != before.get(key)
            for place, number in enumerate(ranked, 1)
            if emit == "all" or before.get(key, [])[place - 1 : place] != [number]
        }
        assert sorted_rows(batch.output.select(["number", "key", "place"])) == sort_rows(expected)
        assert batch.output.schema == SCHEMA.append(pa.field("place", pa.int32()))
        assert batch.state.num_rows == len(seen)


@SETTINGS
@given(STEPS, RESTARTS)
def test_sessionize_equals_a_model_of_sessions(drawn: list[Any], restart: Any) -> None:
    steps = make_steps(drawn)
    result = run_steps(
        steps, sessionize, "key", "at", 5_000, {"n": Agg.count()}, restart=restart, **make_event_time(steps)
    )
    open_groups: dict[Any, list[tuple[int, int, int]]] = {}
    for (rows, late, watermark), batch in zip(steps, result.batches, strict=True):
        for row in rows:
            time = second(row)
            if time is not None and time + 5 > late:
                open_groups.setdefault(row["key"], []).append((time, time + 5, 1))
        expected = []
        for key, sessions in list(open_groups.items()):
            merged: list[tuple[int, int, int]] = []
            for start, end, n in sorted(sessions):
                if merged and start <= merged[-1][1]:
                    merged[-1] = merged[-1][0], max(merged[-1][1], end), merged[-1][2] + n
                else:
                    merged.append((start, end, n))
            expected += [(key, start, end, n) for start, end, n in merged if end <= watermark]
            open_groups[key] = [session for session in merged if session[1] > watermark]
        open_groups = {key: sessions for key, sessions in open_groups.items() if sessions}
        assert sorted_windows(batch.output, "session_window") == sort_rows(expected)
        assert batch.state.num_rows == len(open_groups)
    assert not open_groups


# -- arguments ------------------------------------------------------------------------------------


def test_every_operator_and_every_method_of_a_state_can_run_without_spark() -> None:
    """A new operator or method needs a way to run without Spark."""
    from spark_state_ext.spark.client import operators
    from spark_state_ext.testing.operator_columns import OPERATORS

    assert {operator.__name__ for operator in OPERATORS} == set(operators.__all__)
    methods = {name for name in vars(ArrowState) if not name.startswith("_")}
    # These are run(…, api="pandas"), api="arrow" and api="rows".
    assert methods == {"apply_in_pandas_with_state", "apply_in_arrow_with_state", "apply_rows_with_state"}


def make_rows(*keys: str | None) -> list[dict[str, Any]]:
    return [{"key": key} for key in keys]


def test_a_time_to_live_removes_groups_and_remembered_keys() -> None:
    batches = [make_rows("a", "b"), make_rows("a"), make_rows("a", "b")]
    times = [0, 1_000, 2_000]
    counted = run_operator(aggregate, batches, "key", {"n": Agg.count()}, ttl=Ttl(1_500), processing_times_ms=times)
    assert [sorted_rows(output) for output in counted.outputs] == [
        [("a", 1), ("b", 1)],
        [("a", 2)],
        [("a", 3), ("b", 1)],
    ]
    firsts = run_operator(deduplicate, batches, ttl=Ttl(1_500), processing_times_ms=times)
    assert [sorted_rows(output) for output in firsts.outputs] == [[("a",), ("b",)], [], [("a",), ("b",)]]


def test_groups_expire_by_an_event_time_that_is_not_a_key() -> None:
    """As in the test with Spark, the third batch's watermark is 20 s, and the group of 'a' was written at 1 s."""
    batches = [
        [{"key": key, "at": at(second)} for key, second in rows]
        for rows in ([("a", 1), ("b", 9)], [("b", 20)], [("a", 1), ("b", 5)])
    ]
    ttl = Ttl(10_000, clock="event")
    result = run_operator(aggregate, batches, "key", {"n": Agg.count()}, event_time="at", ttl=ttl)
    assert [sorted_rows(output) for output in result.outputs] == [
        [("a", 1), ("b", 1)],
        [("b", 2)],
        [("a", 1), ("b", 3)],
    ]
    assert [batch.watermark_ms for batch in result.batches] == [0, 9_000, 20_000]


def test_columns_may_have_unusual_names_and_top_k_may_order_by_its_keys() -> None:
    schema = {"a b": ["x", "x", "y"], "__v0": [1, 2, 3]}
    result = run_operator(top_k, [schema], "`a b`", ["a b", "__v0"], 1, descending=[False, True])
    assert sorted_rows(result.output) == [("x", 2, 1), ("y", 3, 1)]
    summed = run_operator(aggregate, [schema], ["a b"], {"total": Agg.sum("__v0"), "n": Agg.count("__v0")})
    assert sorted_rows(summed.output) == [("x", 3, 2), ("y", 3, 1)]


def test_windows_accept_times_before_1970_and_without_a_zone() -> None:
    early, start, end = (pa.array([at(second)], TIME).cast(pa.timestamp("us"))[0].as_py() for second in (-1, -60, 0))
    result = run_operator(aggregate, [{"at": [early]}], Window("at", 60_000), {"n": Agg.count()})
    assert result.output.to_pylist() == [{"window": {"start": start, "end": end}, "n": 1}]


def test_rows_without_a_time_are_in_no_window() -> None:
    schema = pa.schema([("at", TIME)])
    timed = {"event_time": "at", "input_schema": schema}
    result = run_operator(aggregate, [{"at": [None]}], Window("at", 1), {"n": Agg.count()}, "append", **timed)
    assert result.output.num_rows == 0
    assert result.state.num_rows == 0


def test_the_error_of_a_sum_beyond_a_long_names_the_key() -> None:
    batches = [{"key": ["a", "b"], "value": [2**62, 1]}] * 2
    with pytest.raises(StateValueError, match=r"'total' of the key \{'key': 'a'\} exceeds the range of int64"):
        run_operator(aggregate, batches, "key", {"total": Agg.sum("value")})


N: dict[str, Any] = {"n": Agg.count()}


@pytest.mark.parametrize(
    ("operator", "arguments", "options", "error", "text"),
    [
        (print, ["key"], {}, UsageError, "operator must be one of aggregate, deduplicate, sessionize, top_k"),
        (aggregate, ["key"], {}, UsageError, "aggregate does not take these arguments: .*'aggregates'"),
        (aggregate, ["key", N], {"mode": "append"}, UsageError, "does not take these arguments: .*'mode'"),
        (aggregate, ["key", N, "append"], {}, UnsupportedPlanError, "no key has a watermark"),
        (aggregate, ["key", N, "complete"], {}, UsageError, "'update' or 'append'"),
        (aggregate, ["user", N], {}, UsageError, "the column 'user', which the input does not have; it has number"),
        (aggregate, [len, N], {}, UsageError, "takes names of columns only"),
        (aggregate, ["key", {"x": Agg.sum("nothing")}], {}, UsageError, "names the column 'nothing'"),
        (aggregate, ["key", {"x": Agg.sum("key")}], {}, UnsupportedTypeError, "sum of string"),
        (aggregate, ["key", {"key": Agg.count()}], {}, UsageError, "'key' is there more than once"),
        (aggregate, [["key", "key"], N], {}, UsageError, "keys must have different names"),
        (aggregate, [Window("value", 1), N], {}, UnsupportedPlanError, "'value' is of type bigint"),
        (aggregate, ["key", N], {"delay_ms": 5}, UsageError, "give event_time"),
        (aggregate, ["key", N], {"watermarks_ms": [5]}, UsageError, "give event_time"),
        (aggregate, ["key", N], {"event_time": "when"}, UsageError, "event_time='when' is not a column"),
        (aggregate, ["key", N], {"restart": "always"}, UsageError, "restart must be"),
        (
            aggregate,
            ["key", N],
            {"ttl": Ttl(5, clock="event")},
            UnsupportedPlanError,
            "needs an input with a watermark",
        ),
        (deduplicate, [Window("at", 5)], {}, UsageError, "a Window is a key of aggregate only"),
        (deduplicate, ["key"], {"within_watermark": True}, UnsupportedPlanError, "needs a watermark on a timestamp"),
        (sessionize, ["key", "at", 5, N], {}, UnsupportedPlanError, "is not a timestamp with a watermark"),
        (sessionize, ["key", "at", 0, N], {"event_time": "at"}, UsageError, "gap_ms"),
        (top_k, ["key", "value", 0], {}, UsageError, "k of top_k"),
        (top_k, ["key", "value", 1], {"rank": "at"}, UsageError, "'at' is there more than once"),
        (top_k, ["key", "value", 1], {"descending": [True, False]}, UsageError, "descending has 2 values"),
    ],
)
def test_wrong_arguments_are_refused_as_on_spark(
    operator: Any, arguments: Any, options: Any, error: Any, text: str
) -> None:
    batch = SCHEMA.empty_table()
    with pytest.raises(error, match=text):
        run_operator(operator, [batch], *arguments, **options)


def test_wrong_windows_operators_and_batches_are_refused() -> None:
    for duration in (0, True, 1.5):
        with pytest.raises(UsageError, match="duration_ms of a Window"):
            # The type is wrong on purpose.
            Window("at", duration)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"aggregate is a built-in operator: run it with run_operator\(\)"):
        run(aggregate, [make_rows("a")], "key", "n long", "n long")
    with pytest.raises(UsageError, match="batches is empty"):
        run_operator(deduplicate, [], input_schema=SCHEMA)
