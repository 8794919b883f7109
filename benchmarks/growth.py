"""State that grows while batches keep their size: times of batches, memory, bytes written, and the cost of snapshots.

One query runs. Keys are added until its state has the first size. Then batch after batch updates the same number of
random keys, and these batches are measured. Then keys are added up to the next size, and so on. At each size, the whole
output of one more batch is checked.
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
# Adding keys leaves compactions and snapshots to do, which are not typical of a size. These batches let them finish.
_SETTLING_BATCHES = 10
# The JVM must be warm before the first size is measured. Otherwise the later sizes would seem faster in comparison.
_WARMING_BATCHES = 20
ANONYMOUS_AT_MOST = 1.5
_FILES = 2
_LOAD_KEYS = 1_000_000
# Multiplying by this odd number makes distinct keys, in no order that a store could profit from.
_SPREAD = 0x9E3779B97F4A7C15
# Bytes of the key, the count and the sum of one row.
_ROW_BYTES = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument(
        "--sizes", default="1,10,50", metavar="N,…", help="numbers of keys in the state, in millions, ascending"
    )
    parser.add_argument(
        "--events", type=int, default=100_000, metavar="N", help="events in each timed batch, each with a different key"
    )
    parser.add_argument("--batches", type=int, default=30, metavar="N", help="timed batches at each size")
    add_buckets(parser)
    add_spark(parser, "3g")
    add_seed(parser)
    add_quick(parser, "only 0.2 and 1 million keys and 8 batches, without a warm-up of the JVM")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If answers are wrong, an option is out of range, or this system has no ``/proc`` to measure memory with.
    """
    from benchmarks.spark import session
    from benchmarks.streams import TimedStream
    from spark_state_ext import ArrowState

    if not processes.supported():
        raise BenchmarkError("this benchmark reads memory and bytes written from /proc: run it on Linux")
    sizes = [0.2, 1.0] if options.quick else [float(size) for size in options.sizes.split(",")]
    batches = 8 if options.quick else options.batches
    if sizes != sorted(set(sizes)) or batches < 5:
        raise BenchmarkError("--sizes must ascend, and --batches must be at least 5")
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
                stream.process(load.make_random(options.events)[1])
            measured[name] = _measure(report, stream, load, name, options.events, batches)
        stream.stop()
    _report_results(report, measured)
    return report


class _Load:
    """The events, and the expected answer."""

    def __init__(self, keys: int, rng: np.random.Generator) -> None:
        self.keys = (np.arange(keys, dtype=np.uint64) * np.uint64(_SPREAD)).astype(np.int64)
        self.n: npt.NDArray[np.int64] = np.zeros(keys, dtype=np.int64)
        self.total: npt.NDArray[np.float64] = np.zeros(keys)
        self.loaded = 0
        self._rng = rng

    def make_new(self, keys_max: int) -> list[pa.Table]:
        """Return a batch of new keys, so that there are at most `keys_max` keys in all."""
        indices = np.arange(self.loaded, min(keys_max, self.loaded + _LOAD_KEYS))
        self.loaded += len(indices)
        return self._batch(indices)

    def make_random(self, events: int) -> tuple[npt.NDArray[np.int64], list[pa.Table]]:
        """Return a batch of different random keys that the state already has: their indices, and the batch's tables."""
        indices = self._rng.choice(self.loaded, size=min(events, self.loaded), replace=False, shuffle=False)
        return indices, self._batch(indices)

    def is_right(self, answer: pa.Table, indices: npt.NDArray[np.int64]) -> bool:
        """Return whether the output of a batch is the count and sum of its keys."""
        order = np.argsort(self.keys[indices])
        indices = indices[order]
        answer = answer.sort_by("key")
        columns = (self.keys[indices], self.n[indices], self.total[indices])
        return len(indices) == answer.num_rows and all(
            np.array_equal(answer[name].to_numpy(), column)
            for name, column in zip(("key", "n", "total"), columns, strict=True)
        )

    def _batch(self, indices: npt.NDArray[np.int64]) -> list[pa.Table]:
        from benchmarks.streams import cut

        values = self._rng.integers(0, 8000, len(indices)) / 8
        self.n[indices] += 1
        self.total[indices] += values
        return cut(pa.table({"key": self.keys[indices], "value": values}), _FILES)


