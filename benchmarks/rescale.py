"""A query started from a savepoint with twice its buckets, beside one that starts with as many and one rewritten first.

A savepoint of canonical form is made of a table with `write_savepoint`, once with few buckets and once with many. Then
queries with many buckets start, under no-claim, each with an empty root, local disk and checkpoint location:

* *rescaled*: from the savepoint with few buckets;
* *as it is*: from the one with many, so that nothing is rescaled;
* *rewritten first*: as without us. Spark rescales no live state; a user reads the savepoint with few buckets
  (`read_savepoint`), writes it anew with many (`write_savepoint`), and starts from that. All of it is timed.

**Time** goes from before the query is planned until Spark's ``commits/0`` has its name, by that file's ctime. The
input is there before: one file with a few thousand events, each of another key of the savepoint, which the first batch
reads.

**Bytes in the root** are sizes of the files in it when that commit is seen (it is looked for 200 times a second).
*Linked* is a file that has the inode of one of the savepoint's: no byte of it was written. Of the others those count
whose ctime, which is when they got their name, is not after that of ``commits/0``; and the temporary files that are
there. A *snapshot* among them is state that was rewritten; a delta is the batch's own. Files of the batch that are in
Spark's checkpoint (inline) are not in the root.

**Bytes read and written** are ``rchar`` and ``wchar`` of ``/proc/<pid>/io`` of all Python workers, from before the
query is planned until the same look: what they read and wrote by system calls, sockets and the local disk included,
whether it was in the page cache or not. Pages that were read by way of a map of a file (LMDB, base files, snapshots) or
made dirty so (LMDB) are not in it, nor what a worker did that ended meanwhile. *Local disk* is what is allocated below
`local_dir` at that look, LMDB's pages included. What the JVM reads and writes is not counted.

Rescaled buckets write snapshots of their own with later batches, in the background. There are none here, and what
workers still do after the first is waited for before anything else is timed. Then the state of each query is read in
full, outside of the times, and compared with what the table and the events make.
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
# Bytes a row in a snapshot file; the pad makes up for what the other columns have not.
_ROW_BYTES, _PAD_BYTES = 100, 56
_KEY, _INPUT, _OUTPUT = "key", "key bigint, amount bigint", "key bigint, n bigint"
_STATE = "n bigint, total bigint, pad binary"
_COLUMNS = ("key", "n", "total", "pad")
_OPERATOR = "totals"
_FILES, _PIECE_ROWS = 4, 1 << 18
_LOOK_S, _QUIET_S, _WAIT_S = 0.005, 1.0, 900.0
_QUICK_GB, _QUICK_REPEATS = [0.01, 0.05], 1
# An odd number: multiplied by it, modulo 2 ** 64, different numbers stay different.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)

Numbers = npt.NDArray[np.uint64]
# Of a state: rows, and sums modulo 2 ** 64.
Content = tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument(
        "--gb", type=float, nargs="+", default=[0.1, 1.0], metavar="N", help="sizes of state, 10^9 bytes; 100 a row"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="starts of each; one more warms up")
    parser.add_argument("--events", type=int, default=5_000, metavar="N", help="events of the first batch, a key each")
    parser.add_argument("--saved-buckets", type=int, default=64, metavar="N", help="buckets of the savepoint")
    add_buckets(parser, 128)
    add_spark(parser, "4g")
    add_seed(parser, "the rows")
    add_quick(parser, "small states, and few starts")


def add_up(batch: Any) -> pa.Table:
    """Count events of keys and add up their amounts; their pad stays in their state."""
    new = batch.aggregate([([], "count_all"), ("amount", "sum")])
    n = pc.add(pc.fill_null(batch.state["n"], 0), new["count_all"])
    total = pc.add(pc.fill_null(batch.state["total"], 0), new["amount_sum"])
    batch.update({"n": n, "total": total, "pad": batch.state["pad"]})
    return batch.keys.append_column("n", n)


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When a query's state after its first batch is not the one that it should be.
    """
    from benchmarks.spark import session

    sizes, repeats = (_QUICK_GB, _QUICK_REPEATS) if options.quick else (sorted(options.gb), options.repeats)
    if len(sizes) < 2 or min(*sizes, repeats, options.events) <= 0 or _rows(sizes[0]) < options.events:
        raise BenchmarkError(f"--gb must be two sizes or more, of at least --events rows of {_ROW_BYTES} bytes")
    if not processes.supported():
        raise BenchmarkError("bytes are read from /proc, which this system does not have")
    names = ("events", "saved_buckets", "buckets", "cores", "memory", "seed")
    report = Report("rescale", {"gb": sizes, "repeats": repeats, **{it: getattr(options, it) for it in names}})
    with session("rescale", options.cores, options.memory, work / "spark", {}) as spark:
        states = [_State(report, spark, gb, options, work / f"{gb:g}") for gb in sizes]
        # The JVM and the workers get warm with the small one.
        for contender in states[0].contenders:
            states[0].start(contender, counts=False)
        for number in range(repeats):
            for state in states if number % 2 else reversed(states):
                first = number % len(state.contenders)
                for contender in (*state.contenders[first:], *state.contenders[:first]):
                    state.start(contender, counts=True)
        for state in states:
            state.judge()
    _compare(report, states[0], states[-1])
    return report


