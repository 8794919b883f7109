"""Time to live on real Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from api_jobs import (
    COUNTERS,
    DATA_ONLY,
    EVENT_TIME,
    HOUR_MS,
    ApiJob,
    count_arrow,
    count_rows,
)
from jobs import CLASSIC, TIMED, count, event_rows, keyed
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState

from spark_state_ext import Ttl
from tests.helpers.soak import whole

pytestmark = pytest.mark.spark


@CLASSIC
@pytest.mark.parametrize("api", whole(["arrow"], ["pandas"]))
def test_state_expires_once_the_watermark_passes_the_keys_last_row_by_the_time_to_live(
    session: Any, api: str, tmp_path: Path
) -> None:
    """A count begins again at zero once the watermark is ten seconds past the key's last row."""
    job = ApiJob(session, "arrow", tmp_path, COUNTERS[api], api=api, schema=TIMED, watermark=("at", "0 seconds"))
    job.conf, job.options = DATA_ONLY, {"ttl": Ttl(10_000, clock="event"), "buckets": 2}
    rows = job.run(
        event_rows(("a", 10, 1), ("b", 15, 1)),
        event_rows(("a", 19, 1), ("c", 20, 1)),  # the watermark is 15 s
        event_rows(("a", 11, 1), ("b", 12, 1), ("d", 25, 1)),  # the watermark is 20 s
    )
    rows |= job.run(
        event_rows(("a", 34, 1), ("b", 26, 1)), event_rows(("a", 40, 1), ("b", 40, 1))
    )  # the watermark is 25 s and then 34 s
    # Late rows of "a" and "b" in batch 2 count as written at the watermark, 20 s, so that their state lives until 30 s.
    assert rows == {
        0: [("a", 1), ("b", 1)],
        1: [("a", 2), ("c", 1)],
        2: [("a", 3), ("b", 2), ("d", 1)],
        3: [("a", 4), ("b", 3)],
        4: [("a", 5), ("b", 4)],
    }
    rows = job.run(
        event_rows(("x", 51, 1)), event_rows(("a", 52, 1), ("d", 52, 1))
    )  # the watermark is 40 s and then 51 s
    assert rows == {5: [("x", 1)], 6: [("a", 1), ("d", 1)]}


@CLASSIC
@pytest.mark.parametrize("of_rows", whole([True], [False]))
def test_time_to_live_uses_the_watermark_column_a_windows_end_or_the_rows_own_time(
    session: Any, of_rows: bool, tmp_path: Path
) -> None:
    """The time of a row is in the column that has the watermark, either the window or the row's own time."""

    def count_windows(key: Any, rows: list[Any], state: GroupState) -> list[tuple[Any, ...]]:
        n = (state.getOption or (0,))[0] + len(rows)
        state.update((n,))
        return [(key.window.start.second, n)]

    job = ApiJob(session, "arrow", tmp_path, count_windows, output="start int, n bigint", api="rows", schema=TIMED)
    job.watermark, job.conf, job.options = ("at", "0 seconds"), DATA_ONLY, {"ttl": Ttl(10_000, clock="event")}
    window = F.window("at", "10 seconds").alias("window")
    if of_rows:
        job.keys = [window]
    else:
        job.before, job.keys = lambda df: df.select(window, "value"), ["window"]
    rows = job.run(
        event_rows(("", 12, 1)),
        event_rows(("", 29, 1)),  # the watermark is 12 s
        event_rows(("", 13, 1)),  # the watermark is 29 s
        event_rows(("", 45, 1)),
        event_rows(("", 14, 1)),  # the watermark is 45 s
    )
    # The state of the row at 12 s expires at 22 s by the row's time, or at 30 s by its window, which ends at 20 s. The
    # state of the late row at 13 s lives from 29 s.
    assert rows == {0: [(10, 1)], 1: [(20, 1)], 2: [(10, 1 if of_rows else 2)], 3: [(40, 1)], 4: [(10, 1)]}
    rows = job.run(event_rows(("", 51, 1)), event_rows(("", 52, 1)))
    assert rows == {5: [(50, 1)], 6: [(50, 2)]}


@CLASSIC
def test_a_time_to_live_can_be_added_changed_and_dropped_between_starts(session: Any, tmp_path: Path) -> None:
    """By processing time, 1 ms is over in the next batch, and an hour is not."""
    job = ApiJob(session, "arrow", tmp_path, count, api="pandas", options={"buckets": 2})
    assert job.run(keyed("a", "b"))[0] == [("a", 1), ("b", 1)]
    # A query may also change from one kind of function to another.
    job.api, job.function = "arrow", count_arrow
    job.options = {"buckets": 2, "ttl": Ttl(1)}
    # Earlier state does not expire; state that is written now expires before the next batch.
    assert job.run(keyed("a"), keyed("a", "b")) == {1: [("a", 2)], 2: [("a", 1), ("b", 2)]}
    job.options = {"buckets": 2, "ttl": Ttl(HOUR_MS, refresh="read")}
    assert job.run(keyed("a", "b"), keyed("a", "b")) == {3: [("a", 1), ("b", 1)], 4: [("a", 2), ("b", 2)]}
    job.options = {"buckets": 2}
    job.api, job.function = "rows", count_rows
    assert job.run(keyed("a"), keyed("a")) == {5: [("a", 3)], 6: [("a", 4)]}
    assert sorted(path.name for path in (tmp_path / "root" / "tested").glob("*/operator_*")) == [
        "operator_0.json",
        "operator_1.json",
    ]
    # A column can be added although there is a hidden one.
    job.state, job.options = "n bigint, note string", {"buckets": 2, "ttl": Ttl(HOUR_MS)}

    def count_with_note(key: Any, rows: list[Any], state: GroupState) -> list[tuple[Any, ...]]:
        n, note = state.getOption or (0, None)
        state.update((n + len(rows), f"seen {n}"))
        return [(f"{key.key} {note}", n + len(rows))]

    job.function = count_with_note
    assert job.run(keyed("a", "b"), keyed("a")) == {7: [("a None", 5), ("b None", 3)], 8: [("a seen 4", 6)]}


@CLASSIC
def test_a_timeout_fires_even_if_the_state_has_expired_by_its_time_to_live(session: Any, tmp_path: Path) -> None:
    """The pandas API sees the timeout of "a" with its expired state missing, and that of "b" with its state."""

    def describe_call(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        text = f"{key[0]} {'timed out' if state.hasTimedOut else 'rows'} {state.getOption}"
        if state.hasTimedOut:
            state.remove()
        elif key[0] != "driver":
            state.update((len(list(pdfs)),))
            state.setTimeoutTimestamp(20_000)
        yield pd.DataFrame({"text": [text]})

    job = ApiJob(session, "arrow", tmp_path, describe_call, output="text string", api="pandas", schema=TIMED)
    job.watermark, job.timeout, job.options = ("at", "0 seconds"), EVENT_TIME, {"ttl": Ttl(15_000, clock="event")}
    rows = job.run(event_rows(("a", 1, 1), ("b", 10, 1)), event_rows(("driver", 21, 1)))
    texts_of_all_batches = {text for texts in rows.values() for (text,) in texts}
    assert texts_of_all_batches == {
        "a rows None",
        "b rows None",
        "driver rows None",
        "a timed out None",
        "b timed out (1,)",
    }
