"""Streaming queries that take turns at processing each of the same batches, with the time of each query and batch.

Timed batches write to Spark's ``noop`` sink, which takes every row and keeps none, so that only the query is measured
and not a collector of its rows. The output of an extra batch, which is not timed, is kept to check the answer.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import processes
from benchmarks.report import BenchmarkError, Report
from benchmarks.spark import Feed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["TimedStream", "cut", "in_turns"]


class TimedStream:
    """One streaming query that reads a folder of files.

    Parameters
    ----------
    spark
        The Spark session.
    name
        Name in messages and in the report.
    schema
        Columns of the input, in Spark's DDL.
    folder
        Folder for the query's files.
    plan
        Function that makes the query from its input and the folder for its files.
    output_mode
        As for `DataStreamWriter.outputMode`.
    idle_ms
        Milliseconds after which an idle query looks for files again. By default Spark looks a hundred times a second,
        which takes time from other queries.
    checkpoint
        Spark's checkpoint location, if an earlier stream of the same query used another one; by default, one in
        `folder`.
    """

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        schema: str,
        folder: Path,
        plan: Callable[[DataFrame, Path], DataFrame],
        output_mode: str = "update",
        idle_ms: int = 500,
        checkpoint: Path | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        self._feed = Feed(folder / "input")
        self._kept = folder / "kept"
        self._keep = False
        rows = spark.readStream.schema(schema).parquet(self._feed.pattern)

        def sink(batch: DataFrame, number: int) -> None:
            if self._keep:
                batch.write.mode("overwrite").parquet(str(self._kept / f"{number:05d}"))
            else:
                batch.write.format("noop").mode("overwrite").save()

        self._query: StreamingQuery = (
            plan(rows, folder)
            .writeStream.foreachBatch(sink)
            .outputMode(output_mode)
            .option("checkpointLocation", str(checkpoint or folder / "checkpoint"))
            .trigger(processingTime=f"{idle_ms} milliseconds")
            .start()
        )
        self.durations: list[dict[str, int]] = []
        """Spark's ``durationMs`` of each timed batch, including that of batches without input right after it."""
        self.cpu_parts: list[dict[str, float]] = []
        """Processor seconds of each timed batch by program; empty for a batch for which they are unknown."""
        self._last_batch = -1

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of each timed batch, including all of Spark's work on it."""
        return [parts["triggerExecution"] / 1000 for parts in self.durations]

    @property
    def cpu_seconds(self) -> list[float]:
        """Return the processor seconds of each timed batch: of the JVM and of all Python workers."""
        return [sum(parts.values()) for parts in self.cpu_parts]

    def process(self, tables: Sequence[pa.Table]) -> None:
        """Give the query one batch, with a file for each table, and wait until it is processed; time it."""
        before = processes.cpu_seconds(os.getpid()) if processes.supported() else {}
        progress = self._run_batch(tables)
        after = processes.cpu_seconds(os.getpid()) if processes.supported() else {}
        total_ms: dict[str, int] = {}
        for batch_progress in progress:
            for name, ms in batch_progress["durationMs"].items():
                total_ms[name] = total_ms.get(name, 0) + int(ms)
        self.durations.append(total_ms)
        parts = {program: seconds - before.get(program, 0.0) for program, seconds in after.items()}
        # A difference can be negative, because a worker that ended without being waited for no longer counts.
        self.cpu_parts.append(parts if all(seconds >= 0 for seconds in parts.values()) else {})

    def kept(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Process a batch without timing it; return its output and that of batches without input right after it."""
        shutil.rmtree(self._kept, ignore_errors=True)
        self._keep = True
        self._run_batch(tables)
        self._keep = False
        return pa.concat_tables([pq.read_table(folder) for folder in sorted(self._kept.iterdir())])

    def stop(self) -> None:
        """Stop the query."""
        self._query.stop()

    def _run_batch(self, tables: Sequence[pa.Table]) -> list[dict[str, Any]]:
        self._feed.add_tables(iter(tables))
        self._query.processAllAvailable()
        self._feed.clear()
        # An idle query also reports progress now and then, without having run a batch.
        progress = [
            dict(p)
            for p in self._query.recentProgress
            if p["batchId"] > self._last_batch and "addBatch" in p["durationMs"]
        ]
        rows = sum(table.num_rows for table in tables)
        # Spark counts the input twice if the query reads it twice.
        if not progress or progress[0]["numInputRows"] not in (rows, 2 * rows):
            raise BenchmarkError(f"{self.name}: a batch of {rows} rows did not arrive as one micro-batch")
        self._last_batch = progress[-1]["batchId"]
        return progress


def cut(table: pa.Table, files: int) -> list[pa.Table]:
    """Cut a batch into tables of equal size, one for each file; the last one may be smaller."""
    step = -(-table.num_rows // files)
    return [table.slice(offset, step) for offset in range(0, table.num_rows, step)]


def in_turns(streams: Sequence[TimedStream], batches: Sequence[Sequence[pa.Table]], report: Report) -> None:
    """Give each batch to each stream, in alternating order; report the times of all batches but the first."""
    for number, tables in enumerate(batches):
        for stream in _order(streams, number):
            stream.process(tables)
        shown = [f"{stream.name} {stream.seconds[-1]:.2f} s ({stream.cpu_seconds[-1]:.2f})" for stream in streams]
        print(f"batch {number}, seconds (of processor): {', '.join(shown)}", file=sys.stderr, flush=True)
    for stream in streams:
        note_times(stream, report)


def note_times(stream: TimedStream, report: Report) -> None:
    """Report a stream's times; those of the first batch only as a detail."""
    report.timing(f"{stream.name}: batch", stream.seconds[1:])
    known_parts = [parts for parts in stream.cpu_parts[1:] if parts]
    if known_parts:
        report.timing(f"{stream.name}: batch, processor time", [sum(parts.values()) for parts in known_parts])
        for program in sorted({program for parts in known_parts for program in parts}):
            program_seconds = [parts.get(program, 0.0) for parts in known_parts]
            report.timing(f"{stream.name}: batch, processor time of {program}", program_seconds)
    report.details[f"{stream.name}: seconds of the first batch"] = stream.seconds[0]
    report.details[f"{stream.name}: durationMs of each batch"] = stream.durations


def _order(streams: Sequence[TimedStream], number: int) -> Iterator[TimedStream]:
    yield from streams if number % 2 == 0 else reversed(streams)