def _compare(report: Report, small: _State, large: _State) -> None:
    """How the times grow with the state."""
    for contender in (RESCALED, AS_IT_IS, REWRITTEN):
        grown = large.median_s(contender) / small.median_s(contender)
        report.ratio(f"{contender}: {large.name} / {small.name}, time to the first committed batch", grown)
        if contender == RESCALED:
            report.bar(f"{contender}, {large.name} against {small.name}", grown, "at most", FLAT_AT_MOST, "times")


@dataclass
class Tree:
    """Bytes in a root by what became of them, at the first commit.

    Parameters
    ----------
    linked
        Of files that have the inode of one of the savepoint's.
    snapshots, deltas, others
        Of other files that had their name before the commit, or are being written.
    """

    linked: int = 0
    snapshots: int = 0
    deltas: int = 0
    others: int = 0


def tree_of(root: Path, savepoint: Path, until_ns: int | None = None) -> Tree:
    """Look at the files in a root.

    Parameters
    ----------
    root, savepoint
        The folders.
    until_ns
        Files that got their name after this time are left out, nanoseconds since 1970; None: none is.
    """
    theirs = {(it.st_dev, it.st_ino) for it in _stats(savepoint).values()}
    found = Tree()
    for path, stat in _stats(root).items():
        name = path.name
        # Linking it changes a file's ctime, and finishing one that is being written does.
        if (stat.st_dev, stat.st_ino) in theirs:
            found.linked += stat.st_size
        elif until_ns is not None and stat.st_ctime_ns > until_ns and not _is_temporary(name):
            continue
        elif ".snapshot." in name:
            found.snapshots += stat.st_size
        elif ".delta." in name:
            found.deltas += stat.st_size
        else:
            found.others += stat.st_size
    return found


def _is_temporary(name: str) -> bool:
    from spark_state_ext.files.folder import is_temporary

    return is_temporary(name)


def _stats(folder: Path) -> dict[Path, os.stat_result]:
    """All files below a folder that others may be writing to and deleting in."""
    found: dict[Path, os.stat_result] = {}
    for below, _, names in os.walk(folder):
        for name in names:
            path = Path(below) / name
            try:
                found[path] = path.stat()
            except FileNotFoundError:  # it has got its name, or is gone
                continue
    return found


@dataclass
class _Started:
    """What was measured of the starts of one contender."""

    seconds: list[float] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)
    local_bytes: list[int] = field(default_factory=list)
    durations: list[dict[str, int]] = field(default_factory=list)
    quiet_after_s: list[float] = field(default_factory=list)


