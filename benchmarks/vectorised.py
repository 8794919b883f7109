"""Keyed running count and sum, compared with Spark's own JVM aggregation, in two sizes.

The contenders run in one session and get the same batches in turns: Spark's native ``groupBy().agg()`` with RocksDB and
changelog checkpoints, and on our state a function over Arrow tables and one over rows. The smaller workload adds pandas
functions, on our state and on Spark's own; the larger one adds our built-in aggregate, and Bytewax.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from benchmarks import counting
from benchmarks.counting import INPUT, OUTPUT, STATE
from benchmarks.options import add_buckets, add_quick, add_seed, add_spark
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from benchmarks.streams import TimedStream

__all__ = ["ARROW", "NATIVE", "ROWS", "add_arguments", "plans", "run"]

NATIVE, ARROW, BUILT_IN = "Spark's own aggregation (JVM)", "function over Arrow tables", "built-in aggregate"
ROWS, TUPLES, FRAMES = "function over rows", "pandas function, tuples out", "pandas function, unchanged"
PANDAS = "the same on Spark's own state"
SMALL, LARGE = "100,000 events, 50,000 keys", "1,000,000 events, 1,000,000 keys"
_SIZES = {SMALL: (100_000, 50_000), LARGE: (1_000_000, 1_000_000)}
_ON = {SMALL: [NATIVE, ARROW, ROWS, TUPLES, FRAMES, PANDAS], LARGE: [NATIVE, ARROW, BUILT_IN, ROWS]}
LARGE_AT_LEAST, SMALL_AT_LEAST, PANDAS_AT_LEAST = 3.0, 1.0, 35.0
DROP_IN_AT_LEAST, TUPLES_AT_LEAST, ROWS_AT_LEAST = 4.3, 8.0, 20.0
_FILES = 2
# With --quick, the numbers of events and keys are divided by this.
_QUICK_PART = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    # The JVM keeps compiling during the first seconds of work. One large batch takes that long, a small one does not.
    parser.add_argument(
        "--small-batches", type=int, default=20, metavar="N", help="small batches; the first is a warm-up"
    )
    parser.add_argument("--batches", type=int, default=8, metavar="N", help="large batches; the first is a warm-up")
    add_buckets(parser)
    add_spark(parser, "4g")
    add_seed(parser)
    parser.add_argument("--only", choices=["small", "large"], default=None, help="run only this workload")
    parser.add_argument("--ours", action="store_true", help="leave out other systems, and the bars")
    add_quick(parser, "few batches, a fifth of the events and keys, and no Bytewax")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an answer is wrong, or a number of batches is too small.
    """
    from benchmarks.spark import session

    small, large = (4, 4) if options.quick else (options.small_batches, options.batches)
    if min(small, large) < 2:
        raise BenchmarkError("--batches and --small-batches must be at least 2: the first is not counted")
    parameters = {name: getattr(options, name) for name in ("buckets", "cores", "memory", "seed")}
    report = Report("vectorised", {"small batches": small, "batches": large, **parameters})
    with session("vectorised", options.cores, options.memory, work, {}) as spark:
        for workload in {"small": [SMALL], "large": [LARGE], None: [SMALL, LARGE]}[options.only]:
            batches = small if workload == SMALL else large
            _run_workload(report, spark, workload, batches, options, work / workload.split()[0].replace(",", ""))
    if options.only != "small" and not (options.quick or options.ours):
        _compare_with_bytewax(report, large, options.seed, work)
    return report


def _compare_with_bytewax(report: Report, batches: int, seed: int, work: Path) -> None:
    """Run the larger workload in Bytewax, with recovery on; compare the fastest program with our function over rows.

    Programs marked slow are left out.
    """
    from benchmarks.peers.compare import PROGRAMS, WORKLOADS, measure

    events, keys = _SIZES[LARGE]
    (workload,) = (
        candidate for candidate in WORKLOADS.values() if (candidate.events, candidate.keys) == (events, keys)
    )
    programs = [candidate for candidate in PROGRAMS if candidate.environment == "bytewax" and not candidate.slow]
    medians = measure(report, workload, work / "bytewax", batches=batches, programs=programs, seed=seed)
    if medians:
        fastest = min(medians, key=medians.__getitem__)
        ours = statistics.median(report.timings[f"{LARGE}: {ROWS}: batch"])
        report.bar(f"{LARGE}: {ROWS} against {fastest}", medians[fastest] / ours, "at least", 1.0, "times")


