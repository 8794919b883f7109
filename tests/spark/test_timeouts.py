"""Timeouts and late rows, against Spark's operator and ours with the same assertions."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from jobs import CLASSIC, SPARK, TIMED, Job, emitted, event_rows, keyed, table
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from tests.helpers.waiting import eventually

pytestmark = pytest.mark.spark

EVENT_TIME = GroupStateTimeout.EventTimeTimeout
PROCESSING_TIME = GroupStateTimeout.ProcessingTimeTimeout
DELAY = ("at", "5 seconds")
# Under a processing-time timeout Spark runs batches without data for ever, so a query up to the end of its input needs
# them off.
DATA_ONLY = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}


# -- processing time ------------------------------------------------------------------------------------------


@CLASSIC
def test_processing_time_timeout(session: Any, operator: str, tmp_path: Path) -> None:
    """It fires once, in the next batch, for keys without rows there, with the key's columns in the keys' order."""

    def timing_out(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            assert isinstance(pdfs, list)
            (pdf,) = pdfs
            assert len(pdf) == 0
            what = f"timeout {[type(k).__name__ for k in key]} {list(pdf.columns)} {state.get}"
            if key[1] == "removes":
                state.remove()
            else:
                state.update((state.get[0] + 100,))
        else:
            what = f"data {sum(len(pdf) for pdf in pdfs)} {state.getOption}"
            state.update((7,))
            if key[1] == "patient":
                state.setTimeoutDuration(3_600_000)
            elif key[1] != "timeless":
                state.setTimeoutDuration(1)
        yield pd.DataFrame({"text": [f"{key[0]} {key[1]} {what}"]})

    schema = pa.schema([("name", pa.string()), ("id", pa.int64())])
    names = ["removes", "updates", "has rows", "patient", "timeless"]
    job = Job(session, operator, tmp_path, timing_out, keys=["id", "name"], schema=schema, timeout=PROCESSING_TIME)
    job.conf = DATA_ONLY
    first = job.run(table(schema, [(name, i) for i, name in enumerate(names)]))
    assert first[0] == [(f"{i} {name} data 1 None",) for i, name in enumerate(names)]
    fired = "timeout ['int64', 'str'] ['name', 'id'] (7,)"
    second = job.run(table(schema, [("has rows", 2)]))
    assert second[1] == [(f"0 removes {fired}",), (f"1 updates {fired}",), ("2 has rows data 1 (7,)",)]
    third = job.run(table(schema, [("updates", 1), ("removes", 0)]))
    assert third[2] == [(f"2 has rows {fired}",), ("0 removes data 1 None",), ("1 updates data 1 (107,)",)]


@CLASSIC
@pytest.mark.parametrize(("version", "called"), [(1, 4), (2, 0)])
def test_a_batch_without_data_calls_all_buckets_or_those_whose_time_has_come(
    session: Any, version: int, called: int, tmp_path: Path
) -> None:
    """All of them where a part of a partition could go on from another attempt than the rest: under format 1."""
    if version == 2 and SPARK < (4, 0):
        pytest.skip("checkpoint format 2 of the state store came with Spark 4.0")

    def waiting(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = sum(len(pdf) for pdf in pdfs) + (state.get[0] if state.exists else 0)
        state.update((n,))
        state.setTimeoutDuration(3_600_000)
        yield pd.DataFrame({"text": [f"{key[0]} {n} {state.hasTimedOut}"]})

    def without_data(query: Any) -> list[Any]:
        return [progress for progress in query.recentProgress if progress["numInputRows"] == 0]

    job = Job(session, "arrow", tmp_path, waiting, timeout=PROCESSING_TIME, options={"buckets": 4})
    prefix = "spark.sql.streaming.stateStore."
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    job.conf = {f"{prefix}providerClass": provider, f"{prefix}checkpointFormatVersion": str(version)}
    job.feed(keyed("a", "b"))
    with job.running() as query:
        eventually(lambda: len(without_data(query)) > 2)
        done = without_data(query)
    assert {progress["stateOperators"][0]["numRowsUpdated"] for progress in done} == {called}
    # It goes on, with what the pointers that were handed on lead to.
    with job.running() as query:
        job.feed(keyed("a"))
        eventually(lambda: any(p["numInputRows"] > 0 for p in query.recentProgress))
    rows = [text for batch in emitted(job.sink).values() for (text,) in batch]
    assert sorted(rows) == ["a 1 False", "a 2 False", "b 1 False"]


# -- event time -----------------------------------------------------------------------------------------------


@CLASSIC
def test_event_time_timeout_by_any_kind_of_time(session: Any, operator: str, tmp_path: Path) -> None:
    def timing_out(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        what = key[0].split()
        if state.hasTimedOut:
            text = f"{key[0]} timed out at {state.getCurrentWatermarkMs()} with {state.get[0]}"
            state.remove()
        elif what[0] == "driver":
            text = f"{key[0]} {state.getCurrentWatermarkMs()}"
        else:
            state.update((len(list(pdfs)),))
            at: Any = int(what[1]) * 1000
            if what[0] == "naive":
                at = dt.datetime.fromtimestamp(at / 1000)  # noqa: DTZ006  # Spark reads it in the machine's zone
            elif what[0] == "aware":
                at = dt.datetime.fromtimestamp(at / 1000, dt.timezone(dt.timedelta(hours=5)))
            state.setTimeoutTimestamp(at)
            text = f"{key[0]} set"
        yield pd.DataFrame({"text": [text]})

    kinds = ["aware", "int", "naive"]
    job = Job(session, operator, tmp_path, timing_out, schema=TIMED, watermark=DELAY, timeout=EVENT_TIME)
    rows = job.run(
        event_rows(*[(f"{kind} {at}", 10, 1) for kind in kinds for at in (20, 40)]),
        event_rows(("driver", 25, 1)),
        event_rows(("driver", 26, 1)),
    )
    # The watermark is 20 s after the second batch, which is not past 20 s; 21 s after the third.
    assert {batch: texts for batch, texts in rows.items() if texts} == {
        0: [(f"{kind} {at} set",) for kind in kinds for at in (20, 40)],
        1: [("driver 5000",)],
        2: [("driver 20000",)],
        3: [(f"{kind} 20 timed out at 21000 with 1",) for kind in kinds],
    }


@CLASSIC
def test_what_a_call_does_to_the_timeout(session: Any, operator: str, tmp_path: Path) -> None:
    """Keys are named for what they do; every batch moves the watermark by 10 s, and timeouts are set for 15 s."""

    def behave(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        what, values = key[0], sorted(int(v) for pdf in pdfs for v in pdf["value"])
        seen = f"{what} {'timeout' if state.hasTimedOut else values} {state.exists} {state.getOption}"
        if state.hasTimedOut:
            if what == "updates in it":
                state.update((50,))
            elif what == "sets another":
                state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 11_000)
            elif what in ("removes", "keeps an empty row"):
                state.remove()
            elif what == "removes and sets":
                state.remove()
                state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 1)
        elif what == "driver":
            pass
        elif values == [1]:
            if what == "only sets":
                state.setTimeoutTimestamp(15_000)
            elif what == "keeps an empty row":
                state.update((1,))
                state.remove()
                state.setTimeoutTimestamp(15_000)
            else:
                state.update((1,))
                state.setTimeoutTimestamp(15_000)
        elif what == "updates without one":
            state.update((2,))
        yield pd.DataFrame({"text": [seen]})

    job = Job(session, operator, tmp_path, behave, schema=TIMED, watermark=("at", "0 seconds"), timeout=EVENT_TIME)
    names = [
        *("updates in it", "changes nothing", "sets another", "removes", "keeps an empty row", "only sets"),
        *("reads without updating", "updates without one", "removes and sets"),
    ]
    rows = job.run(
        event_rows(*[(name, 1, 1) for name in names], ("driver", 5, 0)),
        event_rows(("reads without updating", 11, 2), ("updates without one", 11, 2), ("driver", 10, 0)),
        event_rows(("driver", 20, 0)),
    )
    # A call with rows that changes nothing leaves a timeout that is due, and it fires in the same batch.
    rows |= job.run(event_rows(("driver", 30, 0), ("reads without updating", 29, 3)))
    rows |= job.run(event_rows(("driver", 40, 0)), event_rows(("updates in it", 50, 9), ("updates without one", 50, 9)))
    texts = {batch: [text for (text,) in batch_rows if "driver" not in text] for batch, batch_rows in rows.items()}
    texts = {batch: found for batch, found in texts.items() if found}
    still = [
        "changes nothing timeout True (1,)",
        "only sets timeout False None",
        "reads without updating timeout True (1,)",
    ]
    empty = "removes and sets timeout False None"
    assert texts == {
        0: [f"{name} [1] False None" for name in sorted(names)],
        1: ["reads without updating [2] True (1,)", "updates without one [2] True (1,)"],
        # Batch 2 has the watermark 11 s, batch 3 has no data and 20 s.
        3: [
            "changes nothing timeout True (1,)",
            "keeps an empty row timeout False None",
            "only sets timeout False None",
            "reads without updating timeout True (1,)",
            "removes and sets timeout True (1,)",
            "removes timeout True (1,)",
            "sets another timeout True (1,)",
            "updates in it timeout True (1,)",
        ],
        4: sorted([*still, "reads without updating [3] True (1,)"]),
        5: [*still, empty],
        6: still,
        7: [
            *still,
            empty,
            "sets another timeout True (1,)",
            "updates in it [9] True (50,)",
            "updates without one [9] True (2,)",
        ],
        8: [*still, empty],
    }


@CLASSIC
def test_late_rows_go_by_the_watermark_of_the_batch_before(session: Any, operator: str, tmp_path: Path) -> None:
    def show(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if not state.hasTimedOut:
            values = sorted(int(v) for pdf in pdfs for v in pdf["value"])
            yield pd.DataFrame({"text": [f"{key[0]} {values} {state.getCurrentWatermarkMs()}"]})

    # Without batches that have no data, the watermark of the batch before a restart is not the one after it.
    job = Job(session, operator, tmp_path, show, schema=TIMED, watermark=DELAY, timeout=EVENT_TIME, conf=DATA_ONLY)
    rows = job.run(
        # The watermark is 0 at first, and what is not after it is late: the first moment of 1970, and all before.
        event_rows(("a", 10, 1), ("b", 15, 2), ("a", 0, 22), ("e", 0, 23), ("e", -9, 24)),
        event_rows(("a", 1, 3), ("b", 25, 4)),  # the watermark is 10 s here, and nothing was late before
    )
    rows |= job.run(
        # 20 s here, and rows up to 10 s are late.
        event_rows(("a", 9, 5), ("a", 10, 6), ("a", 11, 7), ("a", None, 8), ("c", 20, 9), ("c", 21, 10), ("b", 40, 11)),
        event_rows(("a", 20, 12), ("a", 21, 13), ("a", 35, 14), ("a", 36, 15), ("d", 2, 16), ("b", None, 17)),
    )
    rows |= job.run(event_rows(("a", 34, 18), ("a", 35, 19), ("a", 36, 20), ("d", 3, 21)))
    assert rows == {
        0: [("a [1] 0",), ("b [2] 0",)],
        1: [("a [3] 10000",), ("b [4] 10000",)],
        2: [("a [7, 8] 20000",), ("b [11] 20000",), ("c [9, 10] 20000",)],
        3: [("a [13, 14, 15] 35000",), ("b [17] 35000",)],
        4: [("a [20] 35000",)],
    }


@CLASSIC
@pytest.mark.parametrize(
    "timeout", [GroupStateTimeout.NoTimeout, pytest.param(PROCESSING_TIME, marks=pytest.mark.soak)]
)
def test_late_rows_stay_without_event_time_timeout(session: Any, operator: str, timeout: str, tmp_path: Path) -> None:
    def show(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        values = sorted(int(v) for pdf in pdfs for v in pdf["value"])
        yield pd.DataFrame({"text": [f"{key[0]} {values} {state.getCurrentWatermarkMs()}"]})

    job = Job(session, operator, tmp_path, show, schema=TIMED, watermark=DELAY, timeout=timeout, conf=DATA_ONLY)
    rows = job.run(event_rows(("a", 100, 1)), event_rows(("a", 200, 2)), event_rows(("a", 1, 3), ("b", None, 4)))
    assert {batch: texts for batch, texts in rows.items() if texts} == {
        0: [("a [1] 0",)],
        1: [("a [2] 95000",)],
        2: [("a [3] 195000",), ("b [4] 195000",)],
    }


# -- at random ------------------------------------------------------------------------------------------------


def act_at_random(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Does what its rows say, and in timeouts what the key and the state say; tells all it sees."""
    watermark_ms, seen = state.getCurrentWatermarkMs(), state.getOption
    values = sorted(int(v) for pdf in pdfs for v in pdf["value"])
    n = 0 if seen is None else seen[0]
    action = (sum(values) if values else n * 7 + len(key[0]) + ord(key[0][-1]) + watermark_ms // 1000) % 6
    if action in (0, 1, 2):
        state.update((n + 1 + sum(values) % 100,))
    elif action in (3, 4):
        state.remove()
    # 5 changes nothing.
    if action in (1, 4):
        state.setTimeoutTimestamp(watermark_ms + 1 + 1000 * (sum(values) % 20))
    yield pd.DataFrame({"text": [f"{key[0]} {values} {state.hasTimedOut} {seen} {action} {watermark_ms}"]})


@CLASSIC
def test_random_batches_as_spark_runs_them(session: Any, tmp_path: Path) -> None:
    """10 batches with a restart after the fifth: every call sees the same on Spark's operator and on ours."""
    random = np.random.default_rng(1)
    batches = []
    for i in range(10):
        rows = []
        for _ in range(random.integers(6, 20)):
            key, value = "k" + "abcdefghij"[random.integers(10)], int(random.integers(1000))
            at = None if random.random() < 0.1 else max(0, 10 * i + int(random.integers(-25, 12)))
            rows.append((key, at, value))
        batches.append(event_rows(*rows))
    found = {}
    for operator in ("spark", "arrow"):
        folder = tmp_path / operator
        folder.mkdir()
        job = Job(session, operator, folder, act_at_random, schema=TIMED, watermark=DELAY, timeout=EVENT_TIME)
        found[operator] = job.run(*batches[:5]) | job.run(*batches[5:])
    assert found["arrow"] == found["spark"]
    texts = [text for rows in found["spark"].values() for (text,) in rows]
    assert len(found["spark"]) >= 10
    assert sum(" True " in text for text in texts) > 5, "too few timeouts to tell anything"
    given = sum(batch.num_rows for batch in batches)
    taken = sum(len(text.split("[")[1].split("]")[0].split(",")) for text in texts if "[]" not in text)
    assert taken < given, "too few late rows to tell anything"
