"""A job that counts by key and has timeouts pending after every batch, and its expected output, computed in Python."""

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
    "count_state_partitions",
    "make_state",
    "make_timed_job",
    "read_counts",
    "run",
]

# More buckets than partitions in any test, and not a multiple of the number of partitions (except 1).
BUCKETS = 7
# Keys of all buckets. Each key times out, is counted again, and has a timeout pending at some change of the partitions.
FILES: Sequence[Sequence[str]] = [
    [f"key {number}" for number in range(40) if number % step != first]
    for first, step in ((1, 2), (0, 2), (2, 3), (1, 3), (3, 4), (0, 3), (1, 4), (4, 5), (0, 5), (2, 4), (0, 2), (1, 2))
]


def count_with_timeout(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Count rows; a key times out in the first batch in which it has no rows."""
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
    """Compute the rows that each batch must emit."""
    counts: Counter[str] = Counter()
    pending: set[str] = set()
    emitted = []
    for keys in files:
        counts.update(keys)
        texts = [f"{key} has {counts[key]}" for key in set(keys)]
        texts += [f"{key} timed out at {counts[key]}" for key in pending.difference(keys)]
        emitted.append(sorted((text,) for text in texts))
        pending = set(keys)
    return emitted


def make_timed_job(
    session: Any, folder: Path, partitions: int, conf: dict[str, str] | None = None, **options: Any
) -> Job:
    """Make the job with this number of shuffle partitions; `run` feeds it."""
    folder.mkdir(exist_ok=True)
    return Job(
        session,
        "arrow",
        folder,
        count_with_timeout,
        timeout=GroupStateTimeout.ProcessingTimeTimeout,
        options={"buckets": BUCKETS, **options},
        conf={
            "spark.sql.shuffle.partitions": str(partitions),
            # Batches without data would run for ever.
            "spark.sql.streaming.noDataMicroBatches.enabled": "false",
            **(conf or {}),
        },
    )


def run(job: Job, files: Iterable[Sequence[str]]) -> list[list[tuple[Any, ...]]]:
    """Run the job over more files, and return what each batch emitted."""
    emitted: Batches = job.run(*[keyed(*keys) for keys in files])
    return [emitted[batch] for batch in sorted(emitted)]


def read_counts(job: Job) -> dict[str, int]:
    """Return the counts in the job's state, by the pointers that Spark committed."""
    root = job.options.get("root", str(job.folder / "root"))
    with job.configured(), open_committed(job.session, root, job.checkpoint) as state:
        return {row["key"]: row["n"] for row in state.scan(["key", "n"]).read_all().to_pylist()}


def make_state(job: Job) -> ArrowState:
    """Return the options with which a savepoint of the job is taken."""
    root = job.options.get("root", str(job.folder / "root"))
    return ArrowState(root, "tested", buckets=BUCKETS, lease_ms=1_000, local_dir=str(job.folder / "local"))


def count_state_partitions(job: Job) -> int:
    """Return the number of partitions of Spark's state of the job."""
    return len(list((job.checkpoint / "state" / "0").glob("[0-9]*")))
