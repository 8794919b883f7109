"""Who takes over from whom: what followers see of buckets' active hosts becomes failovers, with what they found there.

Every follower of a bucket sees that its active host has changed, by the headers of its files. Exactly one of them
counts it: the host that has taken over where it follows the bucket, else the first of the others by name. So sums over
all hosts are right, unless hosts see each other late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["BEHIND", "NO_REPLICA", "NO_SERVICE", "OUTCOMES", "REPLICA", "Failover", "Failovers", "Takeover", "judge"]

# What a task found on its new host.
REPLICA, BEHIND, NO_REPLICA, NO_SERVICE = "replica", "behind", "no_replica", "no_service"
OUTCOMES = (REPLICA, BEHIND, NO_REPLICA, NO_SERVICE)


@dataclass(frozen=True)
class Takeover:
    """A bucket's active host has changed, as one follower sees it.

    Parameters
    ----------
    before, now
        The hosts.
    built_on, loaded
        The version that the new host's first file was built on, and the newest of this follower's store before it; 0
        where there was none.
    """

    before: str
    now: str
    built_on: int
    loaded: int


@dataclass(frozen=True)
class Failover:
    """What a task found on its new host.

    Parameters
    ----------
    before, now
        The hosts.
    outcome
        `REPLICA`: all of the state. `BEHIND`: a replica that lacked some checkpoints. `NO_REPLICA`: the host's service
        does not follow the bucket. `NO_SERVICE`: no service lives there.
    lag_versions
        How many checkpoints the replica lacked; 0 where there was none.
    died
        No service of the host before is alive: the host has failed, or its service has.
    """

    before: str
    now: str
    outcome: str
    lag_versions: int
    died: bool


def judge(seen: Takeover, me: str, followers: Collection[str], alive: Collection[str]) -> Failover | None:
    """What a takeover was, where it is this host that counts it.

    Parameters
    ----------
    seen
        The takeover.
    me
        The host that asks.
    followers
        Hosts that followed the bucket before, this one included.
    alive
        Hosts whose services are alive, this one included.

    Returns
    -------
    Failover or None
        None where another host counts it.

    Examples
    --------
    >>> judge(Takeover("a", "b", 7, 7), "b", {"b", "c"}, {"b", "c"}).outcome
    'replica'
    """
    died = seen.before not in alive
    if seen.now == me:
        lag = max(0, seen.built_on - seen.loaded)
        return Failover(seen.before, seen.now, BEHIND if lag else REPLICA, lag, died)
    others = sorted(set(followers) & set(alive) | {me})
    if seen.now in others or others[0] != me:
        return None
    return Failover(seen.before, seen.now, NO_REPLICA if seen.now in alive else NO_SERVICE, 0, died)


@dataclass
class Failovers:
    """Counts of a service since it started.

    Parameters
    ----------
    takeovers
        By outcome, and by whether the host before had failed.
    members_lost
        Services of other hosts that this one has seen to die: by whether they were active for a bucket, and whether
        they had replicas.
    """

    takeovers: Counter[tuple[str, bool]] = field(default_factory=Counter)
    members_lost: Counter[str] = field(default_factory=Counter)

    def add(self, failover: Failover) -> None:
        """Count a takeover."""
        self.takeovers[failover.outcome, failover.died] += 1

    def lost(self, active: bool, replicas: bool) -> None:
        """Count a service that died."""
        for role, had in (("active", active), ("standby", replicas)):
            if had:
                self.members_lost[role] += 1
