"""Several runs on a real cluster, with a line of JSON for each: ``python tests/cluster/cluster_runs.py --runs 10``.

Every run has a new query for each of Spark's state store providers and checkpoint formats; its line has the sums. The exit
status is 1 if a result differs from the batch computation, or if an expected event did not happen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster import Cluster, unusable
from cluster_trial import CASES, SHORT, Case, Outcome, Trial, make_long_orders

NAMED = {case.name: case for case in CASES}


def run_case(cluster: Cluster, folder: Path, case: Case, orders: Mapping[int, str], seed: int) -> tuple[Outcome, str]:
    """Return the outcome of a case, and a description of its errors."""
    trial = Trial(cluster, folder, case, orders, seed)
    try:
        outcome = trial.run()
    except (RuntimeError, TimeoutError) as error:
        return trial.outcome, f"{case.name}: {error}"
    errors = [*outcome.differences, *outcome.missing(orders)]
    return outcome, f"{case.name}: {errors}" if errors else ""


def run_all_cases(
    cluster: Cluster, folder: Path, run: int, seed: int, cases: Sequence[Case], long: bool
) -> tuple[dict[str, Any], bool]:
    """Return the line of a run, and whether all of its cases were right."""
    started_s = time.monotonic()
    orders = make_long_orders(seed) if long else SHORT
    line: dict[str, Any] = {"run": run, "seed": seed, "cases": [case.name for case in cases]}
    sums: dict[str, int] = {}
    equal, wrong = True, []
    for case in cases:
        case_folder = folder / f"run-{run}-{case.name}"
        outcome, error = run_case(cluster, case_folder, case, orders, seed)
        equal &= outcome.equal
        if error:
            wrong.append(error)
        else:
            shutil.rmtree(case_folder)
        for name, value in asdict(outcome).items():
            if name not in ("equal", "differences"):
                sums[name] = sums.get(name, 0) + value
    line |= sums | {"equal": equal, "seconds": round(time.monotonic() - started_s, 1)}
    if wrong:
        line["wrong"] = wrong
    return line, not wrong


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--long", action="store_true", help="longer queries with twice as many events, in random order")
    parser.add_argument("--cores", type=int, default=1, help="cores of each worker")
    parser.add_argument("--cases", nargs="+", choices=list(NAMED), default=list(NAMED))
    parser.add_argument(
        "--share-host", action="store_true", help="do not isolate the workers, as on a system without namespaces"
    )
    parser.add_argument("--seed", type=int, help="seed of the first run; random by default")
    parser.add_argument("--folder", type=Path, help="keeps logs and state of runs with errors; made if absent")
    arguments = parser.parse_args()
    reason = unusable()
    if reason is not None:
        print(f"no cluster can run here: {reason}", file=sys.stderr)
        return 2
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(3), "big")
    all_right, cases = True, [NAMED[name] for name in arguments.cases]
    # Signals that end this process end the cluster too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="cluster-", ignore_cleanup_errors=True) as temporary:
        folder = Path(tempfile.mkdtemp(dir=arguments.folder)) if make_folder(arguments.folder) else Path(temporary)
        with Cluster(
            folder.resolve(), cores=arguments.cores, isolated=False if arguments.share_host else None
        ) as cluster:
            print(json.dumps({"isolated": cluster.isolated, "workers": len(cluster.workers)}), flush=True)
            for run in range(1, arguments.runs + 1):
                line, right = run_all_cases(cluster, folder.resolve(), run, seed + run - 1, cases, arguments.long)
                print(json.dumps(line), flush=True)
                all_right &= right
    return 0 if all_right else 1


def make_folder(folder: Path | None) -> bool:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return folder is not None


if __name__ == "__main__":
    sys.exit(main())
