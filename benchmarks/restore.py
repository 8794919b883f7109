"""From an empty disk to the first lookup: a bucket's snapshot, beside `cp` of its bytes and Spark's RocksDB provider.

Spark's progress does not tell how long loading a state takes; its log does: the time between RocksDB's lines "Loading"
and "Loaded", in the first batch after a restart. The first lookup is not in it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader, Writer, file_name, new_checkpoint_id
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.row import RowSchema
from benchmarks.options import add_memory, add_seed
from benchmarks.report import BenchmarkError, Report
from benchmarks.spark import CHANGELOG, session
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.checkpoint import write_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore
from spark_state_ext.version import __version__

__all__ = ["add_arguments", "run"]

CP_AT_MOST = 3.0
SPARK_AT_MOST = 1.0
_PIECE_ROWS = 1 << 19
_WARM_UP_ROWS = 1_000
_LOOKED_UP = 1_000
_WAIT_S = 900
_LOG = """
status = warn
rootLogger.level = error
rootLogger.appenderRef.loads.ref = loads
appender.loads.type = File
appender.loads.name = loads
appender.loads.fileName = {path}
appender.loads.layout.type = PatternLayout
appender.loads.layout.pattern = %d{{UNIX_MILLIS}} %m%n
logger.rocksdb.name = org.apache.spark.sql.execution.streaming.state
logger.rocksdb.level = info
"""
_LINE = re.compile(r"(\d+) (?:.* )?(Loading|Loaded) (\d+)(?: .*)?")
_SCHEMA = RowSchema((pa.field("key", pa.int64()),), (pa.field("n", pa.int64()), pa.field("total", pa.float64())))
_WRITER = Writer("query", "run", 0, "benchmark")

Keys = npt.NDArray[np.int64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000], metavar="N", help="keys")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="measurements of copying and restoring")
    parser.add_argument("--restarts", type=int, default=7, metavar="N", help="restarts of Spark's query")
    add_memory(parser, "4g")
    add_seed(parser, "keys and values")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When a restored state is not the one that was written.
    """
    if min(*options.rows, options.repeats, options.restarts) < 1 or min(options.rows) < _LOOKED_UP:
        raise BenchmarkError(f"--rows must be at least {_LOOKED_UP}, and every count at least 1")
    names = ("rows", "repeats", "restarts", "memory", "seed")
    report = Report("restore", {name: getattr(options, name) for name in names})
    ours = {rows: _restores(report, rows, options, work / str(rows)) for rows in options.rows}
    log = _LoadLog(work / "log")
    settings = {
        "spark.sql.shuffle.partitions": "1",
        "spark.driver.extraJavaOptions": log.java_options,
        # Whole snapshots: replaying changes after a restart takes Spark longer.
        CHANGELOG: "false",
    }
    with session("restore", 2, options.memory, work / "spark", settings, log_level=None) as spark:
        # To warm up.
        _spark_restarts(report, spark, log, _WARM_UP_ROWS, options.restarts, work)
        for rows in options.rows:
            _tell(f"Spark, {rows:,} keys")
            theirs = report.timing(
                f"{rows:,} keys: Spark's RocksDB", _spark_restarts(report, spark, log, rows, options.restarts, work)
            )
            ratio = report.ratio(f"{rows:,} keys: restore / Spark's RocksDB", ours[rows] / theirs)
            report.bar(f"{rows:,} keys, over Spark's", ratio, "at most", SPARK_AT_MOST, "times")
    return report


def _restores(report: Report, rows: int, options: argparse.Namespace, work: Path) -> float:
    _tell(f"{rows:,} keys")
    rng = np.random.default_rng(options.seed)
    hashes = np.sort(rng.integers(0, 2**64, rows, dtype=np.uint64))
    truth = rng.integers(1, 100, rows)
    ref, parent = CheckpointRef(10, new_checkpoint_id()), CheckpointRef(9, new_checkpoint_id())
    header = LineageHeader(SNAPSHOT, "restored", 0, ref, parent, (parent,), 0, _WRITER, __version__)
    folder = work / "root" / "0"
    folder.mkdir(parents=True)
    path = folder / file_name(ref, SNAPSHOT)
    with path.open("wb") as file:
        write_checkpoint(file, header, _SCHEMA, _batches(hashes, truth))
    size = path.stat().st_size
    report.details[f"{rows:,} keys: bytes"] = size
    pointer = Pointer("restored", 0, 1, 0, 9, None, lineage=(LineageEntry(ref, size, 9),), parent=parent, rows=rows)
    looked_up = rng.choice(rows, _LOOKED_UP, replace=False)
    copies: list[float] = []
    restores: list[float] = []
    for _ in range(options.repeats):
        copies.append(_timed_copy(path, work / "copy"))
        started_s = time.perf_counter()
        store = LocalStore.at(work / "local", _SCHEMA)
        replicas = sole_replica(Folder(str(work / "root")).child("0"), work)
        bucket = Bucket(store, replicas, pointer, _WRITER, CommitContext(work))
        found = bucket.read(lambda view: view.lookup(hashes[looked_up], [pa.array(_keys(hashes[looked_up]))]))
        restores.append(time.perf_counter() - started_s)
        values = found.rows.column("state.n").to_numpy()[found.index]
        report.check(
            f"{_LOOKED_UP:,} values of {rows:,} are those that were written",
            bool((found.index >= 0).all() and (values == truth[looked_up]).all()),
        )
        store.close()
        shutil.rmtree(work / "local")
    copied = report.timing(f"{rows:,} keys: cp", copies)
    restored = report.timing(f"{rows:,} keys: restore", restores)
    ratio = report.ratio(f"{rows:,} keys: restore / cp", restored / copied)
    report.bar(f"{rows:,} keys, over cp", ratio, "at most", CP_AT_MOST, "times")
    shutil.rmtree(work)
    return restored


