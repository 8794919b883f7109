"""`spark_state_ext.testing.run`: it runs functions without Spark, with the code of the executors and Spark's rules."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import LongType, StringType, StructField, StructType

from arrow_schemas.spark_hash import hash_key
from arrow_schemas.spark_hashes import hash_keys
from spark_state_ext import StateBatch, Step, Ttl, chain
from spark_state_ext.errors import (
    ResultTypeError,
    StateError,
    StateValueError,
    UnsupportedPlanError,
    UnsupportedTypeError,
    UsageError,
    UserFunctionError,
)
from spark_state_ext.testing import RunResult, run
from spark_state_ext.testing.ddl import ddl_struct
from spark_state_ext.testing.schemas import struct_json
from tests.helpers.soak import examples
from tests.helpers.timed_sessions import START, at, sessions

COUNTED, STATE = "user string, n bigint", "n bigint"
EVENT_TIME, PROCESSING_TIME = "EventTimeTimeout", "ProcessingTimeTimeout"


def count_frames(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n = sum(len(pdf) for pdf in pdfs) + (state.get[0] if state.exists else 0)
    state.update((n,))
    yield pd.DataFrame({"user": [key[0]], "n": [n]})


def count_rows(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
    n = len(rows) + (state.get[0] if state.exists else 0)
    state.update((n,))
    yield key.user, n


def count_tables(batch: StateBatch) -> dict[str, Any]:
    n = batch.counts.to_numpy() + batch.state["n"].fill_null(0).to_numpy()
    batch.update({"n": n})
    return {"user": batch.keys["user"], "n": n}


COUNTS: dict[str, Callable[..., Any]] = {"pandas": count_frames, "rows": count_rows, "arrow": count_tables}


def users(*names: str | None) -> list[dict[str, Any]]:
    return [{"user": name} for name in names]


def dicts(table: pa.Table) -> list[tuple[Any, ...]]:
    """Return the rows as tuples, sorted to ignore their order."""
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)


# -- the result of a run --------------------------------------------------------------------------


@pytest.mark.parametrize("api", COUNTS)
@pytest.mark.parametrize("buckets", [1, 4])
@pytest.mark.parametrize("restart", [False, True, [2]])
def test_run_returns_the_output_and_state_of_each_batch(api: Any, buckets: int, restart: Any) -> None:
    batches = [users("a", "b", "a", None), users("a"), None, users("b", "c")]
    result = run(COUNTS[api], batches, "user", COUNTED, STATE, api=api, buckets=buckets, restart=restart)
    expected = [[("a", 2), ("b", 1), (None, 1)], [("a", 3)], [], [("b", 2), ("c", 1)]]
    assert [dicts(output) for output in result.outputs] == expected
    assert dicts(result.states[0]) == [("a", 2, None), ("b", 1, None), (None, 1, None)]
    assert result.states[1].equals(result.states[2])
    assert dicts(result.state) == [("a", 3, None), ("b", 2, None), ("c", 1, None), (None, 1, None)]
    assert result.output.num_rows == 6
    assert result.output.schema == pa.schema([("user", pa.string()), ("n", pa.int64())])
    assert [batch.watermark_ms for batch in result.batches] == [None] * 4


def test_batches_may_have_any_form_and_are_read_one_at_a_time() -> None:
    polars = pytest.importorskip("polars")
    forms: list[Any] = [
        users("a", "b"),
        {"user": ["a"]},
        pa.table({"user": ["a"]}),
        pa.record_batch({"user": pa.array(["b"]).dictionary_encode()}),
        pd.DataFrame({"user": ["b"]}, index=[7]),
        polars.DataFrame({"user": ["c"]}),
        [],
        pa.table({"user": pa.array([], pa.string())}),
    ]
    # A batch is read only after the previous one is finished.
    numbers: list[int] = []

    def yield_forms() -> Iterator[Any]:
        for number, form in enumerate(forms):
            numbers.append(number)
            yield form

    def check_and_count(batch: StateBatch) -> Any:
        assert batch.batch_id == numbers[-1]
        return count_tables(batch)

    result = run(check_and_count, yield_forms(), ["user"], COUNTED, STATE, api="arrow")
    assert dicts(result.state) == [("a", 3, None), ("b", 3, None), ("c", 1, None)]
    assert len(result.batches) == len(forms)


@pytest.mark.parametrize(
    "state",
    [STATE, "struct<n: long>", pa.schema([("n", pa.int64())]), StructType([StructField("n", LongType())])],
    ids=str,
)
def test_schemas_may_have_any_form(state: Any) -> None:
    output = StructType([StructField("user", StringType()), StructField("n", LongType())])
    assert dicts(run(count_frames, [users("a")], "user", output, state).state) == [("a", 1, None)]


def test_run_accepts_chained_steps() -> None:
    counted = StructType([StructField("n", LongType())])

    def sum_counts(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = sum(int(pdf["n"].sum()) for pdf in pdfs) + (state.get[0] if state.exists else 0)
        state.update((n,))
        yield pd.DataFrame({"n": [n]})

    output = StructType([StructField("user", StringType()), StructField("n", LongType())])
    steps = chain(Step(count_frames, output, counted), Step(sum_counts, counted, counted))
    batches = [users("a"), users("a", "b"), users("a")]
    result = run(steps.func, batches, "user", steps.outputStructType, steps.stateStructType, restart=True)
    assert [dicts(output) for output in result.outputs] == [[(1,)], [(1,), (3,)], [(6,)]]


def test_removed_state_does_not_return() -> None:
    def count_to_three(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
        yield from count_rows(key, rows, state)
        if state.get[0] >= 3:
            state.remove()

    result = run(
        count_to_three, [users("a"), users("a", "a"), users("a")], "user", COUNTED, STATE, api="rows", restart=True
    )
    assert [dicts(state) for state in result.states] == [[("a", 1, None)], [], [("a", 1, None)]]


def test_run_leaves_no_files_or_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {thread.name for thread in threading.enumerate()}
    run(count_frames, [users("a")] * 3, "user", COUNTED, STATE, restart=[1])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserFunctionError):
        run(lambda key, pdfs, state: 1 // 0, [users("a")], "user", COUNTED, STATE)
    assert list(tmp_path.iterdir()) == []
    left = {thread.name for thread in threading.enumerate()} - before
    # The threads of metrics and leases end about a second later.
    assert {name for name in left if "metrics" not in name and "leases" not in name} == set()


# -- cost ----------------------------------------------------------------------------------------


def count_calls(count: int) -> tuple[int, int]:
    """Return the number of Python calls of a run over that many rows, and the number of calls of the user's function."""
    counts = [0, 0]

    def count_and_note(batch: Any) -> Any:
        counts[1] += 1
        return count_tables(batch)

    def profile(frame: Any, event: str, argument: Any) -> None:
        counts[0] += event == "call"

    batches = [pa.table({"user": pa.array(range(count)).cast(pa.string())}), {"user": ["7", "x"]}]
    sys.setprofile(profile)
    try:
        result = run(count_and_note, batches, "user", COUNTED, STATE, api="arrow")
    finally:
        sys.setprofile(None)
    assert result.state.num_rows == count + 1
    return counts[0], counts[1]


