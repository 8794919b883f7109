"""Measure how long native savepoints of running queries take: a small and a large state should take the same time.

All files are on a local disk. *Our own work* is the time that this package's code takes: in each task, from its first
step to its last without the waits for Spark's rows, added up over all tasks; and the processor time of the thread that
called `take_savepoint`. The rest of the time is Spark's, for planning and starting its jobs.

Inodes show whether bytes were copied: a linked file has the inode of the query's own file. For comparison, `cp` copies
the same files. At the end another query starts from the last savepoint, under no-claim.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.options import add_buckets, add_quick, add_seed, add_spark
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    from benchmarks.streams import TimedStream
    from spark_state_ext import ArrowState

__all__ = ["add_arguments", "run", "told_apart", "touch"]

OWN_AT_MOST_S, FLAT_AT_MOST = 2.0, 1.2
_PAD_BYTES = 1000
_INPUT, _OUTPUT = "key bigint", "key bigint, n bigint"
_STATE = "number bigint, n bigint, pad binary"
# Each batch changes this part of the keys, so that deltas are too large to be inline in Spark's state, and are files.
_TOUCHED = 0.1
_BATCHES = 3
_FILES = 4
_QUICK_GB, _QUICK_REPEATS = [0.05, 0.1], 3
# The factor is odd, so different numbers give different products modulo 2 ** 64.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to a parser."""
    parser.add_argument(
        "--gb", type=float, nargs="+", default=[0.1, 1.0], metavar="N", help="sizes of the state in GB (10^9 bytes)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=9,
        metavar="N",
        help="timed savepoints of each state, after one that is not timed",
    )
    add_buckets(parser, 8)
    add_spark(parser, "4g")
    add_seed(parser, "the rows")
    add_quick(parser, "use small states and few savepoints")


