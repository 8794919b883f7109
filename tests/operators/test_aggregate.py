"""Aggregation over many batches, compared with plain Python over all rows."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_bucket import to_comparable
from planned import TIME, at, make_aggregation

from spark_state_ext import Agg
from spark_state_ext.errors import ExecutorPackageError, StateValueError, UnsupportedTypeError, UsageError
from spark_state_ext.operators.agg import Aggregate, find_kernel
from spark_state_ext.operators.arrays import Segments
from spark_state_ext.operators.functions import Buffers, Kernel
from spark_state_ext.operators.sketches import DistinctSketch

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("whole", pa.int64()),
        ("small", pa.int16()),
        ("real", pa.float64()),
        ("single", pa.float32()),
        ("price", pa.decimal128(8, 2)),
        ("wide", pa.decimal128(30, 12)),
        ("text", pa.string()),
        ("bytes", pa.binary()),
        ("day", pa.date32()),
        ("time", TIME),
        ("flag", pa.bool_()),
        ("tags", pa.list_(pa.string())),
    ]
)
NUMBERS = ["whole", "small", "real", "single", "price", "wide"]
FLAT = SCHEMA.names[1:-1]


def decimals(digits: int, scale: int) -> st.SearchStrategy[Any]:
    most = 10**digits - 1
    return st.integers(-most, most).map(lambda n: decimal.Decimal(n).scaleb(-scale, decimal.Context(60)))


LIMITS = dt.datetime(1900, 1, 1), dt.datetime(2100, 1, 1)  # noqa: DTZ001  # Hypothesis adds the zone
REALS = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, math.nan, 1.5, -2.25]))
ROWS = st.fixed_dictionaries(
    {
        "key": st.sampled_from([None, "a", "b", "c"]),
        **{
            name: st.none() | strategy
            for name, strategy in {
                "whole": st.integers(-(2**40), 2**40),
                "small": st.integers(-(2**15), 2**15 - 1),
                "real": REALS,
                "single": REALS,
                "price": decimals(8, 2),
                "wide": decimals(30, 12),
                "text": st.text(max_size=3),
                "bytes": st.binary(max_size=2),
                "day": st.dates(),
                "time": st.datetimes(*LIMITS, timezones=st.just(dt.timezone.utc)),
                "flag": st.booleans(),
                "tags": st.lists(st.none() | st.text(max_size=1), max_size=2),
            }.items()
        },
    }
)
# The number of tasks that aggregate their rows before the shuffle; with 0, no task does.
TASKS = st.sampled_from([0, 1, 2, 5])
BATCHES = st.lists(st.lists(ROWS, max_size=12), min_size=1, max_size=4)


def make_table(rows: list[dict[str, Any]]) -> Any:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def sort_key(value: Any) -> Any:
    """Return a key that sorts values as Spark does."""
    if isinstance(value, float):
        return (math.isnan(value), 0.0 if math.isnan(value) else value)
    return value.encode() if isinstance(value, str) else value


def compute_mean(values: list[Any]) -> Any:
    if not values:
        return None
    if isinstance(values[0], decimal.Decimal):
        scale = {8: 2, 30: 12}[8 if values[0].as_tuple().exponent == -2 else 30] + 4
        with decimal.localcontext(decimal.Context(prec=80)):
            return (sum(values, decimal.Decimal(0)) / len(values)).quantize(
                decimal.Decimal(1).scaleb(-scale), decimal.ROUND_HALF_UP
            )
    return math.nan if compute_sum(values) is None else compute_sum(values) / len(values)


def compute_sum(values: list[Any]) -> Any:
    if not values:
        return None
    if isinstance(values[0], decimal.Decimal):
        with decimal.localcontext(decimal.Context(prec=80)):
            return sum(values, decimal.Decimal(0))
    if isinstance(values[0], float):
        special = {value for value in values if not math.isfinite(value)}
        return float(sum(special)) if special else math.fsum(values)
    return sum(values)


def compute_variance(values: list[Any]) -> Any:
    if len(values) < 2:
        return None
    numbers = [float(value) for value in values]
    return statistics.variance(numbers) if all(map(math.isfinite, numbers)) else math.nan


def drop_nulls(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


MODEL: dict[str, Callable[[list[Any]], Any]] = {
    "count": lambda values: len(drop_nulls(values)),
    "sum": lambda values: compute_sum(drop_nulls(values)),
    "mean": lambda values: compute_mean(drop_nulls(values)),
    "variance": lambda values: compute_variance(drop_nulls(values)),
    "min": lambda values: min(drop_nulls(values), key=sort_key, default=None),
    "max": lambda values: max(drop_nulls(values), key=sort_key, default=None),
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "first_known": lambda values: next(iter(drop_nulls(values)), None),
    "last_known": lambda values: next(reversed(drop_nulls(values)), None),
}
ALL: dict[str, Aggregate] = {
    "rows": Agg.count(),
    "rows_too": Agg.count("*"),
    **{f"count {name}": Agg.count(name) for name in SCHEMA.names[1:]},
    **{f"sum {name}": Agg.sum(name) for name in NUMBERS},
    **{f"mean {name}": Agg.mean(name) for name in NUMBERS},
    **{f"variance {name}": Agg.variance(name) for name in NUMBERS},
    **{f"min {name}": Agg.min(name) for name in FLAT},
    **{f"max {name}": Agg.max(name) for name in FLAT},
    **{f"first {name}": Agg.first(name) for name in SCHEMA.names[1:]},
    **{f"last {name}": Agg.last(name) for name in SCHEMA.names[1:]},
    **{f"first_known {name}": Agg.first(name, ignore_nulls=True) for name in SCHEMA.names[1:]},
    **{f"last_known {name}": Agg.last(name, ignore_nulls=True) for name in SCHEMA.names[1:]},
}


def is_close(actual: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(actual, float):
        if math.isnan(expected) or math.isnan(actual):
            return math.isnan(expected) and math.isnan(actual)
        # The model adds floats in another order.
        return actual == expected or math.isclose(actual, expected, rel_tol=1e-6, abs_tol=1e-6)
    return bool(actual == expected)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(BATCHES, TASKS)
def test_every_function_equals_the_model_for_every_type(batches: list[list[dict[str, Any]]], tasks: int) -> None:
    bucket = make_aggregation(SCHEMA, ["key"], ALL, tasks=tasks)
    seen: dict[Any, list[dict[str, Any]]] = {}
    for batch in batches:
        # Use the values as Arrow stores them: a float may lose digits.
        rows = make_table(batch).to_pylist()
        for row in rows:
            seen.setdefault(row["key"], []).append(row)
        output = bucket.step(make_table(batch))
        assert [row["key"] for row in output] == list(dict.fromkeys(row["key"] for row in rows))
        for row in output:
            actual = seen[row["key"]]
            assert row["rows"] == row["rows_too"] == len(actual)
            for name in list(ALL)[2:]:
                function, column = name.split()
                values = [one[column] for one in actual]
                if function == "variance" and not all(math.isfinite(float(v)) for v in drop_nulls(values)):
                    # The result is infinite or NaN depending on the order of the rows, as in Spark.
                    assert row[name] is None or not math.isfinite(row[name])
                    continue
                expected = MODEL[function](values)
                if function in ("mean", "variance") and expected is not None and abs(expected) > 1e30:
                    continue
                assert is_close(row[name], expected), (name, values, row[name], expected)


# -- event time ----------------------------------------------------------------------------------------------

TIMED = pa.schema([("at", TIME), ("key", pa.string()), ("value", pa.int64())])
WINDOW = pa.struct([("start", TIME), ("end", TIME)])
TIMES = st.none() | st.integers(0, 40).map(lambda n: n / 2 + 0.0004)
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(TIMES, st.sampled_from(["a", "b"]), st.none() | st.integers(0, 9)), max_size=8),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100)
@given(STEPS, st.booleans(), st.booleans(), TASKS)
def test_groups_end_with_the_watermark(
    steps: list[tuple[list[Any], int]], append: bool, windows: bool, tasks: int
) -> None:
    """As in Spark, the previous watermark decides which rows are late, and the current one which groups end."""
    schema = TIMED if not windows else TIMED.set(0, pa.field("at", WINDOW))
    bucket = make_aggregation(schema, ["at", "key"], {"n": Agg.count(), "total": Agg.sum("value")}, "at", append, tasks)
    state: dict[Any, list[Any]] = {}
    watermark = 0
    for rows, by in [*steps, ([], 60)]:
        late, watermark = watermark, watermark + by
        touched = set()
        for time, key, value in rows:
            if time is None or time > late:
                state.setdefault((time, key), []).append(value)
                touched.add((time, key))
        ended = {group for group in state if group[0] is not None and group[0] <= watermark}
        expected = {
            (*group, len(state[group]), sum(drop_nulls(state[group])) if drop_nulls(state[group]) else None)
            for group in (ended if append else touched)
        }
        for group in ended:
            del state[group]
        times = [at(time) for time, _, _ in rows]
        column: Any = pa.array(times, TIME)
        if windows:
            column = pa.array([None if time is None else {"start": at(0), "end": time} for time in times], WINDOW)
        output = bucket.step(
            pa.table([column, [key for _, key, _ in rows], [value for *_, value in rows]], schema=schema),
            watermark * 1000,
        )
        ends = [row["at"]["end"] if windows and row["at"] is not None else row["at"] for row in output]
        actual = [(end, row["key"], row["n"], row["total"]) for end, row in zip(ends, output, strict=True)]
        assert sorted(actual, key=repr) == sorted(((at(time), *rest) for time, *rest in expected), key=repr)
        remaining = {
            (to_comparable(row["at"])[1][1] if windows and row["at"] else row["at"], row["key"])
            for row, _, _ in bucket.stored.values()
        }
        assert remaining == {(at(time), key) for time, key in state}


def test_an_added_aggregate_counts_from_the_next_rows() -> None:
    """Its columns are NULL in the existing state."""
    schema = pa.schema([("key", pa.string()), ("value", pa.int64())])
    bucket = make_aggregation(schema, ["key"], {"n": Agg.count()})
    rows = pa.table({"key": ["a", "b"], "value": [1, 2]}, schema=schema)
    bucket.step(rows)
    more = {"n": Agg.count(), "mean": Agg.mean("value"), "last": Agg.last("value"), "var": Agg.variance("value")}
    wider = make_aggregation(schema, ["key"], more)
    wider.stored = {
        key: (row, {**dict.fromkeys(wider.state.names), **(state or {})}, timeout)
        for key, (row, state, timeout) in bucket.stored.items()
    }
    assert wider.step(rows.slice(0, 1)) == [{"key": "a", "n": 2, "mean": 1.0, "last": 1, "var": None}]


# -- numbers at their limits -----------------------------------------------------------------------------------


def reduce(kernel: Kernel, values: Any, *starts: int) -> Buffers:
    return kernel.reduce(values, Segments(np.array(starts, dtype=np.int64), len(values)))


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4), min_size=1, max_size=4))
def test_sums_of_longs_are_exact_or_an_error(groups: list[list[int]]) -> None:
    schema = pa.schema([("key", pa.int64()), ("value", pa.int64())])
    keys = [key for key, group in enumerate(groups) for _ in group]
    rows = pa.table([pa.array(keys), pa.array([v for group in groups for v in group], pa.int64())], schema=schema)
    totals = [sum(group) for group in groups]
    bucket = make_aggregation(schema, ["key"], {"total": Agg.sum("value")})
    over = [key for key, total in enumerate(totals) if not -(2**63) <= total < 2**63]
    if over:
        with pytest.raises(
            StateValueError, match=rf"'total' of the key {{'key': {over[0]}}} exceeds the range of int64"
        ):
            bucket.step(rows)
        return
    assert [row["total"] for row in bucket.step(rows)] == totals
    over = [key for key, total in enumerate(totals) if not -(2**63) <= 2 * total < 2**63]
    if over:
        with pytest.raises(StateValueError, match=f"'key': {over[0]}"):
            bucket.step(rows)


@pytest.mark.parametrize("precision", [18, 19, 28, 37, 38])
def test_sums_of_decimals_are_exact_at_their_limits(precision: int) -> None:
    kind = pa.decimal128(precision, 2)
    most = decimal.Decimal("9" * precision).scaleb(-2, decimal.Context(60))
    kernel = find_kernel(Agg.sum("v"), kind, "x")
    least = most.copy_negate()
    values = pa.array([most, None, most, least, None, None], kind).slice(0, 6)
    assert kernel.result == pa.decimal128(min(38, precision + 10), 2)
    if precision == 38:
        schema = pa.schema([("key", pa.int64()), ("v", kind)])
        rows = pa.table([pa.array([7, 7, 7, 7, 8, 9]), values], schema=schema)
        bucket = make_aggregation(schema, ["key"], {"x": Agg.sum("v")})
        assert [row["x"] for row in bucket.step(rows)] == [most, None, None]
        with pytest.raises(
            StateValueError, match=r"'x' of the key \{'key': 7\} exceeds the range of decimal128\(38, 2\)"
        ):
            bucket.step(rows)
        return
    with decimal.localcontext(decimal.Context(prec=60)):
        twice, thrice = 2 * most, 3 * most
    assert reduce(kernel, values, 0, 3, 4)[0].to_pylist() == [twice, least, None]
    assert reduce(kernel, values.slice(1), 0, 3)[0].to_pylist() == [decimal.Decimal("0.00"), None]
    left, right = reduce(kernel, values, 0, 3, 4), reduce(kernel, values, 0, 2, 4)
    assert kernel.merge(left, right)[0].to_pylist() == [thrice, least, None]


def test_means_of_decimals_are_rounded_half_up() -> None:
    kernel = find_kernel(Agg.mean("v"), pa.decimal128(8, 2), "x")
    cents = [decimal.Decimal(sign * (n == 0)) / 100 for sign in (1, -1) for n in range(32)]
    means = kernel.finish(reduce(kernel, pa.array(cents, pa.decimal128(8, 2)), 0, 32))
    # The exact means are 0.0003125 and its negative.
    assert means.to_pylist() == [decimal.Decimal("0.000313"), decimal.Decimal("-0.000313")]
    assert means.type == pa.decimal128(12, 6)


HUGE, SMALL = decimal.Decimal(10**35), decimal.Decimal(5)
BEYOND = r"the aggregate 'm' of the key \{.*'key': 'b'\} exceeds the range of decimal128\(38, 6\)"


def test_the_error_of_a_decimal_mean_beyond_its_type_names_the_key() -> None:
    """The type of the mean has four digits fewer before the point than that of the values."""
    schema = pa.schema([("key", pa.string()), ("v", pa.decimal128(38, 2))])
    bucket = make_aggregation(schema, ["key"], {"n": Agg.count(), "m": Agg.mean("v")})
    bucket.step(pa.table({"key": ["z"], "v": [SMALL]}, schema=schema))
    with pytest.raises(StateValueError, match=BEYOND):
        bucket.step(pa.table({"key": ["a", "b", "c"], "v": [SMALL, HUGE, None]}, schema=schema))


@pytest.mark.parametrize("append", [False, True])
def test_the_error_of_a_decimal_mean_names_the_key_of_a_group_with_event_time(append: bool) -> None:
    schema = pa.schema([("at", TIME), ("key", pa.string()), ("v", pa.decimal128(38, 2))])
    bucket = make_aggregation(schema, ["at", "key"], {"m": Agg.mean("v")}, "at", append)

    def step(watermark_s: int, *rows: tuple[int, str, decimal.Decimal]) -> None:
        times, keys, values = zip(*rows, strict=True)
        columns = [pa.array([at(time) for time in times], TIME), list(keys), pa.array(values, schema.field("v").type)]
        bucket.step(pa.table(columns, schema=schema), 1000 * watermark_s)

    if append:
        # The output has some of the keys with rows and some of those that waited.
        step(0, (9, "z", SMALL), (3, "w", SMALL), (3, "b", HUGE))
        with pytest.raises(StateValueError, match=BEYOND):
            step(5, (8, "x", SMALL), (4, "y", SMALL))
        return
    step(0, (9, "z", SMALL))
    with pytest.raises(StateValueError, match=BEYOND):
        step(5, (4, "y", SMALL), (7, "b", HUGE))


def test_the_variance_of_large_numbers_is_precise() -> None:
    """The naive formula returns 0 or less here."""
    kernel = find_kernel(Agg.variance("v"), pa.float64(), "x")
    values = 1e9 + np.arange(1000) % 7
    buffers = reduce(kernel, pa.array(values[:1]), 0)
    for start in range(1, 1000, 37):
        buffers = kernel.merge(buffers, reduce(kernel, pa.array(values[start : start + 37]), 0))
    assert kernel.finish(buffers)[0].as_py() == pytest.approx(statistics.variance(values), rel=1e-8)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e308, 1e308, 1e308], 0.0),
        ([None, 1e308, None, 1e308], 0.0),
        ([1.5e308, 1.5e308, -1.5e308, -1.5e308, 1.5e308], math.inf),
        ([0.0, 1e308, 1e308, -1e308, -1e308, -1e308], math.inf),
        ([math.inf, 1.0], math.nan),
        ([1.0, 2.0, -math.inf], math.nan),
    ],
)
def test_the_variance_of_extreme_values_does_not_depend_on_batches(values: list[float | None], expected: float) -> None:
    """The sums of such values exceed a double."""
    kernel = find_kernel(Agg.variance("v"), pa.float64(), "x")
    column = pa.array(values, pa.float64())
    with np.errstate(all="ignore"):
        whole = reduce(kernel, column, 0)
        single = reduce(kernel, column, *range(len(values)))
        merged = [part.slice(0, 1) for part in single]
        for at in range(1, len(values)):
            merged = kernel.merge(merged, [part.slice(at, 1) for part in single])
        variances = [kernel.finish(buffers)[0].as_py() for buffers in (whole, merged)]
    assert is_close(variances[0], expected), variances
    assert is_close(variances[1], expected), variances


EXTREME = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=200)
@given(st.lists(st.lists(EXTREME, min_size=1, max_size=5), min_size=1, max_size=5))
def test_the_variance_of_any_numbers_does_not_depend_on_batches(batches: list[list[float | None]]) -> None:
    kernel = find_kernel(Agg.variance("v"), pa.float64(), "x")
    values = [value for batch in batches for value in batch]
    with np.errstate(all="ignore"):
        starts = np.cumsum([0, *map(len, batches)])[:-1].tolist()
        parts = reduce(kernel, pa.array(values, pa.float64()), *starts)
        merged = [part.slice(0, 1) for part in parts]
        for at in range(1, len(batches)):
            merged = kernel.merge(merged, [part.slice(at, 1) for part in parts])
        whole = kernel.finish(reduce(kernel, pa.array(values, pa.float64()), 0))[0].as_py()
        batched = kernel.finish(merged)[0].as_py()
    if whole is None or batched is None:
        assert whole is batched
        return
    # Allow the error that rounding of the mean may cause.
    rounded = 1e-15 * max(abs(value) for value in values if value is not None)
    tolerance = rounded * rounded * len(values)
    near = whole == batched or math.isclose(whole, batched, rel_tol=1e-9, abs_tol=tolerance)
    assert near or min(whole, batched) > 1e306 or tolerance == math.inf, (whole, batched)
    assert not math.isnan(whole + batched)


# -- distinct values -------------------------------------------------------------------------------------------


def test_approx_count_distinct_is_within_its_error() -> None:
    pytest.importorskip("datasketches")
    schema = pa.schema([("key", pa.string()), ("number", pa.int64()), ("text", pa.string()), ("real", pa.float64())])
    aggregates = {name: Agg.approx_count_distinct(name, lg_k=11) for name in schema.names[1:]}
    bucket = make_aggregation(schema, ["key"], aggregates)
    output: list[dict[str, Any]] = []
    for batch in range(3):
        numbers = np.arange(batch * 5_000, batch * 5_000 + 10_000) % 15_000
        output = bucket.step(
            pa.table(
                {
                    "key": ["many"] * 10_000 + ["few"] * 4 + ["none"],
                    "number": [*numbers.tolist(), 1, 2, 2, None, None],
                    "text": [*map(str, numbers.tolist()), "", "x", None, "x", None],
                    "real": [*numbers.astype(float), 0.0, -0.0, math.nan, -math.nan, None],
                },
                schema=schema,
            )
        )
    many, few, none = output
    for name in aggregates:
        assert many[name] == pytest.approx(15_000, rel=0.1)
        assert few[name] == 2
        assert none[name] == 0


@pytest.mark.parametrize("column", ["small", "wide", "bytes", "day", "time", "flag", "single"])
def test_approx_count_distinct_counts_values_of_any_type(column: str) -> None:
    pytest.importorskip("datasketches")
    rows = [
        {
            "key": "a",
            "small": 1,
            "wide": decimal.Decimal("1.5"),
            "bytes": b"\xff",
            "day": dt.date(1, 1, 1),
            "time": at(1),
        },
        {
            "key": "a",
            "small": 2,
            "wide": decimal.Decimal("-1.5"),
            "bytes": b"\xfe",
            "day": dt.date(1, 1, 2),
            "time": at(2),
        },
    ]
    rows = [{**row, "flag": row["small"] == 1, "single": float(row["small"])} for row in rows]  # type: ignore[arg-type]
    bucket = make_aggregation(SCHEMA, ["key"], {"n": Agg.approx_count_distinct(column)})
    assert bucket.step(make_table([*rows, rows[0]])) == [{"key": "a", "n": 2}]


def test_sketches_of_another_size_are_refused() -> None:
    pytest.importorskip("datasketches")
    rows = make_table([{"key": "a", "text": str(number)} for number in range(5_000)])
    for before, after in ((12, 10), (10, 12)):
        first, then = (
            make_aggregation(SCHEMA, ["key"], {"n": Agg.approx_count_distinct("text", lg_k=lg_k)})
            for lg_k in (before, after)
        )
        first.step(rows)
        then.stored = first.stored
        with pytest.raises(StateValueError, match=f"has lg_k {before}, but the job has {after}: set lg_k={before}"):
            then.step(rows)


def test_the_error_of_a_missing_package_has_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)
    bucket = make_aggregation(SCHEMA, ["key"], {"n": Agg.approx_count_distinct("text")})
    with pytest.raises(ExecutorPackageError, match=r"pip install 'spark_state_ext\[sketches\]'"):
        bucket.step(make_table([{"key": "a", "text": "x"}]))


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregate", "kind"),
    [
        (Agg.sum("v"), pa.string()),
        (Agg.mean("v"), pa.bool_()),
        (Agg.variance("v"), pa.date32()),
        (Agg.min("v"), pa.list_(pa.int64())),
        (Agg.approx_count_distinct("v"), pa.struct([("a", pa.int64())])),
        (Aggregate("median", "v"), pa.int64()),
    ],
)
def test_a_function_refuses_a_type_that_it_does_not_support(aggregate: Aggregate, kind: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match="'x'"):
        find_kernel(aggregate, kind, "x")


def test_a_function_that_needs_a_column_is_refused_without_one() -> None:
    with pytest.raises(UsageError, match="needs a column"):
        find_kernel(Aggregate("sum"), None, "x")


def test_text_that_is_not_utf_8_is_counted_too() -> None:
    """Spark's text columns hold any bytes."""
    kernel = DistinctSketch(11)
    items = [b"a\xff", b"a\xfe", b"\xc3\xa4", b"a\xff"]
    text = pa.Array.from_buffers(pa.string(), len(items), pa.array(items).buffers())
    buffers = kernel.reduce(text, Segments(np.array([0]), len(items)))
    assert kernel.finish(buffers).to_pylist() == [3]
    valid = kernel.reduce(pa.array(["ä"]), Segments(np.array([0]), 1))
    assert kernel.finish(kernel.merge(buffers, valid)).to_pylist() == [3], "valid text is counted as usual"