def test_the_number_of_python_calls_hardly_grows_with_the_rows() -> None:
    """A vectorised function is called once for each batch; 400 times as many rows and keys cost few more calls."""
    count_calls(10)  # imports and caches are made once
    small, large = count_calls(1_000), count_calls(400_000)
    assert small[1] == large[1] == 2
    assert large[0] < 1.12 * small[0], (small, large)


def test_the_cost_of_a_batch_does_not_grow_with_the_number_of_batches() -> None:
    """The last batches need about as many calls as the first ones."""
    totals: list[int] = []
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def batches() -> Iterator[Any]:
        for _ in range(40):
            totals.append(calls)
            yield {"user": ["a", "b"]}

    sys.setprofile(profile)
    try:
        run(count_tables, batches(), "user", COUNTED, STATE, api="arrow")
    finally:
        sys.setprofile(None)
    calls_of_batches = [after - before for before, after in itertools.pairwise(totals)]
    assert sum(calls_of_batches[-16:]) < 1.5 * sum(calls_of_batches[4:20])


# -- times ----------------------------------------------------------------------------------------


MS = int(START.timestamp() * 1000)
TIMED: list[Any] = [
    [at("a", 0), at("b", 3), at("a", 1)],
    [at("a", 30), at("c", 21)],
    [at("b", 24), at("d", 24), at("c", 26), at("e", 50)],
    None,
    # The first row is late for the watermark of the previous batch.
    [at("d", 45), at("f", 46)],
]


