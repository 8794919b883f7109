"""Measure how long a query takes to start from a savepoint with another number of buckets, by default half as many.

`write_savepoint` makes two canonical savepoints of one table: one with few buckets and one with many. Then queries with
many buckets start from a savepoint, under no-claim, each with an empty root, local disk and checkpoint location:

* *rescaled*: from the savepoint with few buckets;
* *as it is*: from the savepoint with many buckets, so that nothing is rescaled;
* *rewritten first*: as users would do without this package's rescaling. Spark cannot rescale existing state, so they
  read the savepoint with few buckets (`read_savepoint`), write it again with many (`write_savepoint`), and start from
  the new savepoint. The time includes all three steps.

**Time** runs from before the query is planned until Spark's ``commits/0`` gets its name, according to that file's
ctime. The input exists before: one file with a few thousand events, each with a different key of the savepoint. The
first batch reads all of it.

**Bytes in the root** are the sizes of its files when the benchmark notices that commit; it looks 200 times a second.
*Linked* files share an inode with a file of the savepoint, so none of their bytes were written. Another file counts if
it got its name, according to its ctime, no later than ``commits/0``, or if it is a temporary file. Of these files, a
*snapshot* is state that was rewritten, and a delta belongs to the batch itself. Inline deltas are in Spark's checkpoint
and not in the root.

**Bytes read and written** are ``rchar`` and ``wchar`` of ``/proc/<pid>/io``, added up over all Python workers, from
before the query is planned until the same look. They include all calls of ``read`` and ``write``: on files, whether or
not the data was in the page cache, and on the socket between a worker and the JVM. They do not include pages of
memory-mapped files that were read (LMDB, the local store's base files, snapshots) or made dirty (LMDB), nor what was
read and written by a worker that ended before the look. What the JVM reads and writes is not counted.
*Local disk* is the space allocated below `local_dir` at that look, with LMDB's pages.

Rescaled buckets write their own snapshots in the background of later batches. There are no later batches here, and the
benchmark waits until the workers are idle before it times anything else. Then it reads the whole state of the query,
without timing that, and compares it with the state that follows from the table and the events.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks import processes
from benchmarks.options import add_buckets, add_quick, add_seed, add_spark
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Tree", "add_arguments", "add_up", "run", "tree_of"]

RESCALED, AS_IT_IS, REWRITTEN = "rescaled", "as it is", "rewritten first"
OVER_PLAIN_AT_MOST, FLAT_AT_MOST = 1.2, 1.2
# A row has about _ROW_BYTES in a snapshot file: the pad, and the other columns.
_ROW_BYTES, _PAD_BYTES = 100, 56
_KEY, _INPUT, _OUTPUT = "key", "key bigint, amount bigint", "key bigint, n bigint"
_STATE = "n bigint, total bigint, pad binary"
_COLUMNS = ("key", "n", "total", "pad")
_OPERATOR = "totals"
_FILES, _PIECE_ROWS = 4, 1 << 18
_LOOK_S, _QUIET_S, _WAIT_S = 0.005, 1.0, 900.0
_QUICK_GB, _QUICK_REPEATS = [0.01, 0.05], 1
# The factor is odd, so different numbers give different products modulo 2 ** 64.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)

Numbers = npt.NDArray[np.uint64]
# The number of rows of a state, and sums over its rows modulo 2 ** 64.
Content = tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to a parser."""
    parser.add_argument(
        "--gb",
        type=float,
        nargs="+",
        default=[0.1, 1.0],
        metavar="N",
        help="sizes of the state in GB (10^9 bytes), at 100 bytes a row",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="timed starts of each query, after untimed ones with the smallest state",
    )
    parser.add_argument(
        "--events", type=int, default=5_000, metavar="N", help="events of the first batch, all with different keys"
    )
    parser.add_argument(
        "--saved-buckets", type=int, default=64, metavar="N", help="buckets of the savepoint that is rescaled"
    )
    add_buckets(parser, 128)
    add_spark(parser, "4g")
    add_seed(parser, "the rows")
    add_quick(parser, "use small states and few starts")