def _timed_copy(source: Path, target: Path) -> float:
    started_s = time.perf_counter()
    subprocess.run(["cp", str(source), str(target)], check=True)
    elapsed_s = time.perf_counter() - started_s
    target.unlink()
    return elapsed_s


def _keys(hashes: npt.NDArray[np.uint64]) -> Keys:
    keys: Keys = (hashes * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    return keys


def _batches(hashes: npt.NDArray[np.uint64], values: Keys) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(hashes), _PIECE_ROWS):
        part, counts = hashes[start : start + _PIECE_ROWS], values[start : start + _PIECE_ROWS]
        n = len(part)
        columns = [
            pa.array(part),
            pa.array(_keys(part)),
            pa.array(counts),
            pa.array(counts / 8),
            pa.nulls(n, pa.int64()),
            pa.array(np.ones(n, dtype=np.bool_)),
            pa.array(np.zeros(n, dtype=np.bool_)),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA.arrow)


class _LoadLog:
    """Spark's log of how long its state stores take to load.

    Parameters
    ----------
    folder
        Folder for the log and its settings; made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._path = folder / "log"
        settings = folder / "log4j2.properties"
        settings.write_text(_LOG.format(path=self._path))
        self.java_options = f"-Dlog4j2.configurationFile=file:{settings}"
        self._read = 0

    def first_load_s(self) -> float:
        """Seconds that the first load since the last call took."""
        lines = self._path.read_text().splitlines()
        found = [match for line in lines[self._read :] if (match := _LINE.fullmatch(line))]
        self._read = len(lines)
        kinds = [match[2] for match in found[:2]]
        if kinds != ["Loading", "Loaded"] or found[0][3] != found[1][3]:
            raise BenchmarkError(f"Spark's log has no load where one was expected: {kinds}")
        return (int(found[1][1]) - int(found[0][1])) / 1000


def _spark_restarts(report: Report, spark: Any, log: _LoadLog, rows: int, restarts: int, work: Path) -> list[float]:
    """How long Spark takes to load a state of so many keys, seconds, at each restart of a query."""
    folder = work / f"spark-{rows}"
    source = folder / "in"
    source.mkdir(parents=True)
    # As random as ours: neither can be compressed.
    keys = np.random.default_rng(rows).integers(-(2**63), 2**63, rows)
    _show(source, 0, keys)
    _one_start(spark, source, folder, collects=False)
    log.first_load_s()
    times: list[float] = []
    for restart in range(restarts):
        _show(source, 1 + restart, keys[:1])
        seen = _one_start(spark, source, folder, collects=True)
        report.check(f"Spark's state of {rows:,} keys goes on", seen == [(int(keys[0]), 2 + restart)])
        times.append(log.first_load_s())
    shutil.rmtree(folder)
    return times


def _show(source: Path, number: int, keys: Keys) -> None:
    hidden = source.parent / "hidden.parquet"
    pq.write_table(pa.table({"key": pa.array(keys)}), hidden)
    hidden.rename(source / f"{number:05}.parquet")


def _one_start(spark: Any, source: Path, folder: Path, collects: bool) -> list[tuple[int, int]]:
    """Start the query over what is new; the rows it emitted."""
    from pyspark.sql import functions as F

    seen: list[tuple[int, int]] = []

    def note(batch: Any, _: int) -> None:
        seen.extend((row.key, row.n) for row in batch.collect())

    counts = (
        spark.readStream.schema("key long")
        .parquet(str(source))
        .groupBy("key")
        .agg(F.count("*").alias("n"), F.sum(F.col("key") % 8))
    )
    writer = counts.writeStream.outputMode("update")
    # All of the rows are made in any case: a batch that is not read to its end is not committed.
    writer = writer.foreachBatch(note) if collects else writer.format("noop")
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    if not query.awaitTermination(_WAIT_S):
        query.stop()
        raise BenchmarkError(f"Spark's query did not end within {_WAIT_S} s")
    return seen


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
