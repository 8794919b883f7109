"""A running job, and another process that asks for its state: how long an answer takes, and what the job notices.

Each key has one row in each batch, so what a key's count has to be after a batch is known. Batches run in turns: the
other process asks; it pauses; and it wakes as often as if it asked, and counts for as long as an answer takes at best.
The last is the floor: what a machine whose cores are all the job's does to anybody, and anybody to the job.
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
# What an answer takes where nobody else wants the processor.
_COUNTED_S = 0.0001


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--keys", type=int, default=1_000_000, metavar="N", help="keys, and rows of a batch")
    parser.add_argument("--batches", type=int, default=33, metavar="N", help="batches; the first three are a warm-up")
    parser.add_argument("--asks-per-s", type=int, default=200, metavar="N", help="how often the other process asks")
    add_quick(parser, "few keys and batches")
    add_buckets(parser)
    add_spark(parser, "2g")
    add_seed(parser, "the keys that are asked for")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When an answer is wrong, or none came.
    """
    keys, batches = (50_000, 9) if options.quick else (options.keys, options.batches)
    if batches < 2 * len(_TURNS):
        raise BenchmarkError("--batches must be at least 6: the first three are not counted")
    names = ("asks_per_s", "buckets", "cores", "memory", "seed")
    report = Report("live", {"keys": keys, "batches": batches, **{name: getattr(options, name) for name in names}})
    # In no order that the store's merging may have too.
    draws = np.random.default_rng(options.seed)
    turns = [turn for _ in range(-(-batches // len(_TURNS))) for turn in draws.permutation(_TURNS).tolist()]
    for cores, named in [(options.cores, "all cores"), (options.cores - 1, "a core to spare")]:
        if cores:
            folder = work / named.replace(" ", "-")
            folder.mkdir()
            _judge(report, named, *_measured(options, folder, cores, keys, turns[:batches]))
    return report


def _measured(
    options: argparse.Namespace, work: Path, cores: int, keys: int, turns: list[str]
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of the batches of each turn, and what the other process found."""
    from benchmarks.spark import session
    from benchmarks.streams import TimedStream

    def plan(rows: DataFrame, folder: Path) -> DataFrame:
        from spark_state_ext import ArrowState

        state = ArrowState(str(work / "state"), _OPERATOR, buckets=options.buckets, local_dir=str(work / "local-state"))
        return state.apply_in_arrow_with_state(rows, "key", counted, "key bigint, n bigint", "n bigint")

    took: dict[str, list[float]] = {turn: [] for turn in _TURNS}
    with session("live", cores, options.memory, work, {}) as spark:
        stream = TimedStream(spark, "count", "key bigint", work / "job", plan)
        table = pa.table({"key": pa.array(np.arange(keys))})
        step = -(-keys // _FILES)
        rows = [table.slice(at, step) for at in range(0, keys, step)]
        stream.process(rows)
        arguments = [str(it) for it in (work, keys, options.asks_per_s, options.seed)]
        with Beside(work, "benchmarks.live", arguments, _ALONE) as asker:
            for number, turn in enumerate(turns):
                asker.turn(turn)
                stream.process(rows)
                if number >= len(_TURNS):
                    took[turn].append(stream.seconds[-1])
                print(f"{cores} cores, batch {number}, {turn}: {stream.seconds[-1]:.2f} s", file=sys.stderr, flush=True)
            told = asker.over()
        stream.stop()
    return took, told


def counted(batch: Any) -> Any:
    """The rows of each key so far."""
    n = batch.counts.to_numpy() + batch.state["n"].fill_null(0).to_numpy()
    batch.update({"n": n})
    return {"key": batch.keys["key"], "n": n}


def _judge(report: Report, named: str, took: dict[str, list[float]], told: dict[str, Any]) -> None:
    if not (told["took_ms"] and told["floor_ms"]):
        raise BenchmarkError(f"no answer came: {told['gone']}")
    report.check(f"{named}: all answers are what was committed after their batch", not told["wrong"])
    answers, floor = np.array(told["took_ms"]), np.array(told["floor_ms"])
    p50, p99 = (float(np.percentile(answers, at)) for at in (50, 99))
    report.details[named] = {
        "get: p50, ms": p50,
        "get: p99, ms": p99,
        "get: largest, ms": float(answers.max()),
        "get: answers": len(answers),
        "get: processor time of an answer, ms": told["asked_cpu_s"] * 1000 / len(answers),
        "get: buckets without a store just then": len(told["gone"]),
        "floor: p50, ms": float(np.percentile(floor, 50)),
        "floor: p99, ms": float(np.percentile(floor, 99)),
        "floor: counted for, ms": 1000 * _COUNTED_S,
        "age of answers: median, ms": statistics.median(told["age_ms"]),
    }
    every = max(1, len(answers) // 1_000)
    report.timing(f"{named}: get, while a batch runs", [ms / 1000 for ms in told["took_ms"][::every]])
    medians = {turn: report.timing(f"{named}: batch, {turn}", seconds) for turn, seconds in took.items()}
    report.ratio(f"{named}: throughput, floor / left alone", medians[_ALONE] / medians[_FLOOR])
    report.bar(f"{named}: get, p99", p99, "at most", P99_MS_AT_MOST, "ms")
    throughput = medians[_ALONE] / medians[_ASKED]
    report.bar(f"{named}: throughput, asked / left alone", throughput, "at least", THROUGHPUT_AT_LEAST, "times")
    print(f"{named}: get, p50 {p50:.3f} ms, p99 {p99:.3f} ms", file=sys.stderr)


def asking(work: Path, keys: int, asks_per_s: int, seed: int) -> dict[str, Any]:
    """Ask for keys at random, while that is wanted.

    Parameters
    ----------
    work
        Folder of the benchmark.
    keys, asks_per_s, seed
        As the benchmark was told.
    """
    from spark_state_ext import open_live
    from spark_state_ext.errors import StateGoneError

    chosen = np.random.default_rng(seed)
    found: dict[str, Any] = {
        "took_ms": [], "age_ms": [], "gone": [], "wrong": [], "floor_ms": [], "asked_cpu_s": 0.0
    }  # fmt: skip
    with open_live(str(work / "local-state"), _OPERATOR) as live:
        while not (work / "end").exists():
            turn = (work / "turn").read_text()
            if turn == _ALONE:
                time.sleep(0.05)
                continue
            key = int(chosen.integers(keys))
            begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
            if turn == _FLOOR:
                while time.thread_time() - begun_cpu_s < _COUNTED_S:
                    pass
                took_s = time.perf_counter() - begun_s
                found["floor_ms"].append(1000 * took_s)
            else:
                try:
                    answer = live.get(key)
                except StateGoneError as error:
                    found["gone"].append(str(error))
                    continue
                took_s = time.perf_counter() - begun_s
                found["asked_cpu_s"] += time.thread_time() - begun_cpu_s
                found["took_ms"].append(1000 * took_s)
                found["age_ms"].append(answer.age_ms)
                if [row["n"] for row in answer.rows.to_pylist()] != ([] if answer.batch < 0 else [answer.batch + 1]):
                    found["wrong"].append([key, answer.batch, answer.rows.to_pylist()])
            time.sleep(max(0.0, 1 / asks_per_s - took_s))
    return found


if __name__ == "__main__":
    print(json.dumps(asking(Path(sys.argv[1]), *(int(told) for told in sys.argv[2:5]))))
