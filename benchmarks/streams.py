"""Streaming queries that get the same batches, one after the other, each batch timed.

Output of timed batches goes to Spark's ``noop`` sink, which takes every row and keeps none: what is measured is the
query, not a collector of its rows. The answer is checked in a last batch that is not timed, and whose output is kept.
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
    """One query over a folder of files.

    Parameters
    ----------
    spark
        The session.
    name
        For people.
    schema
        The input's columns, in Spark's DDL.
    folder
        For the query's files.
    plan
        Makes the query of its input and a folder for its state.
    output_mode
        As for `DataStreamWriter.outputMode`.
    idle_ms
        How often an idle query looks for files, milliseconds; Spark's default is a hundred times a second, on the time
        of others.
    checkpoint
        Spark's checkpoint, where another stream of the same query had it before; by default one in `folder`.
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
        """Spark's ``durationMs`` of each timed batch, that of batches without input after it included."""
        self.cpu_parts: list[dict[str, float]] = []
        """Processor seconds of each timed batch, by program; empty where these are not known."""
        self._last_batch = -1

    @property
    def seconds(self) -> list[float]:
        """Seconds of each timed batch, all of Spark's work on it included."""
        return [parts["triggerExecution"] / 1000 for parts in self.durations]

    @property
    def cpu_seconds(self) -> list[float]:
        """Processor seconds of each timed batch, of the JVM and all Python workers."""
        return [sum(parts.values()) for parts in self.cpu_parts]

    def process(self, tables: Sequence[pa.Table]) -> None:
        """Hand over one batch, a file a table, and wait for it."""
        before = processes.cpu_seconds(os.getpid()) if processes.supported() else {}
        progress = self._processed(tables)
        after = processes.cpu_seconds(os.getpid()) if processes.supported() else {}
        together: dict[str, int] = {}
        for one in progress:
            for name, ms in one["durationMs"].items():
                together[name] = together.get(name, 0) + int(ms)
        self.durations.append(together)
        parts = {program: seconds - before.get(program, 0.0) for program, seconds in after.items()}
        # Workers that end without being waited for take their time with them.
        self.cpu_parts.append(parts if all(seconds >= 0 for seconds in parts.values()) else {})

    def kept(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Hand over a batch that is not timed; returns its output, and that of batches without input after it."""
        shutil.rmtree(self._kept, ignore_errors=True)
        self._keep = True
        self._processed(tables)
        self._keep = False
        return pa.concat_tables([pq.read_table(folder) for folder in sorted(self._kept.iterdir())])

    def stop(self) -> None:
        """Stop the query."""
        self._query.stop()

    def _processed(self, tables: Sequence[pa.Table]) -> list[dict[str, Any]]:
        self._feed.add_tables(iter(tables))
        self._query.processAllAvailable()
        self._feed.clear()
        # An idle query reports now and then too, without having run a batch.
        progress = [
            dict(p)
            for p in self._query.recentProgress
            if p["batchId"] > self._last_batch and "addBatch" in p["durationMs"]
        ]
        rows = sum(table.num_rows for table in tables)
        # A query that reads its input twice counts it twice.
        if not progress or progress[0]["numInputRows"] not in (rows, 2 * rows):
            raise BenchmarkError(f"{self.name}: a batch of {rows} rows did not arrive as one micro-batch")
        self._last_batch = progress[-1]["batchId"]
        return progress


def cut(table: pa.Table, files: int) -> list[pa.Table]:
    """A batch as equally large files."""
    step = -(-table.num_rows // files)
    return [table.slice(at, step) for at in range(0, table.num_rows, step)]


def in_turns(streams: Sequence[TimedStream], batches: Sequence[Sequence[pa.Table]], report: Report) -> None:
    """Hand each batch to each stream, who goes first alternating; the times after the first batch go to the report."""
    for number, tables in enumerate(batches):
        for stream in _turn(streams, number):
            stream.process(tables)
        shown = [f"{stream.name} {stream.seconds[-1]:.2f} s ({stream.cpu_seconds[-1]:.2f})" for stream in streams]
        print(f"batch {number}, seconds (of processor): {', '.join(shown)}", file=sys.stderr, flush=True)
    for stream in streams:
        note_times(stream, report)


def note_times(stream: TimedStream, report: Report) -> None:
    """A stream's times after the first batch."""
    report.timing(f"{stream.name}: batch", stream.seconds[1:])
    known = [parts for parts in stream.cpu_parts[1:] if parts]
    if known:
        report.timing(f"{stream.name}: batch, processor time", [sum(parts.values()) for parts in known])
        for program in sorted({program for parts in known for program in parts}):
            part = [parts.get(program, 0.0) for parts in known]
            report.timing(f"{stream.name}: batch, processor time of {program}", part)
    report.details[f"{stream.name}: seconds of the first batch"] = stream.seconds[0]
    report.details[f"{stream.name}: durationMs of each batch"] = stream.durations


def _turn(streams: Sequence[TimedStream], number: int) -> Iterator[TimedStream]:
    yield from streams if number % 2 == 0 else reversed(streams)
