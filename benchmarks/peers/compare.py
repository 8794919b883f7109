"""Other systems on the running count and sum: stream processors with Python, and the storage engines below them.

All read the same rows from files (Parquet; Flink, whose Python package lacks it, CSV made of them), keep their state on
the same disk with their own kind of recovery switched on, and must end with the answer of plain pandas. One runs after
the other, each in a process and an environment of its own. What cannot be run on this machine is left out, and the
report says why.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from benchmarks.counting import event_batches, expected, same_answer
from benchmarks.floors import PACKAGES
from benchmarks.peers.environments import ENVIRONMENTS, FOLDER, ROOT, PeerUnavailableError
from benchmarks.peers.protocol import Task, write_batches
from benchmarks.report import BenchmarkError, Report

__all__ = ["PROGRAMS", "WORKLOADS", "Program", "Workload", "add_arguments", "measure", "run"]

_FILES_PER_BATCH = 2
_LEFT_OUT = "left out"
# What systems and floors are compared with: the way of ours that calls a function for each key, and the plainest floor.
_OURS = "Arrow state, a function over rows"
_BASE = "LMDB, an entry a key"


@dataclass(frozen=True)
class Workload:
    """Events to count.

    Parameters
    ----------
    name
        What it is called in the report.
    events
        Events a batch.
    keys
        Keys that they are drawn from.
    small
        Whether its batches are small: there are more of them then.
    """

    name: str
    events: int
    keys: int
    small: bool = False


@dataclass(frozen=True)
class Program:
    """Something that is measured.

    Parameters
    ----------
    name
        What it is called in the report.
    module
        Module to run.
    variant
        Which way of several.
    environment
        Name of its environment; None for our own.
    package
        What our own environment must have for it.
    slow
        Whether it is only run when asked for: a slower way of something that another program does.
    """

    name: str
    module: str
    variant: str
    environment: str | None = None
    package: str | None = None
    slow: bool = False

    def python(self, environments: Path) -> Path:
        """The interpreter to run it with.

        Raises
        ------
        PeerUnavailableError
            When it cannot be run on this machine.
        """
        if self.environment is not None:
            return ENVIRONMENTS[self.environment].python(environments)
        if self.package is not None and find_spec(self.package) is None:
            raise PeerUnavailableError(f"the package {self.package} is not installed here")
        return Path(sys.executable)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("100,000 events of 50,000 keys", 100_000, 50_000, small=True),
        Workload("1,000,000 events of 1,000,000 keys", 1_000_000, 1_000_000),
    )
}
# With --quick: programs take most of their time to start, and Flink's Python for its events.
_QUICK = Workload("20,000 events of 10,000 keys", 20_000, 10_000)


def _bytewax(name: str, variant: str, slow: bool = False) -> Program:
    return Program(f"Bytewax, {name}", "benchmarks.peers.bytewax_peer", variant, "bytewax", slow=slow)


def _spark(name: str, variant: str) -> Program:
    return Program(name, "benchmarks.peers.spark_peer", variant, package="pyspark")


def _flink(name: str, variant: str, slow: bool = False) -> Program:
    return Program(f"Flink, {name}", "benchmarks.peers.flink_peer", variant, "flink", slow=slow)


def _quix(name: str, variant: str, slow: bool = False) -> Program:
    return Program(f"Quix Streams state store, {name}", "benchmarks.peers.quix_peer", variant, "quix", slow=slow)


def _floor(name: str, variant: str) -> Program:
    return Program(name, "benchmarks.floors", variant, package=PACKAGES[variant])


# Two processes were the fastest on two cores throughout; the slow ones are how that is known.
PROGRAMS = (
    _spark("Arrow state, a function over Arrow tables", "arrow"),
    _spark(_OURS, "rows"),
    _spark("Spark's own aggregation (JVM)", "jvm"),
    _bytewax("stateful_map, 2 processes", "map-2x1"),
    _bytewax("stateful_map, 2 threads", "map-1x2", slow=True),
    _bytewax("stateful_map, 1 process", "map-1x1", slow=True),
    _bytewax("stateful_flat_map, 2 processes", "flat_map-2x1", slow=True),
    _bytewax("stateful_batch, 2 processes", "batch-2x1"),
    _bytewax("stateful_batch, 2 threads", "batch-1x2", slow=True),
    _bytewax("stateful_batch, 1 process", "batch-1x1", slow=True),
    _bytewax("stateful_batch on sums made before, 2 processes", "summed-2x1"),
    _flink("SQL in its JVM", "sql"),
    _flink("SQL in its JVM, mini-batches", "sql-minibatch"),
    _flink("a function in Python threads", "python-thread"),
    _flink("a function in Python processes", "python", slow=True),
    _quix("event by event, 2 processes", "events-2"),
    _quix("event by event, 1 process", "events-1", slow=True),
    _quix("on sums made before, 2 processes", "summed-2"),
    _floor("DuckDB, changed rows replaced", "DuckDB"),
    _floor("DuckDB, INSERT ... ON CONFLICT DO UPDATE", "DuckDB-upsert"),
    _floor("RocksDB, an entry a key", "RocksDB"),
    _floor(_BASE, "LMDB"),
    _floor("LMDB, an entry a key, unsynced", "LMDB-unsynced"),
    _floor("cp of the changed rows", "cp"),
)
_FLOORS = frozenset(program.name for program in PROGRAMS if program.module == "benchmarks.floors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    # A JVM, Spark's or Flink's, goes on compiling for some seconds of work, which large batches do in their first.
    parser.add_argument(
        "--small-batches", type=int, default=20, metavar="N", help="small batches; the first is a warm-up"
    )
    parser.add_argument("--batches", type=int, default=6, metavar="N", help="large batches, the same")
    parser.add_argument("--quick", action="store_true", help="a fifth of the small workload, and three batches")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default=None, help="one workload only")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="programs whose names begin so, the slower ways included; repeatable",
    )
    parser.add_argument("--all", action="store_true", help="every program, the slower ways of each system included")
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="seed of the events")
    parser.add_argument(
        "--environments", type=Path, default=FOLDER, metavar="DIR", help="folder of the peers' environments"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="seconds for one program at most")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When an answer is wrong.
    """
    small, large = (3, 3) if options.quick else (options.small_batches, options.batches)
    if min(small, large) < 2:
        raise BenchmarkError("--batches and --small-batches must be at least 2: the first is not counted")
    if options.workload is not None:
        workloads = [WORKLOADS[options.workload]]
    else:
        workloads = [_QUICK] if options.quick else list(WORKLOADS.values())
    if options.only:
        programs = [one for one in PROGRAMS if one.name.startswith(tuple(options.only))]
    else:
        programs = [one for one in PROGRAMS if options.all or not one.slow]
    if not programs:
        raise BenchmarkError(f"no program's name begins with {' or '.join(options.only)}: see benchmarks.peers.compare")
    report = _Report(
        "peers",
        {
            "small batches": small,
            "batches": large,
            "workloads": [workload.name for workload in workloads],
            "seed": options.seed,
        },
    )
    for workload in workloads:
        measure(
            report,
            workload,
            work / str(workload.events),
            batches=small if workload.small else large,
            programs=programs,
            seed=options.seed,
            environments=options.environments,
            timeout_s=options.timeout,
        )
    return report


