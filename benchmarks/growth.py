"""State that grows while batches stay the same: time of a batch, memory, bytes written, and snapshots beside batches.

One query. Keys are added until there are so many; then the same number of random keys is updated in batch after batch,
and those are timed. Then more keys are added, and so on. Every answer of the last batch of each size is checked.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks import processes
from benchmarks.counting import INPUT, OUTPUT, STATE, count_and_sum_in_arrow
from benchmarks.options import add_buckets, add_quick, add_seed, add_spark
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from benchmarks.streams import TimedStream

__all__ = ["add_arguments", "run"]

GROWTH_AT_MOST = 1.5
# Merging what the load left, and its snapshots, are not a size's ordinary business; some batches let it settle.
_SETTLING_BATCHES = 10
# Before the first size is measured the JVM has to be warm, or the sizes after it would seem the faster ones.
_WARMING_BATCHES = 20
ANONYMOUS_AT_MOST = 1.5
_FILES = 2
_LOAD_KEYS = 1_000_000
# An odd number: keys are distinct, and in no order that a store could profit from.
_SPREAD = 0x9E3779B97F4A7C15
_ROW_BYTES = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--sizes", default="1,10,50", metavar="N,…", help="numbers of keys to measure at, in millions")
    parser.add_argument("--events", type=int, default=100_000, metavar="N", help="events a timed batch, each its key's")
    parser.add_argument("--batches", type=int, default=30, metavar="N", help="timed batches at each size")
    add_buckets(parser)
    add_spark(parser, "3g")
    add_seed(parser)
    add_quick(parser, "0.2 and 1 million keys, 8 batches, and no others to warm the JVM")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When answers are wrong, or memory cannot be measured here.
    """
    from benchmarks.spark import session
    from benchmarks.streams import TimedStream
    from spark_state_ext import ArrowState

    if not processes.supported():
        raise BenchmarkError("this benchmark needs Linux's /proc, to measure memory and bytes written")
    sizes = [0.2, 1.0] if options.quick else [float(size) for size in options.sizes.split(",")]
    batches = 8 if options.quick else options.batches
    if sizes != sorted(set(sizes)) or batches < 5:
        raise BenchmarkError("--sizes must ascend, and --batches be at least 5")
    parameters = {name: getattr(options, name) for name in ("events", "buckets", "cores", "memory", "seed")}
    report = Report("growth", {"millions of keys": sizes, "batches": batches, **parameters})

    def plan(rows: DataFrame, folder: Path) -> DataFrame:
        state = ArrowState(str(folder / "state"), "count", buckets=options.buckets, local_dir=str(folder / "local"))
        return state.apply_in_arrow_with_state(rows, "key", count_and_sum_in_arrow, OUTPUT, STATE)

    measured: dict[str, _Measured] = {}
    with session("growth", options.cores, options.memory, work, {}) as spark:
        stream = TimedStream(spark, "count", INPUT, work / "count", plan)
        load = _Load(int(sizes[-1] * 1e6), np.random.default_rng(options.seed))
        for size in sizes:
            name = f"{size:g} million keys"
            _fill(stream, load, int(size * 1e6), name)
            warming = _WARMING_BATCHES if size == sizes[0] and not options.quick else 0
            for _ in range(_SETTLING_BATCHES + warming):
                stream.process(load.some(options.events)[1])
            measured[name] = _measure(report, stream, load, name, options.events, batches)
        stream.stop()
    _judge(report, measured)
    return report


class _Load:
    """The events, and the answer."""

    def __init__(self, keys: int, rng: np.random.Generator) -> None:
        self.keys = (np.arange(keys, dtype=np.uint64) * np.uint64(_SPREAD)).astype(np.int64)
        self.n: npt.NDArray[np.int64] = np.zeros(keys, dtype=np.int64)
        self.total: npt.NDArray[np.float64] = np.zeros(keys)
        self.loaded = 0
        self._rng = rng

    def more(self, upto: int) -> list[pa.Table]:
        """A batch of keys that are new, up to so many in all."""
        chosen = np.arange(self.loaded, min(upto, self.loaded + _LOAD_KEYS))
        self.loaded += len(chosen)
        return self._batch(chosen)

    def some(self, events: int) -> tuple[npt.NDArray[np.int64], list[pa.Table]]:
        """A batch of random keys that are there, no key twice; and which."""
        chosen = self._rng.choice(self.loaded, size=min(events, self.loaded), replace=False, shuffle=False)
        return chosen, self._batch(chosen)

    def is_right(self, answer: pa.Table, chosen: npt.NDArray[np.int64]) -> bool:
        """Whether the output of a batch is the count and sum of its keys."""
        order = np.argsort(self.keys[chosen])
        chosen = chosen[order]
        answer = answer.sort_by("key")
        columns = (self.keys[chosen], self.n[chosen], self.total[chosen])
        return len(chosen) == answer.num_rows and all(
            np.array_equal(answer[name].to_numpy(), column)
            for name, column in zip(("key", "n", "total"), columns, strict=True)
        )

    def _batch(self, chosen: npt.NDArray[np.int64]) -> list[pa.Table]:
        from benchmarks.streams import cut

        values = self._rng.integers(0, 8000, len(chosen)) / 8
        self.n[chosen] += 1
        self.total[chosen] += values
        return cut(pa.table({"key": self.keys[chosen], "value": values}), _FILES)


