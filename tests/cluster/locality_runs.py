"""Measure on which host Spark runs a bucket's next task: ``python tests/cluster/locality_runs.py --batches 20``.

A standalone cluster has three workers, each with its own host name, boot id, process numbers, disk and executor. A query with
a small state runs several times, each time with other public settings of Spark that may influence the placement of tasks. The
package's metrics have the worker of each bucket's call. The script prints a line of JSON for each setting:

* ``stayed``: share of the buckets whose task ran on the host of the previous batch; of the median batch, and of the worst;
* ``hosts_per_bucket``: total number of hosts on which a bucket's tasks ran, of the mean bucket;
* ``largest_share``: share of the buckets on the host that had most of them, of the median batch;
* ``first_worker_share``: share of the buckets on the first worker, in the first batch that counts. If an executor is lost, it
  is that worker's: if no other bucket moves, at least all but these stayed, even in the worst batch.

By chance ``stayed`` would be a third. ``--out FILE`` writes all lines with their versions, together with the lines of other
settings that the file already has for the same state, batches and versions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyspark
from cluster import Cluster, unusable
from commands import end_with_the_cluster, run_folder
from processes import kill_tree, wait_until

from spark_state_ext.version import __version__

__all__ = ["SETTINGS", "Placement", "Setting", "measure_placement", "merge_results"]

_HOSTS, _CORES, _BUCKETS = 3, 2, 16
_ROW_BYTES, _EVENTS = 100, 2_000
# In these batches stores are restored and Python starts.
_WARM_UP_BATCHES = 3
_RUN_S_MAX = 600.0
_TAIL = 2_500


@dataclass(frozen=True)
class Setting:
    """A set of settings to measure.

    Parameters
    ----------
    name
        Name for the output.
    conf
        Settings of Spark.
    partitions
        Shuffle partitions.
    loses
        True if a worker's executor is killed in the middle; the worker starts another one.
    """

    name: str
    conf: Mapping[str, str] = field(default_factory=dict)
    partitions: int = _HOSTS * _CORES
    loses: bool = False


_WAIT, _REDUCE = "spark.locality.wait", "spark.shuffle.reduceLocality.enabled"
SETTINGS = (
    Setting("defaults"),
    Setting("wait 0", {_WAIT: "0s"}),
    Setting("wait 10 s", {_WAIT: "10s"}),
    Setting("reduce locality off", {_REDUCE: "false"}),
    Setting("reduce locality off, wait 10 s", {_REDUCE: "false", _WAIT: "10s"}),
    Setting("reduce locality off, wait 0", {_REDUCE: "false", _WAIT: "0s"}),
    Setting("a partition a host", {}, _HOSTS),
    Setting("a partition a host, reduce locality off", {_REDUCE: "false"}, _HOSTS),
    Setting("a task a host", {_REDUCE: "false", "spark.task.cpus": str(_CORES)}, _HOSTS),
    Setting("two partitions a core", {_REDUCE: "false"}, 2 * _HOSTS * _CORES),
    Setting("two partitions a core, wait 0", {_REDUCE: "false", _WAIT: "0s"}, 2 * _HOSTS * _CORES),
    Setting("wait starts anew with each task", {_REDUCE: "false", f"{_WAIT}.legacyResetOnTaskLaunch": "true"}),
    Setting("fair scheduler", {_REDUCE: "false", "spark.scheduler.mode": "FAIR"}),
    Setting("an executor is lost", {}, loses=True),
    Setting("an executor is lost, reduce locality off", {_REDUCE: "false"}, loses=True),
)


@dataclass(frozen=True)
class Placement:
    """The placement of buckets' tasks on hosts.

    Parameters
    ----------
    batches
        Number of batches that were compared with the previous one.
    stayed, stayed_min
        Share of the buckets that ran on their previous host: of the median batch, and of the worst.
    hosts_per_bucket
        Total number of hosts on which a bucket ran, of the mean bucket.
    largest_share
        Share of the buckets on the host with most of them, of the median batch.
    first_worker_share
        Share of the buckets on the first worker, of the first batch.
    """

    batches: int
    stayed: float
    stayed_min: float
    hosts_per_bucket: float
    largest_share: float
    first_worker_share: float


def measure_placement(calls: pa.Table, warm_up: int, first: str) -> Placement:
    """Compute the placement from metrics of calls.

    Parameters
    ----------
    calls
        Metrics of one query: `batch`, `bucket`, `ended_ms` and `worker`. The last one of several attempts counts.
    warm_up
        Number of batches at the beginning that do not count.
    first
        Name of the first worker.

    Raises
    ------
    ValueError
        If there are fewer than two batches that count, or a bucket is missing in a batch.
    """
    last = calls.filter(pc.greater_equal(calls["batch"], warm_up)).sort_by("ended_ms")
    workers_by_batch: dict[int, dict[int, str]] = {}
    for batch, bucket, worker in zip(*(last[name].to_pylist() for name in ("batch", "bucket", "worker")), strict=True):
        workers_by_batch.setdefault(batch, {})[bucket] = worker
    batches = [workers_by_batch[batch] for batch in sorted(workers_by_batch)]
    buckets = set().union(*batches)
    if len(batches) < 2 or any(batch.keys() != buckets for batch in batches):
        raise ValueError(
            f"batches {sorted(workers_by_batch)} do not each have all of {len(buckets)} buckets, or are too few"
        )
    stayed = [
        sum(before[bucket] == now[bucket] for bucket in buckets) / len(buckets) for before, now in pairwise(batches)
    ]
    workers = [list(batch.values()) for batch in batches]
    return Placement(
        batches=len(stayed),
        stayed=round(statistics.median(stayed), 3),
        stayed_min=round(min(stayed), 3),
        hosts_per_bucket=round(statistics.mean(len({batch[bucket] for batch in batches}) for bucket in buckets), 2),
        first_worker_share=round(workers[0].count(first) / len(buckets), 3),
        largest_share=round(statistics.median(max(map(each.count, set(each))) / len(buckets) for each in workers), 3),
    )


def run(cluster: Cluster, folder: Path, setting: Setting, gb: float, batches: int) -> Placement:
    """Run the query once, over one file for each batch, and measure the placement of its tasks.

    Raises
    ------
    RuntimeError
        If the driver ended.
    TimeoutError
        If a batch is not committed in time.
    """
    rows = int(gb * 1e9 / _ROW_BYTES)
    for name in ("in", "out"):
        (folder / name).mkdir(parents=True)
    random = np.random.default_rng(1)
    for number in range(batches):
        keys = random.choice(rows, min(_EVENTS, rows), replace=False)
        events = pa.table({"key": keys, "amount": random.integers(1000, size=len(keys))})
        pq.write_table(events, folder / "in" / f"{number:06}.parquet")
    settings = folder / "settings.json"
    settings.write_text(json.dumps(make_settings(cluster, folder, setting, rows)))
    log = folder / "driver.log"
    driver = cluster.driver(Path(__file__).with_name("failover_job.py"), [str(settings)], log)
    last = folder / "checkpoint" / "commits" / str(batches - 1)

    def is_last_committed() -> bool:
        if driver.poll() is not None:
            raise RuntimeError(f"the driver ended: {log}\n{log.read_text(errors='replace')[-_TAIL:]}")
        return last.exists()

    def calls() -> pa.Table:
        query = json.loads((folder / "checkpoint" / "metadata").read_text())["id"]
        all_calls = cluster.calls()
        return all_calls.filter(pc.equal(all_calls["query_id"], query))

    try:
        if setting.loses:
            half = last.with_name(str((_WARM_UP_BATCHES + batches) // 2))
            wait_until(lambda: is_last_committed() or half.exists(), f"{half} is there; see {log}", wait_s=_RUN_S_MAX)
            if not cluster.kill_executors(cluster.workers[0]):
                raise RuntimeError("there was no executor to kill")
        wait_until(is_last_committed, f"batch {batches - 1} is committed; see {log}", wait_s=_RUN_S_MAX)
        (folder / "stop").touch()
        # Metrics are written periodically, and at the latest when an executor's Python ends.
        wait_until(lambda: len(calls()) >= batches * _BUCKETS, "executors write their metrics")
        wait_until(lambda: driver.poll() is not None, "the driver ends")
    finally:
        if driver.poll() is None:
            kill_tree(driver.pid)
            driver.wait()
    wait_until(lambda: not any(worker.executors() for worker in cluster.workers), "executors end with their driver")
    return measure_placement(calls(), _WARM_UP_BATCHES, cluster.workers[0].name)


def make_settings(cluster: Cluster, folder: Path, setting: Setting, rows: int) -> dict[str, Any]:
    conf = {
        **cluster.conf,
        "spark.log.level": "WARN",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(setting.partitions),
        **setting.conf,
    }
    return {
        "folder": str(folder),
        "root": str(folder / "root"),
        "savepoint": str(folder / "savepoint"),
        "storage_options": {},
        "local_dir": cluster.local_dir,
        "rows": rows,
        "buckets": _BUCKETS,
        "options": {},
        "conf": conf,
    }


def merge_results(
    gb: float, batches: int, lines: Sequence[Mapping[str, Any]], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the new content of the results file: these lines, and its comparable lines for other settings.

    Parameters
    ----------
    gb, batches
        Total state, and batches of each setting.
    lines
        The new results, one for each setting.
    before
        The previous content of the file; empty if there was none.
    """
    header = {
        "command": f"python tests/cluster/locality_runs.py --gb {gb:g} --batches {batches}",
        "versions": {"pyspark": pyspark.__version__, "spark_state_ext": __version__},
        "hosts": _HOSTS,
        "cores": _HOSTS * _CORES,
        "buckets": _BUCKETS,
    }
    is_comparable = all(before.get(name) == value for name, value in header.items())
    results = {line["name"]: line for line in before["settings"]} if is_comparable else {}
    results |= {line["name"]: line for line in lines}
    return {**header, "settings": [results[setting.name] for setting in SETTINGS if setting.name in results]}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--settings", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--gb", type=float, default=0.01, metavar="N", help="total state")
    parser.add_argument("--batches", type=int, default=20, metavar="N")
    parser.add_argument("--out", type=Path, help="file for all lines")
    parser.add_argument("--folder", type=Path, help="keeps logs and state; made if absent")
    arguments = parser.parse_args()
    reason = unusable()
    if reason is not None:
        print(f"no cluster can run here: {reason}", file=sys.stderr)
        return 2
    end_with_the_cluster()
    lines: list[dict[str, Any]] = []
    with (
        run_folder("locality", arguments.folder) as folder,
        Cluster(folder / "cluster", workers=_HOSTS, cores=_CORES) as cluster,
    ):
        if not cluster.isolated:
            print("hosts cannot be isolated here: namespaces are not allowed", file=sys.stderr)
            return 2
        for at, name in enumerate(arguments.settings):
            setting = SETTINGS[names.index(name)]
            placement = run(cluster, folder / f"query-{at}", setting, arguments.gb, arguments.batches)
            lines.append({**asdict(setting), **asdict(placement)})
            print(json.dumps(lines[-1]), flush=True)
            if arguments.out is not None:
                before = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
                results = merge_results(arguments.gb, arguments.batches, lines, before)
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
