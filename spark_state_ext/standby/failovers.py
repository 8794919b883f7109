"""Who takes over from whom, counted once by all hosts together, though any of them may die at any moment.

Every follower of a bucket finds the same takeovers (`succession`). They are counted in turns: the host that has taken
over comes first, where it follows the bucket, then the others by name. Who counts one writes so in its record, with
its counts, and only then do they count; the others see it there. Where the one whose turn it is does not live, or does
nothing for long, the next one counts. A service that was started again goes on with what its record says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from arrow_schemas.standby import BucketKey, MemberRecord
from spark_state_ext.standby.succession import Takeover

__all__ = [
    "BEHIND",
    "NO_REPLICA",
    "NO_SERVICE",
    "OUTCOMES",
    "REPLICA",
    "Failover",
    "Failovers",
    "Sighting",
    "judge",
    "sighted",
]

# What a task found on its new host.
REPLICA, BEHIND, NO_REPLICA, NO_SERVICE = "replica", "behind", "no_replica", "no_service"
OUTCOMES = (REPLICA, BEHIND, NO_REPLICA, NO_SERVICE)
# So many looks a host is waited for that lives and whose turn it is.
_PATIENCE_LOOKS = 10


@dataclass(frozen=True)
class Failover:
    """What a task found on its new host.

    Parameters
    ----------
    takeover
        From whom to whom.
    outcome
        `REPLICA`: all of the state. `BEHIND`: a replica that lacked some checkpoints. `NO_REPLICA`: the host's service
        did not follow the bucket. `NO_SERVICE`: no service lived there.
    died
        No service of the host before is alive: the host has failed, or its service has.
    """

    takeover: Takeover
    outcome: str
    died: bool


@dataclass(frozen=True)
class Sighting:
    """A takeover that is not counted yet, and what records told when this host saw it first.

    Parameters
    ----------
    takeover
        The takeover.
    order
        Whose turn it is to count it: the followers of the bucket.
    replica
        The new host's replica was in sync, or not; None where it had none.
    heartbeats
        Numbers of the records of the hosts before and now, where they lived.
    looks
        For how many looks it is known.
    """

    takeover: Takeover
    order: tuple[str, ...]
    replica: bool | None
    heartbeats: Mapping[str, int]
    looks: int = 0


def sighted(key: BucketKey, takeover: Takeover, records: Iterable[MemberRecord], alive: Mapping[str, int]) -> Sighting:
    """A takeover that is seen for the first time."""
    followers = {record.host: it.in_sync for record in records for it in record.replicas if it.key == key}
    order = sorted(followers, key=lambda host: (host != takeover.now, host))
    heartbeats = {host: alive[host] for host in (takeover.before, takeover.now) if host in alive}
    return Sighting(takeover, tuple(order), followers.get(takeover.now), heartbeats)


def judge(seen: Sighting, me: str, alive: Mapping[str, int], came_back: bool) -> Failover | None:
    """What a takeover was, where it is this host's turn to count it."""
    takeover = seen.takeover
    turns = [host for host in seen.order if host in alive and host != me]
    before_me = [host for host in turns if seen.order.index(host) < _place(seen.order, me)]
    if seen.looks <= len(before_me) * _PATIENCE_LOOKS:
        return None
    # Whoever has told nothing new since then may be dead.
    others = {takeover.before, takeover.now} - {me}
    if any(host in alive and seen.heartbeats.get(host) == alive[host] for host in others):
        return None
    died = takeover.before != me and takeover.before not in alive
    return Failover(takeover, _outcome(seen, me, alive, came_back), died)


def _place(order: tuple[str, ...], host: str) -> int:
    return order.index(host) if host in order else len(order)


def _outcome(seen: Sighting, me: str, alive: Mapping[str, int], came_back: bool) -> str:
    lag, now = seen.takeover.lag_versions, seen.takeover.now
    if now == me:
        if lag is None:
            return NO_SERVICE if came_back else NO_REPLICA
        return BEHIND if lag else REPLICA
    if seen.replica is not None:
        return REPLICA if seen.replica else BEHIND
    return NO_REPLICA if now in alive else NO_SERVICE


@dataclass
class Failovers:
    """What is counted: by this host since its first record, and of buckets by whatever host.

    Parameters
    ----------
    takeovers
        By outcome, and by whether the host before had failed.
    members_lost
        Services of other hosts that this one has seen to die: by whether they were active for a bucket, and whether
        they had replicas.
    counted
        By bucket the version up to which takeovers are counted.
    """

    takeovers: Counter[tuple[str, bool]] = field(default_factory=Counter)
    members_lost: Counter[str] = field(default_factory=Counter)
    counted: dict[BucketKey, int] = field(default_factory=dict)

    @staticmethod
    def recalled(record: MemberRecord | None) -> Failovers:
        """What a service before this one has counted."""
        if record is None:
            return Failovers()
        return Failovers(Counter(record.takeovers), Counter(record.members_lost), dict(record.counted))

    def copy(self) -> Failovers:
        """The same counts, to go on with."""
        return Failovers(Counter(self.takeovers), Counter(self.members_lost), dict(self.counted))

    def merge(self, records: Iterable[MemberRecord], keys: Container[BucketKey]) -> None:
        """Learn what others have counted of some buckets."""
        for record in records:
            for key, version in record.counted.items():
                if key in keys:
                    self.counted[key] = max(version, self.counted.get(key, version))

    def keep(self, keys: Container[BucketKey]) -> None:
        """Forget up to where takeovers of other buckets are counted."""
        self.counted = {key: version for key, version in self.counted.items() if key in keys}

    def is_counted(self, key: BucketKey, takeover: Takeover) -> bool:
        """Whether somebody has counted it."""
        return takeover.version <= self.counted.get(key, -1)

    def add(self, key: BucketKey, failover: Failover) -> None:
        """Count a takeover."""
        self.takeovers[failover.outcome, failover.died] += 1
        self.counted[key] = failover.takeover.version

    def lost(self, active: bool, replicas: bool) -> None:
        """Count a service that died."""
        for role, had in (("active", active), ("standby", replicas)):
            if had:
                self.members_lost[role] += 1

    def told_in(self, record: MemberRecord) -> MemberRecord:
        """A record that tells them."""
        return replace(
            record,
            counted=dict(self.counted),
            takeovers={kind: n for kind, n in self.takeovers.items() if n},
            members_lost={role: n for role, n in self.members_lost.items() if n},
        )
