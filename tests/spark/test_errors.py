"""What goes wrong, and how it is told: on Spark's operator and on ours with the same assertions."""

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


def wrong_type(key: Any, pdfs: Any, state: GroupState) -> Any:
    yield pd.DataFrame({"key": [key[0]], "n": ["many"]})


@CLASSIC
def test_a_result_of_the_wrong_type_has_sparks_error(session: Any, operator: str, tmp_path: Path) -> None:
    with pytest.raises(StreamingQueryException, match=r"ould not convert 'many'|when converting pandas.Series"):
        Job(session, operator, tmp_path, wrong_type, "key string, n bigint").run(keyed("a"))


@EVERYWHERE
def test_an_exception_in_the_function_and_going_on_after_it(session: Any, operator: str, tmp_path: Path) -> None:
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
    assert "in fragile" in text, "the place in the function"
    if operator == "arrow":
        assert "UserFunctionError" in text
        assert "key ('N1',)" in text
        assert "batch 1" in text
        assert any(f"bucket {i}" in text for i in range(3))
    # Mended, the job goes on from the batch that failed, with the state of the batch before.
    broken = False
    assert job.run(keyed("a")) == {1: [("N1", 1), ("a", 2)], 2: [("a", 3)]}


# -- refused plans --------------------------------------------------------------------------------------------


def refusal(plan: Callable[[], Any]) -> str:
    """Text of the error that a plan raises."""
    with pytest.raises(Exception) as raised:  # its class differs between classic and Connect, Spark and ours
        plan()
    return str(raised.value)


def apply(session: Any, operator: str, folder: Path, df: Any, mode: str = "append", timeout: str = "NoTimeout") -> Any:
    with using(session, operator, folder):
        return df.groupBy("key").applyInPandasWithState(count, "key string, n bigint", "n bigint", mode, timeout)


def stream(session: Any, folder: Path) -> Any:
    job = Job(session, "spark", folder, count, schema=TIMED)
    job.feed(event_rows(("a", 1, 1)))
    return read(session, str(folder / "in"), ddl(TIMED))


def start(out: Any, folder: Path, mode: str = "append") -> None:
    writer = out.writeStream.format("memory").queryName("refused").outputMode(mode).trigger(availableNow=True)
    finish(writer.option("checkpointLocation", str(folder / "checkpoint")).start())


@EVERYWHERE
def test_a_batch_query_is_refused(session: Any, operator: str, tmp_path: Path) -> None:
    batch = session.createDataFrame([("a", 1)], "key string, value bigint")
    text = refusal(lambda: apply(session, operator, tmp_path, batch).collect())
    assert "applyInPandasWithState" in text
    assert "batch" in text


@EVERYWHERE
def test_event_time_timeout_without_watermark_is_refused(session: Any, operator: str, tmp_path: Path) -> None:
    out = stream(session, tmp_path)
    text = refusal(
        lambda: start(apply(session, operator, tmp_path, out, timeout=GroupStateTimeout.EventTimeTimeout), tmp_path)
    )
    assert "Watermark must be specified in the query" in text


@EVERYWHERE
def test_complete_mode_is_refused(session: Any, operator: str, tmp_path: Path) -> None:
    df = stream(session, tmp_path)
    text = refusal(lambda: start(apply(session, operator, tmp_path, df, mode="complete"), tmp_path))
    assert "append or update" in text
    text = refusal(lambda: start(apply(session, operator, tmp_path, df, mode="append"), tmp_path, "complete"))
    assert "omplete" in text


@EVERYWHERE
def test_modes_of_operator_and_query_must_agree(session: Any, operator: str, tmp_path: Path) -> None:
    out = stream(session, tmp_path)
    text = refusal(lambda: start(apply(session, operator, tmp_path, out, mode="append"), tmp_path, "update"))
    assert "applyInPandasWithState" in text
    assert "pdate" in text


@EVERYWHERE
def test_unknown_modes_and_timeouts_are_refused(session: Any, operator: str, tmp_path: Path) -> None:
    df = stream(session, tmp_path)
    assert "sometimes" in refusal(lambda: start(apply(session, operator, tmp_path, df, mode="sometimes"), tmp_path))
    with pytest.raises((UsageError, AssertionError)) as raised:
        apply(session, operator, tmp_path, df, timeout="LunchTimeout")
    # Spark's own client has a bare assert for it.
    assert operator == "spark" or (isinstance(raised.value, UsageError) and "LunchTimeout" in str(raised.value))


@EVERYWHERE
def test_a_second_operator_in_one_query_is_refused(session: Any, operator: str, tmp_path: Path) -> None:
    def twice() -> None:
        once = apply(session, operator, tmp_path, stream(session, tmp_path))
        start(apply(session, operator, tmp_path, once), tmp_path)

    text = refusal(twice)
    # Both have one name here, which is refused when the second is planned.
    same_name = "operator 'tested' is already in this query: the operators of a query must have different names"
    refused = "Multiple applyInPandasWithStates are not supported on a streaming DataFrames/Datasets"
    assert (refused if operator == "spark" else same_name) in text