class _State:
    """A state of some size, as savepoints with few and with many buckets, and the queries that start from these."""

    contenders = (RESCALED, AS_IT_IS, REWRITTEN)

    def __init__(
        self, report: Report, spark: SparkSession, gb: float, options: argparse.Namespace, folder: Path
    ) -> None:
        from spark_state_ext import write_savepoint

        self.name = f"{gb:g} GB"
        self._report, self._spark, self._folder, self._buckets = report, spark, folder, options.buckets
        self._found = {contender: _Started() for contender in self.contenders}
        rows = _rows(gb)
        print(f"{self.name}: savepoints of {rows:,} rows …", file=sys.stderr, flush=True)
        table_of_rows = _write_table(folder / "table", rows, options.seed)
        table = spark.read.parquet(str(folder / "table"))
        self._savepoints = {RESCALED: folder / "few", AS_IT_IS: folder / "many", REWRITTEN: folder / "few"}
        for contender, buckets in ((RESCALED, options.saved_buckets), (AS_IT_IS, options.buckets)):
            target = self._savepoints[contender]
            made = write_savepoint(table, target, keys=[_KEY], state_schema=_STATE, buckets=buckets, operator=_OPERATOR)
            report.details[f"{self.name}: bytes of the savepoint, {buckets} buckets"] = made.size_bytes
        shutil.rmtree(folder / "table")
        events = _events(rows, options.events, options.seed)
        pq.write_table(events, folder / "events.parquet", compression="none")
        self._right = _with_events(table_of_rows, events)

    def start(self, contender: str, *, counts: bool) -> None:
        """Start a query in an empty folder, and wait until its first batch is committed, and all is quiet."""
        folder, found = self._folder / "query", self._found[contender] if counts else _Started()
        (folder / "input").mkdir(parents=True)
        shutil.copy(self._folder / "events.parquet", folder / "input")
        root, checkpoint = folder / "root", folder / "checkpoint"
        before = processes.io_bytes(os.getpid(), "python")
        started_ns = time.time_ns()
        savepoint = self._rewritten(folder / "rewritten") if contender == REWRITTEN else self._savepoints[contender]
        query = self._query(folder, savepoint)
        commit = checkpoint / "commits" / "0"
        while not commit.exists():
            if not query.isActive and not commit.exists():
                raise BenchmarkError(f"{self.name}, {contender}: no batch was committed: {query.exception()}")
            time.sleep(_LOOK_S)
        committed_ns = commit.stat().st_ctime_ns
        after = processes.io_bytes(os.getpid(), "python")
        tree, local = tree_of(root, savepoint, committed_ns), _stats(folder / "local")
        query.awaitTermination()
        quiet_ns = self._wait_until_quiet()
        read, written = _spent(before, after)
        found.seconds.append((committed_ns - started_ns) / 1e9)
        found.trees.append(tree)
        found.read_bytes.append(read)
        found.written_bytes.append(written)
        found.local_bytes.append(sum(512 * it.st_blocks for it in local.values()))
        found.durations.append(dict(query.recentProgress[0]["durationMs"]))
        found.quiet_after_s.append((quiet_ns - committed_ns) / 1e9)
        content = _content_of_state(self._spark, root, checkpoint)
        what = f"{self.name}, {contender}: rows and sums of the state are those of table and events"
        if content != self._right or what not in self._report.checks:
            self._report.check(what, content == self._right)
        shutil.rmtree(folder)
        print(
            f"{self.name}, {contender}{'' if counts else ' (warms up)'}: {found.seconds[-1]:.2f} s; {tree}; read "
            f"{read:,}, written {written:,}; quiet {found.quiet_after_s[-1]:.1f} s later",
            file=sys.stderr,
            flush=True,
        )

    def _rewritten(self, target: Path) -> Path:
        from spark_state_ext import read_savepoint, write_savepoint

        rows = read_savepoint(self._spark, self._savepoints[REWRITTEN]).select(*_COLUMNS)
        write_savepoint(rows, target, keys=[_KEY], state_schema=_STATE, buckets=self._buckets, operator=_OPERATOR)
        return target

    def _query(self, folder: Path, savepoint: Path) -> Any:
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
        """Wait until workers neither read nor write any more; when that began, nanoseconds since 1970."""
        deadline_s = time.monotonic() + _WAIT_S
        since_ns, seen = time.time_ns(), processes.io_bytes(os.getpid(), "python")
        while time.time_ns() - since_ns < _QUIET_S * 1e9:
            time.sleep(_QUIET_S / 10)
            now = processes.io_bytes(os.getpid(), "python")
            if now != seen:
                since_ns, seen = time.time_ns(), now
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"{self.name}: workers were still at work {_WAIT_S:.0f} s after the batch")
        return since_ns

    def median_s(self, contender: str) -> float:
        """Seconds to the first committed batch."""
        return float(np.median(self._found[contender].seconds))

    def judge(self) -> None:
        """What the starts took."""
        report, name = self._report, self.name
        for contender, found in self._found.items():
            told = f"{name}, {contender}"
            report.timing(f"{told}: to the first committed batch", found.seconds)
            for kind in ("linked", "snapshots", "deltas", "others"):
                report.details[f"{told}: bytes in the root by then, {kind}"] = [getattr(it, kind) for it in found.trees]
            report.details[f"{told}: bytes that workers read by then"] = found.read_bytes
            report.details[f"{told}: bytes that workers wrote by then"] = found.written_bytes
            report.details[f"{told}: bytes on the local disk by then"] = found.local_bytes
            report.details[f"{told}: seconds from then on until workers were quiet"] = found.quiet_after_s
            report.details[f"{told}: durationMs of the first batch"] = found.durations
        rescaled_s, plain_s = self.median_s(RESCALED), self.median_s(AS_IT_IS)
        report.ratio(f"{name}: {REWRITTEN} / {RESCALED}, time", self.median_s(REWRITTEN) / rescaled_s)
        ratio = report.ratio(f"{name}: {RESCALED} / {AS_IT_IS}, time", rescaled_s / plain_s)
        report.bar(f"{name}: {RESCALED} against {AS_IT_IS}", ratio, "at most", OVER_PLAIN_AT_MOST, "times")
        for what, of_one in (
            ("bytes that workers read", "read_bytes"),
            ("bytes that workers wrote", "written_bytes"),
        ):
            medians = [float(np.median(getattr(self._found[it], of_one))) for it in (RESCALED, AS_IT_IS)]
            report.ratio(f"{name}: {RESCALED} / {AS_IT_IS}, {what}", medians[0] / medians[1])
        rewritten = max(it.snapshots for it in self._found[RESCALED].trees)
        report.bar(f"{name}: bytes of state rewritten before the first commit", rewritten, "at most", 0, "bytes")


