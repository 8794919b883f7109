"""The Nexmark benchmark: compare each query on Arrow state with the forms that Spark offers, on the same events."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from benchmarks.nexmark.generator import KINDS, Config, events, schema, spark_schema
from benchmarks.options import add_quick, add_seed, add_spark
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    from benchmarks.nexmark.queries import Query

__all__ = ["add_arguments", "run"]

_SPEEDUP_MIN = 2.0
_FILES = 2
_SCHEMA = spark_schema(extra=True)
_MOVED = "rows brought to Python, and nothing else"
# Contenders that take minutes per batch process only so many timed batches, the first of which is a warm-up.
_SLOW_BATCHES = 3
_CLOCK_WINDOW_S = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to a parser."""
    parser.add_argument("--events", type=int, default=1_000_000, metavar="N", help="events in a batch")
    parser.add_argument(
        "--batches", type=int, default=6, metavar="N", help="timed batches, at least 2; the first is a warm-up"
    )
    parser.add_argument("--rate", type=int, default=20_000, metavar="N", help="events per second of event time")
    parser.add_argument(
        "--query", action="append", default=None, metavar="NAME", help="run only this query; may be given several times"
    )
    add_spark(parser, "4g")
    add_seed(parser)
    add_quick(parser, "three timed batches of 200,000 events; do not time the transfer of rows to Python alone")
    parser.add_argument(
        "--per-key", action="store_true", help="also run Spark's per-key forms of q19, which take minutes per batch"
    )


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark and return its report.

    Raises
    ------
    BenchmarkError
        If the options are wrong, or the contenders' answers differ.
    """
    from benchmarks.nexmark.queries import QUERIES
    from benchmarks.spark import session

    size, count = (200_000, 3) if options.quick else (options.events, options.batches)
    names = options.query or list(QUERIES)
    if count < 2 or not set(names) <= set(QUERIES):
        raise BenchmarkError(f"--batches must be at least 2, and each --query one of {', '.join(QUERIES)}")
    config = Config(seed=options.seed, rate=options.rate, extra=True)
    parameters = {name: getattr(options, name) for name in ("rate", "cores", "memory", "seed")}
    report = Report("nexmark", {"events": size, "batches": count, **parameters})
    # One batch precedes the timed ones and one follows them; the contenders' answers to these two are compared.
    batches = [_make_files(config, number * size, size) for number in range(count + 2)]
    settings = {"spark.sql.session.timeZone": "UTC"}
    with session("nexmark", options.cores, options.memory, work, settings) as spark:
        for name in names:
            _run_query(
                report, spark, QUERIES[name], batches, work / name, per_key=options.per_key, floor=not options.quick
            )
    return report


def _make_files(config: Config, first: int, count: int) -> list[pa.Table]:
    """Return a batch as one table per file, with all kinds of events; columns that a kind does not have are NULL."""
    columns = {field.name: field for kind in KINDS for field in schema(kind, config.extra)}
    full_schema = pa.schema([("kind", pa.string()), *columns.values()])
    files = []
    for part in range(_FILES):
        begin, end = first + count * part // _FILES, first + count * (part + 1) // _FILES
        tables = events(config, begin, end - begin)._asdict()
        pieces = []
        for kind, table in tables.items():
            columns_by_name = {"kind": pa.array([kind]).take(pa.array([0] * table.num_rows, pa.int64()))}
            columns_by_name |= {name: table.column(name) for name in table.column_names}
            arrays = [columns_by_name.get(field.name, pa.nulls(table.num_rows, field.type)) for field in full_schema]
            pieces.append(pa.table(arrays, schema=full_schema))
        files.append(pa.concat_tables(pieces).combine_chunks())
    return files


def _run_query(
    report: Report, spark: Any, query: Query, batches: list[list[pa.Table]], work: Path, *, per_key: bool, floor: bool
) -> None:
    from benchmarks.nexmark.queries import OURS, only_moved
    from benchmarks.streams import TimedStream, in_turns

    streams = {}
    chosen = {name: plan for name, plan in query.plans.items() if per_key or name not in query.slow}
    for number, (contender, plan) in enumerate(chosen.items()):
        folder = work / f"contender-{number}"
        streams[contender] = TimedStream(spark, f"{query.name} {contender}", _SCHEMA, folder, plan, query.output_mode)
    first, *timed, last = batches
    _check_equal(report, query, "first", {name: _read_answer(query, stream, first) for name, stream in streams.items()})
    slow = [stream for name, stream in streams.items() if name in query.slow]
    if slow:
        in_turns(slow, timed[:_SLOW_BATCHES], report)
    for stream in slow:
        stream.stop()
    fast = {name: stream for name, stream in streams.items() if name not in query.slow}
    moved = []
    if floor:
        name = f"{query.name} {_MOVED}"
        moved.append(TimedStream(spark, name, _SCHEMA, work / "moved", only_moved(query), query.output_mode))
    in_turns([*fast.values(), *moved], timed, report)
    for stream in moved:
        stream.stop()
    _check_equal(report, query, "last", {name: _read_answer(query, stream, last) for name, stream in fast.items()})
    for stream in fast.values():
        stream.stop()
    medians = {name: statistics.median(stream.seconds[1:]) for name, stream in streams.items()}
    fastest = min((name for name in medians if name != OURS), key=medians.__getitem__)
    report.details[f"{query.name}: Spark's fastest form"] = fastest
    for name in medians:
        if name != OURS:
            report.ratio(f"{query.name} ({query.title}): {OURS} / {name}", medians[name] / medians[OURS])
    for stream in moved:
        report.ratio(
            f"{query.name}: {_MOVED} / {fastest}, time", statistics.median(stream.seconds[1:]) / medians[fastest]
        )
    value = medians[fastest] / medians[OURS]
    report.bar(f"{query.name} ({query.title}) against {fastest}", value, "at least", _SPEEDUP_MIN, "times")


def _read_answer(query: Query, stream: Any, batch: list[pa.Table]) -> pd.DataFrame:
    if query.clocked:
        # Wait for the beginning of a window, so that no other batch is in it.
        time.sleep(_CLOCK_WINDOW_S - time.time() % _CLOCK_WINDOW_S + 0.2)
    output = stream.kept(batch).select(list(query.answer)).to_pandas()
    answer: pd.DataFrame = output.sort_values(list(query.answer), ignore_index=True)
    return answer


def _check_equal(report: Report, query: Query, which: str, answers: dict[str, pd.DataFrame]) -> None:
    (first, answer), *others = answers.items()
    for name, other in others:
        if query.changes and which != "first":
            keys = list(query.changes)
            is_shared = pd.MultiIndex.from_frame(other[keys]).isin(pd.MultiIndex.from_frame(answer[keys]))
            other = other[is_shared].reset_index(drop=True)
        left, right = answer.astype(str), other.astype(str)
        same = left.equals(right)
        if not same:
            differences = left.merge(right, how="outer", indicator=True).query("_merge != 'both'")
            print(f"{query.name}: left is {first}, right is {name}\n{differences.head(20)}", file=sys.stderr)
        report.check(f"{query.name}: the {len(answer)} rows of the {which} batch of {first} and {name} are equal", same)
