"""`spark_state_ext.testing.run`: functions without Spark, by the code that executors run, and what Spark makes of the same."""

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
    """Rows in no order."""
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=repr)


# -- what a run gives -----------------------------------------------------------------------------


@pytest.mark.parametrize("api", COUNTS)
@pytest.mark.parametrize("buckets", [1, 4])
@pytest.mark.parametrize("restart", [False, True, [2]])
def test_output_and_state_of_each_batch(api: Any, buckets: int, restart: Any) -> None:
    batches = [users("a", "b", "a", None), users("a"), None, users("b", "c")]
    found = run(COUNTS[api], batches, "user", COUNTED, STATE, api=api, buckets=buckets, restart=restart)
    expected = [[("a", 2), ("b", 1), (None, 1)], [("a", 3)], [], [("b", 2), ("c", 1)]]
    assert [dicts(output) for output in found.outputs] == expected
    assert dicts(found.states[0]) == [("a", 2, None), ("b", 1, None), (None, 1, None)]
    assert found.states[1].equals(found.states[2])
    assert dicts(found.state) == [("a", 3, None), ("b", 2, None), ("c", 1, None), (None, 1, None)]
    assert found.output.num_rows == 6
    assert found.output.schema == pa.schema([("user", pa.string()), ("n", pa.int64())])
    assert [batch.watermark_ms for batch in found.batches] == [None] * 4


def test_batches_come_in_any_form() -> None:
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
    # As they come, too: not a batch is asked for before the one before it is over.
    seen: list[int] = []

    def coming() -> Iterator[Any]:
        for number, form in enumerate(forms):
            seen.append(number)
            yield form

    def noting(batch: StateBatch) -> Any:
        assert batch.batch_id == seen[-1]
        return count_tables(batch)

    found = run(noting, coming(), ["user"], COUNTED, STATE, api="arrow")
    assert dicts(found.state) == [("a", 3, None), ("b", 3, None), ("c", 1, None)]
    assert len(found.batches) == len(forms)


@pytest.mark.parametrize(
    "state",
    [STATE, "struct<n: long>", pa.schema([("n", pa.int64())]), StructType([StructField("n", LongType())])],
    ids=str,
)
def test_schemas_come_in_any_form(state: Any) -> None:
    output = StructType([StructField("user", StringType()), StructField("n", LongType())])
    assert dicts(run(count_frames, [users("a")], "user", output, state).state) == [("a", 1, None)]