def touch(batch: Any) -> pa.Table:
    """Count the events of each key, and keep the pad in the state."""
    new = batch.aggregate([([], "count_all")])
    n = pc.add(pc.fill_null(batch.state["n"], 0), new["count_all"])
    batch.update({"number": batch.state["number"], "n": n, "pad": batch.state["pad"]})
    return batch.keys.append_column("n", n)


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an option is invalid, or a savepoint or the query that started from it has a wrong state.
    """
    from benchmarks.spark import session

    sizes, repeats = (_QUICK_GB, _QUICK_REPEATS) if options.quick else (sorted(options.gb), options.repeats)
    if min(*sizes, repeats) <= 0 or len(sizes) < 2:
        raise BenchmarkError("give --gb two sizes or more, all above 0, and --repeats of at least 1")
    names = ("buckets", "cores", "memory", "seed")
    report = Report("savepoint", {"gb": sizes, "repeats": repeats, **{item: getattr(options, item) for item in names}})
    with session("savepoint", options.cores, options.memory, work / "spark", {}) as spark:
        jobs = [_Job(report, spark, gb, options.buckets, options.seed, work / f"{gb:g}") for gb in sizes]
        for number in range(repeats + 1):
            for job in jobs if number % 2 else reversed(jobs):
                job.take(is_timed=number > 0)
            progress = ", ".join(f"{job.name} {job.own_s[-1]:.3f} of {job.whole_s[-1]:.2f} s" for job in jobs if number)
            print(f"savepoint {number}: {progress}", file=sys.stderr, flush=True)
        for job in jobs:
            job.judge()
            job.start_another()
            job.stop()
    first, last = (job.medians() for job in (jobs[0], jobs[-1]))
    for label, small, large in zip(("our own work", "all of it"), first, last, strict=True):
        ratio = report.ratio(f"{label}: {jobs[-1].name} / {jobs[0].name}", large / small)
        report.bar(f"{label}, {jobs[-1].name} against {jobs[0].name}", ratio, "at most", FLAT_AT_MOST, "times")
    return report


class _Job:
    """A running query with a state of one size. It started from a savepoint that was made of a table."""

    def __init__(self, report: Report, spark: Any, gb: float, buckets: int, seed: int, folder: Path) -> None:
        from spark_state_ext import Savepoint, write_savepoint

        self.name = f"{gb:g} GB"
        self.own_s: list[float] = []
        self.whole_s: list[float] = []
        self._parts_s: list[dict[str, float]] = []
        self._copied_s: list[float] = []
        self._report, self._spark, self._buckets, self._folder = report, spark, buckets, folder
        self._rows = round(gb * 1e9 / _PAD_BYTES)
        self._times_folder = folder / "told"
        self._times_folder.mkdir(parents=True)
        self._savepoint = folder / "savepoint"
        _write_table(folder / "table", self._rows, seed)
        print(f"{self.name}: a savepoint of {self._rows:,} rows …", file=sys.stderr, flush=True)
        table = spark.read.parquet(str(folder / "table"))
        output = write_savepoint(
            table, folder / "made", keys=["key"], state_schema=_STATE, buckets=buckets, operator="touched"
        )
        self._stream = self._start_stream("job", Savepoint(str(folder / "made")))
        self._touch(self._stream, _BATCHES)
        report.details[f"{self.name}: bytes of the state's first files"] = output.size_bytes
        shutil.rmtree(folder / "made")

    def _make_state(self, name: str, start_from: Any = None) -> ArrowState:
        from spark_state_ext import ArrowState

        folder = self._folder / name
        return ArrowState(
            str(folder / "state"),
            "touched",
            buckets=self._buckets,
            local_dir=str(folder / "local"),
            start_from=start_from,
        )

    def _start_stream(self, name: str, start_from: Any) -> TimedStream:
        from benchmarks.streams import TimedStream

        state = self._make_state(name, start_from)
        return TimedStream(
            self._spark,
            f"{self.name}: {name}",
            _INPUT,
            self._folder / name,
            lambda rows, _: state.apply_in_arrow_with_state(rows, "key", touch, _OUTPUT, _STATE),
        )

    def _touch(self, stream: TimedStream, batches: int) -> None:
        keys = _make_keys(np.arange(round(_TOUCHED * self._rows), dtype=np.uint64))
        for _ in range(batches):
            stream.process([pa.table({"key": keys})])

    def take(self, *, is_timed: bool) -> None:
        """Take a savepoint in place of the last one, and measure it."""
        from spark_state_ext import take_savepoint

        shutil.rmtree(self._savepoint, ignore_errors=True)
        location, state = self._folder / "job" / "checkpoint", self._make_state("job")
        with _record_task_times(self._times_folder):
            before_s, started_s = time.thread_time(), time.perf_counter()
            output = take_savepoint(self._spark, self._savepoint, location, state)
            whole_s, client_s = time.perf_counter() - started_s, time.thread_time() - before_s
        parts = {"client": client_s, **_pop_times(self._times_folder)}
        copied_s = _time_copy(self._savepoint, self._folder / "copy")
        if is_timed:
            self.whole_s.append(whole_s)
            self.own_s.append(sum(parts.values()))
            self._parts_s.append(parts)
            self._copied_s.append(copied_s)
        self._taken = output

    def medians(self) -> tuple[float, float]:
        """Return the median seconds of our own work and of the whole call."""
        return float(np.median(self.own_s)), float(np.median(self.whole_s))

    def judge(self) -> None:
        """Report how long savepoints took, check the last one, and report whether any bytes were copied."""
        report, name = self._report, self.name
        own_s = report.timing(f"{name}: our own work", self.own_s)
        whole_s = report.timing(f"{name}: all of it, Spark's jobs included", self.whole_s)
        for part in self._parts_s[0]:
            report.timing(f"{name}: our own work, {part}", [item[part] for item in self._parts_s])
        copied_s = report.timing(f"{name}: cp of the same files", self._copied_s)
        report.ratio(f"{name}: our own work / cp", own_s / copied_s)
        report.ratio(f"{name}: all of it / cp", whole_s / copied_s)
        report.bar(f"{name}: our own work", own_s, "at most", OWN_AT_MOST_S, "s")
        linked, copied = told_apart(self._savepoint, self._folder / "job" / "state")
        report.details[f"{name}: files and bytes that are linked"] = [len(linked), sum(linked.values())]
        report.check(f"{name}: all files of the savepoint were counted", len(linked) + len(copied) == self._taken.files)
        report.check(f"{name}: they are the whole state", sum(linked.values()) >= self._rows * _PAD_BYTES)
        report.bar(f"{name}: bytes of state that were copied", sum(copied.values()), "at most", 0, "bytes")
        self._check(self._savepoint, "the savepoint", _BATCHES)

    def start_another(self) -> None:
        """Start a query from the savepoint without claiming it, and report how many full snapshots it uploads."""
        from spark_state_ext import Savepoint, take_savepoint

        before = {item: item.stat().st_mtime_ns for item in self._savepoint.rglob("*") if item.is_file()}
        stream = self._start_stream("another", Savepoint(str(self._savepoint)))
        self._touch(stream, 2)
        other_savepoint = self._folder / "again"
        take_savepoint(
            self._spark, other_savepoint, self._folder / "another" / "checkpoint", self._make_state("another")
        )
        stream.stop()
        linked, own = told_apart(self._folder / "another" / "state", self._savepoint)
        snapshots = [path for path in own if ".snapshot." in path]
        name = f"{self.name}: a query started from it"
        self._report.details[f"{name}, seconds of its first batch"] = stream.seconds[0]
        self._report.details[f"{name}, files and bytes that are linked"] = [len(linked), sum(linked.values())]
        self._report.bar(f"{name}: full snapshots uploaded", len(snapshots), "at most", 0)
        self._report.check(f"{name}: it shares all files of the savepoint", len(linked) == self._taken.files)
        after = {item: item.stat().st_mtime_ns for item in self._savepoint.rglob("*") if item.is_file()}
        self._report.check(f"{name}: files of the savepoint were not written to", before == after)
        self._check(other_savepoint, "the query started from it", _BATCHES + 2)

    def stop(self) -> None:
        """Stop the query, and delete its files."""
        self._stream.stop()
        shutil.rmtree(self._folder)

    def _check(self, savepoint: Path, label: str, batches: int) -> None:
        """Check that a savepoint has the table's rows, and that each has the right count after the given batches."""
        from pyspark.sql import functions as F

        from spark_state_ext import read_savepoint

        def compute_content(rows: Any) -> Any:
            row = F.xxhash64("key", "number", "pad")
            return tuple(rows.agg(F.count("*"), F.sum(row.cast("decimal(38,0)")), F.bit_xor(row)).collect()[0])

        result = read_savepoint(self._spark, savepoint)
        n = F.when(F.col("number") < round(_TOUCHED * self._rows), 1 + batches).otherwise(1)
        self._report.check(f"{self.name}: counts of {label} are right", result.where(F.col("n") != n).isEmpty())
        table = self._spark.read.parquet(str(self._folder / "table"))
        self._report.check(
            f"{self.name}: rows of {label} are those of the table", compute_content(result) == compute_content(table)
        )


