"""State on a slow object store: how long do batches wait for it, and what happens if a store hangs?

Three queries run in one session and get the same batches in turns. The first has its state on a local root, the second
on a store on which each PUT takes 200 ms longer, and the third on such a store with synchronous commits. One task has
all buckets, so that a synchronous commit waits for one PUT after the other. Then another query runs with two stores, of
which one hangs for a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks.options import add_memory, add_seed
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_state_ext import ArrowState

__all__ = ["add_arguments", "run"]

OVER_LOCAL_AT_MOST = 1.10
# The batches around a hang are timed from outside, and a batch's first commit comes a little after its beginning.
LATE_S_AT_MOST, EARLY_S_AT_MOST = 2.0, 1.0
_LOCAL, _ASYNC, _SYNC = "local root", "slow store", "slow store, synchronous"
_OUTPUT = "key bigint, n bigint, checksum bigint"
_STATE = "n bigint, value binary"
_SLOW = "benchmarks.slow.SlowStore"
_HANGS_S = 60.0
_CALM_BATCHES = 5


@dataclass(frozen=True)
class _Load:
    """The input of each batch: `keys` rows, one for each key, whose state gets `value_bytes` new bytes."""

    name: str
    keys: int
    value_bytes: int


# A batch's deltas have 1 KB in total in the first load. With headers, each bucket's file has about 4 KB in any case.
_LOADS = (_Load("1 KB a batch", 32, 32), _Load("40 MB a batch", 20_000, 2_048))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--batches", type=int, default=32, metavar="N", help="batches; the first two are a warm-up")
    parser.add_argument("--buckets", type=int, default=32, metavar="N", help="buckets, all in one task")
    parser.add_argument(
        "--put-ms", type=int, default=200, metavar="N", help="milliseconds added to each PUT of the slow store"
    )
    parser.add_argument(
        "--delay-ms",
        type=int,
        default=10_000,
        metavar="N",
        help="commit_delay_ms_max of the query with a store that hangs",
    )
    parser.add_argument(
        "--timeout-ms",
        type=int,
        default=30_000,
        metavar="N",
        help="commit_timeout_ms of the query with a store that hangs",
    )
    parser.add_argument(
        "--ours", action="store_true", help="leave out synchronous commits, the store that hangs, and the bars"
    )
    add_memory(parser, "3g")
    add_seed(parser, "the state's bytes")


def remember(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Keep a count and a batch's new bytes as state; yield the count, and the checksum of the previous bytes."""
    n, before = state.get if state.exists else (0, b"")
    for pdf in pdfs:
        n += len(pdf)
        seed, size = int(pdf["seed"].iloc[-1]), int(pdf["size"].iloc[-1])
    state.update((n, _make_value(key[0], seed, size)))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "checksum": [zlib.crc32(before)]})


