"""Failovers that a standby service counts in its own process, from 0 on; a query must add up the counts of all hosts.

Each round compares the active host of each bucket in the records with the round before. The service of the new host
counts a failover, because it knows what the task found there. If no service is alive on that host, the first live host
by name counts it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from arrow_schemas.standby import BucketKey, MemberRecord
from spark_state_ext.standby.members import Members
from spark_state_ext.standby.values import Followed

__all__ = ["BEHIND", "NO_REPLICA", "NO_SERVICE", "OUTCOMES", "REPLICA", "Failovers"]

_LOGGER = logging.getLogger("spark_state_ext")
# What a task found on its new host: a complete replica; one with missing checkpoints; no replica; no service.
REPLICA, BEHIND, NO_REPLICA, NO_SERVICE = "replica", "behind", "no_replica", "no_service"
OUTCOMES = (REPLICA, BEHIND, NO_REPLICA, NO_SERVICE)


@dataclass(frozen=True)
class _Failover:
    """A bucket that moved between hosts; `heartbeats` are the numbers of the hosts' records when the move was seen."""

    key: BucketKey
    before: str
    now: str
    outcome: str
    heartbeats: Mapping[str, int]


class Failovers:
    """The failovers and lost members that one service has seen since it started.

    Parameters
    ----------
    host
        The service's host.
    """

    def __init__(self, host: str) -> None:
        # By outcome, and by whether the previous host had failed.
        self.takeovers: Counter[tuple[str, bool]] = Counter()
        # Dead services of other hosts, by what their hosts had.
        self.members_lost: Counter[str] = Counter()
        self._host = host
        self._active: dict[BucketKey, str] = {}
        # Not counted until it is known whether the services of both hosts are alive.
        self._waiting: list[_Failover] = []
        # Members of the round before.
        self._members: dict[str, MemberRecord] = {}
        # By host, the number of its newest record, and whether it has had active tasks since it wrote that record.
        self._had_active: dict[str, tuple[int, bool]] = {}

    def unseen(
        self, active: Mapping[BucketKey, str | None], followed: Mapping[BucketKey, Followed]
    ) -> frozenset[BucketKey]:
        """Return the buckets that other hosts' records show on this host, while the follower has not seen the move yet.

        The service keeps following them: only its follower can measure how new the replica was that the task found.
        """
        return frozenset(
            key
            for key, result in followed.items()
            if active.get(key) == self._host and result.host not in ("", self._host)
        )

    def see(
        self, active: Mapping[BucketKey, str | None], followed: Mapping[BucketKey, Followed], members: Members
    ) -> None:
        """Compare a round with the one before: `active` is the host of each bucket's active task by the records."""
        alive = dict(members.heartbeats)
        # What a host knows is missing until its record is read.
        if not members.unread:
            self._see_moves(active, followed, alive)
        self._count(alive)
        self._count_lost(active, members, alive)

    def _see_moves(
        self,
        active: Mapping[BucketKey, str | None],
        followed: Mapping[BucketKey, Followed],
        alive: Mapping[str, int],
    ) -> None:
        """Note failovers that this host may have to count."""
        unseen = self.unseen(active, followed)
        is_first = self._host == min((self._host, *alive))
        previous, self._active = self._active, {}
        for key, now in active.items():
            before = previous.get(key)
            # If a host is not known yet, the next round compares it.
            now = before if now is None or key in unseen else now
            if now is not None:
                self._active[key] = now
            if now is None or before is None or now == before or not (now == self._host or is_first):
                continue
            outcome = _outcome(followed.get(key)) if now == self._host else NO_SERVICE
            heartbeats = {host: alive[host] for host in (before, now) if host in alive}
            self._waiting.append(_Failover(key, before, now, outcome, heartbeats))

    def _count(self, alive: Mapping[str, int]) -> None:
        """Count failovers once each host involved has written another record or is taken for dead."""
        waiting, self._waiting = self._waiting, []
        for failover in waiting:
            others = {failover.before, failover.now} - {self._host}
            if any(host in alive and failover.heartbeats.get(host) == alive[host] for host in others):
                self._waiting.append(failover)
            elif failover.now == self._host or failover.now not in alive:
                died = failover.before != self._host and failover.before not in alive
                self.takeovers[failover.outcome, died] += 1
                why = f", and the service of {failover.before} has died" if died else ""
                _LOGGER.info(
                    "%s moved from %s to %s: %s%s", failover.key, failover.before, failover.now, failover.outcome, why
                )

    def _count_lost(self, active: Mapping[BucketKey, str | None], members: Members, alive: Mapping[str, int]) -> None:
        """Count members of the round before that are not alive; by then their tasks may have run elsewhere for long."""
        has_active = set(active.values()) | {record.host for record in members.records if record.active}
        for host, record in self._members.items():
            if host not in alive and host != self._host:
                _, had_active = self._had_active.get(host, (0, False))
                for role, had in (("active", had_active), ("standby", bool(record.replicas))):
                    if had:
                        self.members_lost[role] += 1
                _LOGGER.warning("the standby service of %s is no longer alive", host)
        counted: dict[str, tuple[int, bool]] = {}
        for host, number in alive.items():
            before, had_active = self._had_active.get(host, (number, False))
            counted[host] = number, host in has_active or (had_active and before == number)
        self._had_active = counted
        self._members = {record.host: record for record in members.records}


def _outcome(followed: Followed | None) -> str:
    """Return what a task found on this host; the follower has seen the move if it followed the bucket then."""
    if followed is None or followed.missing_at_move is None:
        return NO_REPLICA
    return BEHIND if followed.missing_at_move else REPLICA
