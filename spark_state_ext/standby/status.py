"""The status of a root's standby: live hosts, their replicas and lags, and which hosts can be removed safely.

`StandbyStatus` is built from the hosts' records; `read_status` reads them, and waits to see which hosts are alive.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.assignment import find_active_hosts
from spark_state_ext.standby.members import Membership, describe_duplicate, read_settings, record_numbers
from spark_state_ext.standby.recovery import recover_all_s

__all__ = ["Removal", "StandbyStatus", "read_status"]

# How long to wait for a host: longer than the time between two heartbeats, unless its store is slow.
_PATIENCE_HEARTBEATS = 1.5
_LOOK_S = 0.25
_OBSERVER = "observer"


@dataclass(frozen=True)
class Removal:
    """The consequences of removing a host.

    Parameters
    ----------
    host
        The host.
    safe
        True if every bucket that is active there has a replica in sync on another live host.
    exposed
        Buckets without such a replica, or with an unknown active host: their tasks would restore from the store.
    replicas
        How many replicas other hosts would have to build again.
    """

    host: str
    safe: bool
    exposed: tuple[BucketKey, ...]
    replicas: int


@dataclass(frozen=True)
class StandbyStatus:
    """The standby of a root.

    Parameters
    ----------
    settings
        Standby settings of the root.
    records
        Records of live hosts, by host.
    silent
        Hosts that have a record but whose services are not alive.
    buckets
        All buckets of the root, with the hosts of their active tasks as far as records show.
    problems
        Problems, one sentence each.
    """

    settings: StandbySettings
    records: Mapping[str, MemberRecord]
    silent: tuple[str, ...]
    buckets: Mapping[BucketKey, str | None]
    problems: tuple[str, ...] = ()

    @staticmethod
    def of(
        settings: StandbySettings,
        records: Collection[MemberRecord],
        silent: Collection[str],
        buckets: Collection[BucketKey],
        problems: Collection[str] = (),
    ) -> StandbyStatus:
        """Build the status of some buckets from records."""
        active = find_active_hosts(buckets, records)
        return StandbyStatus(
            settings, {record.host: record for record in records}, tuple(sorted(silent)), active, tuple(problems)
        )

    def replicas(self, key: BucketKey) -> dict[str, StandbyReplica]:
        """Return the replicas of a bucket by host, without the active host's copy, which is not a replica."""
        active = self.buckets[key]
        return {
            host: replica
            for host, record in self.records.items()
            if host != active
            for replica in record.replicas
            if replica.key == key
        }

    def lacking(self) -> dict[BucketKey, int]:
        """Return how many replicas in sync each bucket is missing; buckets with enough are left out."""
        in_sync: dict[BucketKey, int] = dict.fromkeys(self.buckets, 0)
        for host, record in self.records.items():
            for replica in record.replicas:
                if replica.in_sync and replica.key in in_sync and self.buckets[replica.key] != host:
                    in_sync[replica.key] += 1
        wanted = self.settings.replicas
        return {key: wanted - count for key, count in in_sync.items() if count < wanted}

    def held(self, host: str) -> list[StandbyReplica]:
        """Return the replicas of a host, without copies of its own active buckets and of buckets that do not exist."""
        record = self.records.get(host)
        replicas = () if record is None else record.replicas
        return [replica for replica in replicas if replica.key in self.buckets and self.buckets[replica.key] != host]

    def failing(self, host: str) -> dict[BucketKey, str]:
        """Return the replicas that a host could not follow when it last tried, and why."""
        record = self.records.get(host)
        reasons = {} if record is None else record.failing
        return {replica.key: reasons[replica.key] for replica in self.held(host) if replica.key in reasons}

    def is_well(self) -> bool:
        """True if all replicas exist and are in sync, none fails, and no two services have the same name."""
        failing = any(self.failing(host) for host in self.records)
        return not (self.lacking() or failing or any(record.doubled for record in self.records.values()))

    def hosts(self) -> list[str]:
        """Return the hosts that have a record or are active for a bucket."""
        return sorted({*self.records, *self.silent, *(host for host in self.buckets.values() if host is not None)})

    def recover_s(self) -> float | None:
        """Return estimated seconds until every replica has caught up; None if unknown, such as when one is missing."""
        having = Counter(replica.key for host in self.records for replica in self.held(host))
        if any(having[key] < self.settings.replicas for key in self.buckets):
            return None
        return recover_all_s((record, self.held(host)) for host, record in self.records.items())

    def removal(self, host: str) -> Removal:
        """Return the consequences of removing a host."""
        covered = {
            replica.key
            for other, record in self.records.items()
            if other != host
            for replica in record.replicas
            if replica.in_sync
        }
        # If a bucket's active host is unknown, it may be this host.
        exposed = tuple(key for key, active in self.buckets.items() if active in (host, None) and key not in covered)
        record = self.records.get(host)
        return Removal(host, not exposed, exposed, 0 if record is None else len(record.replicas))


def read_status(
    root: Folder,
    buckets: Collection[BucketKey],
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> StandbyStatus:
    """Read the records of a root, and wait until every host has written another one or should have."""
    settings = read_settings(root)
    observer = Membership(root, _OBSERVER, settings.heartbeat_s, clock_s)
    deadline_s = clock_s() + _PATIENCE_HEARTBEATS * settings.heartbeat_s
    first = observer.look()
    numbers = record_numbers(root)
    while True:
        changed = {host for host, number in record_numbers(root).items() if number != numbers.get(host)}
        if changed >= numbers.keys() or clock_s() >= deadline_s:
            break
        sleep(min(_LOOK_S, settings.heartbeat_s / 4))
    last = observer.look()
    alive = [record for record in last.records if record.host in changed]
    silent = numbers.keys() - changed
    doubled = (describe_duplicate(record.host) for record in alive if record.doubled)
    problems = dict.fromkeys((*first.problems, *last.problems, *doubled))
    return StandbyStatus.of(settings, alive, silent, buckets, problems)