def told_apart(folder: Path, other: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of checkpoint files by path: of files that are also in the other folder, and of the rest."""

    def files(below: Path) -> Iterator[Path]:
        return (path for path in below.rglob("*.arrow") if path.name.count(".") > 1)

    other_inodes = {(item.stat().st_dev, item.stat().st_ino) for item in files(other)}
    shared, own = dict[str, int](), dict[str, int]()
    for path in files(folder):
        result = path.stat()
        (shared if (result.st_dev, result.st_ino) in other_inodes else own)[str(path)] = result.st_size
    return shared, own


def _time_copy(source: Path, target: Path) -> float:
    started_s = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    elapsed_s = time.perf_counter() - started_s
    shutil.rmtree(target)
    return elapsed_s


@contextlib.contextmanager
def _record_task_times(folder: Path) -> Iterator[None]:
    """Make the tasks of savepoints write to files in a folder how long their own work took."""
    from spark_state_ext.spark.client import savepoints, tasks
    from spark_state_ext.spark.client.task_functions import task_entry

    def make_timed_entry(label: str, *args: Any) -> Callable[[Any], Any]:
        # A label is ``<module>.<function>``. Timings are named by the function only, as in older results.
        return _add_timing(label.rpartition(".")[2], task_entry(label, *args), str(folder))

    with (
        mock.patch.object(savepoints, "task_entry", make_timed_entry),
        mock.patch.object(tasks, "task_entry", make_timed_entry),
    ):
        yield


def _add_timing(label: str, work: Callable[[Any], Any], folder: str) -> Callable[[Any], Any]:
    # A nested function is pickled by value, so that workers need not import this module.
    def run_timed(batches: Iterable[Any]) -> Iterator[Any]:
        import time
        import uuid
        from pathlib import Path

        # The time in which Spark produces the next input row or takes an output row is not our own work.
        others_s = 0.0

        def watch_rows() -> Iterator[Any]:
            nonlocal others_s
            rows = iter(batches)
            while True:
                asked_s = time.perf_counter()
                row = next(rows, None)
                others_s += time.perf_counter() - asked_s
                if row is None:
                    return
                yield row

        started_s = time.perf_counter()
        for output in work(watch_rows()):
            yielded_s = time.perf_counter()
            yield output
            others_s += time.perf_counter() - yielded_s
        own_s = time.perf_counter() - started_s - others_s
        (Path(folder) / f"{label}-{uuid.uuid4().hex}").write_text(repr(own_s))

    return run_timed


def _pop_times(folder: Path) -> dict[str, float]:
    """Return the seconds of tasks' own work by kind of task, and delete the files."""
    result: dict[str, float] = {}
    for path in sorted(folder.iterdir()):
        label = f"tasks that {path.name.partition('-')[0]}"
        result[label] = result.get(label, 0.0) + float(path.read_text())
        os.unlink(path)
    return result


def _make_keys(numbers: np.typing.NDArray[np.uint64]) -> Any:
    return (numbers * _SPREAD).view(np.int64)


def _write_table(folder: Path, rows: int, seed: int) -> None:
    """Write rows of random bytes, which cannot be compressed."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    step = -(-rows // _FILES)
    for at, begin in enumerate(range(0, rows, step)):
        numbers = np.arange(begin, min(rows, begin + step), dtype=np.uint64)
        data = rng.bytes(len(numbers) * _PAD_BYTES)
        offsets = pa.array(np.arange(len(numbers) + 1) * _PAD_BYTES, pa.int32())
        pads = pa.Array.from_buffers(pa.binary(), len(numbers), [None, offsets.buffers()[1], pa.py_buffer(data)])
        columns = {
            "key": _make_keys(numbers),
            "number": numbers.view(np.int64),
            "n": np.ones(len(numbers), np.int64),
            "pad": pads,
        }
        pq.write_table(pa.table(columns), folder / f"part-{at}.parquet", compression="none", use_dictionary=False)
