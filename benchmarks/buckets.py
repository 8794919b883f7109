"""The cost of buckets: times of a batch, and of the first batch of new workers, by the number of buckets.

One query runs for each number of buckets and each size of state. Its first batch has all keys. The timed batches after
it have a fixed number of random keys; all queries with the same number of keys get the same sequence of batches. Then
the query is stopped, its Python workers are killed, and it is started again: first with its local stores, then without
them, so that all buckets are restored. The output of a last batch is compared with plain NumPy, to check the state
after these restarts. Spark's `applyInPandasWithState` gets the batches of the small state, in the same session and with
the same number of shuffle partitions.

The cost of one more bucket is the slope of a line that is fitted to the times with the least relative error. It is
given in milliseconds of one core.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks import processes
from benchmarks.counting import INPUT, OUTPUT, STATE, count_and_sum, count_and_sum_in_arrow
from benchmarks.options import add_quick, add_seed, add_spark
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from benchmarks.streams import TimedStream

__all__ = ["BATCH", "LOST", "SPARKS", "WARM", "add_arguments", "point_name", "run", "slope_ms", "slope_name"]

_KEYS, _QUICK_KEYS = (50_000, 1_000_000), (5_000, 50_000)
BATCH, WARM, LOST = "batch", "first batch of new workers", "first batch, local stores lost"
SPARKS = "Spark's own applyInPandasWithState"
_QUICK_COUNTS = (1, 16)
_FILES = 2
_SETTLING_BATCHES = 2
# The JVM keeps compiling during the first batches, whatever their size.
_WARMING_BATCHES = 10
# A killed worker remains a process until Spark's daemon has waited for it.
_END_S_MAX = 60
# Multiplying by this odd number makes distinct keys, in no order that a store could profit from.
_SPREAD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class _Effort:
    """How often a number of buckets is measured: rarely if there are many, as their times are long and vary less."""

    batches: int
    restarts: int


@dataclass
class _Point:
    """The times measured with one number of buckets, in seconds."""

    batches: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    counts = "1,4,16,64,256,1024,4096"
    parser.add_argument(
        "--counts", default=counts, metavar="N,…", help="numbers of buckets for the smaller state, ascending"
    )
    parser.add_argument(
        "--large-counts",
        default=counts.rpartition(",")[0],
        metavar="N,…",
        help="numbers of buckets for the larger state, ascending",
    )
    parser.add_argument(
        "--events", type=int, default=10_000, metavar="N", help="events in each timed batch, each with a different key"
    )
    add_spark(parser, "3g")
    add_seed(parser)
    add_quick(parser, "only 1 and 16 buckets, a tenth of the events, and fewer keys and batches")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If answers are wrong, an option is out of range, or this system has no ``/proc`` to find Python workers in.
    """
    from benchmarks.spark import session

    if not processes.supported():
        raise BenchmarkError("this benchmark finds Spark's Python workers in /proc: run it on Linux")
    small, large = _QUICK_KEYS if options.quick else _KEYS
    counts = {small: _parse_counts(options.counts), large: _parse_counts(options.large_counts)}
    if options.quick:
        counts = dict.fromkeys(counts, _QUICK_COUNTS)
    events = options.events // 10 if options.quick else options.events
    if not 1 <= events <= small:
        raise BenchmarkError(f"--events must be from 1 to {small:,}, because each event of a batch has a different key")
    parameters = {
        "counts by keys": {f"{keys:,}": bucket_counts for keys, bucket_counts in counts.items()},
        "events": events,
    }
    report = Report("buckets", parameters | {name: getattr(options, name) for name in ("cores", "memory", "seed")})
    measured: dict[int, dict[int, _Point]] = {small: {}, large: {}}
    with session("buckets", options.cores, options.memory, work, {}) as spark:
        query = partial(_Query, spark, options.seed)
        _warm_up(query(work / "warm-up", small, 4), events, 1 if options.quick else _WARMING_BATCHES)
        for keys, bucket_counts in counts.items():
            for buckets in bucket_counts:
                point_query = query(work / f"{keys}-{buckets}", keys, buckets)
                name, effort = point_name(keys, buckets), _choose_effort(buckets, options.quick)
                measured[keys][buckets] = _measure(report, point_query, name, events, effort)
        name = f"{small:,} keys: {SPARKS}"
        sparks_s = _measure_sparks(report, query(work / "sparks", small, None), name, events, 1 if options.quick else 4)
    for keys, points in measured.items():
        _report_slopes(report, keys, points, options.cores)
    for buckets, point in measured[small].items():
        ratio = sparks_s / statistics.median(point.batches)
        report.ratio(f"{point_name(small, buckets)}: {SPARKS} / Arrow state, time of a batch", ratio)
    return report


