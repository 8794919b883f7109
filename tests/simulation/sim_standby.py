"""Hosts with standby services around one root: they come, die, freeze and come back, and see only some of the others.

Membership and assignment are the product's, on a folder in memory and on virtual clocks. Every host has its own monotonic
clock, with a random start and a slightly different rate, and its own time of day. A follower is simulated as a number of
heartbeats until a replica is in sync. A history is a list of small numbers.

Invariants of every decision: A bucket has no replica on its active host, and not more replicas than configured. Existing
replicas stay if possible. A host gives up a replica only if another host has it. A host that writes its records in time
is alive for all hosts that see them, and these see its last record. After failures end, all hosts soon see the same
members, and every bucket has all its replicas, in sync and none too many.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim_parts import Numbers, Step
from sim_search import replace_attributes

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby import assignment as decisions
from spark_state_ext.standby.members import Members, Membership, RecordName

__all__ = ["HEARTBEAT_S", "STANDBY_STEPS", "Patch", "Service", "StandbyWorld", "WrongStandbyError", "simulate_standby"]

HEARTBEAT_S = 10.0
HOSTS_MAX, BUCKETS = 6, 12
KEYS = tuple(BucketKey("counts", "q", at) for at in range(BUCKETS))
# Heartbeats without failures until all hosts see the same (one until every host has looked, and three until dead hosts
# count as dead, by slightly different clocks), and further heartbeats until all replicas are in place.
AGREED_HEARTBEATS, SETTLED_HEARTBEATS = 5, 3

STANDBY_STEPS = (
    "pass_heartbeats",  # a heartbeat passes
    "pass_heartbeats",
    "pass_heartbeats",
    "host",  # one more host comes
    "die",  # a service ends, and its disk stays
    "restart",  # a service begins again, with its disk or without
    "freeze",  # a service freezes, or continues
    "cut",  # a host no longer sees new records of some other hosts
    "heal",  # all hosts see everything
    "task",  # Spark calls buckets on another host
    "task",
    "slow",  # the follower of a host stops, or continues
    "damage",  # a record is damaged until its host writes the next
)


class WrongStandbyError(AssertionError):
    """A decision of a host, or the result of several decisions, violates an invariant."""


def _require(condition: bool, *message_parts: object) -> None:
    if not condition:
        raise WrongStandbyError(" ".join(map(str, message_parts)))


class VisibleFiles:
    """The folder of records as one host sees it: records of hosts that it is cut off from do not change."""

    def __init__(self, real: Folder) -> None:
        self._real = real
        self.frozen: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def child(self, *names: str) -> VisibleFiles:
        self._real = self._real.child(*names)
        return self

    def names(self) -> list[str]:
        seen = [
            file_name
            for file_name in self._real.names()
            if (name := RecordName.parse(file_name)) is None or name.host not in self.frozen
        ]
        return sorted([*seen, *(file_name for names in self.frozen.values() for file_name in names)])

    def get(self, name: str) -> bytes:
        record_name = RecordName.parse(name)
        if record_name is not None and record_name.host in self.frozen and name not in self.frozen[record_name.host]:
            raise MissingCheckpointError(name)
        return self._real.get(name)


@dataclass
class Service:
    """A host's service from its start to its end; a restarted service gets the disk."""

    host: str
    membership: Membership
    files: VisibleFiles
    # By bucket, the number of heartbeats until its replica is in sync.
    disk: dict[BucketKey, int]
    due_s: float
    rate: float
    wall_skew_s: float
    frozen: bool = False
    slow: bool = False
    wrote_s: float = -1e9
    looks: int = 0
    members: Members = field(default_factory=lambda: Members(()))
    assigned: dict[BucketKey, tuple[str, ...]] = field(default_factory=dict)
    active: dict[BucketKey, int] = field(default_factory=dict)