def _make_value(key: int, seed: int, size: int) -> bytes:
    return np.random.default_rng([seed, key]).bytes(size)


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an answer is wrong, or ``--batches`` is too small.
    """
    from benchmarks.spark import session

    if options.batches < 3:
        raise BenchmarkError("--batches must be at least 3: the first two are not counted")
    names = ("batches", "buckets", "put_ms", "delay_ms", "timeout_ms", "memory", "seed")
    report = Report("async_commit", {name: getattr(options, name) for name in names})
    slow = {"implementation": _SLOW, "put_ms": options.put_ms}
    extras: dict[str, dict[str, Any]] = {
        _LOCAL: {},
        _ASYNC: {"storage_options": slow},
        **({} if options.ours else {_SYNC: {"storage_options": slow, "backends": ["fsspec"]}}),
    }
    # With one shuffle partition, one task has all buckets.
    settings = {"spark.sql.shuffle.partitions": "1"}
    with session("async_commit", 2, options.memory, work, settings) as spark:
        for number, load in enumerate(_LOADS):
            load_folder = work / f"load-{number}"
            streams = {
                name: _Stream(
                    spark,
                    load_folder / str(index),
                    _state(load_folder / str(index), options.buckets, extra),
                    load,
                    options.seed,
                )
                for index, (name, extra) in enumerate(extras.items())
            }
            for batch in range(options.batches):
                # The first query of a batch may have an advantage, so the order rotates.
                order = list(streams)
                order = order[batch % len(order) :] + order[: batch % len(order)]
                for name in order:
                    streams[name].process()
                times_shown = ", ".join(f"{name} {stream.seconds[-1]:.2f} s" for name, stream in streams.items())
                print(f"{load.name}, batch {batch}: {times_shown}", file=sys.stderr, flush=True)
            _report_results(report, load, streams)
        if not options.ours:
            _measure_hang(report, spark, options, work / "hanging")
    return report


def _state(folder: Path, buckets: int, extra: dict[str, Any], local: str = "local") -> ArrowState:
    from spark_state_ext import ArrowState

    return ArrowState(str(folder / "state"), "async_commit", buckets=buckets, local_dir=str(folder / local), **extra)


class _Stream:
    """A query, its input, and its expected answers."""

    def __init__(self, spark: SparkSession, folder: Path, state: ArrowState, load: _Load, seed: int) -> None:
        from benchmarks.spark import Feed

        self._spark = spark
        self._folder = folder
        self._feed = Feed(folder / "input")
        self._load = load
        self._seed = seed
        self.batches = 0
        self.seconds: list[float] = []
        self._starts = 0
        self.start(state)

    def start(self, state: ArrowState) -> None:
        """Start the query, from its checkpoint if it has one."""
        from spark_state_ext import disable, enable

        enable(self._spark, state)
        rows = self._spark.readStream.schema("key bigint, seed bigint, size bigint").parquet(self._feed.pattern)
        output = rows.groupBy("key").applyInPandasWithState(remember, _OUTPUT, _STATE, "append", "NoTimeout")
        disable(self._spark)
        self._starts += 1
        self.query = (
            output.writeStream.format("parquet")
            .outputMode("append")
            .option("checkpointLocation", str(self._folder / "checkpoint"))
            # By default, an idle query looks for files a hundred times a second, which would slow down the others.
            .trigger(processingTime="500 milliseconds")
            .start(str(self._folder / "answers"))
        )

    def add(self) -> None:
        """Add the input of another batch."""
        load = self._load
        keys = np.arange(load.keys, dtype=np.int64)
        row = {"key": keys, "seed": self._seed + self.batches, "size": load.value_bytes}
        self._feed.add(pd.DataFrame(row), 1)
        self.batches += 1

    def process(self) -> None:
        """Add the input of another batch, and wait until it is done."""
        self.add()
        self.query.processAllAvailable()
        progress = [p for p in self.query.recentProgress if p["numInputRows"] > 0]
        if progress[-1]["numInputRows"] != self._load.keys:
            raise BenchmarkError(f"batch {self.batches} did not arrive as one micro-batch of {self._load.keys} rows")
        self.seconds.append(progress[-1]["durationMs"]["triggerExecution"] / 1000)

    def is_right(self) -> bool:
        """Stop the query; return whether each batch counted each key and read the bytes of the batch before."""
        self.query.stop()
        answers = self._spark.read.parquet(str(self._folder / "answers")).toPandas()
        answers = answers.sort_values(["n", "key"])
        keys = range(self._load.keys)
        checksums = [0] * self._load.keys
        for batch in range(self.batches - 1):
            checksums += [zlib.crc32(_make_value(key, self._seed + batch, self._load.value_bytes)) for key in keys]
        expected = {
            "key": np.tile(np.array(keys), self.batches),
            "n": np.repeat(np.arange(1, self.batches + 1), self._load.keys),
            "checksum": np.array(checksums),
        }
        return all(np.array_equal(answers[name].to_numpy(), column) for name, column in expected.items())


def _report_results(report: Report, load: _Load, streams: dict[str, _Stream]) -> None:
    medians: dict[str, float] = {}
    for name, stream in streams.items():
        report.check(
            f"{load.name}, {name}: {stream.batches} batches of {load.keys} keys found what those before had left",
            stream.is_right(),
        )
        medians[name] = report.timing(f"{load.name}, {name}: batch", stream.seconds[2:])
    if _SYNC not in streams:
        return
    report.ratio(f"{load.name}: {_SYNC} / {_LOCAL}", medians[_SYNC] / medians[_LOCAL])
    slowdown = report.ratio(f"{load.name}: {_ASYNC} / {_LOCAL}", medians[_ASYNC] / medians[_LOCAL])
    report.bar(
        f"{load.name}: a batch on the slow store against one on a local root", slowdown, "at most", OVER_LOCAL_AT_MOST
    )


@dataclass
class _Hang:
    """What happened while a store hung. Times are seconds since its first PUT that did not end."""

    finished_batches: list[tuple[float, float]] = field(default_factory=list)
    wait_began_s: float = 0.0
    failed_s: float = 0.0
    error: str = ""


def _measure_hang(report: Report, spark: SparkSession, options: argparse.Namespace, folder: Path) -> None:
    """Run a query with two stores, of which one hangs for a minute; then restart it, and check its answers."""
    from spark_state_ext import Backend

    hang_file = folder / "hangs"
    slow = {"implementation": _SLOW, "put_ms": options.put_ms}
    second = Backend(str(folder / "second"), storage_options={**slow, "hangs_while": str(hang_file)})
    extra = {
        "storage_options": slow,
        "backends": ["changelog", "fsspec", second],
        "commit_delay_ms_max": options.delay_ms,
        "commit_timeout_ms": options.timeout_ms,
    }
    load = _LOADS[0]
    stream = _Stream(spark, folder, _state(folder, options.buckets, extra), load, options.seed)
    for _ in range(_CALM_BATCHES):
        stream.process()
    calm_s = statistics.median(stream.seconds[1:])
    hang_file.touch()
    end_of_hang = threading.Timer(_HANGS_S, hang_file.unlink)
    end_of_hang.start()
    try:
        hang = _run_until_failure(stream, hang_file)
    finally:
        end_of_hang.join()
    delay_s, timeout_s = options.delay_ms / 1000, options.timeout_ms / 1000
    slowest_s = max((end - begin for begin, end in hang.finished_batches), default=float("nan"))
    report.details["hanging store"] = {
        "seconds of a batch before it hung": calm_s,
        "batches that went on, from and to second": hang.finished_batches,
        "the batch that waited began at second": hang.wait_began_s,
        "the query failed at second": hang.failed_s,
        "error": hang.error,
    }
    report.check("the error names the limit", f"commit_timeout_ms is {options.timeout_ms}" in hang.error)
    report.bar("hanging store: batches that went on meanwhile", len(hang.finished_batches), "at least", 3)
    report.bar("hanging store: the slowest of them", slowest_s, "at most", calm_s + LATE_S_AT_MOST, "s")
    report.bar("hanging store: commits wait from second", hang.wait_began_s, "at least", delay_s - EARLY_S_AT_MOST, "s")
    report.bar("hanging store: and no later than second", hang.wait_began_s, "at most", delay_s + LATE_S_AT_MOST, "s")
    report.bar("hanging store: the query fails at second", hang.failed_s, "at least", timeout_s - EARLY_S_AT_MOST, "s")
    report.bar("hanging store: and no later than second ", hang.failed_s, "at most", timeout_s + LATE_S_AT_MOST, "s")
    # Restart the query with an empty local folder, so that it restores its state from the store that hung.
    stream.start(_state(folder, options.buckets, {**extra, "restore_from": second.root}, "local again"))
    stream.query.processAllAvailable()
    for _ in range(_CALM_BATCHES):
        stream.process()
    report.check(f"after it failed, the query went on: {stream.batches} batches are right", stream.is_right())


def _run_until_failure(stream: _Stream, hang_file: Path) -> _Hang:
    hang = _Hang()
    began_s = time.time()
    spans: list[tuple[float, float]] = []
    while stream.query.isActive and time.time() < began_s + _HANGS_S:
        from_s = time.time()
        stream.add()
        try:
            stream.query.processAllAvailable()
        except Exception as error:
            hang.error = str(error)
        spans.append((from_s, time.time()))
    since_s = float((hang_file.parent / f"{hang_file.name}.since").read_text())
    relative = [(begin - since_s, end - since_s) for begin, end in spans]
    *hang.finished_batches, (hang.wait_began_s, hang.failed_s) = relative
    return hang
