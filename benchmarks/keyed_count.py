"""Keyed count and sum: the same unmodified pandas function on Spark's own state and on Arrow state.

The queries run in one session and get the same batches in turns. A third query, also on Arrow state, measures the time
within the function: the rest of its workers' time is what we add. The function is also measured alone, in a loop
without Spark, before and after each query's batch, because the speed of a shared machine changes while a benchmark
runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from benchmarks import processes
from benchmarks.clock import clocked, cost_s
from benchmarks.clock import seconds as clock_seconds
from benchmarks.counting import (
    INPUT,
    OUTPUT,
    STATE,
    count_and_sum,
    event_batches,
    every_key_once,
    expected,
    same_answer,
)
from benchmarks.floor import Floor, FloorTime
from benchmarks.options import add_buckets, add_seed, add_spark
from benchmarks.report import BenchmarkError, Report
from spark_state_ext.worker import metrics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["add_arguments", "run"]

SPEEDUP_AT_LEAST = 4.3
OWN_AT_MOST_PERCENT = 15.0
ADDED_AT_MOST_PERCENT = 30.0
_FILES_PER_BATCH = 2
_OURS, _SPARKS, _CLOCKED = "Arrow state", "Spark's own state", "Arrow state, clock around the function"
_FLOOR = "function alone"
_WORKERS = "python"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--batches", type=int, default=6, metavar="N", help="batches; the first is a warm-up")
    parser.add_argument("--events", type=int, default=100_000, metavar="N", help="events in each batch")
    parser.add_argument(
        "--keys", type=int, default=50_000, metavar="N", help="number of keys from which events are drawn"
    )
    add_buckets(parser, None)
    add_spark(parser, "2g")
    add_seed(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a Spark setting for all queries; can be repeated",
    )
    parser.add_argument(
        "--only", choices=["ours", "spark"], default=None, help="run only our queries or only Spark's own, without bars"
    )


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an answer is wrong, or ``--batches`` is too small.
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
            # The first query of a batch may have an advantage, so the order alternates.
            for name in names if number % 2 == 0 else reversed(names):
                streams[name].process(events)
                measured.append(floor.measure())
            floors.append(measured)
            _print_progress(number, streams, measured)
        final = every_key_once(batches)
        answers = {name: stream.finish(final) for name, stream in streams.items()}
        floor.next_batch(final)
        floor.measure()
        answers[_FLOOR] = floor.answer()
        batches.append(final)
    _report_results(report, batches, streams, floors, answers, work)
    return report


class _Stream:
    """One of the queries; the one named `_CLOCKED` has a clock around its function."""

    def __init__(self, spark: SparkSession, name: str, work: Path, buckets: int | None) -> None:
        from benchmarks.streams import TimedStream

        self._folder = work / {_OURS: "ours", _SPARKS: "sparks", _CLOCKED: "clocked"}[name]
        self._clocks = self._folder / "clocks"
        function: Callable[..., Any] = count_and_sum
        if name == _CLOCKED:
            self._clocks.mkdir(parents=True)
            function = clocked(count_and_sum, str(self._clocks))

        def plan(rows: DataFrame, folder: Path) -> DataFrame:
            from spark_state_ext import ArrowState, disable, enable

            if name != _SPARKS:
                extra: dict[str, Any] = {} if buckets is None else {"buckets": buckets}
                enable(
                    spark, ArrowState(str(folder / "state"), "keyed_count", local_dir=str(folder / "local"), **extra)
                )
            counted = rows.groupBy("key").applyInPandasWithState(function, OUTPUT, STATE, "update", "NoTimeout")
            disable(spark)
            return counted

        self._stream = TimedStream(spark, name, INPUT, self._folder, plan)
        self.function_seconds: list[float] = []
        """Processor seconds of each batch within the function; all 0 for a query without a clock."""

    @property
    def durations(self) -> list[dict[str, int]]:
        """Spark's ``durationMs`` of each batch."""
        return self._stream.durations

    @property
    def cpu_parts(self) -> list[dict[str, float]]:
        """Processor seconds of each batch, by program."""
        return self._stream.cpu_parts

    @property
    def seconds(self) -> list[float]:
        """Seconds of each batch, including all of Spark's work on it."""
        return self._stream.seconds

    @property
    def cpu_seconds(self) -> list[float]:
        """Processor seconds of each batch, of the JVM and all Python workers."""
        return self._stream.cpu_seconds

    @property
    def call_seconds(self) -> list[float]:
        """Processor seconds of each batch that workers spent in calls of buckets, including the function."""
        # Workers write their metrics about once a second.
        time.sleep(3)
        (folder,) = self._folder.glob("local/*/metrics")
        rows = metrics.by_batch(metrics.read(folder))
        return [row["cpu_ms"] / 1000 for row in sorted(rows.to_pylist(), key=lambda row: row["batch"])]

    def process(self, events: pd.DataFrame) -> None:
        """Process one batch, and wait until it is done."""
        before = clock_seconds(self._clocks)
        self._stream.process(self._cut_files(events))
        self.function_seconds.append(clock_seconds(self._clocks) - before)

    def finish(self, events: pd.DataFrame) -> pd.DataFrame:
        """Process a last batch, which has every key, and stop the query; return the batch's output."""
        answer: pd.DataFrame = self._stream.kept(self._cut_files(events)).to_pandas()
        self._stream.stop()
        return answer

    @staticmethod
    def _cut_files(events: pd.DataFrame) -> list[pa.Table]:
        from benchmarks.streams import cut

        return cut(pa.Table.from_pandas(events, preserve_index=False), _FILES_PER_BATCH)


