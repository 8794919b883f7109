"""Keyed count and sum: one unmodified pandas function on Spark's own state and on Arrow state.

The queries live in one session and get the same batches in turn. A third one, on Arrow state too, has a clock around
the function: what its workers do besides is what we add. The function is also measured alone, in a tight loop without
Spark, around the batches, because the speed of a shared machine changes while a benchmark runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks import processes
from benchmarks.clock import clocked
from benchmarks.clock import seconds as clock_seconds
from benchmarks.counting import OUTPUT, STATE, count_and_sum, event_batches, expected
from benchmarks.floor import Floor, FloorTime
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["add_arguments", "run"]

SPEEDUP_AT_LEAST = 3.5
ADDED_AT_MOST_PERCENT = 30.0
_FILES_PER_BATCH = 2
_OURS, _SPARKS, _CLOCKED = "Arrow state", "Spark's own state", "Arrow state, clock around the function"
_FLOOR = "function alone"
_WORKERS = "python"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--batches", type=int, default=5, metavar="N", help="batches; the first is a warm-up")
    parser.add_argument("--events", type=int, default=100_000, metavar="N", help="events a batch")
    parser.add_argument("--keys", type=int, default=50_000, metavar="N", help="keys that events are drawn from")
    parser.add_argument(
        "--buckets", type=int, default=None, metavar="N", help="buckets of ArrowState (None: its default)"
    )
    parser.add_argument("--cores", type=int, default=2, metavar="N", help="cores, and shuffle partitions")
    parser.add_argument("--memory", default="2g", help="heap of Spark")
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="seed of the events")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a Spark setting for both queries; repeatable"
    )
    parser.add_argument("--only", choices=["ours", "spark"], default=None, help="leave the other out, and the bars too")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When the answers are wrong.
    """
    from benchmarks.spark import session

    if options.batches < 2:
        raise BenchmarkError("--batches must be at least 2: the first is not counted")
    settings = dict(item.split("=", 1) for item in options.set)
    names = {"ours": [_OURS, _CLOCKED], "spark": [_SPARKS], None: [_SPARKS, _OURS, _CLOCKED]}[options.only]
    batches = event_batches(options.batches, options.events, options.keys, options.seed)
    report = Report(
        "keyed_count" if options.only is None else f"keyed_count_{options.only}",
        {
            "batches": options.batches,
            "events": options.events,
            "keys": options.keys,
            "buckets": options.buckets or "default",
            "cores": options.cores,
            "memory": options.memory,
            "seed": options.seed,
            **({"settings": settings} if settings else {}),
        },
    )
    report.details["distinct keys a batch"] = [int(batch["key"].nunique()) for batch in batches]
    all_keys = pd.concat(batches)["key"].to_numpy(dtype=np.int64)
    with (
        Floor(options.cores, all_keys) as floor,
        session("keyed_count", options.cores, options.memory, work, settings) as spark,
    ):
        streams = {name: _Stream(spark, name, work, options.buckets) for name in names}
        floors: list[list[FloorTime]] = []
        for number, events in enumerate(batches):
            floor.next_batch(events)
            measured = [floor.measure()]
            # Who goes first alternates.
            for name in names if number % 2 == 0 else reversed(names):
                streams[name].process(events)
                measured.append(floor.measure())
            floors.append(measured)
            _progress(number, streams, measured)
        answers = {name: stream.finish() for name, stream in streams.items()}
        answers[_FLOOR] = floor.answer()
    _judge(report, batches, streams, floors, answers)
    return report


class _Stream:
    """One of the two queries."""

    def __init__(self, spark: SparkSession, name: str, work: Path, buckets: int | None) -> None:
        from benchmarks.spark import Feed
        from spark_state_ext import ArrowState, disable, enable

        self._spark = spark
        slug = {_OURS: "ours", _SPARKS: "sparks", _CLOCKED: "clocked"}[name]
        folder = work / slug
        self._feed = Feed(folder / "input")
        function: Callable[..., Any] = count_and_sum
        self._clocks = folder / "clocks"
        if name == _CLOCKED:
            self._clocks.mkdir(parents=True)
            function = clocked(count_and_sum, str(self._clocks))
        if name != _SPARKS:
            more: dict[str, Any] = {} if buckets is None else {"buckets": buckets}
            enable(spark, ArrowState(str(folder / "state"), "keyed_count", local_dir=str(folder / "local"), **more))
        rows = spark.readStream.schema("key bigint, value double").parquet(self._feed.pattern)
        counted = rows.groupBy("key").applyInPandasWithState(function, OUTPUT, STATE, "update", "NoTimeout")
        disable(spark)
        self._table = f"answers_{slug}"
        self._query: StreamingQuery = (
            counted.writeStream.format("memory")
            .queryName(self._table)
            .outputMode("update")
            .option("checkpointLocation", str(folder / "checkpoint"))
            # An idle query looks for files that often; the default is a hundred times a second, on the other's time.
            .trigger(processingTime="500 milliseconds")
            .start()
        )
        self.durations: list[dict[str, int]] = []
        self.cpu_parts: list[dict[str, float]] = []
        self.function_seconds: list[float] = []
        """Processor seconds within the function, of each batch; only with a clock."""

    @property
    def seconds(self) -> list[float]:
        """Seconds of each batch, all of Spark's work on it included."""
        return [parts["triggerExecution"] / 1000 for parts in self.durations]

    @property
    def cpu_seconds(self) -> list[float]:
        """Processor seconds of each batch, of the JVM and all Python workers."""
        return [sum(parts.values()) for parts in self.cpu_parts]

    def process(self, events: pd.DataFrame) -> None:
        """Hand over one batch and wait for it."""
        self._feed.add(events, _FILES_PER_BATCH)
        clock_before = clock_seconds(self._clocks)
        before = processes.cpu_seconds(os.getpid()) if processes.supported() else {}
        self._query.processAllAvailable()
        after = processes.cpu_seconds(os.getpid()) if processes.supported() else {}
        progress = [p for p in self._query.recentProgress if p["numInputRows"] > 0]
        if len(progress) != len(self.durations) + 1 or progress[-1]["numInputRows"] != len(events):
            raise BenchmarkError(f"batch {len(self.durations)} did not arrive as one micro-batch of {len(events)} rows")
        self.function_seconds.append(clock_seconds(self._clocks) - clock_before)
        self.durations.append({name: int(ms) for name, ms in progress[-1]["durationMs"].items()})
        self.cpu_parts.append({program: seconds - before.get(program, 0.0) for program, seconds in after.items()})

    def finish(self) -> pd.DataFrame:
        """Stop; returns the last row of each key."""
        self._query.stop()
        rows = self._spark.table(self._table).toPandas()
        return rows.sort_values(["key", "n"]).drop_duplicates("key", keep="last").reset_index(drop=True)