def add_up(batch: Any) -> pa.Table:
    """Count the events of each key and add up their amounts; keep the pad in the state."""
    new = batch.aggregate([([], "count_all"), ("amount", "sum")])
    n = pc.add(pc.fill_null(batch.state["n"], 0), new["count_all"])
    total = pc.add(pc.fill_null(batch.state["total"], 0), new["amount_sum"])
    batch.update({"n": n, "total": total, "pad": batch.state["pad"]})
    return batch.keys.append_column("n", n)


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an option is invalid, a query commits no batch, or its state after the first batch is wrong.
    """
    from benchmarks.spark import session

    sizes, repeats = (_QUICK_GB, _QUICK_REPEATS) if options.quick else (sorted(options.gb), options.repeats)
    if len(sizes) < 2 or min(*sizes, repeats, options.events) <= 0 or _count_rows(sizes[0]) < options.events:
        raise BenchmarkError(
            f"give --gb two sizes or more, each at least {_ROW_BYTES} bytes times --events; counts must be above 0"
        )
    if not processes.supported():
        raise BenchmarkError(
            "this system has no /proc, from which the benchmark reads how many bytes workers read and write"
        )
    names = ("events", "saved_buckets", "buckets", "cores", "memory", "seed")
    report = Report("rescale", {"gb": sizes, "repeats": repeats, **{item: getattr(options, item) for item in names}})
    with session("rescale", options.cores, options.memory, work / "spark", {}) as spark:
        states = [_State(report, spark, gb, options, work / f"{gb:g}") for gb in sizes]
        # Warm up the JVM and the Python workers with the small state.
        for contender in states[0].contenders:
            states[0].start(contender, is_timed=False)
        for number in range(repeats):
            for state in states if number % 2 else reversed(states):
                first = number % len(state.contenders)
                for contender in (*state.contenders[first:], *state.contenders[:first]):
                    state.start(contender, is_timed=True)
        for state in states:
            state.judge()
    _compare(report, states[0], states[-1])
    return report


def _compare(report: Report, small: _State, large: _State) -> None:
    """Report how the times grow with the size of the state."""
    for contender in (RESCALED, AS_IT_IS, REWRITTEN):
        growth = large.median_s(contender) / small.median_s(contender)
        report.ratio(f"{contender}: {large.name} / {small.name}, time to the first committed batch", growth)
        if contender == RESCALED:
            report.bar(f"{contender}, {large.name} against {small.name}", growth, "at most", FLAT_AT_MOST, "times")


@dataclass
class Tree:
    """Bytes of the files in a root at the first commit, by kind of file.

    Parameters
    ----------
    linked
        Bytes of files that share an inode with a file of the savepoint.
    snapshots, deltas, others
        Bytes of other files that had their name before the commit, or were still being written.
    """

    linked: int = 0
    snapshots: int = 0
    deltas: int = 0
    others: int = 0


def tree_of(root: Path, savepoint: Path, until_ns: int | None = None) -> Tree:
    """Return the bytes of the files in a root, by kind of file.

    Parameters
    ----------
    root
        The root.
    savepoint
        Folder of the savepoint from which the query started.
    until_ns
        Leave out files that got their name after this time, in nanoseconds since 1970; None: count all files.
    """
    savepoint_inodes = {(item.st_dev, item.st_ino) for item in _read_stats(savepoint).values()}
    result = Tree()
    for path, stat in _read_stats(root).items():
        name = path.name
        # Compare inodes first: linking changes a file's ctime, so for linked files the ctime is not the time of naming.
        # Nor is it for a temporary file: writing to it changes its ctime.
        if (stat.st_dev, stat.st_ino) in savepoint_inodes:
            result.linked += stat.st_size
        elif until_ns is not None and stat.st_ctime_ns > until_ns and not _is_temporary(name):
            continue
        elif ".snapshot." in name:
            result.snapshots += stat.st_size
        elif ".delta." in name:
            result.deltas += stat.st_size
        else:
            result.others += stat.st_size
    return result


def _is_temporary(name: str) -> bool:
    from spark_state_ext.files.folder import is_temporary

    return is_temporary(name)


def _read_stats(folder: Path) -> dict[Path, os.stat_result]:
    """Return the status of all files below a folder in which other processes may create and delete files."""
    result: dict[Path, os.stat_result] = {}
    for below, _, names in os.walk(folder):
        for name in names:
            path = Path(below) / name
            try:
                result[path] = path.stat()
            except FileNotFoundError:  # it was renamed or deleted meanwhile
                continue
    return result


@dataclass
class _Measurements:
    """Measurements of the timed starts of one contender."""

    seconds: list[float] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)
    local_bytes: list[int] = field(default_factory=list)
    durations: list[dict[str, int]] = field(default_factory=list)
    quiet_after_s: list[float] = field(default_factory=list)


class _State:
    """A state of one size, its savepoints with few and with many buckets, and the queries that start from them."""

    contenders = (RESCALED, AS_IT_IS, REWRITTEN)

    def __init__(
        self, report: Report, spark: SparkSession, gb: float, options: argparse.Namespace, folder: Path
    ) -> None:
        from spark_state_ext import write_savepoint

        self.name = f"{gb:g} GB"
        self._report, self._spark, self._folder, self._buckets = report, spark, folder, options.buckets
        self._measurements = {contender: _Measurements() for contender in self.contenders}
        rows = _count_rows(gb)
        print(f"{self.name}: savepoints of {rows:,} rows …", file=sys.stderr, flush=True)
        table_of_rows = _write_table(folder / "table", rows, options.seed)
        table = spark.read.parquet(str(folder / "table"))
        self._savepoints = {RESCALED: folder / "few", AS_IT_IS: folder / "many", REWRITTEN: folder / "few"}
        for contender, buckets in ((RESCALED, options.saved_buckets), (AS_IT_IS, options.buckets)):
            target = self._savepoints[contender]
            made = write_savepoint(table, target, keys=[_KEY], state_schema=_STATE, buckets=buckets, operator=_OPERATOR)
            report.details[f"{self.name}: bytes of the savepoint, {buckets} buckets"] = made.size_bytes
        shutil.rmtree(folder / "table")
        events = _make_events(rows, options.events, options.seed)
        pq.write_table(events, folder / "events.parquet", compression="none")
        self._expected = _add_events(table_of_rows, events)

    def start(self, contender: str, *, is_timed: bool) -> None:
        """Start a query in an empty folder, measure its first batch, and check its state when its workers are idle."""
        folder, result = self._folder / "query", self._measurements[contender] if is_timed else _Measurements()
        (folder / "input").mkdir(parents=True)
        shutil.copy(self._folder / "events.parquet", folder / "input")
        root, checkpoint = folder / "root", folder / "checkpoint"
        before = processes.io_bytes(os.getpid(), "python")
        started_ns = time.time_ns()
        savepoint = self._rewrite(folder / "rewritten") if contender == REWRITTEN else self._savepoints[contender]
        query = self._start_query(folder, savepoint)
        commit = checkpoint / "commits" / "0"
        while not commit.exists():
            if not query.isActive and not commit.exists():
                raise BenchmarkError(
                    f"{self.name}, {contender}: the query ended without a committed batch: {query.exception()}"
                )
            time.sleep(_LOOK_S)
        committed_ns = commit.stat().st_ctime_ns
        after = processes.io_bytes(os.getpid(), "python")
        tree, local_files = tree_of(root, savepoint, committed_ns), _read_stats(folder / "local")
        query.awaitTermination()
        quiet_ns = self._wait_until_quiet()
        read, written = _count_bytes(before, after)
        result.seconds.append((committed_ns - started_ns) / 1e9)
        result.trees.append(tree)
        result.read_bytes.append(read)
        result.written_bytes.append(written)
        result.local_bytes.append(sum(512 * item.st_blocks for item in local_files.values()))
        result.durations.append(dict(query.recentProgress[0]["durationMs"]))
        result.quiet_after_s.append((quiet_ns - committed_ns) / 1e9)
        content = _read_content(self._spark, root, checkpoint)
        text = f"{self.name}, {contender}: rows and sums of the state are those of table and events"
        if content != self._expected or text not in self._report.checks:
            self._report.check(text, content == self._expected)
        shutil.rmtree(folder)
        print(
            f"{self.name}, {contender}{'' if is_timed else ' (warms up)'}: {result.seconds[-1]:.2f} s; {tree}; read "
            f"{read:,}, written {written:,}; quiet {result.quiet_after_s[-1]:.1f} s later",
            file=sys.stderr,
            flush=True,
        )

    def _rewrite(self, target: Path) -> Path:
        from spark_state_ext import read_savepoint, write_savepoint

        rows = read_savepoint(self._spark, self._savepoints[REWRITTEN]).select(*_COLUMNS)
        write_savepoint(rows, target, keys=[_KEY], state_schema=_STATE, buckets=self._buckets, operator=_OPERATOR)
        return target

    def _start_query(self, folder: Path, savepoint: Path) -> Any:
        from spark_state_ext import ArrowState, Savepoint

        state = ArrowState(
            str(folder / "root"),
            _OPERATOR,
            buckets=self._buckets,
            local_dir=str(folder / "local"),
            start_from=Savepoint(str(savepoint)),
        )
        rows = self._spark.readStream.schema(_INPUT).parquet(str(folder / "input"))
        return (
            state.apply_in_arrow_with_state(rows, _KEY, add_up, _OUTPUT, _STATE)
            .writeStream.format("noop")
            .outputMode("update")
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )

    def _wait_until_quiet(self) -> int:
        """Wait until the workers read and write nothing; return since when, in nanoseconds since 1970."""
        deadline_s = time.monotonic() + _WAIT_S
        since_ns, seen = time.time_ns(), processes.io_bytes(os.getpid(), "python")
        while time.time_ns() - since_ns < _QUIET_S * 1e9:
            time.sleep(_QUIET_S / 10)
            now = processes.io_bytes(os.getpid(), "python")
            if now != seen:
                since_ns, seen = time.time_ns(), now
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"{self.name}: the workers still read or wrote {_WAIT_S:.0f} s after the batch")
        return since_ns

    def median_s(self, contender: str) -> float:
        """Return the median of the seconds to the first committed batch."""
        return float(np.median(self._measurements[contender].seconds))

    def judge(self) -> None:
        """Report the measurements, and compare rescaled starts with the others."""
        report, name = self._report, self.name
        for contender, result in self._measurements.items():
            label = f"{name}, {contender}"
            report.timing(f"{label}: to the first committed batch", result.seconds)
            for kind in ("linked", "snapshots", "deltas", "others"):
                report.details[f"{label}: bytes in the root by then, {kind}"] = [
                    getattr(item, kind) for item in result.trees
                ]
            report.details[f"{label}: bytes that workers read by then"] = result.read_bytes
            report.details[f"{label}: bytes that workers wrote by then"] = result.written_bytes
            report.details[f"{label}: bytes on the local disk by then"] = result.local_bytes
            report.details[f"{label}: seconds from then on until workers were quiet"] = result.quiet_after_s
            report.details[f"{label}: durationMs of the first batch"] = result.durations
        rescaled_s, plain_s = self.median_s(RESCALED), self.median_s(AS_IT_IS)
        report.ratio(f"{name}: {REWRITTEN} / {RESCALED}, time", self.median_s(REWRITTEN) / rescaled_s)
        ratio = report.ratio(f"{name}: {RESCALED} / {AS_IT_IS}, time", rescaled_s / plain_s)
        report.bar(f"{name}: {RESCALED} against {AS_IT_IS}", ratio, "at most", OVER_PLAIN_AT_MOST, "times")
        for text, attribute in (
            ("bytes that workers read", "read_bytes"),
            ("bytes that workers wrote", "written_bytes"),
        ):
            medians = [float(np.median(getattr(self._measurements[item], attribute))) for item in (RESCALED, AS_IT_IS)]
            report.ratio(f"{name}: {RESCALED} / {AS_IT_IS}, {text}", medians[0] / medians[1])
        rewritten = max(item.snapshots for item in self._measurements[RESCALED].trees)
        report.bar(f"{name}: bytes of state rewritten before the first commit", rewritten, "at most", 0, "bytes")


def _count_bytes(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the bytes that the processes of the second measurement have read and written since the first."""
    read = sum(now[0] - before.get(pid, (0, 0))[0] for pid, now in after.items())
    return read, sum(now[1] - before.get(pid, (0, 0))[1] for pid, now in after.items())


