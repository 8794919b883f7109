"""Changing the number of Spark partitions, but not of buckets, at a new checkpoint location."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jobs import TIMED, Job, event_rows, reads_state
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from timed_counts import (
    BUCKETS,
    FILES,
    batch_computation,
    count_state_partitions,
    make_state,
    make_timed_job,
    read_counts,
    run,
)

from spark_state_ext import RetainedCheckpoint, Savepoint, take_savepoint
from tests.helpers.soak import whole

pytestmark = [pytest.mark.spark, reads_state]

# Each query starts from the state of the previous one, with another number of partitions.
CHANGES = whole(
    [(5, "savepoint", "no_claim"), (1, "left", "claim")], [(3, "savepoint", "claim"), (2, "left", "no_claim")]
)


def make_start_options(spark: Any, old: Job, kind: str, mode: str) -> dict[str, Any]:
    """Return the options of a query that continues with a job's state."""
    root = str(make_state(old).options.root)
    if kind == "savepoint":
        path = old.folder / "savepoint"
        take_savepoint(spark, path, old.checkpoint, make_state(old))
        return {"start_from": Savepoint(str(path), mode=mode)}
    start = RetainedCheckpoint(root, str(old.checkpoint), mode=mode)
    # A claimed query folder stays in its root.
    return {"start_from": start, **({"root": root} if mode == "claim" else {})}


@pytest.mark.slow
def test_a_query_with_processing_time_timeouts_continues_on_another_number_of_partitions(
    spark: Any, tmp_path: Path
) -> None:
    """A pending timeout of a key without rows in the first batch after a change fires in this batch."""
    expected = batch_computation(FILES)
    job = make_timed_job(spark, tmp_path / "first", 2)
    files_read = 2
    assert run(job, FILES[:files_read]) == expected[:files_read]
    for partitions, kind, mode in CHANGES:
        assert any("timed out" in text for (text,) in expected[files_read]), (
            "some timeouts are pending when the number changes"
        )
        job = make_timed_job(
            spark, tmp_path / f"{kind}-{mode}", partitions, **make_start_options(spark, job, kind, mode)
        )
        assert run(job, FILES[files_read : files_read + 2]) == expected[files_read : files_read + 2]
        files_read += 2
        assert count_state_partitions(job) == partitions
        assert read_counts(job) == Counter(key for keys in FILES[:files_read] for key in keys)


def count_until_timeout(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Count rows; every key emits its count when the watermark passes the same late time."""
    if state.hasTimedOut:
        yield pd.DataFrame({"text": [f"{key[0]} closed with {state.get[0]}"]})
        state.remove()
    else:
        state.update(((state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs),))
        state.setTimeoutTimestamp(1_000_000)


@pytest.mark.soak
def test_event_time_timeouts_stay_pending_if_the_number_of_partitions_changes(spark: Any, tmp_path: Path) -> None:
    def make_job(name: str, partitions: int, **options: Any) -> Job:
        (tmp_path / name).mkdir()
        return Job(
            spark,
            "arrow",
            tmp_path / name,
            count_until_timeout,
            schema=TIMED,
            watermark=("at", "5 seconds"),
            timeout=GroupStateTimeout.EventTimeTimeout,
            options={"buckets": BUCKETS, **options},
            conf={"spark.sql.shuffle.partitions": str(partitions)},
        )

    def events_at(second: int, keys: Iterable[str]) -> Any:
        return event_rows(*[(key, second, 1) for key in keys])

    job, total = make_job("first", 2), Counter(FILES[0])
    assert not any(job.run(events_at(10, FILES[0])).values())
    for number, (partitions, kind, mode) in enumerate(CHANGES, 1):
        job = make_job(f"{kind}-{mode}", partitions, **make_start_options(spark, job, kind, mode))
        total += Counter(FILES[number])
        assert not any(job.run(events_at(10 + number, FILES[number])).values())
        assert read_counts(job) == total
    emitted = job.run(events_at(2_000, ["driver"]))
    # The timeout of this key is before the watermark that its own row sets.
    total["driver"] = 1
    assert sorted(row for rows in emitted.values() for row in rows) == sorted(
        (f"{key} closed with {n}",) for key, n in total.items()
    )
