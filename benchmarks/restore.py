"""Measure the time from an empty disk to the first lookup in a restored bucket, compared with `cp` and Spark's RocksDB.

`cp` copies the bucket's snapshot. Spark's progress does not say how long it takes to load a state, but its log does:
it is the time between RocksDB's lines "Loading" and "Loaded" in the first batch after a restart. This time does not
include a lookup.
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
    """Add the benchmark's options to a parser."""
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1_000_000, 10_000_000], metavar="N", help="numbers of keys"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="how often copying and restoring are measured"
    )
    parser.add_argument("--restarts", type=int, default=7, metavar="N", help="how often Spark's query is restarted")
    add_memory(parser, "4g")
    add_seed(parser, "keys and values")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an option is invalid, a restored state is not the one that was written, Spark's query takes too long, or its
        log does not show a load.
    """
    if min(*options.rows, options.repeats, options.restarts) < 1 or min(options.rows) < _LOOKED_UP:
        raise BenchmarkError(f"--rows must be at least {_LOOKED_UP}, and --repeats and --restarts at least 1")
    names = ("rows", "repeats", "restarts", "memory", "seed")
    report = Report("restore", {name: getattr(options, name) for name in names})
    medians_s = {rows: _measure_restores(report, rows, options, work / str(rows)) for rows in options.rows}
    log = _LoadLog(work / "log")
    settings = {
        "spark.sql.shuffle.partitions": "1",
        "spark.driver.extraJavaOptions": log.java_options,
        # Without a changelog Spark loads whole snapshots. Replaying a changelog after a restart takes it longer.
        CHANGELOG: "false",
    }
    with session("restore", 2, options.memory, work / "spark", settings, log_level=None) as spark:
        # Warm up.
        _measure_restarts(report, spark, log, _WARM_UP_ROWS, options.restarts, work)
        for rows in options.rows:
            _print_progress(f"Spark, {rows:,} keys")
            spark_s = report.timing(
                f"{rows:,} keys: Spark's RocksDB", _measure_restarts(report, spark, log, rows, options.restarts, work)
            )
            ratio = report.ratio(f"{rows:,} keys: restore / Spark's RocksDB", medians_s[rows] / spark_s)
            report.bar(f"{rows:,} keys, over Spark's", ratio, "at most", SPARK_AT_MOST, "times")
    return report


def _measure_restores(report: Report, rows: int, options: argparse.Namespace, work: Path) -> float:
    _print_progress(f"{rows:,} keys")
    rng = np.random.default_rng(options.seed)
    hashes = np.sort(rng.integers(0, 2**64, rows, dtype=np.uint64))
    expected = rng.integers(1, 100, rows)
    ref, parent = CheckpointRef(10, new_checkpoint_id()), CheckpointRef(9, new_checkpoint_id())
    header = LineageHeader(SNAPSHOT, "restored", 0, ref, parent, (parent,), 0, _WRITER, __version__)
    folder = work / "root" / "0"
    folder.mkdir(parents=True)
    path = folder / file_name(ref, SNAPSHOT)
    with path.open("wb") as file:
        write_checkpoint(file, header, _SCHEMA, _make_batches(hashes, expected))
    size = path.stat().st_size
    report.details[f"{rows:,} keys: bytes"] = size
    pointer = Pointer("restored", 0, 1, 0, 9, None, lineage=(LineageEntry(ref, size, 9),), parent=parent, rows=rows)
    sample = rng.choice(rows, _LOOKED_UP, replace=False)
    copies: list[float] = []
    restores: list[float] = []
    for _ in range(options.repeats):
        copies.append(_time_copy(path, work / "copy"))
        started_s = time.perf_counter()
        store = LocalStore.at(work / "local", _SCHEMA)
        replicas = sole_replica(Folder(str(work / "root")).child("0"), work)
        bucket = Bucket(store, replicas, pointer, _WRITER, CommitContext(work))
        matches = bucket.read(lambda view: view.lookup(hashes[sample], [pa.array(_make_keys(hashes[sample]))]))
        restores.append(time.perf_counter() - started_s)
        values = matches.rows.column("state.n").to_numpy()[matches.index]
        report.check(
            f"{_LOOKED_UP:,} values of {rows:,} are those that were written",
            bool((matches.index >= 0).all() and (values == expected[sample]).all()),
        )
        store.close()
        shutil.rmtree(work / "local")
    copy_s = report.timing(f"{rows:,} keys: cp", copies)
    restore_s = report.timing(f"{rows:,} keys: restore", restores)
    ratio = report.ratio(f"{rows:,} keys: restore / cp", restore_s / copy_s)
    report.bar(f"{rows:,} keys, over cp", ratio, "at most", CP_AT_MOST, "times")
    shutil.rmtree(work)
    return restore_s


def _time_copy(source: Path, target: Path) -> float:
    started_s = time.perf_counter()
    subprocess.run(["cp", str(source), str(target)], check=True)
    elapsed_s = time.perf_counter() - started_s
    target.unlink()
    return elapsed_s


def _make_keys(hashes: npt.NDArray[np.uint64]) -> Keys:
    keys: Keys = (hashes * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    return keys


def _make_batches(hashes: npt.NDArray[np.uint64], values: Keys) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(hashes), _PIECE_ROWS):
        part, counts = hashes[start : start + _PIECE_ROWS], values[start : start + _PIECE_ROWS]
        n = len(part)
        columns = [
            pa.array(part),
            pa.array(_make_keys(part)),
            pa.array(counts),
            pa.array(counts / 8),
            pa.nulls(n, pa.int64()),
            pa.array(np.ones(n, dtype=np.bool_)),
            pa.array(np.zeros(n, dtype=np.bool_)),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA.arrow)


class _LoadLog:
    """Spark's log of when its state stores start and end loading.

    Parameters
    ----------
    folder
        Folder for the log and its settings, which is created.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._path = folder / "log"
        settings = folder / "log4j2.properties"
        settings.write_text(_LOG.format(path=self._path))
        self.java_options = f"-Dlog4j2.configurationFile=file:{settings}"
        self._read = 0

    def read_first_load_s(self) -> float:
        """Return how long the first load since the last call took, in seconds."""
        lines = self._path.read_text().splitlines()
        matches = [match for line in lines[self._read :] if (match := _LINE.fullmatch(line))]
        self._read = len(lines)
        kinds = [match[2] for match in matches[:2]]
        if kinds != ["Loading", "Loaded"] or matches[0][3] != matches[1][3]:
            raise BenchmarkError(
                f"expected Loading and Loaded of one version in Spark's log of state stores, found {kinds}"
            )
        return (int(matches[1][1]) - int(matches[0][1])) / 1000


