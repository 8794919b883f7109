"""More or fewer Spark partitions for the same buckets, at a new checkpoint location."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jobs import TIMED, Job, event_rows, reads_state
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from timed_counts import BUCKETS, FILES, batch_computation, run, state_of, state_partitions, stored, timed_counts

from spark_state_ext import RetainedCheckpoint, Savepoint, take_savepoint

pytestmark = [pytest.mark.spark, reads_state]

# Each query begins with what the one before has left, on another number of partitions.
CHANGES = [(5, "savepoint", "no_claim"), (1, "left", "claim"), (3, "savepoint", "claim"), (2, "left", "no_claim")]


def started_from(spark: Any, old: Job, kind: str, mode: str) -> dict[str, Any]:
    """The options of a query that goes on with a job's state."""
    root = str(state_of(old).options.root)
    if kind == "savepoint":
        path = old.folder / "savepoint"
        take_savepoint(spark, path, old.checkpoint, state_of(old))
        return {"start_from": Savepoint(str(path), mode=mode)}
    start = RetainedCheckpoint(root, str(old.checkpoint), mode=mode)
    # What is claimed stays where it is.
    return {"start_from": start, **({"root": root} if mode == "claim" else {})}


@pytest.mark.slow
def test_state_and_outputs_go_on_under_processing_time_timeouts(spark: Any, tmp_path: Path) -> None:
    """Whoever has had no rows in the first batch after a change times out in it, if one was pending."""
    expected = batch_computation(FILES)
    job = timed_counts(spark, tmp_path / "first", 2)
    at = 2
    assert run(job, FILES[:at]) == expected[:at]
    for partitions, kind, mode in CHANGES:
        assert any("timed out" in text for (text,) in expected[at]), "pending over the change"
        job = timed_counts(spark, tmp_path / f"{kind}-{mode}", partitions, **started_from(spark, job, kind, mode))
        assert run(job, FILES[at : at + 2]) == expected[at : at + 2]
        at += 2
        assert state_partitions(job) == partitions
        assert stored(job) == Counter(key for keys in FILES[:at] for key in keys)


def closing(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Says a key's count when event time has come so far that all keys are over."""
    if state.hasTimedOut:
        yield pd.DataFrame({"text": [f"{key[0]} closed with {state.get[0]}"]})
        state.remove()
    else:
        state.update(((state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs),))
        state.setTimeoutTimestamp(1_000_000)


def test_event_time_timeouts_stay_pending_over_every_change(spark: Any, tmp_path: Path) -> None:
    def planned(name: str, partitions: int, **options: Any) -> Job:
        (tmp_path / name).mkdir()
        return Job(
            spark,
            "arrow",
            tmp_path / name,
            closing,
            schema=TIMED,
            watermark=("at", "5 seconds"),
            timeout=GroupStateTimeout.EventTimeTimeout,
            options={"buckets": BUCKETS, **options},
            conf={"spark.sql.shuffle.partitions": str(partitions)},
        )

    def at(second: int, keys: Iterable[str]) -> Any:
        return event_rows(*[(key, second, 1) for key in keys])

    job, total = planned("first", 2), Counter(FILES[0])
    assert not any(job.run(at(10, FILES[0])).values())
    for number, (partitions, kind, mode) in enumerate(CHANGES, 1):
        job = planned(f"{kind}-{mode}", partitions, **started_from(spark, job, kind, mode))
        total += Counter(FILES[number])
        assert not any(job.run(at(10 + number, FILES[number])).values())
        assert stored(job) == total
    found = job.run(at(2_000, ["driver"]))
    # Its own timeout lies before the watermark that it sets.
    total["driver"] = 1
    assert sorted(row for rows in found.values() for row in rows) == sorted(
        (f"{key} closed with {n}",) for key, n in total.items()
    )
