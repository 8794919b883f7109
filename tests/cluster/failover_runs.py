"""Hosts that are killed with all they have: ``python tests/cluster/failover_runs.py --modes control --gb 0.1 0.5``.

A standalone cluster of three workers, each with a host name, a boot, process numbers and a disk of its own, runs a query with one
executor. The state is in an S3 server behind a line of 50 MB/s, on which each request takes 30 ms longer. Between two batches
the worker with the executor is killed, with its executor and their Python processes, and its disk is renamed away. What is
measured is the time until Spark has committed the next batch, which has events for a few thousand keys.

* ``control``: nobody follows; the new host fetches the state, whole.
* ``lazy``: nobody follows; the new host fetches what a batch asks for, where files are large enough for that.
* ``peer``: as ``lazy``, from the standby service of a fourth host, on which no executor can run.
* ``standby``: the service runs on each worker. Each bucket has two replicas, so one is on each host where its task can go.
* ``one_replica``: as ``standby``, with one replica. Where it is not, the new host fetches what a batch asks for, from the peer
  that has it.

While the cluster heals, the line is free: the next kill waits until it has healed. A line of JSON for each kill; then medians,
and what they are to prove, which ``--result FOLDER`` writes to a file, with what runs before have written there of other modes
and sizes. The exit status is 1 when that is not proved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster import Cluster, unusable
from commands import end_with_the_cluster, run_folder
from failover_query import Size
from failover_trial import CONTROL, LAZY, MODES, PEER, STANDBY, Failover, FailoverTrial
from slow_s3 import slow_s3

from benchmarks.report import Report, place

Found = Mapping[tuple[str, float], Sequence[Failover]]
ADOPT_S_MAX, CONTROL_AT_LEAST = 1.0, 0.8
# One replica is not always where a task lands, so nothing is promised of it.
_AT_MOST = {STANDBY: 1.2, LAZY: 2.0, PEER: 2.0}
_TIMES = {
    "seconds": "from the death to the next commit",
    "lost_s": "until Spark knows that the executor is lost",
    "executor_s": "until it has another one",
    "task_s": "the longest task",
    "read_s": "restoring or adopting, the longest task",
}


def told(report: Report, found: Found, bytes_s: float) -> None:
    """Note what was measured, and how it grows with the state.

    Parameters
    ----------
    report
        Gets it.
    found
        By mode and size.
    bytes_s
        Of the line.
    """
    report.details["kills"] = [
        {"mode": mode, "gb": gb, **asdict(it)} for (mode, gb), all_ in found.items() for it in all_
    ]
    for (mode, gb), failovers in found.items():
        name = f"{mode}, {gb:g} GB"
        for part, what in _TIMES.items():
            report.timing(f"{name}: {what}", (getattr(it, part) for it in failovers))
        if mode == STANDBY:
            adopting_s = statistics.median(it.read_s for it in failovers)
            report.bar(f"{name}: adopting, the longest task", adopting_s, "at most", ADOPT_S_MAX, "s")
    for mode in dict.fromkeys(mode for mode, _ in found):
        sizes = sorted(gb for it, gb in found if it == mode)
        medians = [statistics.median(it.seconds for it in found[mode, gb]) for gb in sizes]
        if len(sizes) < 2:
            continue
        name = f"{mode}: {sizes[-1]:g} GB / {sizes[0]:g} GB"
        grown = report.ratio(f"{name}, time", medians[-1] / medians[0])
        if mode == CONTROL:
            line_s = (sizes[-1] - sizes[0]) * 1e9 / bytes_s
            share = (medians[-1] - medians[0]) / line_s
            report.bar(f"{name}: growth over bytes by the line", share, "at least", CONTROL_AT_LEAST, "times")
        elif mode in _AT_MOST:
            report.bar(f"{name}, time", grown, "at most", _AT_MOST[mode], "times")


def _reported(given: argparse.Namespace, found: Found) -> Report:
    size = Size(0)
    named = {name: getattr(given, name) for name in ("memory", "seed")}
    line = {"bytes_per_s": size.bytes_s, "request_s": size.request_s, "buckets": size.buckets}
    report = Report("failover", {**named, **line})
    report.check("each batch is equal to the batch computation, after every kill", bool(found))
    told(report, found, size.bytes_s)
    return report


def _before(given: argparse.Namespace) -> tuple[dict[tuple[str, float], list[Failover]], list[dict[str, Any]]]:
    """What runs before have measured of other modes and sizes, and where: all of them together take hours."""
    found: dict[tuple[str, float], list[Failover]] = {}
    if given.result is None or not (given.result / "failover.json").exists():
        return found, []
    details = json.loads((given.result / "failover.json").read_text())["details"]
    for kill in details["kills"]:
        mode, gb = kill.pop("mode"), kill.pop("gb")
        if mode not in given.modes or gb not in given.gb:
            found.setdefault((mode, gb), []).append(Failover(**kill))
    return found, [it for it in details["places"] if it["mode"] not in given.modes or it["gb"] not in given.gb]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[CONTROL, LAZY, PEER, STANDBY])
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 0.5, 2.0], metavar="N")
    parser.add_argument("--kills", type=int, default=5, metavar="N")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB", help="of an executor")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps logs and state; made if absent")
    parser.add_argument("--result", type=Path, metavar="FOLDER", help="gets failover.json")
    given = parser.parse_args()
    reason = unusable()
    if reason is not None:
        print(f"no cluster can run here: {reason}", file=sys.stderr)
        return 2
    end_with_the_cluster()
    found, places = _before(given)
    report = None
    with run_folder("failover", given.folder) as folder, slow_s3(folder) as store:
        for gb in given.gb:
            for mode in given.modes:
                where = folder / f"{mode}-{gb:g}"
                bystanders = int(mode == PEER)
                cluster = Cluster(
                    where / "cluster",
                    workers=3 + bystanders,
                    cores=2,
                    memory_mb=given.memory,
                    bystanders=bystanders,
                )
                with cluster:
                    if not cluster.isolated:
                        print("hosts cannot be told apart here: namespaces are not allowed", file=sys.stderr)
                        return 2
                    trial = FailoverTrial(cluster, store, where / "query", mode, Size(gb), given.seed)
                    found[mode, gb] = trial.run(given.kills)
                for failover in found[mode, gb]:
                    print(json.dumps({"mode": mode, "gb": gb, **asdict(failover)}), flush=True)
                places.append({"mode": mode, "gb": gb, **place()})
                report = _reported(given, found)
                report.details["places"] = places
                if given.result is not None:
                    report.write(given.result)
    assert report is not None, "there is a mode and a size"
    print(report.table(), flush=True)
    return 0 if report.met or not report.bars else 1


if __name__ == "__main__":
    sys.exit(main())