def measure(
    report: Report,
    workload: Workload,
    work: Path,
    *,
    batches: int,
    programs: list[Program],
    seed: int = 7,
    environments: Path = FOLDER,
    timeout_s: float = 1800.0,
) -> dict[str, float]:
    """Measure programs on one workload, on the same files.

    Parameters
    ----------
    report
        Report to note times, checks and what was left out in.
    workload
        Events to count.
    work
        Folder to work in; made.
    batches
        How many batches; the first is not counted.
    programs
        What to measure, one after the other.
    seed
        Seed of the events.
    environments
        Folder of the peers' environments.
    timeout_s
        Seconds for one program at most.

    Returns
    -------
    dict of str to float
        Median seconds of a batch, by program; without those that were left out.

    Raises
    ------
    BenchmarkError
        When an answer is wrong.
    """
    frames = event_batches(batches, workload.events, workload.keys, seed)
    write_batches(
        work / "batches", [pa.Table.from_pandas(frame, preserve_index=False) for frame in frames], _FILES_PER_BATCH
    )
    right = expected(frames)
    del frames
    medians: dict[str, float] = {}
    for program in programs:
        name = f"{program.name}: {workload.name}"
        try:
            seconds, details, answer = _measured(program, work, environments, timeout_s)
        except PeerUnavailableError as error:
            report.details.setdefault(_LEFT_OUT, {})[name] = str(error)
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
            continue
        report.check(f"{name}: final count and sum of {len(right)} keys equal plain pandas", same_answer(answer, right))
        medians[program.name] = report.timing(name, seconds[1:])
        report.details[name] = {"seconds of the first batch": seconds[0], **details}
        print(f"{name}: {', '.join(f'{one:.3f}' for one in seconds)} s", file=sys.stderr, flush=True)
    for name, median in medians.items():
        base = _BASE if name in _FLOORS else _OURS
        if base in medians and name != base:
            report.ratio(f"{name} / {base}: {workload.name}", median / medians[base])
    if _OURS in medians and _BASE in medians:
        report.ratio(f"{_OURS} / {_BASE}: {workload.name}", medians[_OURS] / medians[_BASE])
    shutil.rmtree(work / "batches")
    return medians


def _measured(
    program: Program, work: Path, environments: Path, timeout_s: float
) -> tuple[list[float], dict[str, Any], pd.DataFrame]:
    """Run one program; returns the seconds of each batch, its details, and its answer."""
    python = program.python(environments)
    folder = work / "program"
    (folder / "work").mkdir(parents=True)
    task = Task(
        work / "batches", folder / "work", folder / "result.json", folder / "answer.parquet", variant=program.variant
    )
    # What is set for this Python, or for the Spark beside it, is not for another.
    outside = ("VIRTUAL_ENV", "PYTHONHOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME", "FLINK_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in outside}
    environment["PYTHONPATH"] = str(ROOT)
    log = folder / "log"
    with log.open("wb") as into:
        process = subprocess.Popen(
            [str(python), "-m", program.module, *task.arguments()],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=into,
            stderr=subprocess.STDOUT,
            # A group of its own: what it starts can be ended with it.
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    try:
        if code is None:
            raise PeerUnavailableError(f"it was not done after {timeout_s:.0f} s")
        if code != 0:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no word"]
            raise PeerUnavailableError(f"it ended with exit code {code}: {lines[-1].strip()}")
        told = json.loads(task.result.read_text())
        return told["seconds"], told["details"], pd.read_parquet(task.answer)
    finally:
        shutil.rmtree(folder)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started and has not ended."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


class _Report(Report):
    """A report whose table says what was left out."""

    def table(self) -> str:
        """The result as text."""
        left_out = self.details.get(_LEFT_OUT, {})
        return "\n".join([super().table(), "", *(f"left out: {name}: {why}" for name, why in left_out.items())])