@pytest.mark.parametrize("restart", [False, True])
def test_the_watermark_is_computed_from_earlier_batches(restart: bool) -> None:
    result = run(
        sessions,
        TIMED,
        "user",
        COUNTED,
        STATE,
        timeout_conf=EVENT_TIME,
        event_time="at",
        delay_ms=5_000,
        restart=restart,
    )
    assert [batch.watermark_ms for batch in result.batches] == [0, MS - 2_000, MS + 25_000, MS + 45_000, MS + 45_000]
    timed_out = [("a", 3), ("b", 2), ("c", 2), ("d", 1)]
    assert [dicts(output) for output in result.outputs] == [[], [], [], timed_out, []]
    assert dicts(result.states[1]) == [("a", 3, MS + 40_000), ("b", 1, MS + 13_000), ("c", 1, MS + 31_000)]
    assert dicts(result.state) == [("e", 1, MS + 60_000), ("f", 1, MS + 56_000)]


def test_the_watermarks_can_be_given() -> None:
    watermarks = [0, MS + 5_000, MS + 12_000, MS + 41_000, MS + 41_000]
    batches = [TIMED[0], None, TIMED[1], None, None]
    result = run(sessions, batches, "user", COUNTED, STATE, timeout_conf=EVENT_TIME, watermarks_ms=watermarks)
    assert [dicts(output) for output in result.outputs] == [[], [], [], [("a", 3), ("b", 1), ("c", 1)], []]
    assert result.state.num_rows == 0


