"""Frames, keys and schemas that a function gets, and enabling a session; on Spark's operator and on ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from jobs import CLASSIC, EVERYWHERE, KEYED, SPARK, Job, keyed, table
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import LongType, StringType, StructField, StructType
from streams import finish, read, using, write_batches

from spark_state_ext import ArrowState, disable, enable
from spark_state_ext.errors import UsageError
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.spark
# Type and value of a NULL string in pandas.
NULL_TEXT = "float nan" if int(pd.__version__.split(".")[0]) >= 3 else "NoneType None"


def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Count the rows of a key so far."""
    assert isinstance(state, GroupState)
    n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
    state.update((n,))
    assert state.get == (n,)
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


@CLASSIC
def test_a_function_may_yield_any_number_of_rows_whether_or_not_it_updates_the_state(
    session: Any, operator: str, tmp_path: Path
) -> None:
    def act_by_key(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        def frame(*keys: Any) -> pd.DataFrame:
            return pd.DataFrame({"key": list(keys), "seen": [seen] * len(keys)})

        case, seen = key[0], "nothing" if state.getOption is None else str(state.get[0])
        if case == "no state":
            yield frame(case, "second row")
        elif case == "no state and no data":
            yield frame()
        elif case == "no frame":
            return
        elif case == "frame without columns":
            state.update((7,))
            yield pd.DataFrame()
        elif case == "more data":
            state.update((1,))
            yield frame(case, case + "_2")
            yield frame(case + "_3")
        elif case == "fewer data":
            state.update((2,))
            yield frame()
        elif case == "state without data":
            state.update((3,))
        elif case == "null":
            state.update((4,))
            yield frame(None)

    case_keys = [
        *("no state", "no state and no data", "no frame", "frame without columns"),
        *("more data", "fewer data", "state without data", "null"),
    ]
    silent_keys = ["frame without columns", "fewer data", "state without data"]

    def show_state(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"key": [key[0]], "seen": [str(state.getOption)]})

    job = Job(session, operator, tmp_path, act_by_key, output="key string, seen string")
    assert job.run(keyed(*case_keys), keyed(*case_keys)) == {
        batch: sorted(
            [
                *[("no state", "nothing"), ("second row", "nothing")],
                *[(key, seen[0]) for key in ("more data", "more data_2", "more data_3")],
                (None, seen[1]),
            ],
            key=repr,
        )
        for batch, seen in enumerate([("nothing", "nothing"), ("1", "4")])
    }
    # The next start finds the state that came without output, even with another function.
    job.function = show_state
    assert job.run(keyed(*silent_keys, "no state")) == {
        2: [
            ("fewer data", "(2,)"),
            ("frame without columns", "(7,)"),
            ("no state", "None"),
            ("state without data", "(3,)"),
        ]
    }


