"""The assignment of standby replicas, which every host computes at every heartbeat, while hosts join and leave.

The benchmark uses the real assignment, and the real membership over a folder in memory that counts requests. Time is
virtual, and a replica is in sync one heartbeat after its host began to keep it. In each heartbeat all hosts first read
the records of the others, and then each host decides and writes its record. Hosts that have read the same records come
to the same assignment, so it is computed and timed only once.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from benchmarks.options import add_quick, add_seed
from benchmarks.report import Report
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.assignment import assign, buckets_to_hold, find_active_buckets, find_active_hosts
from spark_state_ext.standby.members import Members, Membership

__all__ = ["add_arguments", "run"]

MOST_OVER_MEAN, DECISION_S_AT_MOST = 1.25, 1.0
# A host joins or leaves once in this many heartbeats; in between, the cluster comes to rest.
_CHANGE_EVERY = 8
# Number of heartbeats at the end in which no host joins or leaves.
_REST_HEARTBEATS = 8
_RACKS = 5
# The kinds of requests. A heartbeat in which no host reads a record is called warm.
_LIST, _PUT, _REMOVE, _GET = "list", "put", "delete", "get"


class CountedFolder(Folder):
    """A folder that counts its requests to the store; its child folders add theirs to the same counter."""

    counts: Counter[str]

    def child(self, *names: str) -> Folder:
        folder = super().child(*names)
        folder.__class__ = CountedFolder
        return folder

    def names(self) -> list[str]:
        self.counts[_LIST] += 1
        return super().names()

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.counts[_PUT] += 1
        super().put(name, data)

    def remove(self, name: str) -> None:
        self.counts[_REMOVE] += 1
        super().remove(name)

    def get(self, name: str) -> bytes:
        self.counts[_GET] += 1
        return super().get(name)


@dataclass
class _Host:
    name: str
    rack: str
    membership: Membership
    held: set[BucketKey] = field(default_factory=set)
    in_sync: set[BucketKey] = field(default_factory=set)
    active: dict[BucketKey, int] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--hosts", type=int, default=100, metavar="N", help="number of hosts at the beginning")
    parser.add_argument("--buckets", type=int, default=10_000, metavar="N", help="number of buckets of the query")
    parser.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="number of standby replicas of each bucket"
    )
    parser.add_argument("--heartbeats", type=int, default=50, metavar="N", help="number of simulated heartbeats")
    add_quick(parser, "few hosts, buckets and heartbeats")
    add_seed(parser, "the choice of hosts that leave")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark with the options of the command line.

    Raises
    ------
    BenchmarkError
        If, at rest, a bucket has too few or too many replicas, or a replica on the host of its active task.
    """
    hosts, buckets, heartbeats = options.hosts, options.buckets, options.heartbeats
    if options.quick:
        hosts, buckets, heartbeats = 20, 1_000, 32
    settings = StandbySettings(standby_replicas=options.replicas)
    parameters = {"hosts": hosts, "buckets": buckets, "heartbeats": heartbeats, "racks": _RACKS, "seed": options.seed}
    report = Report("standby_assignment", {**parameters, "replicas": options.replicas})
    cluster = _Cluster(hosts, buckets, settings, np.random.default_rng(options.seed))
    for number in range(heartbeats):
        cluster.heartbeat(number, changes=number < heartbeats - _REST_HEARTBEATS)
    _report_results(report, cluster, settings)
    return report