def _judge(
    report: Report,
    batches: list[pd.DataFrame],
    streams: dict[str, _Stream],
    floors: list[list[FloorTime]],
    answers: dict[str, pd.DataFrame],
) -> None:
    right = expected(batches)
    for name, answer in answers.items():
        report.check(f"{name}: final count and sum of {len(right)} keys equal plain pandas", _same(answer, right))
    # Of the measurements of one batch the median: none stands out then, whatever else the machine was doing.
    floor_each = [statistics.median(one.wall_s for one in measured) for measured in floors]
    floor_cpu = [statistics.median(one.cpu_s for one in measured) for measured in floors]
    rows = sum(len(batch) for batch in batches[1:])
    rates = {}
    for name, stream in streams.items():
        report.timing(f"{name}: batch", stream.seconds[1:])
        rates[name] = rows / sum(stream.seconds[1:])
        report.details[f"{name}: rows per second after the first batch"] = rates[name]
        report.details[f"{name}: seconds of the first batch"] = stream.seconds[0]
        report.details[f"{name}: durationMs of each batch"] = stream.durations
    report.timing(f"{_FLOOR}: batch", floor_each[1:])
    report.details[f"{_FLOOR}: every measurement, by batch"] = [[one.wall_s for one in m] for m in floors]
    keys = sum(batch["key"].nunique() for batch in batches[1:])
    report.details[f"{_FLOOR}: processor ms a key"] = 1000 * sum(floor_cpu[1:]) / keys
    for name, stream in streams.items():
        added = [100 * (whole / least - 1) for whole, least in zip(stream.seconds, floor_each, strict=True)]
        report.details[f"{name}: percent added to the function's own time, by batch"] = added
        report.ratio(f"{name} / {_FLOOR}, time", sum(stream.seconds[1:]) / sum(floor_each[1:]))
    if processes.supported():
        # Where other work competes for the cores, processor time is the steadier measure. It counts the JVM as well.
        report.timing(f"{_FLOOR}: batch, processor time", floor_cpu[1:])
        for name, stream in streams.items():
            report.timing(f"{name}: batch, processor time", stream.cpu_seconds[1:])
            for program in sorted({program for parts in stream.cpu_parts for program in parts}):
                part = [parts.get(program, 0.0) for parts in stream.cpu_parts[1:]]
                report.timing(f"{name}: batch, processor time of {program}", part)
            report.ratio(f"{name} / {_FLOOR}, processor time", sum(stream.cpu_seconds[1:]) / sum(floor_cpu[1:]))
    if _SPARKS not in streams or _OURS not in streams:
        return
    speedup = report.ratio(f"{_OURS} / {_SPARKS}, rows per second", rates[_OURS] / rates[_SPARKS])
    report.bar("rows per second against Spark's own", speedup, "at least", SPEEDUP_AT_LEAST, "times")
    if processes.supported():
        # What workers do beside the function, Spark's part of them included, and that of a clock too.
        parts = streams[_CLOCKED].cpu_parts[1:]
        inside = sum(streams[_CLOCKED].function_seconds[1:])
        workers = sum(part.get(_WORKERS, 0.0) for part in parts)
        report.details["processor ms a key within the function, in the workers"] = 1000 * inside / keys
        added_percent = 100 * (workers / inside - 1)
        report.bar(
            "added in the workers to the function's own time", added_percent, "at most", ADDED_AT_MOST_PERCENT, "%"
        )
        ours = sum(part.get(_WORKERS, 0.0) for part in streams[_OURS].cpu_parts[1:])
        report.ratio(f"{_OURS}, workers only / {_FLOOR}, processor time", ours / sum(floor_cpu[1:]))


def _same(answer: pd.DataFrame, right: pd.DataFrame) -> bool:
    """Exactly: the sums have no rounding in any order."""
    return len(answer) == len(right) and all(
        np.array_equal(answer[name].to_numpy(), right[name].to_numpy()) for name in ("key", "n", "total")
    )


def _progress(number: int, streams: dict[str, _Stream], floors: list[FloorTime]) -> None:
    parts = []
    for name, stream in streams.items():
        cpu = ", ".join(f"{program} {seconds:.2f} s" for program, seconds in stream.cpu_parts[-1].items())
        parts.append(f"{name} {stream.seconds[-1]:.2f} s (processor {cpu})")
    alone = ", ".join(f"{one.wall_s:.2f} s (processor {one.cpu_s:.2f} s)" for one in floors)
    print(f"batch {number}: {', '.join(parts)}; {_FLOOR} {alone}", file=sys.stderr, flush=True)
