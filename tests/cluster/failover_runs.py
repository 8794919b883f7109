"""Kill hosts with their disks, and measure failover: ``python tests/cluster/failover_runs.py --modes control --gb 0.1 0.5``.

A standalone cluster of three workers, each with its own host name, boot id, process numbers and disk, runs a query with one
executor. The state is in an S3 server behind a line of 50 MB/s that delays each request by 30 ms. Between two batches the
worker with the executor is killed, with its executor and their Python processes, and its disk is renamed. The script measures
the time until Spark has committed the next batch, which has events for a few thousand keys.

* ``control``: there are no standby services; the new host fetches the whole state.
* ``lazy``: there are no standby services; the new host fetches only what a batch needs, if files are large enough for that.
* ``peer``: as ``lazy``, from the standby service of a fourth host, on which no executor can run.
* ``standby``: the service runs on each worker. Each bucket has two replicas: one on each host to which its task can move.
* ``one_replica``: as ``standby``, with one replica. A new host without the replica fetches what a batch needs from the peer
  that has it.

While the cluster recovers, the line is unlimited: the next kill waits for the recovery. The script prints a line of JSON for
each kill, then the medians and the limits that they must meet. ``--result FOLDER`` writes these to a file, together with the
results of earlier runs there for other modes and sizes. The exit status is 1 if a limit is not met.
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

Results = Mapping[tuple[str, float], Sequence[Failover]]
ADOPT_S_MAX, CONTROL_AT_LEAST = 1.0, 0.8
# With one replica, a task may move to a host without it, so there is no limit for this mode.
_AT_MOST = {STANDBY: 1.2, LAZY: 2.0, PEER: 2.0}
_TIMES = {
    "seconds": "from the death to the next commit",
    "lost_s": "until Spark knows that the executor is lost",
    "executor_s": "until it has another one",
    "task_s": "the longest task",
    "read_s": "restoring or adopting, the longest task",
}


def report_results(report: Report, results: Results, bytes_s: float) -> None:
    """Report what was measured, and how it grows with the state.

    Parameters
    ----------
    report
        The report.
    found
        The failovers by mode and size.
    bytes_s
        Bandwidth of the line.
    """
    report.details["kills"] = [
        {"mode": mode, "gb": gb, **asdict(failover)}
        for (mode, gb), failovers in results.items()
        for failover in failovers
    ]
    for (mode, gb), failovers in results.items():
        name = f"{mode}, {gb:g} GB"
        for part, label in _TIMES.items():
            report.timing(f"{name}: {label}", (getattr(failover, part) for failover in failovers))
        if mode == STANDBY:
            adopting_s = statistics.median(failover.read_s for failover in failovers)
            report.bar(f"{name}: adopting, the longest task", adopting_s, "at most", ADOPT_S_MAX, "s")
    for mode in dict.fromkeys(mode for mode, _ in results):
        sizes = sorted(gb for result_mode, gb in results if result_mode == mode)
        medians = [statistics.median(failover.seconds for failover in results[mode, gb]) for gb in sizes]
        if len(sizes) < 2:
            continue
        name = f"{mode}: {sizes[-1]:g} GB / {sizes[0]:g} GB"
        growth = report.ratio(f"{name}, time", medians[-1] / medians[0])
        if mode == CONTROL:
            line_s = (sizes[-1] - sizes[0]) * 1e9 / bytes_s
            share = (medians[-1] - medians[0]) / line_s
            report.bar(f"{name}: growth over bytes by the line", share, "at least", CONTROL_AT_LEAST, "times")
        elif mode in _AT_MOST:
            report.bar(f"{name}, time", growth, "at most", _AT_MOST[mode], "times")


def make_report(arguments: argparse.Namespace, results: Results) -> Report:
    size = Size(0)
    parameters = {name: getattr(arguments, name) for name in ("memory", "seed")}
    line = {"bytes_per_s": size.bytes_s, "request_s": size.request_s, "buckets": size.buckets}
    report = Report("failover", {**parameters, **line})
    report.check("each batch is equal to the batch computation, after every kill", bool(results))
    report_results(report, results, size.bytes_s)
    return report


def read_earlier_results(
    arguments: argparse.Namespace,
) -> tuple[dict[tuple[str, float], list[Failover]], list[dict[str, Any]]]:
    """Return the results and places of earlier runs for other modes and sizes, because all runs together take hours."""
    results: dict[tuple[str, float], list[Failover]] = {}
    if arguments.result is None or not (arguments.result / "failover.json").exists():
        return results, []
    details = json.loads((arguments.result / "failover.json").read_text())["details"]
    for kill in details["kills"]:
        mode, gb = kill.pop("mode"), kill.pop("gb")
        if mode not in arguments.modes or gb not in arguments.gb:
            results.setdefault((mode, gb), []).append(Failover(**kill))
    return results, [
        place_
        for place_ in details["places"]
        if place_["mode"] not in arguments.modes or place_["gb"] not in arguments.gb
    ]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[CONTROL, LAZY, PEER, STANDBY])
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 0.5, 2.0], metavar="N")
    parser.add_argument("--kills", type=int, default=5, metavar="N")
    parser.add_argument("--memory", type=int, default=1024, metavar="MIB", help="memory of an executor")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps logs and state; made if absent")
    parser.add_argument("--result", type=Path, metavar="FOLDER", help="folder for failover.json")
    arguments = parser.parse_args()
    reason = unusable()
    if reason is not None:
        print(f"no cluster can run here: {reason}", file=sys.stderr)
        return 2
    end_with_the_cluster()
    results, places = read_earlier_results(arguments)
    report = None
    with run_folder("failover", arguments.folder) as folder, slow_s3(folder) as store:
        for gb in arguments.gb:
            for mode in arguments.modes:
                run_path = folder / f"{mode}-{gb:g}"
                bystanders = int(mode == PEER)
                cluster = Cluster(
                    run_path / "cluster",
                    workers=3 + bystanders,
                    cores=2,
                    memory_mb=arguments.memory,
                    bystanders=bystanders,
                )
                with cluster:
                    if not cluster.isolated:
                        print("hosts cannot be isolated here: namespaces are not allowed", file=sys.stderr)
                        return 2
                    trial = FailoverTrial(cluster, store, run_path / "query", mode, Size(gb), arguments.seed)
                    results[mode, gb] = trial.run(arguments.kills)
                for failover in results[mode, gb]:
                    print(json.dumps({"mode": mode, "gb": gb, **asdict(failover)}), flush=True)
                places.append({"mode": mode, "gb": gb, **place()})
                report = make_report(arguments, results)
                report.details["places"] = places
                if arguments.result is not None:
                    report.write(arguments.result)
    assert report is not None, "there must be a mode and a size"
    print(report.table(), flush=True)
    return 0 if report.met or not report.bars else 1


if __name__ == "__main__":
    sys.exit(main())