def _report_results(
    report: Report,
    batches: list[pd.DataFrame],
    streams: dict[str, _Stream],
    floors: list[list[FloorTime]],
    answers: dict[str, pd.DataFrame],
    work: Path,
) -> None:
    expected_answer = expected(batches)
    for name, answer in answers.items():
        report.check(
            f"{name}: final count and sum of {len(expected_answer)} keys equal plain pandas",
            same_answer(answer, expected_answer),
        )
    # Take the median of each batch's measurements, because other work on the machine may slow some of them down.
    floor_each = [statistics.median(floor_time.wall_s for floor_time in measured) for measured in floors]
    floor_cpu = [statistics.median(floor_time.cpu_s for floor_time in measured) for measured in floors]
    batches = batches[:-1]  # the last one was not timed
    rows = sum(len(batch) for batch in batches[1:])
    rates = {}
    for name, stream in streams.items():
        report.timing(f"{name}: batch", stream.seconds[1:])
        rates[name] = rows / sum(stream.seconds[1:])
        report.details[f"{name}: rows per second after the first batch"] = rates[name]
        report.details[f"{name}: seconds of the first batch"] = stream.seconds[0]
        report.details[f"{name}: durationMs of each batch"] = stream.durations
    report.timing(f"{_FLOOR}: batch", floor_each[1:])
    report.details[f"{_FLOOR}: every measurement, by batch"] = [
        [floor_time.wall_s for floor_time in batch_floors] for batch_floors in floors
    ]
    keys = sum(batch["key"].nunique() for batch in batches[1:])
    report.details[f"{_FLOOR}: processor ms a key"] = 1000 * sum(floor_cpu[1:]) / keys
    for name, stream in streams.items():
        added_percents = [
            100 * (stream_s / floor_s - 1) for stream_s, floor_s in zip(stream.seconds, floor_each, strict=True)
        ]
        report.details[f"{name}: percent added to the function's own time, by batch"] = added_percents
        report.ratio(f"{name} / {_FLOOR}, time", sum(stream.seconds[1:]) / sum(floor_each[1:]))
    if processes.supported():
        # If other work competes for the cores, processor time varies less than elapsed time. It includes the JVM.
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
        parts = streams[_CLOCKED].cpu_parts[1:]
        function_s = sum(streams[_CLOCKED].function_seconds[1:])
        workers_s = sum(part.get(_WORKERS, 0.0) for part in parts)
        # Subtract the time of the clock itself, which is not our work. It is measured in a loop in which nothing else
        # competes for the processor's cache, so that rather too little is subtracted than too much.
        clock = keys * cost_s(work / "clock")
        calls_s = sum(streams[_CLOCKED].call_seconds[1 : 1 + len(parts)]) - clock
        workers_s -= clock
        report.details["processor seconds within the function, by batch"] = streams[_CLOCKED].function_seconds
        report.details["processor seconds of the workers' calls, by batch"] = streams[_CLOCKED].call_seconds
        report.details["processor seconds of the clock itself, taken off"] = clock
        report.details["processor ms a key within the function, in the workers"] = 1000 * function_s / keys
        report.bar(
            "our own time in the workers' calls", 100 * (calls_s / function_s - 1), "at most", OWN_AT_MOST_PERCENT, "%"
        )
        # Unlike the calls, this includes packing, and Spark's own work in the workers.
        added_percent = 100 * (workers_s / function_s - 1)
        report.bar(
            "added in the workers to the function's own time", added_percent, "at most", ADDED_AT_MOST_PERCENT, "%"
        )
        ours_s = sum(part.get(_WORKERS, 0.0) for part in streams[_OURS].cpu_parts[1:])
        report.ratio(f"{_OURS}, workers only / {_FLOOR}, processor time", ours_s / sum(floor_cpu[1:]))


def _print_progress(number: int, streams: dict[str, _Stream], floors: list[FloorTime]) -> None:
    parts = []
    for name, stream in streams.items():
        cpu = ", ".join(f"{program} {seconds:.2f} s" for program, seconds in stream.cpu_parts[-1].items())
        parts.append(f"{name} {stream.seconds[-1]:.2f} s (processor {cpu})")
    floor_parts = ", ".join(f"{floor_time.wall_s:.2f} s (processor {floor_time.cpu_s:.2f} s)" for floor_time in floors)
    print(f"batch {number}: {', '.join(parts)}; {_FLOOR} {floor_parts}", file=sys.stderr, flush=True)
