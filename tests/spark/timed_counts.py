"""A job that counts by key and has timeouts pending after every batch, and what it must have emitted and kept: by a batch job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jobs import Batches, Job, keyed
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from spark_state_ext import ArrowState, open_committed

__all__ = [
    "BUCKETS",
    "FILES",
    "batch_computation",
    "run",
    "state_of",
    "state_partitions",
    "stored",
    "timed_counts",
]

# More than any number of partitions in the tests, and no multiple of one.
BUCKETS = 7
# Keys of all buckets. Each has timed out, has been counted anew, and has a timeout pending at some change.
FILES: Sequence[Sequence[str]] = [
    [f"key {at}" for at in range(40) if at % step != first]
    for first, step in ((1, 2), (0, 2), (2, 3), (1, 3), (3, 4), (0, 3), (1, 4), (4, 5), (0, 5), (2, 4), (0, 2), (1, 2))
]


def counting(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """It times out in the first batch without rows of the key."""
    if state.hasTimedOut:
        state.update(state.get)
        text = f"{key[0]} timed out at {state.get[0]}"
    else:
        n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
        state.update((n,))
        state.setTimeoutDuration(1)
        text = f"{key[0]} has {n}"
    yield pd.DataFrame({"text": [text]})


def batch_computation(files: Iterable[Sequence[str]]) -> list[list[tuple[str]]]:
    """What each batch must emit."""
    counts: Counter[str] = Counter()
    pending: set[str] = set()
    found = []
    for keys in files:
        counts.update(keys)
        texts = [f"{key} has {counts[key]}" for key in set(keys)]
        texts += [f"{key} timed out at {counts[key]}" for key in pending.difference(keys)]
        found.append(sorted((text,) for text in texts))
        pending = set(keys)
    return found


def timed_counts(
    session: Any, folder: Path, partitions: int, conf: dict[str, str] | None = None, **options: Any
) -> Job:
    """The job, on so many partitions of Spark's shuffle; `run` gives it files and returns what each emitted."""
    folder.mkdir(exist_ok=True)
    return Job(
        session,
        "arrow",
        folder,
        counting,
        timeout=GroupStateTimeout.ProcessingTimeTimeout,
        options={"buckets": BUCKETS, **options},
        conf={
            "spark.sql.shuffle.partitions": str(partitions),
            # Batches without data would go on for ever.
            "spark.sql.streaming.noDataMicroBatches.enabled": "false",
            **(conf or {}),
        },
    )


def run(job: Job, files: Iterable[Sequence[str]]) -> list[list[tuple[Any, ...]]]:
    """What each of the files' batches emitted."""
    found: Batches = job.run(*[keyed(*keys) for keys in files])
    return [found[batch] for batch in sorted(found)]


def stored(job: Job) -> dict[str, int]:
    """What the job's state says, by the pointers that Spark committed."""
    root = job.options.get("root", str(job.folder / "root"))
    with job.configured(), open_committed(job.session, root, job.checkpoint) as state:
        return {row["key"]: row["n"] for row in state.scan(["key", "n"]).read_all().to_pylist()}


def state_of(job: Job) -> ArrowState:
    """As a savepoint of the job is taken with."""
    root = job.options.get("root", str(job.folder / "root"))
    return ArrowState(root, "tested", buckets=BUCKETS, lease_ms=1_000, local_dir=str(job.folder / "local"))


def state_partitions(job: Job) -> int:
    """Over how many partitions Spark's state of the job is spread."""
    return len(list((job.checkpoint / "state" / "0").glob("[0-9]*")))
