"""Errors of functions and of plans, on Spark's operator and on ours with the same assertions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jobs import CLASSIC, EVERYWHERE, TIMED, Job, ddl, event_rows, keyed
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from streams import finish, read, using

from spark_state_ext.errors import UsageError

pytestmark = pytest.mark.spark


def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def yield_wrong_type(key: Any, pdfs: Any, state: GroupState) -> Any:
    yield pd.DataFrame({"key": [key[0]], "n": ["many"]})


@CLASSIC
def test_an_output_value_of_the_wrong_type_raises_sparks_error(session: Any, operator: str, tmp_path: Path) -> None:
    with pytest.raises(StreamingQueryException, match=r"ould not convert 'many'|when converting pandas.Series"):
        Job(session, operator, tmp_path, yield_wrong_type, "key string, n bigint").run(keyed("a"))


@EVERYWHERE
def test_a_query_fails_with_the_functions_exception_and_continues_once_it_is_fixed(
    session: Any, operator: str, tmp_path: Path
) -> None:
    def fragile(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = (state.getOption or (0,))[0]
        for pdf in pdfs:
            if 1 in set(pdf["value"]) and broken:
                state.update((1000,))
                raise KeyError("no such aircraft")
            n += len(pdf)
        state.update((n,))
        yield pd.DataFrame({"key": [key[0]], "n": [n]})

    broken = True
    job = Job(session, operator, tmp_path, fragile, "key string, n bigint")
    with pytest.raises(StreamingQueryException) as raised:
        job.run(keyed("a"), keyed("a", "N1"))
    text = str(raised.value)
    assert "KeyError" in text
    assert "no such aircraft" in text
    assert "in fragile" in text, "the error names the function that failed"
    if operator == "arrow":
        assert "UserFunctionError" in text
        assert "key ('N1',)" in text
        assert "batch 1" in text
        assert any(f"bucket {i}" in text for i in range(3))
    # Once it is fixed, the job continues with the batch that failed and the state of the batch before.
    broken = False
    assert job.run(keyed("a")) == {1: [("N1", 1), ("a", 2)], 2: [("a", 3)]}


# -- refused plans --------------------------------------------------------------------------------------------


def refusal(plan: Callable[[], Any]) -> str:
    """Return the text of the error that a plan raises."""
    with pytest.raises(Exception) as raised:  # classic, Connect, Spark and our package raise different classes
        plan()
    return str(raised.value)


def apply_count(
    session: Any, operator: str, folder: Path, df: Any, mode: str = "append", timeout: str = "NoTimeout"
) -> Any:
    with using(session, operator, folder):
        return df.groupBy("key").applyInPandasWithState(count, "key string, n bigint", "n bigint", mode, timeout)


def read_stream(session: Any, folder: Path) -> Any:
    job = Job(session, "spark", folder, count, schema=TIMED)
    job.feed(event_rows(("a", 1, 1)))
    return read(session, str(folder / "in"), ddl(TIMED))


def start(out: Any, folder: Path, mode: str = "append") -> None:
    writer = out.writeStream.format("memory").queryName("refused").outputMode(mode).trigger(availableNow=True)
    finish(writer.option("checkpointLocation", str(folder / "checkpoint")).start())


@EVERYWHERE
def test_a_batch_query_is_refused(session: Any, operator: str, tmp_path: Path) -> None:
    batch = session.createDataFrame([("a", 1)], "key string, value bigint")
    text = refusal(lambda: apply_count(session, operator, tmp_path, batch).collect())
    assert "applyInPandasWithState" in text
    assert "batch" in text


@EVERYWHERE
def test_an_event_time_timeout_without_a_watermark_is_refused(session: Any, operator: str, tmp_path: Path) -> None:
    out = read_stream(session, tmp_path)
    text = refusal(
        lambda: start(
            apply_count(session, operator, tmp_path, out, timeout=GroupStateTimeout.EventTimeTimeout), tmp_path
        )
    )
    assert "Watermark must be specified in the query" in text


@EVERYWHERE
def test_complete_mode_is_refused(session: Any, operator: str, tmp_path: Path) -> None:
    df = read_stream(session, tmp_path)
    text = refusal(lambda: start(apply_count(session, operator, tmp_path, df, mode="complete"), tmp_path))
    assert "append or update" in text
    text = refusal(lambda: start(apply_count(session, operator, tmp_path, df, mode="append"), tmp_path, "complete"))
    assert "omplete" in text


@EVERYWHERE
def test_modes_of_operator_and_query_must_agree(session: Any, operator: str, tmp_path: Path) -> None:
    out = read_stream(session, tmp_path)
    text = refusal(lambda: start(apply_count(session, operator, tmp_path, out, mode="append"), tmp_path, "update"))
    assert "applyInPandasWithState" in text
    assert "pdate" in text


@EVERYWHERE
def test_unknown_modes_and_timeouts_are_refused(session: Any, operator: str, tmp_path: Path) -> None:
    df = read_stream(session, tmp_path)
    assert "sometimes" in refusal(
        lambda: start(apply_count(session, operator, tmp_path, df, mode="sometimes"), tmp_path)
    )
    with pytest.raises((UsageError, AssertionError)) as raised:
        apply_count(session, operator, tmp_path, df, timeout="LunchTimeout")
    # Spark's own client only asserts.
    assert operator == "spark" or (isinstance(raised.value, UsageError) and "LunchTimeout" in str(raised.value))


@EVERYWHERE
def test_a_second_operator_in_one_query_is_refused(session: Any, operator: str, tmp_path: Path) -> None:
    def plan() -> None:
        first = apply_count(session, operator, tmp_path, read_stream(session, tmp_path))
        start(apply_count(session, operator, tmp_path, first), tmp_path)

    text = refusal(plan)
    # Here both operators have the same name, which the plan of the second refuses.
    same_name = "operator 'tested' is already in this query: the operators of a query must have different names"
    refused = "Multiple applyInPandasWithStates are not supported on a streaming DataFrames/Datasets"
    assert (refused if operator == "spark" else same_name) in text
