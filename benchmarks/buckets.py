"""What buckets cost: a batch, and the first batch of new workers, against the number of buckets.

One query for each number of buckets and each size of state. All keys come in one batch, then batches of so many random
keys, and these are timed: every point gets the same rows. Then the query is stopped, its Python workers are ended, and
it starts again: once with its local stores there, once without, so that all buckets are restored. A last batch, whose
output is compared with plain NumPy, shows that the state is right after all that. Spark's `applyInPandasWithState` gets
the same rows of the small state, in the same session on as many shuffle partitions.

What one more bucket adds is the slope of a line through a curve's points, fitted to their relative errors, on one core.
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
# The JVM goes on compiling for some batches, whatever it is given.
_WARMING_BATCHES = 10
# Daemons wait for the workers that ended.
_END_S_MAX = 60
_SPREAD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class _Effort:
    """How often a point is measured: one with many buckets takes long, and differs less from time to time."""

    batches: int
    restarts: int


@dataclass
class _Point:
    """Seconds of one number of buckets."""

    batches: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    counts = "1,4,16,64,256,1024,4096"
    parser.add_argument("--counts", default=counts, metavar="N,…", help="numbers of buckets, ascending")
    parser.add_argument(
        "--large-counts", default=counts.rpartition(",")[0], metavar="N,…", help="the same with the larger state"
    )
    parser.add_argument("--events", type=int, default=10_000, metavar="N", help="events a timed batch, each its key's")
    add_spark(parser, "3g")
    add_seed(parser)
    add_quick(parser, "1 and 16 buckets, a tenth of the keys and events and less")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When answers are wrong, or workers cannot be found here.
    """
    from benchmarks.spark import session

    if not processes.supported():
        raise BenchmarkError("this benchmark needs Linux's /proc, to find Spark's Python workers")
    small, large = _QUICK_KEYS if options.quick else _KEYS
    counts = {small: _counts_of(options.counts), large: _counts_of(options.large_counts)}
    if options.quick:
        counts = dict.fromkeys(counts, _QUICK_COUNTS)
    events = options.events // 10 if options.quick else options.events
    if not 1 <= events <= small:
        raise BenchmarkError(f"--events must be from 1 to {small:,}, as no key has two in a batch")
    parameters = {"counts by keys": {f"{keys:,}": counted for keys, counted in counts.items()}, "events": events}
    report = Report("buckets", parameters | {name: getattr(options, name) for name in ("cores", "memory", "seed")})
    measured: dict[int, dict[int, _Point]] = {small: {}, large: {}}
    with session("buckets", options.cores, options.memory, work, {}) as spark:
        query = partial(_Query, spark, options.seed)
        _warm_up(query(work / "warm-up", small, 4), events, 1 if options.quick else _WARMING_BATCHES)
        for keys, counted in counts.items():
            for buckets in counted:
                one = query(work / f"{keys}-{buckets}", keys, buckets)
                name, effort = point_name(keys, buckets), _effort(buckets, options.quick)
                measured[keys][buckets] = _measure(report, one, name, events, effort)
        name = f"{small:,} keys: {SPARKS}"
        theirs = _measure_sparks(report, query(work / "sparks", small, None), name, events, 1 if options.quick else 4)
    for keys, points in measured.items():
        _note(report, keys, points, options.cores)
    for buckets, point in measured[small].items():
        ratio = theirs / statistics.median(point.batches)
        report.ratio(f"{point_name(small, buckets)}: {SPARKS} / Arrow state, time of a batch", ratio)
    return report


def point_name(keys: int, buckets: int) -> str:
    """How a point's timings begin."""
    return f"{keys:,} keys: {buckets:,} bucket{'s' if buckets > 1 else ''}"


def slope_name(keys: int, what: str) -> str:
    """Under which name what one more bucket adds is among the ratios."""
    return f"{keys:,} keys: one more bucket adds to the {what}, ms of a core"


def _counts_of(text: str) -> tuple[int, ...]:
    counts = tuple(int(it) for it in text.split(",") if it.strip().isdecimal())
    if len(counts) < 2 or counts[0] < 1 or list(counts) != sorted(set(counts)) or len(counts) != text.count(",") + 1:
        raise BenchmarkError(f"--counts and --large-counts each name two numbers or more, ascending, not {text!r}")
    return counts


def _effort(buckets: int, quick: bool) -> _Effort:
    if quick:
        return _Effort(3, 1)
    return _Effort(10, 2) if buckets <= 64 else _Effort(6, 2) if buckets <= 256 else _Effort(3, 1)