def point_name(keys: int, buckets: int) -> str:
    """Return how the names of the timings of a number of keys and buckets begin."""
    return f"{keys:,} keys: {buckets:,} bucket{'s' if buckets > 1 else ''}"


def slope_name(keys: int, curve: str) -> str:
    """Return the name of the ratio that says what one more bucket costs."""
    return f"{keys:,} keys: one more bucket adds to the {curve}, ms of a core"


def _parse_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(",") if part.strip().isdecimal())
    if len(counts) < 2 or counts[0] < 1 or list(counts) != sorted(set(counts)) or len(counts) != text.count(",") + 1:
        raise BenchmarkError(f"--counts and --large-counts must each name two numbers or more, ascending, not {text!r}")
    return counts


def _choose_effort(buckets: int, quick: bool) -> _Effort:
    if quick:
        return _Effort(3, 1)
    return _Effort(10, 2) if buckets <= 64 else _Effort(6, 2) if buckets <= 256 else _Effort(3, 1)


class _Query:
    """One query with its restarts, its events, and the expected answer.

    Parameters
    ----------
    spark
        The session.
    seed
        Seed of the events. With the same seed, queries with the same number of keys get the same events.
    folder
        Folder for all files of the query.
    keys
        Number of keys.
    buckets
        Number of buckets of `ArrowState`, or None for Spark's own operator.
    """

    def __init__(self, spark: SparkSession, seed: int, folder: Path, keys: int, buckets: int | None) -> None:
        self._spark = spark
        self._rng = np.random.default_rng(seed)
        self._folder = folder
        self._buckets = buckets
        self._starts = 0
        self._keys = (np.arange(keys, dtype=np.uint64) * np.uint64(_SPREAD)).astype(np.int64)
        self._n: npt.NDArray[np.int64] = np.zeros(keys, dtype=np.int64)
        self._total: npt.NDArray[np.float64] = np.zeros(keys)
        self._stream: TimedStream = self._start()

    @property
    def local_dir(self) -> Path:
        """Folder of the local stores."""
        return self._folder / "local"

    def process_all(self) -> float:
        """Process a batch of all keys; return its seconds."""
        return self._process(np.arange(len(self._keys)))

    def process_random(self, events: int) -> float:
        """Process a batch of distinct random keys; return its seconds."""
        return self._process(self._choose_keys(events))

    def check_next_batch(self, events: int) -> bool:
        """Process one more batch; return whether its output is the count and sum of its keys."""
        indices = self._choose_keys(events)
        answer = self._stream.kept(self._make_tables(indices)).sort_by("key")
        indices = indices[np.argsort(self._keys[indices])]
        expected = {"key": self._keys[indices], "n": self._n[indices], "total": self._total[indices]}
        return all(np.array_equal(answer[name].to_numpy(), column) for name, column in expected.items())

    def restart(self) -> None:
        """Stop the query, kill the Python workers, and start it from the same checkpoint."""
        self._stream.stop()
        _kill_workers()
        self._stream = self._start()

    def restart_without_stores(self) -> None:
        """Do the same as `restart`, but remove the local stores in between."""
        self._stream.stop()
        _kill_workers()
        shutil.rmtree(self.local_dir)
        self._stream = self._start()

    def end(self) -> None:
        """Stop the query and remove its local stores; other files may still be written in the background."""
        self._stream.stop()
        if self.local_dir.exists():
            _kill_workers()
            shutil.rmtree(self.local_dir)

    def _start(self) -> TimedStream:
        from benchmarks.streams import TimedStream

        self._starts += 1
        # Each start has its own input folder, so that Spark's file source takes its files for new ones.
        name, checkpoint = f"start-{self._starts}", self._folder / "checkpoint"
        return TimedStream(self._spark, name, INPUT, self._folder / name, self._plan, checkpoint=checkpoint)

    def _plan(self, rows: DataFrame, _: Path) -> DataFrame:
        from spark_state_ext import ArrowState

        if self._buckets is None:
            return rows.groupBy("key").applyInPandasWithState(count_and_sum, OUTPUT, STATE, "update", "NoTimeout")
        root, local = str(self._folder / "state"), str(self.local_dir)
        state = ArrowState(root, "count", buckets=self._buckets, local_dir=local)
        return state.apply_in_arrow_with_state(rows, "key", count_and_sum_in_arrow, OUTPUT, STATE)

    def _choose_keys(self, events: int) -> npt.NDArray[np.int64]:
        return self._rng.choice(len(self._keys), size=events, replace=False, shuffle=False)

    def _process(self, indices: npt.NDArray[np.int64]) -> float:
        self._stream.process(self._make_tables(indices))
        return self._stream.seconds[-1]

    def _make_tables(self, indices: npt.NDArray[np.int64]) -> list[pa.Table]:
        from benchmarks.streams import cut

        values = self._rng.integers(0, 8000, len(indices)) / 8
        self._n[indices] += 1
        self._total[indices] += values
        return cut(pa.table({"key": self._keys[indices], "value": values}), _FILES)