class _Measured:
    """The measurements at one size of the state."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.anonymous_bytes: list[int] = []
        """For each batch, the anonymous memory of the worker that had most."""
        self.resident_bytes = 0
        self.written_bytes = 0
        self.snapshot: list[bool] = []
        """For each batch, whether snapshots were published during the batch, or since the batch before."""


def _fill(stream: TimedStream, load: _Load, keys: int, name: str) -> None:
    while load.loaded < keys:
        stream.process(load.make_new(keys))
    print(f"{name}: loaded, the last batch of the load took {stream.seconds[-1]:.2f} s", file=sys.stderr, flush=True)


def _measure(report: Report, stream: TimedStream, load: _Load, name: str, events: int, batches: int) -> _Measured:
    result = _Measured()
    snapshots = _list_snapshots(stream)
    bytes_before = processes.written_bytes(os.getpid())
    for _ in range(batches):
        with processes.MemoryWatch() as watch:
            stream.process(load.make_random(events)[1])
        workers = [peak for peak in watch.peaks.values() if "pyspark" in peak.command and "java" not in peak.command]
        result.anonymous_bytes.append(max(peak.anonymous_bytes for peak in workers))
        result.resident_bytes = max(result.resident_bytes, *(peak.rss_bytes for peak in workers))
        result.seconds.append(stream.seconds[-1])
        snapshots_now = _list_snapshots(stream)
        result.snapshot.append(bool(snapshots_now - snapshots))
        snapshots = snapshots_now
    result.written_bytes = processes.written_bytes(os.getpid()) - bytes_before
    # These details show where the time goes: the parts of a batch as Spark sees them, and processor time by program.
    report.details[f"{name}: durationMs of each batch"] = stream.durations[-batches:]
    parts = [parts for parts in stream.cpu_parts[-batches:] if parts]
    for program in sorted({program for batch_parts in parts for program in batch_parts}):
        report.timing(
            f"{name}: processor time of {program} a batch", [batch_parts.get(program, 0.0) for batch_parts in parts]
        )
    indices, tables = load.make_random(events)
    report.check(f"{name}: count and sum of {len(indices)} keys are right", load.is_right(stream.kept(tables), indices))
    print(f"{name}: median {statistics.median(result.seconds):.3f} s", file=sys.stderr, flush=True)
    return result


def _list_snapshots(stream: TimedStream) -> set[str]:
    return {path.name for path in (stream.folder / "state").rglob("*.snapshot.arrow")}


def _report_results(report: Report, measured: dict[str, _Measured]) -> None:
    medians = {}
    changed_bytes = _ROW_BYTES * report.parameters["events"] * report.parameters["batches"]
    for name, result in measured.items():
        medians[name] = report.timing(f"{name}: batch", result.seconds)
        quantiles = np.quantile(result.seconds, [0.99, 1.0]).tolist()
        report.details[f"{name}: seconds, 99th percentile, maximum and total"] = [*quantiles, sum(result.seconds)]
        report.details[
            f"{name}: most memory of a worker, anonymous in the median batch and in any, resident in any, MB"
        ] = [
            statistics.median(result.anonymous_bytes) / 1e6,
            max(result.anonymous_bytes) / 1e6,
            result.resident_bytes / 1e6,
        ]
        report.ratio(
            f"{name}: bytes written a byte of keys and values that changed", result.written_bytes / changed_bytes
        )
        report.ratio(f"{name}: 99th percentile / median of a batch", quantiles[0] / medians[name])
        with_snapshot = [batch_s for batch_s, snapshot in zip(result.seconds, result.snapshot, strict=True) if snapshot]
        without_snapshot = [
            batch_s for batch_s, snapshot in zip(result.seconds, result.snapshot, strict=True) if not snapshot
        ]
        report.details[f"{name}: batches in which snapshots were published"] = len(with_snapshot)
        if with_snapshot and without_snapshot:
            ratio = statistics.median(with_snapshot) / statistics.median(without_snapshot)
            report.ratio(f"{name}: batch in which a snapshot was published / others", ratio)
    first, *_, last = measured
    growth = medians[last] / medians[first]
    report.bar(f"median batch, {last} against {first}", growth, "at most", GROWTH_AT_MOST, "times")
    # The bar is on the median batch. The maximum comes from compactions and snapshots, whose memory is bounded.
    anonymous = {
        name: (statistics.median(result.anonymous_bytes), max(result.anonymous_bytes))
        for name, result in measured.items()
    }
    growth, peak_growth = (after / before for after, before in zip(anonymous[last], anonymous[first], strict=True))
    report.bar(f"anonymous memory of a worker, {last} against {first}", growth, "at most", ANONYMOUS_AT_MOST, "times")
    report.ratio(f"most anonymous memory of a worker in any batch, {last} against {first}", peak_growth)
