"""The job of SPARK-49374's appendix: it samples three elements of each of some random keys. `test_sampling` runs it.

Usage: ``python tests/spark/sample_job.py FOLDER --timeouts processing --format 1 --restarts 500 --kills 100``. Each start of the
query reads one file; workers kill themselves at random points. The job emits the elements that it drops from a sample; timeouts
drop some more. The last start emits all samples. So each element is emitted exactly once, whatever the random numbers are: the
job fails if an element is lost or duplicated. With ``--operator spark`` it runs on Spark's own operator.
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
# Only one provider supports checkpoint format 2.
PROVIDERS = {1: "hdfs", 2: "rocksdb"}
# Event time: the file of each start advances the watermark.
_BEGIN, _STEP, _DELAY = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc), dt.timedelta(seconds=10), "5 seconds"
_SCHEMA = "element long, flush boolean, at int, time timestamp"


def make_file(restart: int, last: bool) -> pa.Table:
    """Make the input of one start: elements whose keys are drawn later, or for the last start a row that empties each sample."""
    rows = range(KEYS) if last else range(restart * ROWS, (restart + 1) * ROWS)
    return pa.table(
        {
            "element": pa.array(rows, pa.int64()),
            "flush": pa.array([last] * len(rows)),
            "at": pa.array([i if last else None for i, _ in enumerate(rows)], pa.int32()),
            "time": pa.array([_BEGIN + restart * _STEP] * len(rows), pa.timestamp("us", "UTC")),
        }
    )


def make_sample_function(timeouts: str, die_now_and_then: Callable[[], None]) -> Callable[..., Iterator[pd.DataFrame]]:
    """Return the function that Spark calls with the rows of a key."""
    size = SAMPLE

    def sample(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        die_now_and_then()
        kept = list(state.get[0]) if state.exists else []
        flush = False
        kept_size = size
        if state.hasTimedOut:
            kept_size = random.randrange(size)
        else:
            for pdf in pdfs:
                kept += pdf.loc[~pdf["flush"], "element"].tolist()
                flush |= bool(pdf["flush"].any())
        random.shuffle(kept)
        if flush:
            kept_size = 0
        if kept[:kept_size]:
            state.update((kept[:kept_size],))
        elif state.exists:
            state.remove()
        if kept[:kept_size] and random.random() < 0.7:
            if timeouts == "processing":
                state.setTimeoutDuration(random.randint(1, 500))
            elif timeouts == "event":
                state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + random.randint(1, 30_000))
        yield pd.DataFrame({"element": pd.Series(kept[kept_size:], dtype="int64")})

    return sample


def run_until_a_batch_without_data(out: Any, target: Path, checkpoint: Path) -> None:
    """Run a query that does not end by itself until a batch without data follows its input.

    When the query is stopped it may already be in a later batch.
    """
    query = (
        out.writeStream.format("parquet")
        .outputMode("append")
        .option("path", str(target))
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="0 seconds")
        .start()
    )

    def has_run_a_batch_without_data() -> bool:
        assert query.isActive, f"the query failed: {query.exception()}"
        rows = [progress["numInputRows"] for progress in query.recentProgress]
        # The first batch may be one that an earlier start had begun.
        return any(rows) and rows[-1] == 0

    try:
        eventually(has_run_a_batch_without_data, 0.02)
    finally:
        query.stop()


def run(spark: Any, folder: Path, operator: str, timeouts: str, buckets: int, restarts: int, kills: int) -> list[int]:
    """Start the query again and again, and flush the samples in the last start; return the emitted elements."""
    folder.mkdir(parents=True)
    sample = make_sample_function(timeouts, killer(folder, kills, chance=0.15))
    for restart in range(restarts + 1):
        events = read(spark, write_batches(folder / "in", [make_file(restart, restart == restarts)]), _SCHEMA)
        if timeouts == "event":
            events = events.withWatermark("time", _DELAY)
        keyed = events.withColumn("key", F.coalesce("at", (F.rand() * KEYS).cast("int"))).drop("at")
        with using(spark, operator, folder, buckets=buckets):
            out = keyed.groupBy("key").applyInPandasWithState(
                sample, "element long", "kept array<long>", "append", TIMEOUTS[timeouts]
            )
            run_query = run_until_a_batch_without_data if timeouts == "processing" else to_parquet
            run_query(out, folder / "out", folder / "checkpoint")
    return [row.element for row in spark.read.parquet(str(folder / "out")).collect()]


def main() -> int:
    """Run the job with each requested kind of timeouts, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--operator", choices=["arrow", "spark"], default="arrow")
    parser.add_argument("--timeouts", choices=list(TIMEOUTS), nargs="+", default=list(TIMEOUTS))
    parser.add_argument("--format", type=int, choices=list(PROVIDERS), default=1, help="Spark's checkpoint format")
    parser.add_argument("--buckets", type=int, default=6, help="number of buckets, in two partitions")
    parser.add_argument("--restarts", type=int, default=40)
    parser.add_argument("--kills", type=int, default=10)
    arguments = parser.parse_args()
    conf = {
        # Clean-up then has something to delete within so few batches.
        "spark.sql.streaming.minBatchesToRetain": str(RETAINED),
        "spark.sql.streaming.stateStore.checkpointFormatVersion": str(arguments.format),
    }
    spark = session(arguments.kills, PROVIDERS[arguments.format], conf)
    failed = False
    result: dict[str, Any] = {}
    for timeouts in arguments.timeouts:
        folder = arguments.folder / timeouts
        counts = Counter(
            run(spark, folder, arguments.operator, timeouts, arguments.buckets, arguments.restarts, arguments.kills)
        )
        lost = sorted(set(range(arguments.restarts * ROWS)) - counts.keys())
        doubled = sorted(element for element, n in counts.items() if n > 1)
        failed |= bool(lost or doubled) or len(counts) != arguments.restarts * ROWS
        result[timeouts] = {"elements": len(counts), "lost": lost, "doubled": doubled, "kills": killed(folder)}
    spark.stop()
    print(json.dumps(result))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