class _Measured:
    """What was measured at one size."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.anonymous_bytes: list[int] = []
        """For each batch the most that any worker had."""
        self.resident_bytes = 0
        self.written_bytes = 0
        self.snapshot: list[bool] = []
        """For each batch whether snapshots were published while it ran, or since the batch before."""


def _fill(stream: TimedStream, load: _Load, keys: int, name: str) -> None:
    while load.loaded < keys:
        stream.process(load.more(keys))
    print(f"{name}: loaded, the last batch of the load took {stream.seconds[-1]:.2f} s", file=sys.stderr, flush=True)


def _measure(report: Report, stream: TimedStream, load: _Load, name: str, events: int, batches: int) -> _Measured:
    found = _Measured()
    snapshots = _snapshots(stream)
    written = processes.written_bytes(os.getpid())
    for _ in range(batches):
        with processes.MemoryWatch() as watch:
            stream.process(load.some(events)[1])
        workers = [peak for peak in watch.peaks.values() if "pyspark" in peak.command and "java" not in peak.command]
        found.anonymous_bytes.append(max(peak.anonymous_bytes for peak in workers))
        found.resident_bytes = max(found.resident_bytes, *(peak.rss_bytes for peak in workers))
        found.seconds.append(stream.seconds[-1])
        now = _snapshots(stream)
        found.snapshot.append(bool(now - snapshots))
        snapshots = now
    found.written_bytes = processes.written_bytes(os.getpid()) - written
    # Where the time goes: Spark's own parts of a batch, and processor time by program.
    report.details[f"{name}: durationMs of each batch"] = stream.durations[-batches:]
    parts = [parts for parts in stream.cpu_parts[-batches:] if parts]
    for program in sorted({program for one in parts for program in one}):
        report.timing(f"{name}: processor time of {program} a batch", [one.get(program, 0.0) for one in parts])
    chosen, tables = load.some(events)
    report.check(f"{name}: count and sum of {len(chosen)} keys are right", load.is_right(stream.kept(tables), chosen))
    print(f"{name}: median {statistics.median(found.seconds):.3f} s", file=sys.stderr, flush=True)
    return found


def _snapshots(stream: TimedStream) -> set[str]:
    return {path.name for path in (stream.folder / "state").rglob("*.snapshot.arrow")}


def _judge(report: Report, measured: dict[str, _Measured]) -> None:
    medians = {}
    changed = _ROW_BYTES * report.parameters["events"] * report.parameters["batches"]
    for name, found in measured.items():
        medians[name] = report.timing(f"{name}: batch", found.seconds)
        quantiles = np.quantile(found.seconds, [0.99, 1.0]).tolist()
        report.details[f"{name}: seconds, 99th percentile, maximum and total"] = [*quantiles, sum(found.seconds)]
        report.details[
            f"{name}: most memory of a worker, anonymous in the median batch and in any, resident in any, MB"
        ] = [
            statistics.median(found.anonymous_bytes) / 1e6,
            max(found.anonymous_bytes) / 1e6,
            found.resident_bytes / 1e6,
        ]
        report.ratio(f"{name}: bytes written a byte of keys and values that changed", found.written_bytes / changed)
        report.ratio(f"{name}: 99th percentile / median of a batch", quantiles[0] / medians[name])
        beside = [s for s, snapshot in zip(found.seconds, found.snapshot, strict=True) if snapshot]
        without = [s for s, snapshot in zip(found.seconds, found.snapshot, strict=True) if not snapshot]
        report.details[f"{name}: batches in which snapshots were published"] = len(beside)
        if beside and without:
            ratio = statistics.median(beside) / statistics.median(without)
            report.ratio(f"{name}: batch in which a snapshot was published / others", ratio)
    first, *_, last = measured
    growth = medians[last] / medians[first]
    report.bar(f"median batch, {last} against {first}", growth, "at most", GROWTH_AT_MOST, "times")
    # Of the median batch; the most of any is that of a merge or a snapshot, whose size is bounded.
    anonymous = {
        name: (statistics.median(found.anonymous_bytes), max(found.anonymous_bytes)) for name, found in measured.items()
    }
    growth, most = (after / before for after, before in zip(anonymous[last], anonymous[first], strict=True))
    report.bar(f"anonymous memory of a worker, {last} against {first}", growth, "at most", ANONYMOUS_AT_MOST, "times")
    report.ratio(f"most anonymous memory of a worker in any batch, {last} against {first}", most)