def _measure_restarts(report: Report, spark: Any, log: _LoadLog, rows: int, restarts: int, work: Path) -> list[float]:
    """Return the seconds that Spark takes to load a state with the given number of keys, for each restart."""
    folder = work / f"spark-{rows}"
    source = folder / "in"
    source.mkdir(parents=True)
    # The keys are random like those of our state, so that neither state can be compressed.
    keys = np.random.default_rng(rows).integers(-(2**63), 2**63, rows)
    _add_input(source, 0, keys)
    _run_query(spark, source, folder, is_collected=False)
    log.read_first_load_s()
    times: list[float] = []
    for restart in range(restarts):
        _add_input(source, 1 + restart, keys[:1])
        emitted = _run_query(spark, source, folder, is_collected=True)
        report.check(f"Spark's state of {rows:,} keys goes on", emitted == [(int(keys[0]), 2 + restart)])
        times.append(log.read_first_load_s())
    shutil.rmtree(folder)
    return times


def _add_input(source: Path, number: int, keys: Keys) -> None:
    hidden = source.parent / "hidden.parquet"
    pq.write_table(pa.table({"key": pa.array(keys)}), hidden)
    hidden.rename(source / f"{number:05}.parquet")


def _run_query(spark: Any, source: Path, folder: Path, is_collected: bool) -> list[tuple[int, int]]:
    """Run the query over its new input; return the rows that it emitted, if they are collected."""
    from pyspark.sql import functions as F

    emitted: list[tuple[int, int]] = []

    def note(batch: Any, _: int) -> None:
        emitted.extend((row.key, row.n) for row in batch.collect())

    counts = (
        spark.readStream.schema("key long")
        .parquet(str(source))
        .groupBy("key")
        .agg(F.count("*").alias("n"), F.sum(F.col("key") % 8))
    )
    writer = counts.writeStream.outputMode("update")
    # Spark computes all rows either way, because it commits a batch only after the sink has read all of its output.
    writer = writer.foreachBatch(note) if is_collected else writer.format("noop")
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    if not query.awaitTermination(_WAIT_S):
        query.stop()
        raise BenchmarkError(f"Spark's query did not end within {_WAIT_S} s")
    return emitted


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
