"""Hosts that are killed with all they have: ``python tests/cluster/failover_runs.py --modes control --gb 0.1 0.5``.

A standalone cluster of three workers, each with a host name, a boot, process numbers and a disk of its own, runs a query with one
executor. The state is in an S3 server behind a line of 50 MB/s, on which each request takes 30 ms longer. Between two batches
the worker with the executor is killed, with its executor and their Python processes, and its disk is renamed away. What is
measured is the time until Spark has committed the next batch, which has events for a few thousand keys.

* ``control``: nobody follows; the new host fetches the state.
* ``standby``: the service runs on each worker and follows all buckets.

While the cluster heals, the line is free: the next kill waits until it has healed. A line of JSON for each kill; the last one
has medians and what they are to prove. The exit status is 1 when that is not proved.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster import Cluster, unusable
from failover_query import Size
from failover_trial import CONTROL, STANDBY, Failover, FailoverTrial
from slow_s3 import slow_s3

Found = Mapping[tuple[str, float], Sequence[Failover]]
FLAT_AT_MOST, ADOPT_S_MAX, CONTROL_AT_LEAST = 1.2, 1.0, 0.8


def judged(found: Found, bytes_s: float) -> dict[str, Any]:
    """Medians, and how they grow with the state.

    Parameters
    ----------
    found
        By mode and size.
    bytes_s
        Of the line.
    """
    told: dict[str, Any] = {}
    for (mode, gb), failovers in found.items():
        told[f"{mode}, {gb:g} GB"] = {
            name: round(statistics.median(getattr(it, name) for it in failovers), 3)
            for name in ("seconds", "lost_s", "executor_s", "read_s", "task_s", "restored_files", "down_bytes")
        }
    for mode in dict.fromkeys(mode for mode, _ in found):
        sizes = sorted(gb for it, gb in found if it == mode)
        if len(sizes) < 2:
            continue
        small, large = (told[f"{mode}, {gb:g} GB"]["seconds"] for gb in (sizes[0], sizes[-1]))
        told[f"{mode}: {sizes[-1]:g} GB / {sizes[0]:g} GB"] = round(large / small, 3)
        if mode == CONTROL:
            line_s = (sizes[-1] - sizes[0]) * 1e9 / bytes_s
            told[f"{mode}: growth over bytes by the line"] = round((large - small) / line_s, 3)
    return told


def is_proved(told: Mapping[str, Any]) -> bool:
    """Whether the figures are those that are promised, as far as they were measured."""
    proved = True
    for name, value in told.items():
        if name.startswith(f"{STANDBY}: "):
            proved &= value <= FLAT_AT_MOST
        elif name.startswith(f"{STANDBY}, "):
            proved &= value["read_s"] <= ADOPT_S_MAX
        elif name == f"{CONTROL}: growth over bytes by the line":
            proved &= value >= CONTROL_AT_LEAST
    return proved


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=(CONTROL, STANDBY), default=[CONTROL, STANDBY])
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 0.5, 2.0], metavar="N")
    parser.add_argument("--kills", type=int, default=5, metavar="N")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="standby replicas of each bucket")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB", help="of an executor")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps logs and state; made if absent")
    given = parser.parse_args()
    reason = unusable()
    if reason is not None:
        print(f"no cluster can run here: {reason}", file=sys.stderr)
        return 2
    # What ends this process ends the cluster too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    found: dict[tuple[str, float], list[Failover]] = {}
    bytes_s = Size(0).bytes_s
    with tempfile.TemporaryDirectory(prefix="failover-", ignore_cleanup_errors=True) as temporary:
        parent = given.folder or Path(temporary)
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent)).resolve()
        with slow_s3(folder) as store:
            for gb in given.gb:
                for mode in given.modes:
                    where = folder / f"{mode}-{gb:g}"
                    with Cluster(where / "cluster", workers=3, cores=2, memory_mb=given.memory) as cluster:
                        if not cluster.isolated:
                            print("hosts cannot be told apart here: namespaces are not allowed", file=sys.stderr)
                            return 2
                        size = Size(gb, replicas=given.replicas)
                        trial = FailoverTrial(cluster, store, where / "query", mode, size, given.seed)
                        found[mode, gb] = trial.run(given.kills)
                    for failover in found[mode, gb]:
                        print(json.dumps({"mode": mode, "gb": gb, **asdict(failover)}), flush=True)
    told = judged(found, bytes_s)
    print(json.dumps(told), flush=True)
    return 0 if is_proved(told) else 1


if __name__ == "__main__":
    sys.exit(main())