def _warm_up(query: _Query, events: int, batches: int) -> None:
    query.process_all()
    for _ in range(batches):
        query.process_random(events)
    query.end()


def _measure(report: Report, query: _Query, name: str, events: int, effort: _Effort) -> _Point:
    result = _Point()
    report.details[f"{name}: seconds of the batch with all keys"] = query.process_all()
    for _ in range(_SETTLING_BATCHES):
        query.process_random(events)
    result.batches = [query.process_random(events) for _ in range(effort.batches)]
    for restart_query, seconds in ((query.restart, result.warm), (query.restart_without_stores, result.lost)):
        for _ in range(effort.restarts):
            restart_query()
            seconds.append(query.process_random(events))
    report.check(f"{name}: count and sum of {events:,} keys are right after restarts", query.check_next_batch(events))
    query.end()
    for curve, times in ((BATCH, result.batches), (WARM, result.warm), (LOST, result.lost)):
        report.timing(f"{name}: {curve}", times)
    medians = (f"{statistics.median(times):.2f}" for times in (result.batches, result.warm, result.lost))
    print(
        f"{name}: batch, first batch, first batch without stores: {', '.join(medians)} s", file=sys.stderr, flush=True
    )
    return result


def _measure_sparks(report: Report, query: _Query, name: str, events: int, batches: int) -> float:
    """Return the median seconds of the same batches in Spark's own operator."""
    query.process_all()
    query.process_random(events)
    seconds = [query.process_random(events) for _ in range(batches)]
    report.check(f"{name}: count and sum of {events:,} keys are right", query.check_next_batch(events))
    query.end()
    median = report.timing(f"{name}: {BATCH}", seconds)
    print(f"{name}: {median:.2f} s", file=sys.stderr, flush=True)
    return median


def _report_slopes(report: Report, keys: int, points: dict[int, _Point], cores: int) -> None:
    curves: dict[str, Callable[[_Point], list[float]]] = {
        BATCH: lambda point: point.batches,
        WARM: lambda point: point.warm,
        LOST: lambda point: point.lost,
    }
    for curve, times in curves.items():
        medians = {buckets: statistics.median(times(point)) for buckets, point in points.items()}
        report.ratio(slope_name(keys, curve), slope_ms(medians, cores))


def slope_ms(seconds: dict[int, float], cores: int) -> float:
    """Return the time that one more bucket adds.

    Parameters
    ----------
    seconds
        Seconds by number of buckets.
    cores
        Number of cores that work on buckets at the same time.

    Returns
    -------
    float
        Milliseconds of one core.
    """
    counts, times = np.array(list(seconds)), np.array(list(seconds.values()))
    # The weights minimize the relative error: otherwise the point with the most buckets would decide alone.
    slope, _ = np.polyfit(counts, times, 1, w=1 / times)
    return 1000 * cores * float(slope)


def _kill_workers() -> None:
    """Kill the Python workers that Spark's daemons forked; the daemons fork new ones when Spark needs them."""
    daemons = [pid for pid in processes.descendants(os.getpid()) if b"pyspark.daemon" in _read_command(pid)]
    workers = {worker for daemon in daemons for worker in processes.descendants(daemon)}
    if not workers:
        raise BenchmarkError("Spark has no Python worker that could be killed")
    for worker in workers:
        try:
            os.kill(worker, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has ended
    until_s = time.monotonic() + _END_S_MAX
    while workers & set(processes.descendants(os.getpid())):
        if time.monotonic() > until_s:
            raise BenchmarkError(f"killed Python workers still existed after {_END_S_MAX} s")
        time.sleep(0.01)


def _read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""  # it has ended