class StandbyWorld:
    """Hosts, buckets and time.

    Parameters
    ----------
    begin
        Numbers of the initial state.
    """

    def __init__(self, begin: Step) -> None:
        self._numbers = Numbers(begin)
        self._random = random.Random(begin)
        self.settings = StandbySettings(standby_replicas=1 + self._numbers.below(2), heartbeat_s=HEARTBEAT_S)
        self.root = Folder(f"memory://sim-standby-{uuid.uuid4().hex}")
        self.now_s = 0.0
        self.running: dict[str, Service] = {}
        self.dead: dict[str, tuple[float, dict[BucketKey, int]]] = {}
        self.active = {key: f"host-{self._random.randrange(3)}" for key in KEYS}
        self.version = dict.fromkeys(KEYS, 9)
        self.last_records: dict[str, MemberRecord] = {}
        self.written_wall_s: dict[str, float] = {}
        self.hosts_started = self.died = self.moves = 0
        self.is_calm = False
        for _ in range(2):
            self.host()

    # -- what happens -----------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Take one step; its first byte gives the kind."""
        self._numbers = Numbers(step[1:])
        getattr(self, STANDBY_STEPS[step[0]])()

    def host(self) -> None:
        if len(self.running) < HOSTS_MAX:
            self._start(f"host-{self.hosts_started}", {})
            self.hosts_started += 1

    def die(self) -> None:
        service = self._draw_service()
        if len(self.running) > 1:
            self.dead[service.host] = self.now_s, service.disk
            del self.running[service.host]
            self.died += 1

    def restart(self) -> None:
        """Restart a service at once, or one that was dead."""
        dead = sorted(self.dead)
        if dead and len(self.running) < HOSTS_MAX and self._numbers.below(2):
            host = dead[self._numbers.below(len(dead))]
            self._start(host, self.dead.pop(host)[1])
        else:
            service = self._draw_service()
            self._start(service.host, service.disk if self._numbers.below(2) else {})

    def freeze(self) -> None:
        service = self._draw_service()
        service.frozen = not service.frozen

    def cut(self) -> None:
        service = self._draw_service()
        for host in self.running:
            if host != service.host and self._numbers.below(2):
                names = [file_name for file_name in service.files.names() if file_name.startswith(f"{host}.")]
                service.files.frozen[host] = names if self._numbers.below(2) else []

    def heal(self) -> None:
        for service in self.running.values():
            if service.files.frozen:
                # Frozen records change now, also those of dead hosts, which looks like a sign of life.
                service.looks = 0
            service.files.frozen.clear()

    def task(self) -> None:
        """Move buckets to another host, which may have no service, or get one later."""
        host = f"host-{self._numbers.below(self.hosts_started + 1)}"
        for _ in range(1 + self._numbers.below(4)):
            key = KEYS[self._random.randrange(BUCKETS)]
            self.active[key] = host
            self.version[key] += 1

    def slow(self) -> None:
        service = self._draw_service()
        service.slow = not service.slow

    def damage(self) -> None:
        service = self._draw_service()
        name = next(
            (file_name for file_name in service.files.names() if file_name.startswith(f"{service.host}.")), None
        )
        if name is not None and service.host not in service.files.frozen:
            files = self.root.child("_standby", "members")
            files.put(name, files.get(name)[:-7] + b"damaged")

    def pass_heartbeats(self, heartbeats: int = 1) -> None:
        """Let time pass, with the turns of all services."""
        until_s = self.now_s + heartbeats * HEARTBEAT_S
        while due := [service for service in self.running.values() if service.due_s <= until_s]:
            service = min(due, key=lambda service: (service.due_s, service.host))
            self.now_s = max(self.now_s, service.due_s)
            service.due_s += HEARTBEAT_S / service.rate * (1 if self.is_calm else self._random.uniform(0.9, 1.1))
            if not service.frozen:
                self._run_turn(service)
        self.now_s = until_s

    # -- a service --------------------------------------------------------------------------------

    def _draw_service(self) -> Service:
        hosts = sorted(self.running)
        return self.running[hosts[self._numbers.below(len(hosts))]]

    def _start(self, host: str, disk: dict[BucketKey, int]) -> None:
        files, clock_start_s = VisibleFiles(self.root), self._random.uniform(0, 1e6)
        rate = self._random.uniform(0.98, 1.02)
        membership = Membership(
            files,  # type: ignore[arg-type]
            host,
            HEARTBEAT_S,
            lambda: clock_start_s + rate * self.now_s,
        )
        due_s = self.now_s + self._random.uniform(0, HEARTBEAT_S)
        skew_s = self._random.uniform(-1_800, 1_800)
        self.running[host] = Service(host, membership, files, dict(disk), due_s, rate, skew_s)

    def _run_turn(self, service: Service) -> None:
        """Look, decide, follow and write a record, as the product does once a heartbeat."""
        service.members = service.membership.look()
        service.looks += 1
        self._check_view(service)
        mine = self._record(service)
        records = [record for record in service.members.records if record.host != service.host] + [mine]
        buckets = decisions.find_active_hosts(KEYS, records)
        service.assigned = decisions.assign(buckets, records, self.settings)
        holding = decisions.buckets_to_hold(service.host, service.assigned, records)
        self._check_decision(service, records, buckets)
        self._check_given_up(service, holding)
        self.moves += len(holding - service.disk.keys())
        service.disk = {key: service.disk.get(key, 2) for key in sorted(holding)}
        if not service.slow:
            service.disk = {key: max(0, left - 1) for key, left in service.disk.items()}
        unfollowed = {
            key for key in decisions.find_unfollowed(service.host, KEYS, records) if self.active[key] != service.host
        }
        active = decisions.find_active_buckets(service.host, KEYS, records)
        service.active = {key: version for key, version in active.items() if key not in unfollowed}
        last_record = service.membership.heartbeat(self._record(service))
        service.wrote_s = self.now_s
        self.last_records[service.host] = last_record
        self.written_wall_s[service.host] = 1e9 + self.now_s + service.wall_skew_s

    def _record(self, service: Service) -> MemberRecord:
        replicas = (
            StandbyReplica(key, self.version[key] - left, 0, left == 0, self.active[key], left)
            for key, left in service.disk.items()
        )
        return MemberRecord(service.host, replicas=tuple(replicas), active=service.active)

    # -- what must hold ---------------------------------------------------------------------------

    def _check_view(self, service: Service) -> None:
        """Check the view of hosts that it is not cut off from; damaged records are ignored."""
        seen = {record.host: record for record in service.members.records}
        damaged = any(
            "damaged" in problem or "is not a valid record" in problem or "checksum" in problem
            for problem in service.members.problems
        )
        for other in self.running.values():
            if other.host in service.files.frozen or other is service:
                continue
            if self.now_s - other.wrote_s < 2.5 * HEARTBEAT_S:
                _require(other.host in seen, service.host, "counts", other.host, "as dead")
                if not damaged:
                    same = seen[other.host].decided_by == self.last_records[other.host].decided_by
                    _require(same, service.host, "sees an old record of", other.host)
        for host, (died_s, _) in self.dead.items():
            if service.looks > 8 and self.now_s - died_s > 10 * HEARTBEAT_S and not service.files.frozen:
                _require(host not in seen, service.host, "counts", host, "as alive")

    def _check_decision(
        self, service: Service, records: Sequence[MemberRecord], buckets: dict[BucketKey, str | None]
    ) -> None:
        hosts = {record.host for record in records}
        holders = {
            key: {record.host for record in records for replica in record.replicas if replica.key == key}
            for key in KEYS
        }
        load = {
            host: sum(host in key_hosts and buckets[key] != host for key, key_hosts in holders.items())
            for host in hosts
        }
        total = sum(min(self.settings.replicas, len(hosts - {active})) for active in buckets.values())
        mean = total / len(hosts)
        bound = max(int(1.25 * mean), -(-total // len(hosts)))
        even = all(0.8 * mean <= count <= bound for count in load.values())
        # Replicas need not move: no host has too many or too few, and no bucket has too many replicas.
        even = even and all(
            len(key_hosts - {buckets[key]}) <= self.settings.replicas for key, key_hosts in holders.items()
        )
        for key, placed in service.assigned.items():
            allowed = hosts - {buckets[key]}
            _require(set(placed) <= allowed, key, "on", placed, "of", allowed)
            if key in service.disk:
                _require(buckets[key] == self.active[key], service.host, "does not know the active host of", key)
            _require(len(placed) == min(self.settings.replicas, len(allowed)), key, "has", placed)
            if even:
                _require(holders[key] & allowed <= set(placed), key, "moves from", holders[key], "to", placed)

    def _check_given_up(self, service: Service, holding: Iterable[BucketKey]) -> None:
        """Check that a host that sees all others gives up a complete replica only if another host has one."""
        if service.files.frozen:
            return
        for key, left in service.disk.items():
            if left == 0 and key not in holding and self.active[key] != service.host:
                others = (record for record in self.last_records.values() if record.host != service.host)
                _require(
                    any(replica.key == key and replica.in_sync for record in others for replica in record.replicas),
                    service.host,
                    "gives up",
                    key,
                    "that no other host has",
                )

    def end(self) -> None:
        """Run without failures, and check that all hosts agree and all replicas are in place."""
        self.is_calm = True
        self.heal()
        for service in self.running.values():
            service.frozen = service.slow = False
            # All services keep their clocks, but none is late.
            service.due_s = min(service.due_s, self.now_s + HEARTBEAT_S)
        self.pass_heartbeats(AGREED_HEARTBEATS)
        for service in self.running.values():
            seen = [service.host for service in service.members.records]
            _require(seen == sorted(self.running), service.host, "sees", seen, "of", sorted(self.running))
            _require(not service.members.problems, service.members.problems)
        self.pass_heartbeats(SETTLED_HEARTBEATS)
        assigned = [service.assigned for service in self.running.values()]
        _require(all(assignment == assigned[0] for assignment in assigned), "hosts decide differently")
        moves = self.moves
        for key, active in self.active.items():
            holders = {service.host for service in self.running.values() if key in service.disk}
            in_sync = {service.host for service in self.running.values() if service.disk.get(key) == 0}
            wanted = min(self.settings.replicas, len(self.running.keys() - {active}))
            _require(holders == in_sync == set(assigned[0][key]), key, "is on", holders, "in sync on", in_sync)
            _require(len(holders) == wanted and active not in holders, key, "is on", holders, "of", wanted)
        self.pass_heartbeats(2)
        _require(self.moves == moves, "replicas keep moving")


Patch = tuple[Any, str, Callable[[StandbyWorld], Any]]


def simulate_standby(steps: Iterable[Step], patches: Iterable[Patch] = ()) -> StandbyWorld:
    """Run a history to its end.

    Parameters
    ----------
    steps
        The steps; the first one gives the initial state.
    patches
        Replacements for a broken variant: object, name, and a function that makes the value from the world.

    Raises
    ------
    WrongStandbyError
        If an invariant is violated.
    """
    first, *others = steps
    world = StandbyWorld(first)
    with replace_attributes([(owner, name, make(world)) for owner, name, make in patches]):
        for step in others:
            world.step(step)
        world.end()
    return world