@CLASSIC
def test_dtypes_of_a_frame_depend_only_on_the_rows_of_its_key(session: Any, operator: str, tmp_path: Path) -> None:
    def dtypes(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        (pdf,) = pdfs
        text = f"{[type(k).__name__ for k in key]} {[str(t) for t in pdf.dtypes[1:]]} {sorted(map(str, pdf['value']))}"
        yield pd.DataFrame({"key": [None if pd.isna(key[0]) else key[0]], "text": [text]})

    schema = pa.schema([("name", pa.string()), ("id", pa.int64()), ("value", pa.int64())])
    exact = 2**53 + 1
    rows = [
        ("whole", 1, exact),
        ("holes", 2, 5),
        ("holes", 2, None),
        ("nobody", None, 6),
        (None, 3, 7),
        ("none", 4, None),
    ]
    job = Job(session, operator, tmp_path, dtypes, "key string, text string", keys=["name", "id"], schema=schema)
    assert job.run(table(schema, rows)) == {
        0: [
            ("holes", "['str', 'int64'] ['int64', 'float64'] ['5.0', 'nan']"),
            ("nobody", "['str', 'float64'] ['float64', 'int64'] ['6']"),
            ("none", "['str', 'int64'] ['int64', 'float64'] ['nan']"),
            ("whole", f"['str', 'int64'] ['int64', 'int64'] ['{exact}']"),
            (None, f"['{NULL_TEXT.split()[0]}', 'int64'] ['int64', 'int64'] ['7']"),
        ]
    }


@CLASSIC
def test_output_and_state_columns_may_be_not_null(session: Any, operator: str, tmp_path: Path) -> None:
    output = StructType([StructField("key", StringType(), False), StructField("n", LongType(), False)])
    state = StructType([StructField("n", LongType(), False)])
    job = Job(session, operator, tmp_path, count, output, state)
    assert job.run(keyed("a", "b"), keyed("b")) == {0: [("a", 1), ("b", 1)], 1: [("b", 2)]}


def show(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Return the key with its Python types, and the number of its rows so far."""
    n = (state.getOption or (0,))[0]
    for pdf in pdfs:
        assert list(pdf.columns) == ["key", "value"]
        n += len(pdf)
    state.update((n,))
    yield pd.DataFrame({"text": [f"{[f'{type(k).__name__} {k}' for k in key]} {n}"]})


@CLASSIC
def test_key_columns_may_have_any_order_and_repeat(session: Any, operator: str, tmp_path: Path) -> None:
    batch = table(KEYED, [("a", 1), ("a", 2), ("a", 1), ("bb", 1), (None, 3)])
    job = Job(session, operator, tmp_path, show, keys=[F.col("value"), "key", "value"])
    assert job.run(batch, batch) == {
        i: [
            (f"['int64 1', 'str a', 'int64 1'] {2 * (i + 1)}",),
            (f"['int64 1', 'str bb', 'int64 1'] {i + 1}",),
            (f"['int64 2', 'str a', 'int64 2'] {i + 1}",),
            (f"['int64 3', '{NULL_TEXT}', 'int64 3'] {i + 1}",),
        ]
        for i in range(2)
    }


def test_keys_may_be_expressions(session: Any, tmp_path: Path) -> None:
    """Only our operator: Spark's accepts only columns."""
    # "key" as an expression is not the column "key".
    keys = [(F.col("value") % 10).alias("digit"), "key", F.upper("key").alias("value"), F.length("key").alias("key")]
    batch = table(KEYED, [("a", 1), ("a", 11), ("A", 1), ("bb", 12), (None, 3)])
    assert Job(session, "arrow", tmp_path, show, keys=keys).run(batch, batch) == {
        i: [
            (f"['int64 1', 'str A', 'str A', 'int32 1'] {i + 1}",),
            (f"['int64 1', 'str a', 'str A', 'int32 1'] {2 * (i + 1)}",),
            (f"['int64 2', 'str bb', 'str BB', 'int32 2'] {i + 1}",),
            (f"['int64 3', '{NULL_TEXT}', '{NULL_TEXT}', 'float64 nan'] {i + 1}",),
        ]
        for i in range(2)
    }


def test_a_constant_key_is_not_the_column_of_that_name(session: Any, tmp_path: Path) -> None:
    """Connect prints both in the same way."""
    batch = table(KEYED, [("a", 1), ("b", 2)])
    for number, (key, expected) in enumerate(
        ((F.lit("key"), [("['str key'] 2",)]), (F.col("key"), [("['str a'] 1",), ("['str b'] 1",)]))
    ):
        (tmp_path / str(number)).mkdir()
        assert Job(session, "arrow", tmp_path / str(number), show, keys=[key]).run(batch) == {0: expected}


@EVERYWHERE
@pytest.mark.skipif(SPARK < (4, 0), reason="PySpark 3.5 cannot group by a column's position")
def test_a_key_may_be_the_position_of_a_column(session: Any, operator: str, tmp_path: Path) -> None:
    batch = table(KEYED, [("a", 1), ("b", 2)])
    assert Job(session, operator, tmp_path, show, keys=[1]).run(batch) == {0: [("['str a'] 1",), ("['str b'] 1",)]}


@EVERYWHERE
def test_a_text_source_works_in_update_mode_with_foreach_batch(session: Any, operator: str, tmp_path: Path) -> None:
    target = str(tmp_path / "rows")

    def save(batch: Any, number: int) -> None:
        batch.write.mode("overwrite").parquet(f"{target}/{number}")

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "words.txt").write_text("hello\nthis\nhello\n")
    lines = session.readStream.format("text").load(str(tmp_path / "in"))
    with using(session, operator, tmp_path):
        counted = lines.groupBy(lines["value"]).applyInPandasWithState(
            count, "key string, n bigint", "n bigint", "Update", "NoTimeout"
        )
    name = f"words_{operator}"
    query = (
        counted.writeStream.queryName(name).foreachBatch(save).outputMode("update").trigger(availableNow=True).start()
    )
    assert query.name == name
    finish(query)
    rows = session.read.parquet(f"{target}/0").collect()
    assert sorted(map(tuple, rows)) == [("hello", 2), ("this", 1)]


def test_a_session_uses_arrow_state_from_enable_until_disable(session: Any, tmp_path: Path) -> None:
    state = ArrowState(str(tmp_path / "root"), "mine", buckets=2, local_dir=str(tmp_path / "local"))
    enable(session, state)
    disable(session)
    assert Job(session, "spark", tmp_path, count, "key string, n bigint").run(keyed("a")) == {0: [("a", 1)]}
    assert not (tmp_path / "root").exists()
    enable(session, state)
    try:
        job = Job(session, "spark", tmp_path / "other", count, "key string, n bigint")
        (tmp_path / "other").mkdir()
        assert job.run(keyed("a")) == {0: [("a", 1)]}
    finally:
        disable(session)
    # The only delta is uploaded in the background.
    eventually(lambda: list((tmp_path / "root" / "mine").rglob("*.arrow")))


def test_data_grouped_before_enable_is_refused_while_the_session_is_enabled(session: Any, tmp_path: Path) -> None:
    """We do not know its columns. Such a query once ran on Spark's own state."""
    state = ArrowState(str(tmp_path / "root"), "mine", buckets=2, local_dir=str(tmp_path / "local"))
    enable(session, state)
    disable(session)
    events = read(session, write_batches(tmp_path / "in", [keyed("a")]), "key string, value long")
    # The original method, as in a process that has not enabled a session yet.
    before = type(events).groupBy.__wrapped__(events, "key")
    arguments: Any = count, "key string, n bigint", "n bigint", "update", "NoTimeout"
    before.applyInPandasWithState(*arguments)
    enable(session, state)
    try:
        for grouped in (before, events.rollup("key")):
            with pytest.raises(UsageError, match=r"Call df\.groupBy\(…\) after enable"):
                grouped.applyInPandasWithState(*arguments)
        events.groupBy("key").applyInPandasWithState(*arguments)
    finally:
        disable(session)
    before.applyInPandasWithState(*arguments)


@CLASSIC
def test_a_misnamed_output_column_is_an_error_on_our_operator_and_null_on_sparks(
    session: Any, operator: str, tmp_path: Path
) -> None:
    def function(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"key": [key[0]], "N": [1]})

    job = Job(session, operator, tmp_path, function, "key string, n bigint")
    if operator == "arrow":
        with pytest.raises(Exception, match=r"StateValueError.*columns key, N; .* has key, n and no 'N'.*key \('a',\)"):
            job.run(keyed("a"))
        job.options = {"strict_output": False}
    assert job.run(keyed("a") if operator == "spark" else keyed())[0] == [("a", None)]
