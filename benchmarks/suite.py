"""All benchmarks, one after the other, each in a process of its own: ``python -m benchmarks all``."""

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
# Arguments of each benchmark: enough to see that all run and about what they say, in under ten minutes together.
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
# What the committed result files come from. Takes some hours, a machine that does nothing else, and 60 GB of disk.
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
    """Run them; returns the exit status, see `exit_status`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks all",
        description="Run all benchmarks, each in a process of its own, and draw charts.",
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--quick", action="store_true", help="small, under ten minutes; results in ./benchmark-results")
    how.add_argument("--full", action="store_true", help="as the committed results were made: some hours")
    parser.add_argument("--results", type=Path, default=None, metavar="DIR", help="folder for the result files")
    options = parser.parse_args(arguments)
    # Quick results are no figures: they do not take the place of the committed ones.
    results = options.results or (RESULTS if options.full else QUICK_RESULTS)
    statuses = []
    for name, own in (FULL if options.full else QUICK).items():
        started_s = time.monotonic()
        command = [sys.executable, "-m", "benchmarks", name, *own, "--results", str(results)]
        print(f"== {' '.join(command[1:])}", file=sys.stderr, flush=True)
        statuses.append(subprocess.run(command, check=False).returncode)
        print(f"== {name}: exit {statuses[-1]}, {time.monotonic() - started_s:.0f} s\n", file=sys.stderr, flush=True)
    committed = options.full and results.resolve() == RESULTS.resolve()
    charts = ["--results", str(results), "--charts", str(CHARTS if committed else results / "charts")]
    drawn = subprocess.run([sys.executable, "-m", "benchmarks.charts", *charts], check=False).returncode
    if not options.full:
        print("Bars are promised for the sizes of --full; of these small ones some may be missed.", file=sys.stderr)
    return 2 if drawn else exit_status(statuses, options.full)


def exit_status(statuses: Iterable[int], full: bool) -> int:
    """The worst of the benchmarks' own: 2 when one failed, 1 when bars are not met and the sizes are those promised."""
    found = set(statuses)
    if found - {0, 1}:
        return 2
    return 1 if full and 1 in found else 0