@pytest.mark.parametrize("restart", [False, True])
def test_processing_time_timeouts_use_the_given_times(restart: bool) -> None:
    def count_with_timeout(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
        if state.hasTimedOut:
            yield key.user, -state.get[0]
            state.remove()
            return
        yield from count_rows(key, rows, state)
        state.setTimeoutDuration(100)

    result = run(
        count_with_timeout,
        [users("a", "b"), users("a"), None, None, users("c"), None],
        "user",
        COUNTED,
        STATE,
        api="rows",
        timeout_conf=PROCESSING_TIME,
        processing_times_ms=[1_000, 1_090, 1_100, 1_101, 1_300, 1_300],
        restart=restart,
    )
    outputs = [[("a", 1), ("b", 1)], [("a", 2)], [], [("b", -1)], [("a", -2), ("c", 1)], []]
    assert [dicts(output) for output in result.outputs] == outputs
    assert [batch.processing_time_ms for batch in result.batches] == [1_000, 1_090, 1_100, 1_101, 1_300, 1_300]
    assert dicts(result.state) == [("c", 1, 1_400)]


def test_a_timeout_without_state_is_part_of_the_returned_state() -> None:
    def set_timeout(batch: StateBatch) -> None:
        batch.set_timeout(duration_ms=5)

    result = run(set_timeout, [users("a")], "user", COUNTED, STATE, api="arrow", timeout_conf=PROCESSING_TIME)
    assert dicts(result.state) == [("a", None, result.batches[0].processing_time_ms + 5)]


def test_state_expires_after_its_time_to_live() -> None:
    result = run(
        count_tables,
        [users("a", "b"), users("a"), users("a", "b")],
        "user",
        COUNTED,
        STATE,
        api="arrow",
        ttl=Ttl(1_500),
        processing_times_ms=[0, 1_000, 2_000],
    )
    assert [dicts(output) for output in result.outputs] == [[("a", 1), ("b", 1)], [("a", 2)], [("a", 3), ("b", 1)]]
    assert result.states[0].column_names == ["user", "n", "timeout_ms"]


# -- errors ---------------------------------------------------------------------------------------


def _return_none(key: Any, pdfs: Any, state: GroupState) -> None:
    return None


def _return_too_few_columns(key: Any, pdfs: Any, state: GroupState) -> Any:
    return [pd.DataFrame({"user": ["a"]})]


def _return_text_for_number(key: Any, pdfs: Any, state: GroupState) -> Any:
    return [pd.DataFrame({"user": ["a"], "n": ["many"]})]


def _return_wrong_name(key: Any, pdfs: Any, state: GroupState) -> Any:
    return [pd.DataFrame({"user": ["a"], "m": [1]})]


def _write_wrong_state(key: Any, pdfs: Any, state: GroupState) -> Any:
    state.update((1, 2))
    return []


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (_return_none, ResultTypeError, "the function returned None"),
        (_return_too_few_columns, ResultTypeError, "a frame with 1 columns, user; the output schema has user, n"),
        (_return_text_for_number, StateValueError, "column 'n' of type int64 cannot hold"),
        (_return_wrong_name, StateValueError, "no 'm'"),
        (_write_wrong_state, StateValueError, "the state has the columns n"),
        (lambda key, pdfs, state: 1 // 0, UserFunctionError, r"the function failed for key \('a',\).*by zero"),
        (lambda key, pdfs, state: state.setTimeoutDuration(1), StateError, "setTimeoutDuration|[Tt]imeout"),
    ],
)
def test_errors_of_functions_are_the_same_as_on_spark(function: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        run(function, [users("a")], "user", COUNTED, STATE)
    if text.endswith("by zero"):
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"func": 3}, UsageError, "func must be a function"),
        ({"api": "spark"}, UsageError, "api must be"),
        ({"keys": "name"}, UsageError, "the key 'name' is not a column of the input, which has user"),
        ({"keys": []}, UsageError, "at least one key column"),
        ({"batches": []}, UsageError, "no batch has columns"),
        ({"batches": [], "input_schema": "user string"}, UsageError, "batches is empty"),
        ({"batches": [[3]]}, StateValueError, r"a list with 3 \(int\)"),
        ({"batches": ["a"]}, StateValueError, "batches has 'a'"),
        ({"batches": [users("a"), {"name": ["b"]}]}, StateValueError, "the columns name; the input has user"),
        ({"batches": [[{"user": "a"}, {}]]}, StateValueError, "a row with the columns"),
        (
            {"batches": [{"user": [1]}, {"user": ["a"]}]},
            StateValueError,
            "column .user. of type int64 cannot hold string",
        ),
        (
            {"batches": [{"user": pa.array([1], pa.uint64())}]},
            UnsupportedTypeError,
            "uint64, which Spark does not have",
        ),
        ({"output_schema": "user strnig"}, UsageError, "the output schema is not DDL .*'strnig'"),
        ({"output_schema": 3}, UsageError, "the output schema must be"),
        ({"state_schema": StructType()}, UsageError, "the state schema has no columns"),
        ({"state_schema": "n bigint, N int"}, UsageError, "two state columns have the same name"),
        ({"state_schema": "n varchar(3)"}, UnsupportedTypeError, "use string"),
        ({"timeout_conf": "Never"}, UsageError, "the timeout must be one of"),
        ({"timeout_conf": EVENT_TIME}, UnsupportedPlanError, "needs a watermark"),
        ({"event_time": "at"}, UsageError, "event_time='at' is not a column"),
        ({"event_time": "user"}, UnsupportedPlanError, "is of type string"),
        ({"delay_ms": 5}, UsageError, "give event_time"),
        ({"delay_ms": -5}, UsageError, "delay_ms must be"),
        ({"watermarks_ms": [5, 4]}, UsageError, "never goes back"),
        ({"watermarks_ms": [5]}, UsageError, "watermarks_ms has no time for batch 1"),
        ({"processing_times_ms": [5, "now"]}, UsageError, "processing_times_ms has 'now' for batch 1"),
        ({"restart": "always"}, UsageError, "restart must be"),
        ({"buckets": 0}, UsageError, "buckets"),
        ({"ttl": Ttl(5, clock="event")}, UnsupportedPlanError, "needs a watermark"),
    ],
)
def test_invalid_arguments_are_refused(changed: dict[str, Any], error: Any, text: str) -> None:
    arguments: dict[str, Any] = {
        "func": count_frames,
        "batches": [users("a"), users("b")],
        "keys": "user",
        "output_schema": COUNTED,
        "state_schema": STATE,
        **changed,
    }
    with pytest.raises(error, match=text):
        run(**arguments)


# -- hashes, schemas ------------------------------------------------------------------------------


