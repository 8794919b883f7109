"""Runs in a row on a real cluster, a line of JSON each: ``python tests/cluster/cluster_runs.py --runs 10``.

Every run has a fresh query for each of Spark's state store providers and checkpoint formats; its line has the sums. The exit
status is 1 when a result was not equal to the batch computation, or when something that should have happened did not.
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
from cluster_trial import CASES, SHORT, Case, Seen, Trial, long_orders

NAMED = {case.name: case for case in CASES}


def _one_case(cluster: Cluster, folder: Path, case: Case, orders: Mapping[int, str], seed: int) -> tuple[Seen, str]:
    """What was seen, and what is wrong with it."""
    trial = Trial(cluster, folder, case, orders, seed)
    try:
        seen = trial.run()
    except (RuntimeError, TimeoutError) as error:
        return trial.seen, f"{case.name}: {error}"
    wrong = [*seen.differences, *seen.missing(orders)]
    return seen, f"{case.name}: {wrong}" if wrong else ""


def _one_run(
    cluster: Cluster, folder: Path, run: int, seed: int, cases: Sequence[Case], long: bool
) -> tuple[dict[str, Any], bool]:
    """The line of a run, and whether all was as it should be."""
    began_s = time.monotonic()
    orders = long_orders(seed) if long else SHORT
    line: dict[str, Any] = {"run": run, "seed": seed, "cases": [case.name for case in cases]}
    sums: dict[str, int] = {}
    equal, wrong = True, []
    for case in cases:
        where = folder / f"run-{run}-{case.name}"
        seen, complaint = _one_case(cluster, where, case, orders, seed)
        equal &= seen.equal
        if complaint:
            wrong.append(complaint)
        else:
            shutil.rmtree(where)
        for name, value in asdict(seen).items():
            if name not in ("equal", "differences"):
                sums[name] = sums.get(name, 0) + value
    line |= sums | {"equal": equal, "seconds": round(time.monotonic() - began_s, 1)}
    if wrong:
        line["wrong"] = wrong
    return line, not wrong


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument(
        "--long", action="store_true", help="longer queries, to which twice as much happens, in any order"
    )
    parser.add_argument("--cores", type=int, default=1, help="of each worker")
    parser.add_argument("--cases", nargs="+", choices=list(NAMED), default=list(NAMED))
    parser.add_argument("--share-host", action="store_true", help="as where the system lets nobody make namespaces")
    parser.add_argument("--seed", type=int, help="of the first run; drawn when not given")
    parser.add_argument("--folder", type=Path, help="keeps logs and state of runs that went wrong; made if absent")
    given = parser.parse_args()
    reason = unusable()
    if reason is not None:
        print(f"no cluster can run here: {reason}", file=sys.stderr)
        return 2
    seed = given.seed if given.seed is not None else int.from_bytes(os.urandom(3), "big")
    good, cases = True, [NAMED[name] for name in given.cases]
    # What ends this process ends the cluster too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="cluster-", ignore_cleanup_errors=True) as temporary:
        folder = Path(tempfile.mkdtemp(dir=given.folder)) if _made(given.folder) else Path(temporary)
        with Cluster(folder.resolve(), cores=given.cores, isolated=False if given.share_host else None) as cluster:
            print(json.dumps({"isolated": cluster.isolated, "workers": len(cluster.workers)}), flush=True)
            for run in range(1, given.runs + 1):
                line, right = _one_run(cluster, folder.resolve(), run, seed + run - 1, cases, given.long)
                print(json.dumps(line), flush=True)
                good &= right
    return 0 if good else 1


def _made(folder: Path | None) -> bool:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return folder is not None


if __name__ == "__main__":
    sys.exit(main())
