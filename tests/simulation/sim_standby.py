"""Hosts with standby services around one root: they come, die, stand still and come back, and see only some of the others.

The real membership over a real folder in memory, and the real assignment, on virtual clocks. Every host has its own
monotonic clock, which begins anywhere and is not quite as fast as others', and its own idea of the time of day. A
follower is a number of heartbeats until a replica is in sync. A history is a list of small numbers.

What must hold of every decision: no replica beside its bucket's active task, and no more than wanted; what is held
stays where nothing is in its way; nobody gives up what no other host has; a host that writes its records in time is
alive for all who see them; and what is seen of it is what it said last. When nothing goes wrong any more, soon all see
the same members, and every bucket has its replicas, in sync and none too many.
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
# When nothing goes wrong any more: after so many heartbeats all see the same (one until everybody has looked, and three
# until the dead are dead, by clocks that are not quite the same), and after so many more all is in its place.
AGREED_HEARTBEATS, SETTLED_HEARTBEATS = 5, 3

STANDBY_STEPS = (
    "pass_heartbeats",  # a heartbeat passes
    "pass_heartbeats",
    "pass_heartbeats",
    "host",  # one more comes
    "die",  # a service ends, and its disk stays
    "restart",  # it begins again, on its disk
    "freeze",  # a service stands still, or goes on
    "cut",  # a host sees the records of some others no more as they change
    "heal",  # all see everything
    "task",  # Spark calls buckets on another host
    "task",
    "slow",  # the follower of a host stops, or goes on
    "damage",  # a record is damaged until its host writes the next
)


class WrongStandbyError(AssertionError):
    """A decision, or what came of decisions, is not as it must be."""


def _must(holds: bool, *said: object) -> None:
    if not holds:
        raise WrongStandbyError(" ".join(map(str, said)))


class SeenFiles:
    """The folder of the records as one host sees it: of hosts that it is cut off from, as it was then."""

    def __init__(self, real: Folder) -> None:
        self._real = real
        self.frozen: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def child(self, *names: str) -> SeenFiles:
        self._real = self._real.child(*names)
        return self

    def names(self) -> list[str]:
        seen = [
            it for it in self._real.names() if (name := RecordName.parse(it)) is None or name.host not in self.frozen
        ]
        return sorted([*seen, *(it for names in self.frozen.values() for it in names)])

    def get(self, name: str) -> bytes:
        found = RecordName.parse(name)
        if found is not None and found.host in self.frozen and name not in self.frozen[found.host]:
            raise MissingCheckpointError(name)
        return self._real.get(name)


@dataclass
class Service:
    """A host's service, from its start to its end; the disk is handed on."""

    host: str
    membership: Membership
    files: SeenFiles
    # By bucket the heartbeats until it is in sync.
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
        What it begins with.
    """

    def __init__(self, begin: Step) -> None:
        self._numbers = Numbers(begin)
        self._chance = random.Random(begin)
        self.settings = StandbySettings(standby_replicas=1 + self._numbers.below(2), heartbeat_s=HEARTBEAT_S)
        self.root = Folder(f"memory://sim-standby-{uuid.uuid4().hex}")
        self.now_s = 0.0
        self.running: dict[str, Service] = {}
        self.dead: dict[str, tuple[float, dict[BucketKey, int]]] = {}
        self.active = {key: f"host-{self._chance.randrange(3)}" for key in KEYS}
        self.version = dict.fromkeys(KEYS, 9)
        self.told: dict[str, MemberRecord] = {}
        self.wrote_wall_s: dict[str, float] = {}
        self.born = self.died = self.moves = 0
        self.quiet = False
        for _ in range(2):
            self.host()

    # -- what happens -----------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """One of the history: its first byte says of which kind."""
        self._numbers = Numbers(step[1:])
        getattr(self, STANDBY_STEPS[step[0]])()

    def host(self) -> None:
        if len(self.running) < HOSTS_MAX:
            self._start(f"host-{self.born}", {})
            self.born += 1

    def die(self) -> None:
        service = self._one()
        if len(self.running) > 1:
            self.dead[service.host] = self.now_s, service.disk
            del self.running[service.host]
            self.died += 1

    def restart(self) -> None:
        """At once, or one that has been dead."""
        dead = sorted(self.dead)
        if dead and len(self.running) < HOSTS_MAX and self._numbers.below(2):
            host = dead[self._numbers.below(len(dead))]
            self._start(host, self.dead.pop(host)[1])
        else:
            service = self._one()
            self._start(service.host, service.disk if self._numbers.below(2) else {})

    def freeze(self) -> None:
        service = self._one()
        service.frozen = not service.frozen

    def cut(self) -> None:
        service = self._one()
        for host in self.running:
            if host != service.host and self._numbers.below(2):
                names = [it for it in service.files.names() if it.startswith(f"{host}.")]
                service.files.frozen[host] = names if self._numbers.below(2) else []

    def heal(self) -> None:
        for service in self.running.values():
            if service.files.frozen:
                # Records that were frozen change now, also those of dead hosts, which looks like a sign of life.
                service.looks = 0
            service.files.frozen.clear()

    def task(self) -> None:
        """Also to a host without a service, or to one that is about to come."""
        host = f"host-{self._numbers.below(self.born + 1)}"
        for _ in range(1 + self._numbers.below(4)):
            key = KEYS[self._chance.randrange(BUCKETS)]
            self.active[key] = host
            self.version[key] += 1

    def slow(self) -> None:
        service = self._one()
        service.slow = not service.slow

    def damage(self) -> None:
        service = self._one()
        name = next((it for it in service.files.names() if it.startswith(f"{service.host}.")), None)
        if name is not None and service.host not in service.files.frozen:
            files = self.root.child("_standby", "members")
            files.put(name, files.get(name)[:-7] + b"damaged")

    def pass_heartbeats(self, heartbeats: int = 1) -> None:
        """Time passes, and services whose turn it is do what they do."""
        until_s = self.now_s + heartbeats * HEARTBEAT_S
        while due := [it for it in self.running.values() if it.due_s <= until_s]:
            service = min(due, key=lambda it: (it.due_s, it.host))
            self.now_s = max(self.now_s, service.due_s)
            service.due_s += HEARTBEAT_S / service.rate * (1 if self.quiet else self._chance.uniform(0.9, 1.1))
            if not service.frozen:
                self._turn(service)
        self.now_s = until_s

    # -- a service --------------------------------------------------------------------------------

    def _one(self) -> Service:
        hosts = sorted(self.running)
        return self.running[hosts[self._numbers.below(len(hosts))]]

    def _start(self, host: str, disk: dict[BucketKey, int]) -> None:
        files, begin_s = SeenFiles(self.root), self._chance.uniform(0, 1e6)
        rate = self._chance.uniform(0.98, 1.02)
        membership = Membership(
            files,  # type: ignore[arg-type]
            host,
            HEARTBEAT_S,
            lambda: begin_s + rate * self.now_s,
        )
        due_s = self.now_s + self._chance.uniform(0, HEARTBEAT_S)
        skew_s = self._chance.uniform(-1_800, 1_800)
        self.running[host] = Service(host, membership, files, dict(disk), due_s, rate, skew_s)

    def _turn(self, service: Service) -> None:
        """Look, decide, follow and tell, as the real service does once a heartbeat."""
        service.members = service.membership.look()
        service.looks += 1
        self._check_view(service)
        mine = self._record(service)
        records = [it for it in service.members.records if it.host != service.host] + [mine]
        buckets = decisions.find_active_hosts(KEYS, records)
        service.assigned = decisions.assign(buckets, records, self.settings)
        holding = decisions.buckets_to_hold(service.host, service.assigned, records)
        self._check_decision(service, records, buckets)
        self._check_given_up(service, holding)
        self.moves += len(holding - service.disk.keys())
        service.disk = {key: service.disk.get(key, 2) for key in sorted(holding)}
        if not service.slow:
            service.disk = {key: max(0, left - 1) for key, left in service.disk.items()}
        gone = {
            key for key in decisions.find_unfollowed(service.host, KEYS, records) if self.active[key] != service.host
        }
        active = decisions.find_active_buckets(service.host, KEYS, records)
        service.active = {key: version for key, version in active.items() if key not in gone}
        told = service.membership.heartbeat(self._record(service))
        service.wrote_s = self.now_s
        self.told[service.host] = told
        self.wrote_wall_s[service.host] = 1e9 + self.now_s + service.wall_skew_s

    def _record(self, service: Service) -> MemberRecord:
        replicas = (
            StandbyReplica(key, self.version[key] - left, 0, left == 0, self.active[key], left)
            for key, left in service.disk.items()
        )
        return MemberRecord(service.host, replicas=tuple(replicas), active=service.active)

    # -- what must hold ---------------------------------------------------------------------------

    def _check_view(self, service: Service) -> None:
        """Of hosts that it is not cut off from; damaged records say nothing."""
        seen = {it.host: it for it in service.members.records}
        damaged = any(
            "damaged" in it or "is not a valid record" in it or "checksum" in it for it in service.members.problems
        )
        for other in self.running.values():
            if other.host in service.files.frozen or other is service:
                continue
            if self.now_s - other.wrote_s < 2.5 * HEARTBEAT_S:
                _must(other.host in seen, service.host, "takes", other.host, "for dead")
                if not damaged:
                    same = seen[other.host].decided_by == self.told[other.host].decided_by
                    _must(same, service.host, "sees what", other.host, "said before")
        for host, (died_s, _) in self.dead.items():
            if service.looks > 8 and self.now_s - died_s > 10 * HEARTBEAT_S and not service.files.frozen:
                _must(host not in seen, service.host, "takes", host, "for alive")

    def _check_decision(
        self, service: Service, records: Sequence[MemberRecord], buckets: dict[BucketKey, str | None]
    ) -> None:
        hosts = {it.host for it in records}
        held = {key: {it.host for it in records for replica in it.replicas if replica.key == key} for key in KEYS}
        load = {host: sum(host in it and buckets[key] != host for key, it in held.items()) for host in hosts}
        total = sum(min(self.settings.replicas, len(hosts - {active})) for active in buckets.values())
        mean = total / len(hosts)
        bound = max(int(1.25 * mean), -(-total // len(hosts)))
        even = all(0.8 * mean <= it <= bound for it in load.values())
        # Nothing is in the way of what is held: nobody has too much or too little, and no bucket is held too often.
        even = even and all(len(it - {buckets[key]}) <= self.settings.replicas for key, it in held.items())
        for key, placed in service.assigned.items():
            may = hosts - {buckets[key]}
            _must(set(placed) <= may, key, "on", placed, "of", may)
            if key in service.disk:
                _must(buckets[key] == self.active[key], service.host, "does not know who is active for", key)
            _must(len(placed) == min(self.settings.replicas, len(may)), key, "has", placed)
            if even:
                _must(held[key] & may <= set(placed), key, "moves from", held[key], "to", placed)

    def _check_given_up(self, service: Service, holding: Iterable[BucketKey]) -> None:
        """Whoever sees all, and has all of a bucket, gives it up only where others have it."""
        if service.files.frozen:
            return
        for key, left in service.disk.items():
            if left == 0 and key not in holding and self.active[key] != service.host:
                others = (it for it in self.told.values() if it.host != service.host)
                _must(
                    any(replica.key == key and replica.in_sync for it in others for replica in it.replicas),
                    service.host,
                    "gives up",
                    key,
                    "that nobody else has",
                )

    def end(self) -> None:
        """Nothing goes wrong any more."""
        self.quiet = True
        self.heal()
        for service in self.running.values():
            service.frozen = service.slow = False
            # By their own clocks, but nobody is late.
            service.due_s = min(service.due_s, self.now_s + HEARTBEAT_S)
        self.pass_heartbeats(AGREED_HEARTBEATS)
        for service in self.running.values():
            seen = [it.host for it in service.members.records]
            _must(seen == sorted(self.running), service.host, "sees", seen, "of", sorted(self.running))
            _must(not service.members.problems, service.members.problems)
        self.pass_heartbeats(SETTLED_HEARTBEATS)
        assigned = [service.assigned for service in self.running.values()]
        _must(all(it == assigned[0] for it in assigned), "not all decide the same")
        moves = self.moves
        for key, active in self.active.items():
            having = {it.host for it in self.running.values() if key in it.disk}
            synced = {it.host for it in self.running.values() if it.disk.get(key) == 0}
            wanted = min(self.settings.replicas, len(self.running.keys() - {active}))
            _must(having == synced == set(assigned[0][key]), key, "is on", having, "in sync on", synced)
            _must(len(having) == wanted and active not in having, key, "is on", having, "of", wanted)
        self.pass_heartbeats(2)
        _must(self.moves == moves, "it does not come to rest")


Patch = tuple[Any, str, Callable[[StandbyWorld], Any]]


def simulate_standby(steps: Iterable[Step], patches: Iterable[Patch] = ()) -> StandbyWorld:
    """Live through a history.

    Parameters
    ----------
    steps
        What happens; the first is what the world begins with.
    patches
        What is built in another way.

    Raises
    ------
    WrongStandbyError
        When something is not as it must be.
    """
    first, *others = steps
    world = StandbyWorld(first)
    with replace_attributes([(owner, name, made(world)) for owner, name, made in patches]):
        for step in others:
            world.step(step)
        world.end()
    return world