def _count_rows(gb: float) -> int:
    return round(gb * 1e9 / _ROW_BYTES)


def _make_keys(numbers: Numbers) -> Numbers:
    keys: Numbers = numbers * _SPREAD
    return keys


def _make_events(rows: int, events: int, seed: int) -> pa.Table:
    """Return events with different keys, which are drawn from the whole table."""
    rng = np.random.default_rng(seed + 1)
    numbers = rng.choice(rows, events, replace=False).astype(np.uint64)
    return pa.table({"key": _make_keys(numbers).view(np.int64), "amount": rng.integers(1, 1000, events)})


def _write_table(folder: Path, rows: int, seed: int) -> Content:
    """Write rows with random bytes, which cannot be compressed; return the content of a state with these rows."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    step, made = -(-rows // _FILES), []
    for at, begin in enumerate(range(0, rows, step)):
        count = min(rows, begin + step) - begin
        data = rng.bytes(count * _PAD_BYTES)
        offsets = pa.array(np.arange(count + 1) * _PAD_BYTES, pa.int32())
        columns = {
            "key": _make_keys(np.arange(begin, begin + count, dtype=np.uint64)).view(np.int64),
            "n": np.ones(count, np.int64),
            "total": rng.integers(0, 1000, count),
            "pad": pa.Array.from_buffers(pa.binary(), count, [None, offsets.buffers()[1], pa.py_buffer(data)]),
        }
        table = pa.table(columns)
        pq.write_table(table, folder / f"part-{at}.parquet", compression="none", use_dictionary=False)
        made.append(_content(table.to_batches(_PIECE_ROWS)))
    return _add_contents(made)


def _content(batches: Iterable[pa.RecordBatch]) -> Content:
    """Return the number of rows, the sums of key, n and total, and the sums of key times each of n, total and pad."""
    return _add_contents([_compute_batch_content(batch) for batch in batches])


def _compute_batch_content(batch: pa.RecordBatch) -> Content:
    def numbers(name: str) -> Numbers:
        result: Numbers = batch.column(name).to_numpy(zero_copy_only=False).view(np.uint64)
        return result

    # The cast fails if a pad has another length. The number that stands for a pad is the sum of its 8-byte words.
    pad = batch.column("pad").cast(pa.binary(_PAD_BYTES))
    start = pad.offset * _PAD_BYTES
    data = np.frombuffer(pad.buffers()[1], np.uint8)[start : start + len(pad) * _PAD_BYTES]
    words = data.view(np.uint64).reshape(len(pad), -1).sum(axis=1, dtype=np.uint64)
    key, n, total = numbers("key"), numbers("n"), numbers("total")
    columns = (key, n, total, key * n, key * total, key * words)
    return (batch.num_rows, *(int(column.sum(dtype=np.uint64)) for column in columns))


def _add_contents(parts: Sequence[Content]) -> Content:
    return tuple(sum(column) % 2**64 for column in zip(*parts, strict=True))


def _add_events(content: Content, events: pa.Table) -> Content:
    """Return the content of a state after it has processed events, all of which have keys of the state."""
    key, amount = (events[name].to_numpy().view(np.uint64) for name in ("key", "amount"))
    new = (np.ones(len(key), np.uint64), amount, key, key * amount)
    n, total, key_n, key_total = (int(column.sum(dtype=np.uint64)) for column in new)
    return _add_contents([content, (0, 0, n, total, key_n, key_total, 0)])


def _read_content(spark: SparkSession, root: Path, checkpoint: Path) -> Content:
    """Return the content of the state that Spark committed last."""
    from spark_state_ext import open_committed

    # No hold is needed: the query has ended, so that no clean-up deletes the files.
    with open_committed(spark, str(root), str(checkpoint), hold=False) as state:
        return _content(state.scan(list(_COLUMNS)))
