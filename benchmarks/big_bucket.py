"""Send gigabytes to one bucket in one batch, and measure how much memory Spark's Python workers need for it.

The rows consist of random bytes, which cannot be compressed. So they have the same size on their way to Python as in
memory. The user's function keeps no rows, so it adds nothing to the measured memory.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from benchmarks.options import add_memory, add_seed
from benchmarks.report import BenchmarkError, Report

__all__ = ["add_arguments", "run"]

# Rows of a bucket must never be in memory several times. This bar is stricter: at most a third of their bytes.
RSS_AT_MOST_OF_INPUT = 1 / 3
_OUTPUT = "key bigint, n bigint, bytes bigint, checksum bigint"
_FILE_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to a parser."""
    parser.add_argument("--gib", type=float, default=3.0, metavar="N", help="GiB of values in the batch")
    parser.add_argument("--row-bytes", type=int, default=4096, metavar="N", help="bytes of the value in each row")
    parser.add_argument("--keys", type=int, default=2000, metavar="N", help="number of keys")
    add_memory(parser, "2g")
    parser.add_argument(
        "--memory-bytes-max",
        type=int,
        default=None,
        metavar="N",
        help="memory_bytes_max of ArrowState (None: its default)",
    )
    add_seed(parser, "the rows")


def count_bytes(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Count a key's rows and bytes, and add up the checksums of its values; keep the three sums as its state."""
    n, size, checksum = state.get if state.exists else (0, 0, 0)
    for pdf in pdfs:
        n += len(pdf)
        for value in pdf["value"]:
            size += len(value)
            checksum += zlib.crc32(value)
    state.update((n, size, checksum))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "bytes": [size], "checksum": [checksum]})


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If the answer is wrong, or the memory of the Python workers could not be measured.
    """
    from benchmarks import processes
    from benchmarks.spark import Feed, session
    from spark_state_ext import ArrowState, disable, enable

    if not processes.supported():
        raise BenchmarkError("this system has no /proc, from which the benchmark reads how much memory processes use")
    names = ("gib", "row_bytes", "keys", "memory", "memory_bytes_max", "seed")
    report = Report("big_bucket", {name: getattr(options, name) for name in names})
    extra_options = {} if options.memory_bytes_max is None else {"memory_bytes_max": options.memory_bytes_max}
    with session("big_bucket", 2, options.memory, work, {}) as spark, processes.MemoryWatch() as watch:
        feed = Feed(work / "input")
        state = ArrowState(
            str(work / "state"), "big_bucket", buckets=1, local_dir=str(work / "state-local"), **extra_options
        )
        enable(spark, state)
        rows = spark.readStream.schema("key bigint, value binary").parquet(feed.pattern)
        counts = rows.groupBy("key").applyInPandasWithState(
            count_bytes, _OUTPUT, "n bigint, bytes bigint, checksum bigint", "update", "NoTimeout"
        )
        disable(spark)
        query = (
            counts.writeStream.format("memory")
            .queryName("answer")
            .outputMode("update")
            .option("checkpointLocation", str(work / "checkpoint"))
            .start()
        )
        expected = _Expected(options.keys)
        feed.add_tables(_make_tables(options, expected))
        value_bytes = expected.total_bytes
        print("the input is written; the batch is running …", file=sys.stderr, flush=True)
        query.processAllAvailable()
        # A second, small batch reads the state of the first.
        small = argparse.Namespace(**{**vars(options), "gib": 8 * options.row_bytes / 2**30, "seed": options.seed + 1})
        feed.add_tables(_make_tables(small, expected))
        query.processAllAvailable()
        progress = [p for p in query.recentProgress if p["numInputRows"] > 0]
        query.stop()
        answer = spark.table("answer").toPandas()
    report.check("the large input came as one micro-batch, the small one as another", len(progress) == 2)
    last = answer.sort_values(["key", "n"]).drop_duplicates("key", keep="last")
    report.check(
        f"rows, bytes and checksums of {len(last)} keys are those written, before and after a second batch",
        expected.matches(last) and len(answer) > len(last),
    )
    seconds = report.timing("batch", [progress[0]["durationMs"]["triggerExecution"] / 1000])
    report.details["MB of values a second"] = value_bytes / 1e6 / seconds
    workers = {pid: peak for pid, peak in watch.peaks.items() if "pyspark.daemon" in peak.command}
    if not workers:
        raise BenchmarkError("no Python worker was found among the processes of Spark")
    report.details["Python workers, peak bytes"] = [
        {"resident": peak.rss_bytes, "anonymous": peak.anonymous_bytes} for peak in workers.values()
    ]
    report.details["JVM, peak resident bytes"] = max(p.rss_bytes for p in watch.peaks.values() if "java" in p.command)
    resident = max(peak.rss_bytes for peak in workers.values())
    anonymous = max(peak.anonymous_bytes for peak in workers.values())
    report.ratio("largest worker, resident memory / values", resident / value_bytes)
    report.ratio("largest worker, memory that is no mapped file's / values", anonymous / value_bytes)
    report.ratio("largest worker, resident GiB", resident / 2**30)
    report.ratio("largest worker, GiB that are no mapped file's", anonymous / 2**30)
    report.bar(
        "memory of the largest worker against the batch's values",
        anonymous / value_bytes,
        "at most",
        RSS_AT_MOST_OF_INPUT,
    )
    return report


class _Expected:
    """Counts the rows, the bytes and a checksum of each key in the input, to compare the results with."""

    def __init__(self, keys: int) -> None:
        self._n = np.zeros(keys, dtype=np.int64)
        self._bytes = np.zeros(keys, dtype=np.int64)
        self._checksum = np.zeros(keys, dtype=np.int64)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all values so far."""
        return int(self._bytes.sum())

    def add(self, keys: np.typing.NDArray[np.int64], values: list[bytes]) -> None:
        """Add rows to the expected answer."""
        self._n += np.bincount(keys, minlength=len(self._n))
        np.add.at(self._bytes, keys, [len(value) for value in values])
        np.add.at(self._checksum, keys, [zlib.crc32(value) for value in values])

    def matches(self, answer: pd.DataFrame) -> bool:
        """Return whether an answer, sorted by key, is right."""
        present = np.flatnonzero(self._n)
        columns = {
            "key": present,
            "n": self._n[present],
            "bytes": self._bytes[present],
            "checksum": self._checksum[present],
        }
        return all(np.array_equal(answer[name].to_numpy(), expected) for name, expected in columns.items())


def _make_tables(options: argparse.Namespace, expected: _Expected) -> Iterator[pa.Table]:
    """Yield the tables of the input files, with random keys and values; add their rows to the expected answer."""
    rng = np.random.default_rng(options.seed)
    remaining = max(1, int(options.gib * 2**30) // options.row_bytes)
    per_file = max(1, _FILE_BYTES // options.row_bytes)
    while remaining:
        count = min(per_file, remaining)
        remaining -= count
        data = rng.bytes(count * options.row_bytes)
        values = [data[at : at + options.row_bytes] for at in range(0, len(data), options.row_bytes)]
        keys = rng.integers(0, options.keys, count)
        expected.add(keys, values)
        yield pa.table({"key": pa.array(keys), "value": pa.array(values, pa.binary())})
