"""Timeouts and late rows, on Spark's operator and on ours with the same assertions."""

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
# With a processing-time timeout Spark runs batches without data for ever. A query that ends with its input must turn them off.
DATA_ONLY = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}


# -- processing time ------------------------------------------------------------------------------------------


@CLASSIC
def test_a_processing_time_timeout_fires_once_for_keys_without_rows_in_the_next_batch(
    session: Any, operator: str, tmp_path: Path
) -> None:
    """The key has the order of `groupBy`, and the empty frame the order of the schema."""

    def time_out(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            assert isinstance(pdfs, list)
            (pdf,) = pdfs
            assert len(pdf) == 0
            text = f"timeout {[type(k).__name__ for k in key]} {list(pdf.columns)} {state.get}"
            if key[1] == "removes":
                state.remove()
            else:
                state.update((state.get[0] + 100,))
        else:
            text = f"data {sum(len(pdf) for pdf in pdfs)} {state.getOption}"
            state.update((7,))
            if key[1] == "patient":
                state.setTimeoutDuration(3_600_000)
            elif key[1] != "timeless":
                state.setTimeoutDuration(1)
        yield pd.DataFrame({"text": [f"{key[0]} {key[1]} {text}"]})

    schema = pa.schema([("name", pa.string()), ("id", pa.int64())])
    names = ["removes", "updates", "has rows", "patient", "timeless"]
    job = Job(session, operator, tmp_path, time_out, keys=["id", "name"], schema=schema, timeout=PROCESSING_TIME)
    job.conf = DATA_ONLY
    first = job.run(table(schema, [(name, i) for i, name in enumerate(names)]))
    assert first[0] == [(f"{i} {name} data 1 None",) for i, name in enumerate(names)]
    timeout_text = "timeout ['int64', 'str'] ['name', 'id'] (7,)"
    second = job.run(table(schema, [("has rows", 2)]))
    assert second[1] == [(f"0 removes {timeout_text}",), (f"1 updates {timeout_text}",), ("2 has rows data 1 (7,)",)]
    third = job.run(table(schema, [("updates", 1), ("removes", 0)]))
    assert third[2] == [(f"2 has rows {timeout_text}",), ("0 removes data 1 None",), ("1 updates data 1 (107,)",)]


@CLASSIC
@pytest.mark.parametrize(("version", "called_buckets"), [(1, 4), (2, 0)])
def test_a_batch_without_data_calls_all_buckets_in_format_1_and_only_due_ones_in_format_2(
    session: Any, version: int, called_buckets: int, tmp_path: Path
) -> None:
    """In format 1, some buckets of a partition could otherwise continue from another attempt than the rest."""
    if version == 2 and SPARK < (4, 0):
        pytest.skip("checkpoint format 2 of the state store came with Spark 4.0")

    def count_and_wait(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n = sum(len(pdf) for pdf in pdfs) + (state.get[0] if state.exists else 0)
        state.update((n,))
        state.setTimeoutDuration(3_600_000)
        yield pd.DataFrame({"text": [f"{key[0]} {n} {state.hasTimedOut}"]})

    def find_batches_without_data(query: Any) -> list[Any]:
        return [progress for progress in query.recentProgress if progress["numInputRows"] == 0]

    job = Job(session, "arrow", tmp_path, count_and_wait, timeout=PROCESSING_TIME, options={"buckets": 4})
    prefix = "spark.sql.streaming.stateStore."
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    job.conf = {f"{prefix}providerClass": provider, f"{prefix}checkpointFormatVersion": str(version)}
    job.feed(keyed("a", "b"))
    with job.running() as query:
        eventually(lambda: len(find_batches_without_data(query)) > 2)
        batches = find_batches_without_data(query)
    assert {progress["stateOperators"][0]["numRowsUpdated"] for progress in batches} == {called_buckets}
    # The query continues with the state of the pointers that these batches returned.
    with job.running() as query:
        job.feed(keyed("a"))
        eventually(lambda: any(p["numInputRows"] > 0 for p in query.recentProgress))
    rows = [text for batch in emitted(job.sink).values() for (text,) in batch]
    assert sorted(rows) == ["a 1 False", "a 2 False", "b 1 False"]


# -- event time -----------------------------------------------------------------------------------------------


@CLASSIC
def test_an_event_time_timeout_can_be_set_by_a_number_and_by_naive_and_aware_datetimes(
    session: Any, operator: str, tmp_path: Path
) -> None:
    def set_timeout(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        words = key[0].split()
        if state.hasTimedOut:
            text = f"{key[0]} timed out at {state.getCurrentWatermarkMs()} with {state.get[0]}"
            state.remove()
        elif words[0] == "driver":
            text = f"{key[0]} {state.getCurrentWatermarkMs()}"
        else:
            state.update((len(list(pdfs)),))
            at: Any = int(words[1]) * 1000
            if words[0] == "naive":
                at = dt.datetime.fromtimestamp(at / 1000)  # noqa: DTZ006  # Spark uses the time zone of the machine
            elif words[0] == "aware":
                at = dt.datetime.fromtimestamp(at / 1000, dt.timezone(dt.timedelta(hours=5)))
            state.setTimeoutTimestamp(at)
            text = f"{key[0]} set"
        yield pd.DataFrame({"text": [text]})

    kinds = ["aware", "int", "naive"]
    job = Job(session, operator, tmp_path, set_timeout, schema=TIMED, watermark=DELAY, timeout=EVENT_TIME)
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
def test_updates_removals_and_new_timeouts_in_a_call_decide_if_the_timeout_fires_again(
    session: Any, operator: str, tmp_path: Path
) -> None:
    """A key's name says what its calls do. Every batch advances the watermark by 10 s; timeouts are set for 15 s."""

    def behave(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        name, values = key[0], sorted(int(v) for pdf in pdfs for v in pdf["value"])
        text = f"{name} {'timeout' if state.hasTimedOut else values} {state.exists} {state.getOption}"
        if state.hasTimedOut:
            if name == "updates in it":
                state.update((50,))
            elif name == "sets another":
                state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 11_000)
            elif name in ("removes", "keeps an empty row"):
                state.remove()
            elif name == "removes and sets":
                state.remove()
                state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 1)
        elif name == "driver":
            pass
        elif values == [1]:
            if name == "only sets":
                state.setTimeoutTimestamp(15_000)
            elif name == "keeps an empty row":
                state.update((1,))
                state.remove()
                state.setTimeoutTimestamp(15_000)
            else:
                state.update((1,))
                state.setTimeoutTimestamp(15_000)
        elif name == "updates without one":
            state.update((2,))
        yield pd.DataFrame({"text": [text]})

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
    # A call with rows that changes nothing keeps a due timeout, which fires in the same batch.
    rows |= job.run(event_rows(("driver", 30, 0), ("reads without updating", 29, 3)))
    rows |= job.run(event_rows(("driver", 40, 0)), event_rows(("updates in it", 50, 9), ("updates without one", 50, 9)))
    texts = {batch: [text for (text,) in batch_rows if "driver" not in text] for batch, batch_rows in rows.items()}
    texts = {batch: batch_texts for batch, batch_texts in texts.items() if batch_texts}
    repeated_timeouts = [
        "changes nothing timeout True (1,)",
        "only sets timeout False None",
        "reads without updating timeout True (1,)",
    ]
    removed_and_set = "removes and sets timeout False None"
    assert texts == {
        0: [f"{name} [1] False None" for name in sorted(names)],
        1: ["reads without updating [2] True (1,)", "updates without one [2] True (1,)"],
        # The watermark is 11 s in batch 2, and 20 s in batch 3, which has no data.
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
        4: sorted([*repeated_timeouts, "reads without updating [3] True (1,)"]),
        5: [*repeated_timeouts, removed_and_set],
        6: repeated_timeouts,
        7: [
            *repeated_timeouts,
            removed_and_set,
            "sets another timeout True (1,)",
            "updates in it [9] True (50,)",
            "updates without one [9] True (2,)",
        ],
        8: [*repeated_timeouts, removed_and_set],
    }


@CLASSIC
def test_rows_are_late_by_the_watermark_of_the_previous_batch(session: Any, operator: str, tmp_path: Path) -> None:
    def show(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if not state.hasTimedOut:
            values = sorted(int(v) for pdf in pdfs for v in pdf["value"])
            yield pd.DataFrame({"text": [f"{key[0]} {values} {state.getCurrentWatermarkMs()}"]})

    # If batches without data are off, the watermarks before and after a restart differ.
    job = Job(session, operator, tmp_path, show, schema=TIMED, watermark=DELAY, timeout=EVENT_TIME, conf=DATA_ONLY)
    rows = job.run(
        # The watermark is 0 at first, and rows not after it are late: those of the first moment of 1970 and before.
        event_rows(("a", 10, 1), ("b", 15, 2), ("a", 0, 22), ("e", 0, 23), ("e", -9, 24)),
        event_rows(("a", 1, 3), ("b", 25, 4)),  # the watermark is 10 s here; rows are late by the previous one, 0
    )
    rows |= job.run(
        # The watermark is 20 s here, and rows up to 10 s are late.
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
def test_late_rows_are_not_dropped_without_an_event_time_timeout(
    session: Any, operator: str, timeout: str, tmp_path: Path
) -> None:
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
    """Do what the rows say, or in a timeout what the key and the state say; emit everything that the call sees."""
    watermark_ms, old_state = state.getCurrentWatermarkMs(), state.getOption
    values = sorted(int(v) for pdf in pdfs for v in pdf["value"])
    n = 0 if old_state is None else old_state[0]
    action = (sum(values) if values else n * 7 + len(key[0]) + ord(key[0][-1]) + watermark_ms // 1000) % 6
    if action in (0, 1, 2):
        state.update((n + 1 + sum(values) % 100,))
    elif action in (3, 4):
        state.remove()
    # Action 5 changes nothing.
    if action in (1, 4):
        state.setTimeoutTimestamp(watermark_ms + 1 + 1000 * (sum(values) % 20))
    yield pd.DataFrame({"text": [f"{key[0]} {values} {state.hasTimedOut} {old_state} {action} {watermark_ms}"]})


@CLASSIC
def test_calls_of_random_batches_see_the_same_on_both_operators(session: Any, tmp_path: Path) -> None:
    """The query has 10 batches, and is restarted after the fifth."""
    random = np.random.default_rng(1)
    batches = []
    for i in range(10):
        rows = []
        for _ in range(random.integers(6, 20)):
            key, value = "k" + "abcdefghij"[random.integers(10)], int(random.integers(1000))
            at = None if random.random() < 0.1 else max(0, 10 * i + int(random.integers(-25, 12)))
            rows.append((key, at, value))
        batches.append(event_rows(*rows))
    emitted_by = {}
    for operator in ("spark", "arrow"):
        folder = tmp_path / operator
        folder.mkdir()
        job = Job(session, operator, folder, act_at_random, schema=TIMED, watermark=DELAY, timeout=EVENT_TIME)
        emitted_by[operator] = job.run(*batches[:5]) | job.run(*batches[5:])
    assert emitted_by["arrow"] == emitted_by["spark"]
    texts = [text for rows in emitted_by["spark"].values() for (text,) in rows]
    assert len(emitted_by["spark"]) >= 10
    assert sum(" True " in text for text in texts) > 5, "there are too few timeouts for this test"
    rows_in = sum(batch.num_rows for batch in batches)
    rows_seen = sum(len(text.split("[")[1].split("]")[0].split(",")) for text in texts if "[]" not in text)
    assert rows_seen < rows_in, "there are too few late rows for this test"
