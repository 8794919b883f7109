"""The job of SPARK-49374's appendix: random keys, three elements sampled from each; run by test_sampling.

Usage: ``python tests/spark/sample_job.py FOLDER --timeouts processing --format 1 --restarts 500 --kills 100``. Each start of the
query takes one file; workers kill themselves at random points. What is pushed out of a sample is emitted; timeouts push out
some more. In the end all samples are emitted. So each element is emitted once, whatever was drawn: the job fails where one is
lost or doubled. With ``--operator spark`` it runs on Spark's own operator.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from killed_jobs import killed, killer, session
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from streams import read, to_parquet, using, write_batches

from tests.helpers.waiting import eventually

KEYS, ROWS, SAMPLE = 16, 40, 3
RETAINED = 2
TIMEOUTS = {"none": "NoTimeout", "processing": "ProcessingTimeTimeout", "event": "EventTimeTimeout"}
# Checkpoint format 2 is of the one provider only.
PROVIDERS = {1: "hdfs", 2: "rocksdb"}
# In event time: each start's file moves the watermark.
_BEGIN, _STEP, _DELAY = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc), dt.timedelta(seconds=10), "5 seconds"
_SCHEMA = "element long, flush boolean, at int, time timestamp"


def file_of(restart: int, last: bool) -> pa.Table:
    """One start's input: elements whose keys are drawn later, or a row for each key that empties its sample."""
    rows = range(KEYS) if last else range(restart * ROWS, (restart + 1) * ROWS)
    return pa.table(
        {
            "element": pa.array(rows, pa.int64()),
            "flush": pa.array([last] * len(rows)),
            "at": pa.array([i if last else None for i, _ in enumerate(rows)], pa.int32()),
            "time": pa.array([_BEGIN + restart * _STEP] * len(rows), pa.timestamp("us", "UTC")),
        }
    )


def sampling(timeouts: str, die_now_and_then: Callable[[], None]) -> Callable[..., Iterator[pd.DataFrame]]:
    """The function of a key's rows."""
    size = SAMPLE

    def sample(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        die_now_and_then()
        kept = list(state.get[0]) if state.exists else []
        flush = False
        stays = size
        if state.hasTimedOut:
            stays = random.randrange(size)
        else:
            for pdf in pdfs:
                kept += pdf.loc[~pdf["flush"], "element"].tolist()
                flush |= bool(pdf["flush"].any())
        random.shuffle(kept)
        if flush:
            stays = 0
        if kept[:stays]:
            state.update((kept[:stays],))
        elif state.exists:
            state.remove()
        if kept[:stays] and random.random() < 0.7:
            if timeouts == "processing":
                state.setTimeoutDuration(random.randint(1, 500))
            elif timeouts == "event":
                state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + random.randint(1, 30_000))
        yield pd.DataFrame({"element": pd.Series(kept[stays:], dtype="int64")})

    return sample


def until_a_batch_without_data(out: Any, target: Path, checkpoint: Path) -> None:
    """Run a query that does not end by itself, until a batch without data comes after its input; it may be in the next one."""
    query = (
        out.writeStream.format("parquet")
        .outputMode("append")
        .option("path", str(target))
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="0 seconds")
        .start()
    )

    def came() -> bool:
        assert query.isActive, f"it failed: {query.exception()}"
        rows = [progress["numInputRows"] for progress in query.recentProgress]
        # A batch that a start before this one was stopped in comes first.
        return any(rows) and rows[-1] == 0

    try:
        eventually(came, 0.02)
    finally:
        query.stop()


def run(spark: Any, folder: Path, operator: str, timeouts: str, buckets: int, restarts: int, kills: int) -> list[int]:
    """Start the query again and again, and flush the samples in the last start; returns what was emitted."""
    folder.mkdir(parents=True)
    sample = sampling(timeouts, killer(folder, kills, chance=0.15))
    for restart in range(restarts + 1):
        events = read(spark, write_batches(folder / "in", [file_of(restart, restart == restarts)]), _SCHEMA)
        if timeouts == "event":
            events = events.withWatermark("time", _DELAY)
        keyed = events.withColumn("key", F.coalesce("at", (F.rand() * KEYS).cast("int"))).drop("at")
        with using(spark, operator, folder, buckets=buckets):
            out = keyed.groupBy("key").applyInPandasWithState(
                sample, "element long", "kept array<long>", "append", TIMEOUTS[timeouts]
            )
            end = until_a_batch_without_data if timeouts == "processing" else to_parquet
            end(out, folder / "out", folder / "checkpoint")
    return [row.element for row in spark.read.parquet(str(folder / "out")).collect()]


def main() -> int:
    """Run it with each kind of timeouts that was asked for; prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--operator", choices=["arrow", "spark"], default="arrow")
    parser.add_argument("--timeouts", choices=list(TIMEOUTS), nargs="+", default=list(TIMEOUTS))
    parser.add_argument("--format", type=int, choices=list(PROVIDERS), default=1, help="Spark's checkpoint format")
    parser.add_argument("--buckets", type=int, default=6, help="of two partitions")
    parser.add_argument("--restarts", type=int, default=40)
    parser.add_argument("--kills", type=int, default=10)
    given = parser.parse_args()
    conf = {
        # So that clean-up has something to do within so few batches.
        "spark.sql.streaming.minBatchesToRetain": str(RETAINED),
        "spark.sql.streaming.stateStore.checkpointFormatVersion": str(given.format),
    }
    spark = session(given.kills, PROVIDERS[given.format], conf)
    wrong = False
    result: dict[str, Any] = {}
    for timeouts in given.timeouts:
        folder = given.folder / timeouts
        found = Counter(run(spark, folder, given.operator, timeouts, given.buckets, given.restarts, given.kills))
        lost = sorted(set(range(given.restarts * ROWS)) - found.keys())
        doubled = sorted(element for element, n in found.items() if n > 1)
        wrong |= bool(lost or doubled) or len(found) != given.restarts * ROWS
        result[timeouts] = {"elements": len(found), "lost": lost, "doubled": doubled, "kills": killed(folder)}
    spark.stop()
    print(json.dumps(result))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
