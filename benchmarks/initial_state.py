"""A savepoint made of a table, and read back as one, beside Spark's own sorted parquet files of the same rows.

`write_savepoint` hashes rows, shuffles them once by bucket, sorts them by hash, and writes a file a bucket. Spark does
the same with `repartition`, `sortWithinPartitions` and `write.parquet`: once with rows in turn, as `repartition(N)` has
it, and once by the hash of the key. Either has as many files as the savepoint has buckets.
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
# An odd number: multiplied by it, modulo 2 ** 64, different numbers stay different.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--rows", type=int, default=10_000_000, metavar="N", help="rows of the table, a key each")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed runs of each; one more warms up")
    add_buckets(parser, 16)
    add_spark(parser, "4g")
    add_seed(parser, "the rows")
    add_quick(parser, f"{_QUICK_ROWS:,} rows, and few runs")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When rows that were read back are not those of the table.
    """
    from benchmarks.spark import session

    rows, repeats = (_QUICK_ROWS, 2) if options.quick else (options.rows, options.repeats)
    if min(rows, repeats) < 1:
        raise BenchmarkError("--rows and --repeats must be at least 1")
    names = ("buckets", "cores", "memory", "seed")
    report = Report("initial_state", {"rows": rows, "repeats": repeats, **{it: getattr(options, it) for it in names}})
    _write_table(work / "table", rows, options.seed)
    with session("initial_state", options.cores, options.memory, work / "spark", {}) as spark:
        table = spark.read.parquet(str(work / "table"))
        right = _told(table)
        contenders = _contenders(report, table, options.buckets)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(repeats + 1):
            for name in list(contenders) if number % 2 else list(reversed(contenders)):
                target = work / "made"
                started_s = time.perf_counter()
                contenders[name](target)
                seconds[name].append(time.perf_counter() - started_s)
                if number == repeats:
                    _check(report, name, spark, target, right)
                shutil.rmtree(target)
            shown = ", ".join(f"{name} {found[-1]:.2f} s" for name, found in seconds.items())
            print(f"run {number}: {shown}", file=sys.stderr, flush=True)
    # The first warms the JVM and Python's workers up.
    medians = {name: report.timing(name, found[1:]) for name, found in seconds.items()}
    for other in (PARQUET, PARQUET_BY_HASH):
        ratio = report.ratio(f"{OURS} / {other}, time", medians[OURS] / medians[other])
        report.bar(f"{rows:,} rows: {OURS} against {other}", ratio, "at most", AT_MOST, "times")
    return report


def _contenders(report: Report, table: DataFrame, buckets: int) -> dict[str, Callable[[Path], None]]:
    from pyspark.sql import functions as F

    from spark_state_ext import write_savepoint

    hashed = table.withColumn("hash", F.xxhash64("key"))

    def ours(target: Path) -> None:
        made = write_savepoint(table, target, keys=["key"], state_schema=_STATE, buckets=buckets)
        report.details["savepoint, files"], report.details["savepoint, bytes"] = made.files, made.size_bytes

    def in_turn(target: Path) -> None:
        hashed.repartition(buckets).sortWithinPartitions("hash").write.parquet(str(target))
        report.details["parquet, bytes"] = sum(it.stat().st_size for it in target.glob("*.parquet"))

    def by_hash(target: Path) -> None:
        hashed.repartition(buckets, "hash").sortWithinPartitions("hash").write.parquet(str(target))

    return {OURS: ours, PARQUET: in_turn, PARQUET_BY_HASH: by_hash}


def _check(report: Report, name: str, spark: Any, target: Path, right: tuple[Any, ...]) -> None:
    """What was written, read back, is the table."""
    from spark_state_ext import read_savepoint

    back = read_savepoint(spark, target) if name == OURS else spark.read.parquet(str(target))
    report.check(
        f"{name}: number, keys, sums and hashes of the rows that are read back are those of {right[0]:,} rows of the "
        "table",
        _told(back) == right,
    )


def _told(rows: DataFrame) -> tuple[Any, ...]:
    """What is equal for equal rows, whatever their order, and hardly for others."""
    from pyspark.sql import functions as F

    row = F.xxhash64(*_COLUMNS)
    found = rows.agg(
        F.count("*"),
        F.countDistinct("key"),
        F.sum(F.col("key").cast("decimal(38,0)")),
        F.sum("n"),
        F.sum("total"),
        F.sum(row.cast("decimal(38,0)")),
        F.bit_xor(row),
    )
    return tuple(found.collect()[0])


def _write_table(folder: Path, rows: int, seed: int) -> None:
    """Rows in no order of their keys; totals in eighths, so that sums are exact in any order."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    numbers = rng.permutation(rows).astype(np.uint64)
    step = -(-rows // _FILES)
    for at, begin in enumerate(range(0, rows, step)):
        keys = (numbers[begin : begin + step] * _SPREAD).view(np.int64)
        n = rng.integers(1, 1000, len(keys))
        columns = dict(zip(_COLUMNS, (keys, n, n * rng.integers(0, 8000, len(keys)) / 8), strict=True))
        pq.write_table(pa.table(columns), folder / f"part-{at}.parquet", compression="none")
