"""Measure how long lookups of another process in the state of a running job take, and how much they slow down the job.

Each key has one row in each batch, so the right count of a key after each batch is known. Batches take turns: during
one the other process asks for keys; during another it is idle; and during a third it wakes up as often as if it asked,
and keeps a core busy for about the processor time of a lookup. The third is the floor: it shows how much
the other process and the job slow each other down on a machine whose cores the job needs, even if no state is read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks.beside import Beside
from benchmarks.options import add_buckets, add_quick, add_seed, add_spark
from benchmarks.report import BenchmarkError, Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["add_arguments", "run"]

P99_MS_AT_MOST = 2.0
THROUGHPUT_AT_LEAST = 0.98
_OPERATOR = "asked"
_FILES = 2
_ASKED, _ALONE, _FLOOR = _TURNS = ("asked", "left alone", "floor")
# Processor seconds that the other process uses each time it wakes up in a turn of the floor: about what an answer takes
# if nothing else needs the processor.
_COUNTED_S = 0.0001


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to a parser."""
    parser.add_argument(
        "--keys", type=int, default=1_000_000, metavar="N", help="number of keys, and of rows in a batch"
    )
    parser.add_argument(
        "--batches", type=int, default=33, metavar="N", help="number of batches; the first three are a warm-up"
    )
    parser.add_argument(
        "--asks-per-s", type=int, default=200, metavar="N", help="lookups per second of the other process"
    )
    add_quick(parser, "use few keys and batches")
    add_buckets(parser)
    add_spark(parser, "2g")
    add_seed(parser, "the keys that are asked for")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an option is invalid, an answer is wrong, or there was no answer or no measurement of the floor.
    """
    keys, batches = (50_000, 9) if options.quick else (options.keys, options.batches)
    if batches < 2 * len(_TURNS):
        raise BenchmarkError("--batches must be at least 6: the first three are not counted")
    names = ("asks_per_s", "buckets", "cores", "memory", "seed")
    report = Report("live", {"keys": keys, "batches": batches, **{name: getattr(options, name) for name in names}})
    # In random order, so that the turns do not coincide with a rhythm of the store's compactions.
    draws = np.random.default_rng(options.seed)
    turns = [turn for _ in range(-(-batches // len(_TURNS))) for turn in draws.permutation(_TURNS).tolist()]
    for cores, label in [(options.cores, "all cores"), (options.cores - 1, "a core to spare")]:
        if cores:
            folder = work / label.replace(" ", "-")
            folder.mkdir()
            _judge(report, label, *_measure(options, folder, cores, keys, turns[:batches]))
    return report


def _measure(
    options: argparse.Namespace, work: Path, cores: int, keys: int, turns: list[str]
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of the batches of each turn, and the measurements of the other process."""
    from benchmarks.spark import session
    from benchmarks.streams import TimedStream

    def plan(rows: DataFrame, folder: Path) -> DataFrame:
        from spark_state_ext import ArrowState

        state = ArrowState(str(work / "state"), _OPERATOR, buckets=options.buckets, local_dir=str(work / "local-state"))
        return state.apply_in_arrow_with_state(rows, "key", count_rows, "key bigint, n bigint", "n bigint")

    times_s: dict[str, list[float]] = {turn: [] for turn in _TURNS}
    with session("live", cores, options.memory, work, {}) as spark:
        stream = TimedStream(spark, "count", "key bigint", work / "job", plan)
        table = pa.table({"key": pa.array(np.arange(keys))})
        step = -(-keys // _FILES)
        rows = [table.slice(at, step) for at in range(0, keys, step)]
        stream.process(rows)
        arguments = [str(argument) for argument in (work, keys, options.asks_per_s, options.seed)]
        with Beside(work, "benchmarks.live", arguments, _ALONE) as asker:
            for number, turn in enumerate(turns):
                asker.turn(turn)
                stream.process(rows)
                if number >= len(_TURNS):
                    times_s[turn].append(stream.seconds[-1])
                print(f"{cores} cores, batch {number}, {turn}: {stream.seconds[-1]:.2f} s", file=sys.stderr, flush=True)
            data = asker.over()
        stream.stop()
    return times_s, data


def count_rows(batch: Any) -> Any:
    """Count the rows of each key in all batches so far."""
    n = batch.counts.to_numpy() + batch.state["n"].fill_null(0).to_numpy()
    batch.update({"n": n})
    return {"key": batch.keys["key"], "n": n}


def _judge(report: Report, label: str, times_s: dict[str, list[float]], data: dict[str, Any]) -> None:
    if not (data["took_ms"] and data["floor_ms"]):
        raise BenchmarkError(
            f"the other process got no answer or did not measure the floor; errors of lookups: {data['gone']}"
        )
    report.check(f"{label}: all answers are what was committed after their batch", not data["wrong"])
    answers, floor = np.array(data["took_ms"]), np.array(data["floor_ms"])
    p50, p99 = (float(np.percentile(answers, at)) for at in (50, 99))
    report.details[label] = {
        "get: p50, ms": p50,
        "get: p99, ms": p99,
        "get: largest, ms": float(answers.max()),
        "get: answers": len(answers),
        "get: processor time of an answer, ms": data["asked_cpu_s"] * 1000 / len(answers),
        "get: buckets without a store just then": len(data["gone"]),
        "floor: p50, ms": float(np.percentile(floor, 50)),
        "floor: p99, ms": float(np.percentile(floor, 99)),
        "floor: counted for, ms": 1000 * _COUNTED_S,
        "age of answers: median, ms": statistics.median(data["age_ms"]),
    }
    stride = max(1, len(answers) // 1_000)
    report.timing(f"{label}: get, while a batch runs", [ms / 1000 for ms in data["took_ms"][::stride]])
    medians = {turn: report.timing(f"{label}: batch, {turn}", seconds) for turn, seconds in times_s.items()}
    report.ratio(f"{label}: throughput, floor / left alone", medians[_ALONE] / medians[_FLOOR])
    report.bar(f"{label}: get, p99", p99, "at most", P99_MS_AT_MOST, "ms")
    throughput = medians[_ALONE] / medians[_ASKED]
    report.bar(f"{label}: throughput, asked / left alone", throughput, "at least", THROUGHPUT_AT_LEAST, "times")
    print(f"{label}: get, p50 {p50:.3f} ms, p99 {p99:.3f} ms", file=sys.stderr)


def ask(work: Path, keys: int, asks_per_s: int, seed: int) -> dict[str, Any]:
    """Look up random keys, keep a core busy, or idle, as ``turn`` says, until the benchmark ends.

    Return the times, the wrong answers, and the errors of lookups that got no answer.

    Parameters
    ----------
    work
        Folder of the benchmark.
    keys, asks_per_s, seed
        The benchmark's options.
    """
    from spark_state_ext import open_live
    from spark_state_ext.errors import StateGoneError

    rng = np.random.default_rng(seed)
    measured: dict[str, Any] = {
        "took_ms": [], "age_ms": [], "gone": [], "wrong": [], "floor_ms": [], "asked_cpu_s": 0.0
    }  # fmt: skip
    with open_live(str(work / "local-state"), _OPERATOR) as live:
        while not (work / "end").exists():
            turn = (work / "turn").read_text()
            if turn == _ALONE:
                time.sleep(0.05)
                continue
            key = int(rng.integers(keys))
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            if turn == _FLOOR:
                while time.thread_time() - started_cpu_s < _COUNTED_S:
                    pass
                took_s = time.perf_counter() - started_s
                measured["floor_ms"].append(1000 * took_s)
            else:
                try:
                    answer = live.get(key)
                except StateGoneError as error:
                    measured["gone"].append(str(error))
                    continue
                took_s = time.perf_counter() - started_s
                measured["asked_cpu_s"] += time.thread_time() - started_cpu_s
                measured["took_ms"].append(1000 * took_s)
                measured["age_ms"].append(answer.age_ms)
                if [row["n"] for row in answer.rows.to_pylist()] != ([] if answer.batch < 0 else [answer.batch + 1]):
                    measured["wrong"].append([key, answer.batch, answer.rows.to_pylist()])
            time.sleep(max(0.0, 1 / asks_per_s - took_s))
    return measured


if __name__ == "__main__":
    print(json.dumps(ask(Path(sys.argv[1]), *(int(data) for data in sys.argv[2:5]))))