@contextmanager
def _freeze_heap() -> Iterator[None]:
    """Keep the garbage collector from scanning the objects of all hosts: only in the benchmark they share a process."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Cluster:
    """All hosts of the simulated cluster, which run one heartbeat after the other."""

    def __init__(self, hosts: int, buckets: int, settings: StandbySettings, rng: np.random.Generator) -> None:
        self.settings, self._rng = settings, rng
        self.root = CountedFolder(f"memory://benchmark-standby-{uuid.uuid4().hex}")
        self.root.counts = Counter()
        self.now_s = 0.0
        self.running: dict[str, _Host] = {}
        self._hosts_added = 0
        self.keys = [BucketKey("counts", "query", index) for index in range(buckets)]
        self.writer = {key: f"host-{key.bucket % hosts}.example.org" for key in self.keys}
        self.decision_s: list[float] = []
        self.read_all_s: list[float] = []
        self.record_bytes_max = 0
        self.requests: list[dict[str, int]] = []
        self.balance: list[float] = []
        self.changes: list[dict[str, float]] = []
        for _ in range(hosts):
            self._add_host()

    def _add_host(self) -> None:
        name = f"host-{self._hosts_added}.example.org"
        membership = Membership(self.root, name, self.settings.heartbeat_s, lambda: self.now_s)
        self.running[name] = _Host(name, f"rack-{self._hosts_added % _RACKS}", membership)
        self._hosts_added += 1

    def _add_or_remove_host(self, number: int) -> None:
        """Add a host, or remove one and move its active tasks to other hosts."""
        if number // _CHANGE_EVERY % 2:
            names = sorted(self.running)
            removed = names[int(self._rng.integers(len(names)))]
            del self.running[removed]
            remaining = sorted(self.running)
            for key in (key for key, writer in self.writer.items() if writer == removed):
                self.writer[key] = remaining[key.bucket % len(remaining)]
        else:
            self._add_host()
        self.changes.append({"goes": number // _CHANGE_EVERY % 2, "hosts": len(self.running), "moved": 0})

    def heartbeat(self, number: int, changes: bool) -> None:
        """Let all hosts read the records, and then let each of them decide and write its record."""
        if changes and number and number % _CHANGE_EVERY == 0:
            self._add_or_remove_host(number)
        self.root.counts.clear()
        views_by_host = {host.name: self._look(host) for host in self.running.values()}
        assignments: dict[int, dict[BucketKey, tuple[str, ...]]] = {}
        views: list[Members] = []
        for host in self.running.values():
            view = views_by_host[host.name]
            index = next((index for index, other in enumerate(views) if other.records == view.records), len(views))
            if index == len(views):
                views.append(view)
            self._decide_and_write(host, view, assignments, index)
        self.requests.append({name: self.root.counts[name] for name in (_LIST, _PUT, _REMOVE, _GET)})
        loads = [len(host.held) for host in self.running.values()]
        self.balance.append(max(loads) * len(loads) / max(1, sum(loads)))
        self.now_s += self.settings.heartbeat_s
        print(f"heartbeat {number}: {len(self.running)} hosts, {self.requests[-1]}", file=sys.stderr, flush=True)

    def _look(self, host: _Host) -> Members:
        with _freeze_heap():
            counts, began_s = self.root.counts[_GET], time.perf_counter()
            members = host.membership.look()
        if self.root.counts[_GET] - counts >= len(self.running) - 1:
            self.read_all_s.append(time.perf_counter() - began_s)
        return members

    def _decide_and_write(
        self, host: _Host, view: Members, assignments: dict[int, dict[BucketKey, tuple[str, ...]]], index: int
    ) -> None:
        records = view.records
        if host.name not in {entry.host for entry in records}:
            # A new host only writes its record, so that other hosts learn of it, and decides from the next heartbeat
            # on. If it decided while it knows only itself, it would take every replica.
            host.membership.heartbeat(MemberRecord(host.name, host.rack))
            return
        with _freeze_heap():
            began_s = time.perf_counter()
            is_first = index not in assignments
            assignment = (
                assign(find_active_hosts(self.keys, records), records, self.settings)
                if is_first
                else assignments[index]
            )
            to_hold = buckets_to_hold(host.name, assignment, records)
            if is_first:
                self.decision_s.append(time.perf_counter() - began_s)
        assignments.setdefault(index, assignment)
        if self.changes:
            self.changes[-1]["moved"] += len(to_hold - host.held)
        host.in_sync = host.held & to_hold
        host.held = set(to_hold)
        host.active = find_active_buckets(host.name, self.keys, records)
        replicas = (StandbyReplica(key, 7, 10**8, key in host.in_sync, self.writer[key]) for key in sorted(host.held))
        record = MemberRecord(host.name, host.rack, replicas=tuple(replicas), active=host.active)
        self.record_bytes_max = max(self.record_bytes_max, len(host.membership.heartbeat(record).encode()))


def _report_results(report: Report, cluster: _Cluster, settings: StandbySettings) -> None:
    expected = min(settings.replicas, len(cluster.running) - 1)
    replicas = Counter(key for host in cluster.running.values() for key in host.held)
    active = [key for host in cluster.running.values() for key in host.held if cluster.writer[key] == host.name]
    report.check("every bucket has its replicas, and none too many", replicas == dict.fromkeys(cluster.keys, expected))
    report.check("no replica is beside its bucket's active task", not active)
    # Requests per second of the whole cluster, by heartbeat.
    per_s = [
        {name: count / settings.heartbeat_s for name, count in counts.items()}
        | {"all": sum(counts.values()) / settings.heartbeat_s}
        for counts in cluster.requests
    ]
    warm = [entry["all"] for entry in per_s if not entry[_GET]]
    report.details["requests a second of the whole cluster"] = {
        "cold: first two heartbeats": [entry["all"] for entry in per_s[:2]],
        "warm: median": statistics.median(warm) if warm else None,
        "while a change spreads: most": max(entry["all"] for entry in per_s[2:]),
        "each heartbeat": per_s,
    }
    report.details["replicas moved by each change"] = cluster.changes
    report.details["most over mean, each heartbeat"] = cluster.balance
    report.timing("a decision", cluster.decision_s)
    # The store in memory answers at once, so this is the time to decode the records.
    report.timing("reading all records", cluster.read_all_s)
    report.details["a record: most bytes"] = cluster.record_bytes_max
    report.bar("the slowest decision of a host", max(cluster.decision_s), "at most", DECISION_S_AT_MOST, "s")
    report.bar("replicas of a host: most over mean, at rest", cluster.balance[-1], "at most", MOST_OVER_MEAN, "times")