def random_keys(chosen: random.Random, rows: int) -> dict[str, pa.Array]:
    def column(make: Callable[[], Any], kind: pa.DataType) -> pa.Array:
        return pa.array([None if chosen.random() < 0.1 else make() for _ in range(rows)], kind)

    def text() -> str:
        return "".join(
            chosen.choice("abcäü€z") for _ in range(chosen.choice([0, 1, 3, 4, 7, 8, 12, 31, 32, 33, 64, 99]))
        )

    def number() -> float:
        return chosen.choice([0.0, -0.0, float("nan"), float("inf"), chosen.gauss(0, 1e6)])

    def digits(precision: int) -> decimal.Decimal:
        context = decimal.Context(prec=40)
        return decimal.Decimal(chosen.randint(1 - 10**precision, 10**precision - 1)).scaleb(-2, context)

    day = dt.timedelta(days=1)
    return {
        "byte": column(lambda: chosen.randint(-128, 127), pa.int8()),
        "short": column(lambda: chosen.randint(-(2**15), 2**15 - 1), pa.int16()),
        "int": column(lambda: chosen.randint(-(2**31), 2**31 - 1), pa.int32()),
        "long": column(lambda: chosen.randint(-(2**63), 2**63 - 1), pa.int64()),
        "float": column(number, pa.float32()),
        "double": column(number, pa.float64()),
        "bool": column(lambda: chosen.random() < 0.5, pa.bool_()),
        "string": column(text, pa.string()),
        "binary": column(lambda: chosen.randbytes(chosen.randint(0, 80)), pa.binary()),
        "date": column(lambda: dt.date(1900, 1, 1) + chosen.randint(0, 90_000) * day, pa.date32()),
        "timestamp": column(lambda: START + chosen.random() * 9_999 * day, pa.timestamp("us", "UTC")),
        "decimal18": column(lambda: digits(18), pa.decimal128(18, 2)),
        "decimal38": column(lambda: digits(chosen.choice([4, 38])), pa.decimal128(38, 2)),
        "list": column(
            lambda: [chosen.choice([None, text()]) for _ in range(chosen.randint(0, 4))], pa.list_(pa.string())
        ),
        "struct": column(
            lambda: {"x": chosen.choice([None, 1]), "y": [number()]},
            pa.struct([("x", pa.int32()), ("y", pa.list_(pa.float64()))]),
        ),
    }


def test_hash_keys_returns_the_hash_of_each_key() -> None:
    keys = random_keys(random.Random(1), examples(60))
    columns = list(keys.values())
    for group in (columns, *([column] for column in columns)):
        expected = [hash_key([column.slice(at, 1) for column in group]) for at in range(len(columns[0]))]
        assert hash_keys(group).tolist() == expected
        assert hash_keys([column.slice(7, 20) for column in group]).tolist() == expected[7:27]
    assert hash_keys([pa.array([], pa.string())]).tolist() == []
    with pytest.raises(UnsupportedTypeError, match="does not hash it"):
        hash_keys([pa.array([1], pa.uint8())])


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("user", "a name is missing"),
        ("user string,", "a name is missing"),
        ("user string; n int", "is not understood"),
        ("a array<int", "'>' is missing"),
        ("a decimal(x)", "decimal precision and scale must be integers"),
        ("a string b", "expected 'end', not 'b'"),
        ("a string comment b", "a comment must be a quoted text"),
        ("", "a name is missing"),
    ],
)
def test_invalid_ddl_is_refused(ddl: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ddl_struct(ddl, "the schema")


def test_an_arrow_schema_gives_the_same_struct_as_its_ddl() -> None:
    columns = random_keys(random.Random(2), 1)
    schema = pa.schema([pa.field(name, column.type) for name, column in columns.items()])
    ddl = (
        "byte byte, short short, int int, long long, float float, double double, bool boolean, string string, "
        "binary binary, date date, timestamp timestamp, decimal18 decimal(18,2), decimal38 decimal(38,2), "
        "list array<string>, struct struct<x: int, y: array<double>>"
    )
    assert struct_json(schema, "the schema") == struct_json(ddl, "the schema")


def test_a_result_contains_its_batches() -> None:
    result = run(count_frames, [users("a"), users("a")], "user", COUNTED, STATE)
    assert isinstance(result, RunResult)
    assert result.batches[1].output.to_pylist() == [{"user": "a", "n": 2}]
