"""Measure how long it takes to make a savepoint of a table, compared with Spark's own sorted Parquet files of its rows.

`write_savepoint` hashes the rows, shuffles them once by bucket, sorts them by hash, and writes one file per bucket.
Spark does the same with `repartition`, `sortWithinPartitions` and `write.parquet`: once with `repartition(N)`, which
distributes rows round-robin, and once with a repartitioning by the hash of the key. Either way Spark writes as many
files as the savepoint has buckets. The rows are read back to check them, which is not timed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.options import add_buckets, add_quick, add_seed, add_spark
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["OURS", "PARQUET", "PARQUET_BY_HASH", "add_arguments", "run"]

OURS = "write_savepoint"
PARQUET, PARQUET_BY_HASH = "repartition(N), sort, write.parquet", "repartition(N, key hash), sort, write.parquet"
AT_MOST = 1.5
_STATE = "n bigint, total double"
_COLUMNS = ("key", "n", "total")
_FILES = 4
_QUICK_ROWS = 200_000
# The factor is odd, so different numbers give different products modulo 2 ** 64.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to a parser."""
    parser.add_argument(
        "--rows", type=int, default=10_000_000, metavar="N", help="rows of the table, all with different keys"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="timed runs of each, after one that is not timed"
    )
    add_buckets(parser, 16)
    add_spark(parser, "4g")
    add_seed(parser, "the rows")
    add_quick(parser, f"use {_QUICK_ROWS:,} rows and few runs")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an option is invalid, or the rows that are read back are not those of the table.
    """
    from benchmarks.spark import session

    rows, repeats = (_QUICK_ROWS, 2) if options.quick else (options.rows, options.repeats)
    if min(rows, repeats) < 1:
        raise BenchmarkError("--rows and --repeats must be at least 1")
    names = ("buckets", "cores", "memory", "seed")
    report = Report(
        "initial_state", {"rows": rows, "repeats": repeats, **{item: getattr(options, item) for item in names}}
    )
    _write_table(work / "table", rows, options.seed)
    with session("initial_state", options.cores, options.memory, work / "spark", {}) as spark:
        table = spark.read.parquet(str(work / "table"))
        expected = _compute_fingerprint(table)
        contenders = _make_contenders(report, table, options.buckets)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(repeats + 1):
            for name in list(contenders) if number % 2 else list(reversed(contenders)):
                target = work / "made"
                started_s = time.perf_counter()
                contenders[name](target)
                seconds[name].append(time.perf_counter() - started_s)
                if number == repeats:
                    _check_rows(report, name, spark, target, expected)
                shutil.rmtree(target)
            progress = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items())
            print(f"run {number}: {progress}", file=sys.stderr, flush=True)
    # The first run only warms up the JVM and the Python workers.
    medians = {name: report.timing(name, values[1:]) for name, values in seconds.items()}
    for other in (PARQUET, PARQUET_BY_HASH):
        ratio = report.ratio(f"{OURS} / {other}, time", medians[OURS] / medians[other])
        report.bar(f"{rows:,} rows: {OURS} against {other}", ratio, "at most", AT_MOST, "times")
    return report


def _make_contenders(report: Report, table: DataFrame, buckets: int) -> dict[str, Callable[[Path], None]]:
    from pyspark.sql import functions as F

    from spark_state_ext import write_savepoint

    hashed = table.withColumn("hash", F.xxhash64("key"))

    def write_ours(target: Path) -> None:
        savepoint = write_savepoint(table, target, keys=["key"], state_schema=_STATE, buckets=buckets)
        report.details["savepoint, files"], report.details["savepoint, bytes"] = savepoint.files, savepoint.size_bytes

    def write_round_robin(target: Path) -> None:
        hashed.repartition(buckets).sortWithinPartitions("hash").write.parquet(str(target))
        report.details["parquet, bytes"] = sum(item.stat().st_size for item in target.glob("*.parquet"))

    def write_by_hash(target: Path) -> None:
        hashed.repartition(buckets, "hash").sortWithinPartitions("hash").write.parquet(str(target))

    return {OURS: write_ours, PARQUET: write_round_robin, PARQUET_BY_HASH: write_by_hash}


def _check_rows(report: Report, name: str, spark: Any, target: Path, expected: tuple[Any, ...]) -> None:
    """Read back what was written, and check that its rows are those of the table."""
    from spark_state_ext import read_savepoint

    back = read_savepoint(spark, target) if name == OURS else spark.read.parquet(str(target))
    report.check(
        f"{name}: number, keys, sums and hashes of the rows that are read back are those of {expected[0]:,} rows "
        "of the table",
        _compute_fingerprint(back) == expected,
    )


def _compute_fingerprint(rows: DataFrame) -> tuple[Any, ...]:
    """Return values that are equal for the same rows in any order, and almost certainly differ for other rows."""
    from pyspark.sql import functions as F

    row = F.xxhash64(*_COLUMNS)
    values = rows.agg(
        F.count("*"),
        F.countDistinct("key"),
        F.sum(F.col("key").cast("decimal(38,0)")),
        F.sum("n"),
        F.sum("total"),
        F.sum(row.cast("decimal(38,0)")),
        F.bit_xor(row),
    )
    return tuple(values.collect()[0])


def _write_table(folder: Path, rows: int, seed: int) -> None:
    """Write rows in random order; totals are multiples of 1/8, so that their sum is exact in any order."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    numbers = rng.permutation(rows).astype(np.uint64)
    step = -(-rows // _FILES)
    for at, begin in enumerate(range(0, rows, step)):
        keys = (numbers[begin : begin + step] * _SPREAD).view(np.int64)
        n = rng.integers(1, 1000, len(keys))
        columns = dict(zip(_COLUMNS, (keys, n, n * rng.integers(0, 8000, len(keys)) / 8), strict=True))
        pq.write_table(pa.table(columns), folder / f"part-{at}.parquet", compression="none")
