"""The running count and sum in other systems: stream processors with a Python API, and storage engines alone.

All programs read the same rows from Parquet files; only Flink, whose Python package cannot read Parquet, reads them
from CSV. All keep their state on the same disk, with their own kind of recovery switched on (except LMDB unsynced), and
must end with the same answer as plain pandas. They run one after the other, each in a separate process, and other
stream processors also in separate environments. A program that cannot be run on this machine is left out, and the
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
# Systems are compared with Arrow state in the API that calls a function for each key, and floors with the simplest
# floor.
_OURS = "Arrow state, a function over rows"
_BASE = "LMDB, an entry a key"


@dataclass(frozen=True)
class Workload:
    """Events to count.

    Parameters
    ----------
    name
        Its name in the report.
    events
        Number of events of each batch.
    keys
        Number of keys from which the events are drawn.
    small
        True if its batches count as small: the benchmark runs more small batches than large ones.
    """

    name: str
    events: int
    keys: int
    small: bool = False


@dataclass(frozen=True)
class Program:
    """A program to measure.

    Parameters
    ----------
    name
        Its name in the report.
    module
        Module to run.
    variant
        Variant of the module to run.
    environment
        Name of its environment in `ENVIRONMENTS`; None for the environment of this process.
    package
        Package that the environment of this process must have for it; None if it needs none.
    slow
        True for a slower variant of another program, which is run only on request.
    """

    name: str
    module: str
    variant: str
    environment: str | None = None
    package: str | None = None
    slow: bool = False

    def python(self, environments: Path) -> Path:
        """Return the interpreter to run the program with.

        Raises
        ------
        PeerUnavailableError
            If the program cannot be run on this machine.
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
# The workload of --quick. It is this small because Flink's Python takes long for each event. The other programs take
# most of their time to start.
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


# On two cores, Bytewax and Quix Streams were fastest with two processes in all cases. Most slow programs show this.
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
    # The JVMs of Spark and Flink continue to compile for some seconds of work. One large batch is enough for this, but
    # not one small batch.
    parser.add_argument(
        "--small-batches", type=int, default=20, metavar="N", help="number of small batches; the first is a warm-up"
    )
    parser.add_argument(
        "--batches", type=int, default=6, metavar="N", help="number of large batches; the first is a warm-up"
    )
    parser.add_argument(
        "--quick", action="store_true", help="three batches; without --workload, only a fifth of the small workload"
    )
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default=None, help="run only this workload")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="run only programs whose names begin with TEXT, including the slower ones; may be repeated",
    )
    parser.add_argument(
        "--all", action="store_true", help="run all programs, including the slower variants of each system"
    )
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="seed of the events")
    parser.add_argument(
        "--environments", type=Path, default=FOLDER, metavar="DIR", help="folder of the peers' environments"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="longest time for one program, in seconds"
    )


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark with the options of the command line.

    Raises
    ------
    BenchmarkError
        If an option or a program's answer is wrong.
    """
    small, large = (3, 3) if options.quick else (options.small_batches, options.batches)
    if min(small, large) < 2:
        raise BenchmarkError("--batches and --small-batches must be at least 2, because the first batch is not counted")
    if options.workload is not None:
        workloads = [WORKLOADS[options.workload]]
    else:
        workloads = [_QUICK] if options.quick else list(WORKLOADS.values())
    if options.only:
        programs = [one for one in PROGRAMS if one.name.startswith(tuple(options.only))]
    else:
        programs = [one for one in PROGRAMS if options.all or not one.slow]
    if not programs:
        raise BenchmarkError(
            f"no program's name begins with {' or '.join(options.only)}: see PROGRAMS in benchmarks.peers.compare"
        )
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
    """Measure programs on the same files of one workload.

    Parameters
    ----------
    report
        Report to which this adds times, checks, ratios, and the names of programs that cannot run here.
    workload
        Events to count.
    work
        Folder to work in; created if it is missing.
    batches
        Number of batches; the first is not counted.
    programs
        Programs to measure, one after the other.
    seed
        Seed of the events.
    environments
        Folder of the peers' environments.
    timeout_s
        Longest time for one program, in seconds.

    Returns
    -------
    dict of str to float
        Median seconds of a batch, by program. Programs that cannot run here are missing.

    Raises
    ------
    BenchmarkError
        If a program's answer is wrong.
    """
    frames = event_batches(batches, workload.events, workload.keys, seed)
    write_batches(
        work / "batches", [pa.Table.from_pandas(frame, preserve_index=False) for frame in frames], _FILES_PER_BATCH
    )
    expected_answer = expected(frames)
    del frames
    medians: dict[str, float] = {}
    for program in programs:
        name = f"{program.name}: {workload.name}"
        try:
            seconds, details, answer = _run_program(program, work, environments, timeout_s)
        except PeerUnavailableError as error:
            report.details.setdefault(_LEFT_OUT, {})[name] = str(error)
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
            continue
        report.check(
            f"{name}: final count and sum of {len(expected_answer)} keys equal plain pandas",
            same_answer(answer, expected_answer),
        )
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


def _run_program(
    program: Program, work: Path, environments: Path, timeout_s: float
) -> tuple[list[float], dict[str, Any], pd.DataFrame]:
    """Run one program; return the seconds of each batch, the details, and the answer."""
    python = program.python(environments)
    folder = work / "program"
    (folder / "work").mkdir(parents=True)
    task = Task(
        work / "batches", folder / "work", folder / "result.json", folder / "answer.parquet", variant=program.variant
    )
    # These variables may be set for this Python and its Spark, and would mislead another Python.
    excluded = ("VIRTUAL_ENV", "PYTHONHOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME", "FLINK_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in excluded}
    environment["PYTHONPATH"] = str(ROOT)
    log = folder / "log"
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [str(python), "-m", program.module, *task.arguments()],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            # A separate process group, so that the processes that the program starts can be killed with it.
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
    try:
        if code is None:
            raise PeerUnavailableError(f"it was not done after {timeout_s:.0f} s")
        if code != 0:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
            raise PeerUnavailableError(f"it ended with exit code {code}: {lines[-1].strip()}")
        measured = json.loads(task.result.read_text())
        return measured["seconds"], measured["details"], pd.read_parquet(task.answer)
    finally:
        shutil.rmtree(folder)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and all processes of its group that are still running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


class _Report(Report):
    """A report whose table also lists the programs that cannot run here, each with the reason."""

    def table(self) -> str:
        """Return the report as text."""
        left_out = self.details.get(_LEFT_OUT, {})
        return "\n".join([super().table(), "", *(f"left out: {name}: {reason}" for name, reason in left_out.items())])
