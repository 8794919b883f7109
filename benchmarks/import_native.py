"""Measure how long it takes to import a stopped job on Spark's own operator, compared with Spark's reader of its state.

The job's state has one row for each key, with two numbers and a timeout. Spark's reader counts the rows and adds up
their hashes, which is the least work for anybody who reads all of the state.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.options import add_buckets, add_quick, add_seed, add_spark
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["AT_MOST", "add_arguments", "run"]

AT_MOST = 3.0
_STATE = "n bigint, total double"
_FILES = 4
_QUICK_ROWS = 5_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to a parser."""
    parser.add_argument("--rows", type=int, default=1_000_000, metavar="N", help="number of keys in the job's state")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="timed runs of each, after one that is not timed"
    )
    add_buckets(parser, 16)
    add_spark(parser, "4g")
    add_seed(parser, "the rows")
    add_quick(parser, f"use {_QUICK_ROWS:,} keys and few runs")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an option is invalid, or the import or Spark's reader has a wrong number of rows or timeouts.
    """
    from benchmarks.spark import ROCKSDB, session
    from spark_state_ext import import_native

    rows, repeats = (_QUICK_ROWS, 2) if options.quick else (options.rows, options.repeats)
    if min(rows, repeats) < 1:
        raise BenchmarkError("--rows and --repeats must be at least 1")
    names = ("buckets", "cores", "memory", "seed")
    report = Report(
        "import_native",
        {"rows": rows, "repeats": repeats, **{parameter: getattr(options, parameter) for parameter in names}},
    )
    _write_input(work / "in", rows, options.seed)
    seconds: dict[str, list[float]] = {"Spark's reader": [], "import_native": []}
    conf = {"spark.sql.streaming.stateStore.providerClass": ROCKSDB}
    with session("import_native", options.cores, options.memory, work / "spark", conf) as spark:
        _run_job(spark, work)
        for number in range(repeats + 1):
            started_s = time.perf_counter()
            counted = _scan_with_spark(spark, work / "checkpoint")
            seconds["Spark's reader"].append(time.perf_counter() - started_s)
            started_s = time.perf_counter()
            job = import_native(
                spark, work / "checkpoint", work / "savepoint", work / "new", buckets=options.buckets, idle_s=0
            )
            seconds["import_native"].append(time.perf_counter() - started_s)
            report.check("the import has all keys, and all have a timeout", (job.rows, job.timeouts) == (rows, rows))
            report.check("Spark's reader has all keys", counted == rows)
            report.details["savepoint, bytes"] = job.savepoint.size_bytes
            for output in ("savepoint", "new"):
                shutil.rmtree(work / output)
            progress = ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items())
            print(f"run {number}: {progress}", file=sys.stderr, flush=True)
    # The first run only warms up the JVM and the Python workers.
    medians = {name: report.timing(name, times[1:]) for name, times in seconds.items()}
    ratio = report.ratio("import_native / Spark's reader, time", medians["import_native"] / medians["Spark's reader"])
    report.bar(f"{rows:,} keys: import_native against Spark's reader", ratio, "at most", AT_MOST, "times")
    return report


def _write_input(folder: Path, rows: int, seed: int) -> None:
    folder.mkdir(parents=True)
    draws = np.random.default_rng(seed)
    for at, part in enumerate(np.array_split(draws.permutation(rows), _FILES)):
        table = pa.table({"key": pa.array(part, pa.int64()), "value": draws.random(len(part))})
        pq.write_table(table, folder / f"{at}.parquet")


def _set_state(key: Any, frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Set the state of a key without reading its rows: their values do not matter, and reading them takes long."""
    state.update((1, float(key[0])))
    # So late that no timeout fires.
    state.setTimeoutTimestamp(4_000_000_000_000)
    return iter(())


def _run_job(spark: Any, work: Path) -> None:
    from pyspark.sql import functions as F

    stream = spark.readStream.schema("key bigint, value double").parquet(str(work / "in"))
    events = stream.withColumn("at", F.timestamp_seconds(F.lit(1_000_000_000))).withWatermark("at", "1 hour")
    counted = events.groupBy("key").applyInPandasWithState(
        _set_state, "key bigint", _STATE, "append", "EventTimeTimeout"
    )
    writer = counted.writeStream.format("noop").option("checkpointLocation", str(work / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()


def _scan_with_spark(spark: Any, checkpoint: Path) -> int:
    from pyspark.sql import functions as F

    state = spark.read.format("statestore").load(str(checkpoint)).select("key.key", "value.groupState.*", "value.*")
    hashed = F.xxhash64("key", "n", "total", "timeoutTimestamp").cast("decimal(38,0)")
    row = state.agg(F.count("*").alias("rows"), F.sum(hashed)).collect()[0]
    return int(row.rows)
