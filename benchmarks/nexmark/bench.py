"""Nexmark: each query on Arrow state and in the forms that Spark has for it, on the same events."""

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

_AT_LEAST = 2.0
_FILES = 2
_SCHEMA = spark_schema(extra=True)
_MOVED = "rows brought to Python, and nothing else"
# Contenders that take minutes a batch get so many timed ones, the first a warm-up.
_SLOW_BATCHES = 3
_CLOCK_WINDOW_S = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--events", type=int, default=1_000_000, metavar="N", help="events a batch")
    parser.add_argument("--batches", type=int, default=6, metavar="N", help="timed batches; the first is a warm-up")
    parser.add_argument("--rate", type=int, default=20_000, metavar="N", help="events a second of event time")
    parser.add_argument("--query", action="append", default=None, metavar="NAME", help="only this one; repeatable")
    add_spark(parser, "4g")
    add_seed(parser)
    add_quick(parser, "three timed batches of 200,000 events, without the floor")
    parser.add_argument("--per-key", action="store_true", help="Spark's per-key forms too, which take minutes a batch")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When answers differ.
    """
    from benchmarks.nexmark.queries import QUERIES
    from benchmarks.spark import session

    size, count = (200_000, 3) if options.quick else (options.events, options.batches)
    names = options.query or list(QUERIES)
    if count < 2 or not set(names) <= set(QUERIES):
        raise BenchmarkError(f"--batches must be at least 2, and --query one of {', '.join(QUERIES)}")
    config = Config(seed=options.seed, rate=options.rate, extra=True)
    parameters = {name: getattr(options, name) for name in ("rate", "cores", "memory", "seed")}
    report = Report("nexmark", {"events": size, "batches": count, **parameters})
    # One batch before and one after those that are timed: their answers are compared.
    batches = [_files(config, number * size, size) for number in range(count + 2)]
    settings = {"spark.sql.session.timeZone": "UTC"}
    with session("nexmark", options.cores, options.memory, work, settings) as spark:
        for name in names:
            _query(report, spark, QUERIES[name], batches, work / name, per_key=options.per_key, floor=not options.quick)
    return report


def _files(config: Config, first: int, count: int) -> list[pa.Table]:
    """A batch as files of all kinds of events, with NULL in the columns that a kind lacks."""
    columns = {field.name: field for kind in KINDS for field in schema(kind, config.extra)}
    every = pa.schema([("kind", pa.string()), *columns.values()])
    files = []
    for part in range(_FILES):
        begin, end = first + count * part // _FILES, first + count * (part + 1) // _FILES
        made = events(config, begin, end - begin)._asdict()
        pieces = []
        for kind, table in made.items():
            own = {"kind": pa.array([kind]).take(pa.array([0] * table.num_rows, pa.int64()))}
            own |= {name: table.column(name) for name in table.column_names}
            arrays = [own.get(field.name, pa.nulls(table.num_rows, field.type)) for field in every]
            pieces.append(pa.table(arrays, schema=every))
        files.append(pa.concat_tables(pieces).combine_chunks())
    return files


def _query(
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
    _same(report, query, "first", {name: _kept(query, stream, first) for name, stream in streams.items()})
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
    _same(report, query, "last", {name: _kept(query, stream, last) for name, stream in fast.items()})
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
    report.bar(f"{query.name} ({query.title}) against {fastest}", value, "at least", _AT_LEAST, "times")


def _kept(query: Query, stream: Any, batch: list[pa.Table]) -> pd.DataFrame:
    if query.clocked:
        # At the beginning of a window of the day, so that no other batch is in it.
        time.sleep(_CLOCK_WINDOW_S - time.time() % _CLOCK_WINDOW_S + 0.2)
    found = stream.kept(batch).select(list(query.answer)).to_pandas()
    answer: pd.DataFrame = found.sort_values(list(query.answer), ignore_index=True)
    return answer


def _same(report: Report, query: Query, which: str, answers: dict[str, pd.DataFrame]) -> None:
    (first, answer), *others = answers.items()
    for name, other in others:
        if query.changes and which != "first":
            keys = list(query.changes)
            theirs = pd.MultiIndex.from_frame(other[keys]).isin(pd.MultiIndex.from_frame(answer[keys]))
            other = other[theirs].reset_index(drop=True)
        left, right = answer.astype(str), other.astype(str)
        same = left.equals(right)
        if not same:
            apart = left.merge(right, how="outer", indicator=True).query("_merge != 'both'")
            print(f"{query.name}: left is {first}, right is {name}\n{apart.head(20)}", file=sys.stderr)
        report.check(f"{query.name}: the {len(answer)} rows of the {which} batch of {first} and {name} are equal", same)