def _run_workload(
    report: Report, spark: Any, workload: str, batches: int, options: argparse.Namespace, work: Path
) -> None:
    from benchmarks.streams import TimedStream, cut, in_turns

    events, keys = (size // (_QUICK_PART if options.quick else 1) for size in _SIZES[workload])
    title = f"{events:,} events, {keys:,} keys"
    frames = counting.event_batches(batches, events, keys, options.seed)
    inputs = [cut(pa.Table.from_pandas(frame, preserve_index=False), _FILES) for frame in frames]
    streams: dict[str, TimedStream] = {}
    for number, name in enumerate(
        contender for contender in _ON[workload] if not (options.ours and contender in (NATIVE, PANDAS))
    ):
        plan = plans(options.buckets)[name]
        streams[name] = TimedStream(spark, f"{title}: {name}", INPUT, work / f"contender-{number}", plan)
    slow = [streams[PANDAS]] if PANDAS in streams else []
    in_turns([stream for stream in streams.values() if stream not in slow], inputs, report)
    if slow:  # fewer batches: each takes half a minute
        in_turns(slow, inputs[: 2 if options.quick else min(batches, 6)], report)
    for stream in streams.values():
        timed_frames = frames[: len(stream.seconds)]
        final = counting.every_key_once(timed_frames)
        answer = stream.kept(cut(pa.Table.from_pandas(final, preserve_index=False), _FILES)).to_pandas()
        stream.stop()
        expected_answer = counting.expected([*timed_frames, final])
        description = f"{stream.name}: final count and sum of {len(expected_answer)} keys equal plain pandas"
        report.check(description, counting.same_answer(answer, expected_answer))
    if not options.ours:
        _report_ratios(report, workload, title, streams)


def _report_ratios(report: Report, workload: str, title: str, streams: dict[str, TimedStream]) -> None:
    median = {name: statistics.median(stream.seconds[1:]) for name, stream in streams.items()}
    for name in (name for name in streams if name != NATIVE):
        report.ratio(f"{title}: {name} / {NATIVE}, rows per second", median[NATIVE] / median[name])
        if PANDAS in streams and name != PANDAS:
            report.ratio(f"{title}: {name} / {PANDAS}, rows per second", median[PANDAS] / median[name])

    def bar(fast: str, slow: str, limit: float) -> None:
        report.bar(f"{title}: {fast} against {slow}", median[slow] / median[fast], "at least", limit, "times")

    bar(ARROW, NATIVE, SMALL_AT_LEAST if workload == SMALL else LARGE_AT_LEAST)
    if PANDAS in streams:
        bar(ARROW, PANDAS, PANDAS_AT_LEAST)
        bar(FRAMES, PANDAS, DROP_IN_AT_LEAST)
        bar(TUPLES, PANDAS, TUPLES_AT_LEAST)
        bar(ROWS, PANDAS, ROWS_AT_LEAST)


def plans(buckets: int) -> dict[str, Callable[[DataFrame, Path], DataFrame]]:
    """Return for each contender the function that makes its query from its input and a folder for its state."""
    from pyspark.sql import functions as F

    from spark_state_ext import ArrowState

    def make_state(folder: Path) -> ArrowState:
        # Durability is complete: each batch's delta is in Spark's checkpoint, and soon afterwards in a file. If it is
        # large, it is only in a file, for which the task waits.
        return ArrowState(str(folder / "state"), "count", buckets=buckets, local_dir=str(folder / "local"))

    def plan_native(rows: DataFrame, folder: Path) -> DataFrame:
        return rows.groupBy("key").agg(F.count("*").alias("n"), F.sum("value").alias("total"))

    def plan_arrow(rows: DataFrame, folder: Path) -> DataFrame:
        function = counting.count_and_sum_in_arrow
        return make_state(folder).apply_in_arrow_with_state(rows, "key", function, OUTPUT, STATE)

    def plan_built_in(rows: DataFrame, folder: Path) -> DataFrame:
        from spark_state_ext import Agg, aggregate

        counts: DataFrame = aggregate(make_state(folder), rows, "key", {"n": Agg.count(), "total": Agg.sum("value")})
        return counts

    def plan_rows(rows: DataFrame, folder: Path) -> DataFrame:
        function = counting.count_and_sum_of_rows
        return make_state(folder).apply_rows_with_state(rows, "key", function, OUTPUT, STATE)

    def plan_pandas(function: Callable[..., Any]) -> Callable[[DataFrame, Path], DataFrame]:
        return lambda rows, folder: make_state(folder).apply_in_pandas_with_state(
            rows, "key", function, OUTPUT, STATE, "update", "NoTimeout"
        )

    def plan_sparks(rows: DataFrame, folder: Path) -> DataFrame:
        return rows.groupBy("key").applyInPandasWithState(counting.count_and_sum, OUTPUT, STATE, "update", "NoTimeout")

    return {
        NATIVE: plan_native,
        ARROW: plan_arrow,
        BUILT_IN: plan_built_in,
        ROWS: plan_rows,
        TUPLES: plan_pandas(counting.count_and_sum_to_tuples),
        FRAMES: plan_pandas(counting.count_and_sum),
        PANDAS: plan_sparks,
    }
