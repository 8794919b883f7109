"""Who keeps which standby replica, as every host decides it at every heartbeat, while hosts come and go.

The real membership, over a folder in memory that counts requests, and the real assignment. Time is virtual, and a
replica is in sync one heartbeat after its host began with it. All hosts look, then all decide, then all write: so those
that see the same records are measured once.
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
# A host comes or goes in every so many heartbeats; between them all comes to rest.
_EVERY = 8
# Heartbeats at the end in which no host comes or goes.
_REST = 8
_RACKS = 5
# What requests are counted in: warm is a heartbeat at which no host reads a record.
_LIST, _PUT, _REMOVE, _GET = "list", "put", "delete", "get"


class CountedFolder(Folder):
    """A folder that counts what it asks of its store, for itself and those below it."""

    asked: Counter[str]

    def child(self, *names: str) -> Folder:
        made = super().child(*names)
        made.__class__ = CountedFolder
        return made

    def names(self) -> list[str]:
        self.asked[_LIST] += 1
        return super().names()

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.asked[_PUT] += 1
        super().put(name, data)

    def remove(self, name: str) -> None:
        self.asked[_REMOVE] += 1
        super().remove(name)

    def get(self, name: str) -> bytes:
        self.asked[_GET] += 1
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
    parser.add_argument("--hosts", type=int, default=100, metavar="N", help="hosts at the beginning")
    parser.add_argument("--buckets", type=int, default=10_000, metavar="N", help="buckets of one query")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="standby replicas of a bucket")
    parser.add_argument("--heartbeats", type=int, default=50, metavar="N", help="heartbeats that are simulated")
    add_quick(parser, "few hosts, buckets and heartbeats")
    add_seed(parser, "the hosts that go")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When a bucket lacks a replica once all has come to rest.
    """
    hosts, buckets, heartbeats = options.hosts, options.buckets, options.heartbeats
    if options.quick:
        hosts, buckets, heartbeats = 20, 1_000, 32
    settings = StandbySettings(standby_replicas=options.replicas)
    parameters = {"hosts": hosts, "buckets": buckets, "heartbeats": heartbeats, "racks": _RACKS, "seed": options.seed}
    report = Report("standby_assignment", {**parameters, "replicas": options.replicas})
    cluster = _Cluster(hosts, buckets, settings, np.random.default_rng(options.seed))
    for number in range(heartbeats):
        cluster.heartbeat(number, changes=number < heartbeats - _REST)
    _judge(report, cluster, settings)
    return report


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """All hosts are in one process: the garbage collector is not to walk what a hundred others hold."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Cluster:
    """All hosts, one heartbeat after the other."""

    def __init__(self, hosts: int, buckets: int, settings: StandbySettings, draws: np.random.Generator) -> None:
        self.settings, self._draws = settings, draws
        self.root = CountedFolder(f"memory://benchmark-standby-{uuid.uuid4().hex}")
        self.root.asked = Counter()
        self.now_s = 0.0
        self.running: dict[str, _Host] = {}
        self._born = 0
        self.keys = [BucketKey("counts", "query", at) for at in range(buckets)]
        self.writer = {key: f"host-{key.bucket % hosts}.example.org" for key in self.keys}
        self.decision_s: list[float] = []
        self.read_all_s: list[float] = []
        self.record_bytes_max = 0
        self.requests: list[dict[str, int]] = []
        self.balance: list[float] = []
        self.changes: list[dict[str, float]] = []
        for _ in range(hosts):
            self._come()

    def _come(self) -> None:
        name = f"host-{self._born}.example.org"
        membership = Membership(self.root, name, self.settings.heartbeat_s, lambda: self.now_s)
        self.running[name] = _Host(name, f"rack-{self._born % _RACKS}", membership)
        self._born += 1

    def _change(self, number: int) -> None:
        """One host goes, with its active tasks; or one comes."""
        if number // _EVERY % 2:
            names = sorted(self.running)
            gone = names[int(self._draws.integers(len(names)))]
            del self.running[gone]
            left = sorted(self.running)
            for key in (key for key, writer in self.writer.items() if writer == gone):
                self.writer[key] = left[key.bucket % len(left)]
        else:
            self._come()
        self.changes.append({"goes": number // _EVERY % 2, "hosts": len(self.running), "moved": 0})

    def heartbeat(self, number: int, changes: bool) -> None:
        """Look, decide, write."""
        if changes and number and number % _EVERY == 0:
            self._change(number)
        self.root.asked.clear()
        looks = {host.name: self._look(host) for host in self.running.values()}
        decided: dict[int, dict[BucketKey, tuple[str, ...]]] = {}
        views: list[Members] = []
        for host in self.running.values():
            view = looks[host.name]
            at = next((at for at, other in enumerate(views) if other.records == view.records), len(views))
            if at == len(views):
                views.append(view)
            self._turn(host, view, decided, at)
        self.requests.append({name: self.root.asked[name] for name in (_LIST, _PUT, _REMOVE, _GET)})
        loads = [len(host.held) for host in self.running.values()]
        self.balance.append(max(loads) * len(loads) / max(1, sum(loads)))
        self.now_s += self.settings.heartbeat_s
        print(f"heartbeat {number}: {len(self.running)} hosts, {self.requests[-1]}", file=sys.stderr, flush=True)

    def _look(self, host: _Host) -> Members:
        with _as_if_alone():
            asked, began_s = self.root.asked[_GET], time.perf_counter()
            found = host.membership.look()
        if self.root.asked[_GET] - asked >= len(self.running) - 1:
            self.read_all_s.append(time.perf_counter() - began_s)
        return found

    def _turn(self, host: _Host, view: Members, decided: dict[int, dict[BucketKey, tuple[str, ...]]], at: int) -> None:
        records = view.records
        if host.name not in {it.host for it in records}:
            # Who has just come tells so, and decides when others know it too: alone it would take everything.
            host.membership.heartbeat(MemberRecord(host.name, host.rack))
            return
        with _as_if_alone():
            began_s = time.perf_counter()
            mine = at not in decided
            assignment = assign(find_active_hosts(self.keys, records), records, self.settings) if mine else decided[at]
            holding = buckets_to_hold(host.name, assignment, records)
            if mine:
                self.decision_s.append(time.perf_counter() - began_s)
        decided.setdefault(at, assignment)
        if self.changes:
            self.changes[-1]["moved"] += len(holding - host.held)
        host.in_sync = host.held & holding
        host.held = set(holding)
        host.active = find_active_buckets(host.name, self.keys, records)
        replicas = (StandbyReplica(key, 7, 10**8, key in host.in_sync, self.writer[key]) for key in sorted(host.held))
        record = MemberRecord(host.name, host.rack, replicas=tuple(replicas), active=host.active)
        self.record_bytes_max = max(self.record_bytes_max, len(host.membership.heartbeat(record).encode()))


def _judge(report: Report, cluster: _Cluster, settings: StandbySettings) -> None:
    wanted = min(settings.replicas, len(cluster.running) - 1)
    replicas = Counter(key for host in cluster.running.values() for key in host.held)
    active = [key for host in cluster.running.values() for key in host.held if cluster.writer[key] == host.name]
    report.check("every bucket has its replicas, and none too many", set(replicas.values()) == {wanted})
    report.check("no replica is beside its bucket's active task", not active)
    # Per second, of the whole cluster.
    per_s = [
        {name: count / settings.heartbeat_s for name, count in asked.items()}
        | {"all": sum(asked.values()) / settings.heartbeat_s}
        for asked in cluster.requests
    ]
    warm = [it["all"] for it in per_s if not it[_GET]]
    report.details["requests a second of the whole cluster"] = {
        "cold: first two heartbeats": [it["all"] for it in per_s[:2]],
        "warm: median": statistics.median(warm) if warm else None,
        "while a change spreads: most": max(it["all"] for it in per_s[2:]),
        "each heartbeat": per_s,
    }
    report.details["replicas moved by each change"] = cluster.changes
    report.details["most over mean, each heartbeat"] = cluster.balance
    report.timing("a decision", cluster.decision_s)
    # The store answers at once: what is left is decoding.
    report.timing("reading all records", cluster.read_all_s)
    report.details["a record: most bytes"] = cluster.record_bytes_max
    report.bar("the slowest decision of a host", max(cluster.decision_s), "at most", DECISION_S_AT_MOST, "s")
    report.bar("replicas of a host: most over mean, at rest", cluster.balance[-1], "at most", MOST_OVER_MEAN, "times")