def test_chained_steps() -> None:
    one = StructType([StructField("n", LongType())])

    def summed(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = sum(int(pdf["n"].sum()) for pdf in pdfs) + (state.get[0] if state.exists else 0)
        state.update((n,))
        yield pd.DataFrame({"n": [n]})

    output = StructType([StructField("user", StringType()), StructField("n", LongType())])
    steps = chain(Step(count_frames, output, one), Step(summed, one, one))
    batches = [users("a"), users("a", "b"), users("a")]
    found = run(steps.func, batches, "user", steps.outputStructType, steps.stateStructType, restart=True)
    assert [dicts(output) for output in found.outputs] == [[(1,)], [(1,), (3,)], [(6,)]]


def test_removal() -> None:
    def until_three(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
        yield from count_rows(key, rows, state)
        if state.get[0] >= 3:
            state.remove()

    found = run(
        until_three, [users("a"), users("a", "a"), users("a")], "user", COUNTED, STATE, api="rows", restart=True
    )
    assert [dicts(state) for state in found.states] == [[("a", 1, None)], [], [("a", 1, None)]]


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {thread.name for thread in threading.enumerate()}
    run(count_frames, [users("a")] * 3, "user", COUNTED, STATE, restart=[1])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserFunctionError):
        run(lambda key, pdfs, state: 1 // 0, [users("a")], "user", COUNTED, STATE)
    assert list(tmp_path.iterdir()) == []
    left = {thread.name for thread in threading.enumerate()} - before
    # It sleeps for a second, and then finds that nothing is held back.
    assert {name for name in left if "metrics" not in name and "leases" not in name} == set()


# -- cost ----------------------------------------------------------------------------------------


def calls_of(count: int) -> tuple[int, int]:
    """How many Python functions a run over so many rows calls in all, and how often the user's function."""
    called = [0, 0]

    def counting(batch: Any) -> Any:
        called[1] += 1
        return count_tables(batch)

    def note(frame: Any, event: str, argument: Any) -> None:
        called[0] += event == "call"

    batches = [pa.table({"user": pa.array(range(count)).cast(pa.string())}), {"user": ["7", "x"]}]
    sys.setprofile(note)
    try:
        found = run(counting, batches, "user", COUNTED, STATE, api="arrow")
    finally:
        sys.setprofile(None)
    assert found.state.num_rows == count + 1
    return called[0], called[1]


def test_no_python_runs_for_a_row_but_the_functions() -> None:
    """A vectorised function is called once a batch, and 400 times as many rows and keys cost few calls more."""
    calls_of(10)  # what is imported and made once
    small, large = calls_of(1_000), calls_of(400_000)
    assert small[1] == large[1] == 2
    assert large[0] < 1.12 * small[0], (small, large)


def test_a_batch_costs_the_same_whatever_came_before() -> None:
    """As many calls for the fortieth batches as for the first ones."""
    seen: list[int] = []
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def batches() -> Iterator[Any]:
        for _ in range(40):
            seen.append(calls)
            yield {"user": ["a", "b"]}

    sys.setprofile(note)
    try:
        run(count_tables, batches(), "user", COUNTED, STATE, api="arrow")
    finally:
        sys.setprofile(None)
    each = [after - before for before, after in itertools.pairwise(seen)]
    assert sum(each[-16:]) < 1.5 * sum(each[4:20])


# -- times ----------------------------------------------------------------------------------------


MS = int(START.timestamp() * 1000)
TIMED: list[Any] = [
    [at("a", 0), at("b", 3), at("a", 1)],
    [at("a", 30), at("c", 21)],
    [at("b", 24), at("d", 24), at("c", 26), at("e", 50)],
    None,
    # The first is late, by the watermark of the batch before.
    [at("d", 45), at("f", 46)],
]


@pytest.mark.parametrize("restart", [False, True])
def test_the_watermark_comes_from_the_rows_before(restart: bool) -> None:
    found = run(
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
    assert [batch.watermark_ms for batch in found.batches] == [0, MS - 2_000, MS + 25_000, MS + 45_000, MS + 45_000]
    fired = [("a", 3), ("b", 2), ("c", 2), ("d", 1)]
    assert [dicts(output) for output in found.outputs] == [[], [], [], fired, []]
    assert dicts(found.states[1]) == [("a", 3, MS + 40_000), ("b", 1, MS + 13_000), ("c", 1, MS + 31_000)]
    assert dicts(found.state) == [("e", 1, MS + 60_000), ("f", 1, MS + 56_000)]


def test_the_watermark_may_be_given() -> None:
    watermarks = [0, MS + 5_000, MS + 12_000, MS + 41_000, MS + 41_000]
    batches = [TIMED[0], None, TIMED[1], None, None]
    found = run(sessions, batches, "user", COUNTED, STATE, timeout_conf=EVENT_TIME, watermarks_ms=watermarks)
    assert [dicts(output) for output in found.outputs] == [[], [], [], [("a", 3), ("b", 1), ("c", 1)], []]
    assert found.state.num_rows == 0


@pytest.mark.parametrize("restart", [False, True])
def test_processing_time(restart: bool) -> None:
    def patient(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
        if state.hasTimedOut:
            yield key.user, -state.get[0]
            state.remove()
            return
        yield from count_rows(key, rows, state)
        state.setTimeoutDuration(100)

    found = run(
        patient,
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
    assert [dicts(output) for output in found.outputs] == outputs
    assert [batch.processing_time_ms for batch in found.batches] == [1_000, 1_090, 1_100, 1_101, 1_300, 1_300]
    assert dicts(found.state) == [("c", 1, 1_400)]


def test_a_timeout_without_state_is_in_the_state() -> None:
    def timed(batch: StateBatch) -> None:
        batch.set_timeout(duration_ms=5)

    found = run(timed, [users("a")], "user", COUNTED, STATE, api="arrow", timeout_conf=PROCESSING_TIME)
    assert dicts(found.state) == [("a", None, found.batches[0].processing_time_ms + 5)]


def test_a_time_to_live() -> None:
    found = run(
        count_tables,
        [users("a", "b"), users("a"), users("a", "b")],
        "user",
        COUNTED,
        STATE,
        api="arrow",
        ttl=Ttl(1_500),
        processing_times_ms=[0, 1_000, 2_000],
    )
    assert [dicts(output) for output in found.outputs] == [[("a", 1), ("b", 1)], [("a", 2)], [("a", 3), ("b", 1)]]
    assert found.states[0].column_names == ["user", "n", "timeout_ms"]


# -- mistakes -------------------------------------------------------------------------------------


def _returns_none(key: Any, pdfs: Any, state: GroupState) -> None:
    return None


def _too_few(key: Any, pdfs: Any, state: GroupState) -> Any:
    return [pd.DataFrame({"user": ["a"]})]


def _no_number(key: Any, pdfs: Any, state: GroupState) -> Any:
    return [pd.DataFrame({"user": ["a"], "n": ["many"]})]


def _wrong_name(key: Any, pdfs: Any, state: GroupState) -> Any:
    return [pd.DataFrame({"user": ["a"], "m": [1]})]


def _wrong_state(key: Any, pdfs: Any, state: GroupState) -> Any:
    state.update((1, 2))
    return []


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (_returns_none, ResultTypeError, "the function returned None"),
        (_too_few, ResultTypeError, "a frame with 1 columns, user; the output schema has user, n"),
        (_no_number, StateValueError, "column 'n' of type int64 cannot hold"),
        (_wrong_name, StateValueError, "no 'm'"),
        (_wrong_state, StateValueError, "the state has the columns n"),
        (lambda key, pdfs, state: 1 // 0, UserFunctionError, r"the function failed for key \('a',\).*by zero"),
        (lambda key, pdfs, state: state.setTimeoutDuration(1), StateError, "setTimeoutDuration|[Tt]imeout"),
    ],
)
def test_mistakes_of_functions_are_told_as_on_spark(function: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        run(function, [users("a")], "user", COUNTED, STATE)
    if said.endswith("by zero"):
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
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
def test_mistakes_of_calls_are_named(changed: dict[str, Any], error: Any, said: str) -> None:
    told: dict[str, Any] = {
        "func": count_frames,
        "batches": [users("a"), users("b")],
        "keys": "user",
        "output_schema": COUNTED,
        "state_schema": STATE,
        **changed,
    }
    with pytest.raises(error, match=said):
        run(**told)


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


def test_hashes_of_many_keys_are_those_of_each() -> None:
    keys = random_keys(random.Random(1), examples(60))
    columns = list(keys.values())
    for chosen in (columns, *([column] for column in columns)):
        expected = [hash_key([column.slice(at, 1) for column in chosen]) for at in range(len(columns[0]))]
        assert hash_keys(chosen).tolist() == expected
        assert hash_keys([column.slice(7, 20) for column in chosen]).tolist() == expected[7:27]
    assert hash_keys([pa.array([], pa.string())]).tolist() == []
    with pytest.raises(UnsupportedTypeError, match="does not hash it"):
        hash_keys([pa.array([1], pa.uint8())])


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_what_is_no_ddl_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ddl_struct(text, "the schema")


def test_schemas_of_arrow_are_those_of_spark() -> None:
    columns = random_keys(random.Random(2), 1)
    schema = pa.schema([pa.field(name, column.type) for name, column in columns.items()])
    ddl = (
        "byte byte, short short, int int, long long, float float, double double, bool boolean, string string, "
        "binary binary, date date, timestamp timestamp, decimal18 decimal(18,2), decimal38 decimal(38,2), "
        "list array<string>, struct struct<x: int, y: array<double>>"
    )
    assert struct_json(schema, "the schema") == struct_json(ddl, "the schema")


def test_a_result_tells_its_batches() -> None:
    found = run(count_frames, [users("a"), users("a")], "user", COUNTED, STATE)
    assert isinstance(found, RunResult)
    assert found.batches[1].output.to_pylist() == [{"user": "a", "n": 2}]
