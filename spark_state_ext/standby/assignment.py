"""The assignment: which hosts should have a standby replica of which bucket. No I/O, no clock.

Every host computes it from the same records, and carries out its own part. Like Kafka Streams it keeps what is held: a
replica moves only if its host is gone, runs the bucket's active task, or has far more than other hosts. Rendezvous
weights with a bound on the load decide which host gets a missing replica, so that hosts which see different records for
a while mostly decide the same. See `docs/design/009-standby.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.standby.placement import Placing

__all__ = [
    "find_active_hosts",
    "find_active_buckets",
    "assign",
    "describe_shortfall",
    "find_unfollowed",
    "buckets_to_hold",
]


def find_active_hosts(buckets: Iterable[BucketKey], members: Iterable[MemberRecord]) -> dict[BucketKey, str | None]:
    """Return the host of each bucket's active task: the writer of the newest file in any record, None if unknown."""
    newest = _find_newest(members)
    return {key: newest[key][1] if key in newest else None for key in sorted(buckets)}


def find_active_buckets(
    host: str, buckets: Iterable[BucketKey], members: Iterable[MemberRecord]
) -> dict[BucketKey, int]:
    """Return the buckets whose newest file a host wrote, for `MemberRecord.active` of its own record.

    Such a bucket may have no follower, for example if there is no other host. Then only this record shows that its
    replica must not be on this host.
    """
    newest = _find_newest(members)
    return {key: newest[key][0] for key in sorted(buckets) if key in newest and newest[key][1] == host}


def find_unfollowed(host: str, buckets: Iterable[BucketKey], members: Iterable[MemberRecord]) -> frozenset[BucketKey]:
    """Return the buckets that a host is active for, by the records, and that no host follows.

    No record shows when another host becomes active for them. So the host must look at their newest file itself,
    without loading it, and leave the buckets that another host wrote out of its record (`find_active_buckets`).
    """
    records = list(members)
    followed = {replica.key for member in records for replica in member.replicas}
    return frozenset(find_active_buckets(host, buckets, records).keys() - followed)


def _find_newest(members: Iterable[MemberRecord]) -> dict[BucketKey, tuple[int, str]]:
    """Return the version and the writer of each bucket's newest file."""
    newest: dict[BucketKey, tuple[int, str]] = {}
    for member in members:
        seen = [
            (replica.key, (replica.seen_version, replica.active))
            for replica in member.replicas
            if replica.active is not None
        ]
        for key, file in [*seen, *((key, (version, member.host)) for key, version in member.active.items())]:
            newest[key] = max(newest.get(key, file), file)
    return newest


def assign(
    buckets: Mapping[BucketKey, str | None], members: Iterable[MemberRecord], settings: StandbySettings
) -> dict[BucketKey, tuple[str, ...]]:
    """Return which hosts should have a replica of each bucket."""
    placing = Placing(buckets, members, settings.replicas)
    if placing.hosts and placing.total:
        placing.keep()
        placing.fill()
        placing.level()
        placing.trim()
    return placing.result()


def describe_shortfall(assignment: Mapping[BucketKey, tuple[str, ...]], settings: StandbySettings) -> str | None:
    """Return the problem text if buckets have fewer replicas than the settings ask for; None if all have enough."""
    wanted = settings.replicas
    short = [wanted - len(hosts) for hosts in assignment.values() if len(hosts) < wanted]
    if not short:
        return None
    return (
        f"too few hosts have a standby service: {len(short)} of {len(assignment)} buckets have fewer than {wanted} "
        f"replicas, and {sum(short)} replicas are missing in all. Start the service on more hosts"
    )


def buckets_to_hold(
    host: str, assignment: Mapping[BucketKey, tuple[str, ...]], members: Iterable[MemberRecord]
) -> frozenset[BucketKey]:
    """Return what a host must hold: the buckets assigned to it, and those that it may not give up yet.

    A replica that moves stays on its old host until the new host is in sync. If several unassigned hosts have it, it
    stays on as many of them as there are assigned hosts not yet in sync, first on the hosts that are furthest ahead.
    """
    records = {member.host: member for member in members}
    assigned = {key for key, hosts in assignment.items() if host in hosts}
    mine = records[host].replicas if host in records else ()
    leaving = {replica.key for replica in mine if replica.key in assignment and replica.key not in assigned}
    if not leaving:
        return frozenset(assigned)
    holders: dict[BucketKey, dict[str, StandbyReplica]] = {key: {} for key in leaving}
    for member in records.values():
        for replica in member.replicas:
            if replica.key in leaving:
                holders[replica.key][member.host] = replica
    active = find_active_hosts(leaving, records.values())
    return frozenset(assigned | {key for key in leaving if _keeps(host, assignment[key], holders[key], active[key])})


def _keeps(host: str, assigned: tuple[str, ...], holders: Mapping[str, StandbyReplica], active: str | None) -> bool:
    """True if a host keeps an unassigned replica. The host of the active task has the state anyway."""
    if host == active:
        return False
    waited_for = sum(other not in holders or not holders[other].in_sync for other in assigned)
    others = (other for other in holders if other not in assigned and other != active)
    ranked = sorted(others, key=lambda other: (not holders[other].in_sync, -holders[other].version, other))
    return host in ranked[:waited_for]