class _Query:
    """One query through its starts, its events, and the right answer.

    Parameters
    ----------
    spark
        The session.
    seed
        Of its events: each query with as many keys gets the same.
    folder
        For all of its files.
    keys
        How many.
    buckets
        Of ArrowState; None: Spark's own operator.
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

    def load(self) -> float:
        """A batch of all keys."""
        return self._process(np.arange(len(self._keys)))

    def some(self, events: int) -> float:
        """A batch of random keys, no key twice."""
        return self._process(self._chosen(events))

    def is_right(self, events: int) -> bool:
        """Whether one more batch gives the count and sum of its keys."""
        chosen = self._chosen(events)
        answer = self._stream.kept(self._tables(chosen)).sort_by("key")
        chosen = chosen[np.argsort(self._keys[chosen])]
        right = {"key": self._keys[chosen], "n": self._n[chosen], "total": self._total[chosen]}
        return all(np.array_equal(answer[name].to_numpy(), column) for name, column in right.items())

    def start_again(self) -> None:
        """Stop, end the Python workers, and start on the same checkpoint."""
        self._stream.stop()
        _end_workers()
        self._stream = self._start()

    def begin_again_without_stores(self) -> None:
        """The same, with the local stores removed meanwhile."""
        self._stream.stop()
        _end_workers()
        shutil.rmtree(self.local_dir)
        self._stream = self._start()

    def end(self) -> None:
        """Stop, and remove the local stores; other files may still be written beside batches."""
        self._stream.stop()
        if self.local_dir.exists():
            _end_workers()
            shutil.rmtree(self.local_dir)

    def _start(self) -> TimedStream:
        from benchmarks.streams import TimedStream

        self._starts += 1
        # The files of each start in a folder of their own: to Spark's file source these are new files.
        name, checkpoint = f"start-{self._starts}", self._folder / "checkpoint"
        return TimedStream(self._spark, name, INPUT, self._folder / name, self._plan, checkpoint=checkpoint)

    def _plan(self, rows: DataFrame, _: Path) -> DataFrame:
        from spark_state_ext import ArrowState

        if self._buckets is None:
            return rows.groupBy("key").applyInPandasWithState(count_and_sum, OUTPUT, STATE, "update", "NoTimeout")
        root, local = str(self._folder / "state"), str(self.local_dir)
        state = ArrowState(root, "count", buckets=self._buckets, local_dir=local)
        return state.apply_in_arrow_with_state(rows, "key", count_and_sum_in_arrow, OUTPUT, STATE)

    def _chosen(self, events: int) -> npt.NDArray[np.int64]:
        return self._rng.choice(len(self._keys), size=events, replace=False, shuffle=False)

    def _process(self, chosen: npt.NDArray[np.int64]) -> float:
        self._stream.process(self._tables(chosen))
        return self._stream.seconds[-1]

    def _tables(self, chosen: npt.NDArray[np.int64]) -> list[pa.Table]:
        from benchmarks.streams import cut

        values = self._rng.integers(0, 8000, len(chosen)) / 8
        self._n[chosen] += 1
        self._total[chosen] += values
        return cut(pa.table({"key": self._keys[chosen], "value": values}), _FILES)


def _warm_up(query: _Query, events: int, batches: int) -> None:
    query.load()
    for _ in range(batches):
        query.some(events)
    query.end()


def _measure(report: Report, query: _Query, name: str, events: int, effort: _Effort) -> _Point:
    found = _Point()
    report.details[f"{name}: seconds of the batch with all keys"] = query.load()
    for _ in range(_SETTLING_BATCHES):
        query.some(events)
    found.batches = [query.some(events) for _ in range(effort.batches)]
    for again, seconds in ((query.start_again, found.warm), (query.begin_again_without_stores, found.lost)):
        for _ in range(effort.restarts):
            again()
            seconds.append(query.some(events))
    report.check(f"{name}: count and sum of {events:,} keys are right after restarts", query.is_right(events))
    query.end()
    for what, times in ((BATCH, found.batches), (WARM, found.warm), (LOST, found.lost)):
        report.timing(f"{name}: {what}", times)
    medians = (f"{statistics.median(times):.2f}" for times in (found.batches, found.warm, found.lost))
    print(
        f"{name}: batch, first batch, first batch without stores: {', '.join(medians)} s", file=sys.stderr, flush=True
    )
    return found


def _measure_sparks(report: Report, query: _Query, name: str, events: int, batches: int) -> float:
    """The median of the same batches in Spark's own operator."""
    query.load()
    query.some(events)
    seconds = [query.some(events) for _ in range(batches)]
    report.check(f"{name}: count and sum of {events:,} keys are right", query.is_right(events))
    query.end()
    median = report.timing(f"{name}: {BATCH}", seconds)
    print(f"{name}: {median:.2f} s", file=sys.stderr, flush=True)
    return median


def _note(report: Report, keys: int, points: dict[int, _Point], cores: int) -> None:
    curves: dict[str, Callable[[_Point], list[float]]] = {
        BATCH: lambda point: point.batches,
        WARM: lambda point: point.warm,
        LOST: lambda point: point.lost,
    }
    for what, times in curves.items():
        medians = {buckets: statistics.median(times(point)) for buckets, point in points.items()}
        report.ratio(slope_name(keys, what), slope_ms(medians, cores))


def slope_ms(seconds: dict[int, float], cores: int) -> float:
    """What one more bucket adds.

    Parameters
    ----------
    seconds
        By the number of buckets.
    cores
        How many work on buckets side by side.

    Returns
    -------
    float
        Milliseconds of one core.
    """
    counts, times = np.array(list(seconds)), np.array(list(seconds.values()))
    # Weights against the relative error: else the point with most buckets would decide alone.
    slope, _ = np.polyfit(counts, times, 1, w=1 / times)
    return 1000 * cores * float(slope)


def _end_workers() -> None:
    """End the Python workers that Spark's daemons forked; Spark has the daemons fork others."""
    daemons = [pid for pid in processes.descendants(os.getpid()) if b"pyspark.daemon" in _command(pid)]
    workers = {worker for daemon in daemons for worker in processes.descendants(daemon)}
    if not workers:
        raise BenchmarkError("no Python worker of Spark was found")
    for worker in workers:
        try:
            os.kill(worker, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has ended
    until_s = time.monotonic() + _END_S_MAX
    while workers & set(processes.descendants(os.getpid())):
        if time.monotonic() > until_s:
            raise BenchmarkError(f"Python workers did not end within {_END_S_MAX} s")
        time.sleep(0.01)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""  # it has ended