def _spent(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Bytes read and written by the processes of the second look since the first."""
    read = sum(now[0] - before.get(pid, (0, 0))[0] for pid, now in after.items())
    return read, sum(now[1] - before.get(pid, (0, 0))[1] for pid, now in after.items())


def _rows(gb: float) -> int:
    return round(gb * 1e9 / _ROW_BYTES)


def _keys(numbers: Numbers) -> Numbers:
    keys: Numbers = numbers * _SPREAD
    return keys


def _events(rows: int, events: int, seed: int) -> pa.Table:
    """Events of different keys of the table, from all over it."""
    rng = np.random.default_rng(seed + 1)
    numbers = rng.choice(rows, events, replace=False).astype(np.uint64)
    return pa.table({"key": _keys(numbers).view(np.int64), "amount": rng.integers(1, 1000, events)})


def _write_table(folder: Path, rows: int, seed: int) -> Content:
    """Rows with random bytes, which cannot be compressed; returns what a state of them has."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    step, made = -(-rows // _FILES), []
    for at, begin in enumerate(range(0, rows, step)):
        count = min(rows, begin + step) - begin
        data = rng.bytes(count * _PAD_BYTES)
        offsets = pa.array(np.arange(count + 1) * _PAD_BYTES, pa.int32())
        columns = {
            "key": _keys(np.arange(begin, begin + count, dtype=np.uint64)).view(np.int64),
            "n": np.ones(count, np.int64),
            "total": rng.integers(0, 1000, count),
            "pad": pa.Array.from_buffers(pa.binary(), count, [None, offsets.buffers()[1], pa.py_buffer(data)]),
        }
        table = pa.table(columns)
        pq.write_table(table, folder / f"part-{at}.parquet", compression="none", use_dictionary=False)
        made.append(_content(table.to_batches(_PIECE_ROWS)))
    return _sum(made)


def _content(batches: Iterable[pa.RecordBatch]) -> Content:
    """Rows; sums of the columns, and of the products of each row's key with its other columns."""
    return _sum([_content_of(batch) for batch in batches])


def _content_of(batch: pa.RecordBatch) -> Content:
    def numbers(name: str) -> Numbers:
        found: Numbers = batch.column(name).to_numpy(zero_copy_only=False).view(np.uint64)
        return found

    # The cast fails where a pad has another length; its eight-byte words are added up.
    pad = batch.column("pad").cast(pa.binary(_PAD_BYTES))
    start = pad.offset * _PAD_BYTES
    data = np.frombuffer(pad.buffers()[1], np.uint8)[start : start + len(pad) * _PAD_BYTES]
    words = data.view(np.uint64).reshape(len(pad), -1).sum(axis=1, dtype=np.uint64)
    key, n, total = numbers("key"), numbers("n"), numbers("total")
    columns = (key, n, total, key * n, key * total, key * words)
    return (batch.num_rows, *(int(column.sum(dtype=np.uint64)) for column in columns))


def _sum(parts: Sequence[Content]) -> Content:
    return tuple(sum(column) % 2**64 for column in zip(*parts, strict=True))


def _with_events(content: Content, events: pa.Table) -> Content:
    """What a state has once each event, all of keys that it has, has been counted and its amount added."""
    key, amount = (events[name].to_numpy().view(np.uint64) for name in ("key", "amount"))
    new = (np.ones(len(key), np.uint64), amount, key, key * amount)
    n, total, key_n, key_total = (int(column.sum(dtype=np.uint64)) for column in new)
    return _sum([content, (0, 0, n, total, key_n, key_total, 0)])


def _content_of_state(spark: SparkSession, root: Path, checkpoint: Path) -> Content:
    """What the state has that Spark has committed last."""
    from spark_state_ext import open_committed

    # Nobody else is there who would delete what is read.
    with open_committed(spark, str(root), str(checkpoint), hold=False) as state:
        return _content(state.scan(list(_COLUMNS)))
