"""Most benchmarks, one after the other, each in a separate process: ``python -m benchmarks all``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.charts import CHARTS
from benchmarks.report import RESULTS

__all__ = ["FULL", "QUICK", "QUICK_RESULTS", "exit_status", "run_all"]

QUICK_RESULTS = Path("benchmark-results")
# Arguments of each benchmark. The sizes suffice to see that a benchmark runs and roughly which figures it gives. All of
# them together take less than ten minutes.
QUICK: dict[str, tuple[str, ...]] = {
    "store": ("--rows", "200000", "--repeats", "5", "--loads", "3", "--growth-batches", "10"),
    "vectorised": ("--quick",),
    "nexmark": ("--quick",),
    "growth": ("--quick",),
    "buckets": ("--quick",),
    "peers": ("--quick",),
    "restore": ("--rows", "200000", "--repeats", "3", "--restarts", "1"),
    "savepoint": ("--quick",),
    "initial_state": ("--quick",),
    "rescale": ("--quick",),
    "reading": ("--rows", "200000", "--repeats", "3"),
    "live": ("--quick",),
    "standby_following": ("--quick",),
    "import_native": ("--quick",),
    "standby_assignment": ("--quick",),
}
# These arguments made most of the committed result files. They take some hours, 60 GB of disk, and a machine that does
# nothing else.
FULL: dict[str, tuple[str, ...]] = {
    "store": (),
    "vectorised": (),
    "keyed_count": (),
    "nexmark": (),
    "growth": (),
    "buckets": (),
    "peers": (),
    "restore": (),
    "savepoint": (),
    "initial_state": (),
    "rescale": (),
    "reading": (),
    "live": (),
    "standby_following": (),
    "import_native": (),
    "standby_assignment": (),
    "async_commit": (),
    "big_bucket": (),
}


def run_all(arguments: list[str]) -> int:
    """Run the benchmarks and draw their charts; return `exit_status`, or 2 if the charts failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks all",
        description="Run most benchmarks, each in a separate process, and draw charts.",
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument(
        "--quick", action="store_true", help="small sizes, under ten minutes; results go to ./benchmark-results"
    )
    mode.add_argument(
        "--full",
        action="store_true",
        help="the sizes of the committed results, some hours; results go to benchmarks/results",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder for the result files, if it should be another one",
    )
    options = parser.parse_args(arguments)
    # Results of small sizes are not figures, so they must not replace the committed ones.
    results = options.results or (RESULTS if options.full else QUICK_RESULTS)
    statuses = []
    for name, flags in (FULL if options.full else QUICK).items():
        started_s = time.monotonic()
        command = [sys.executable, "-m", "benchmarks", name, *flags, "--results", str(results)]
        print(f"== {' '.join(command[1:])}", file=sys.stderr, flush=True)
        statuses.append(subprocess.run(command, check=False).returncode)
        print(f"== {name}: exit {statuses[-1]}, {time.monotonic() - started_s:.0f} s\n", file=sys.stderr, flush=True)
    committed = options.full and results.resolve() == RESULTS.resolve()
    charts = ["--results", str(results), "--charts", str(CHARTS if committed else results / "charts")]
    drawn = subprocess.run([sys.executable, "-m", "benchmarks.charts", *charts], check=False).returncode
    if not options.full:
        print("Bars are promised for the sizes of --full; at these small sizes some may be missed.", file=sys.stderr)
    return 2 if drawn else exit_status(statuses, options.full)


def exit_status(statuses: Iterable[int], full: bool) -> int:
    """Return 2 if a benchmark failed, 1 if bars were missed at full size, otherwise 0.

    Bars are promised for the full sizes only, so smaller sizes never give 1.
    """
    distinct = set(statuses)
    if distinct - {0, 1}:
        return 2
    return 1 if full and 1 in distinct else 0
