"""Broken variants of hot standby. The simulator of standby services must find each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sim_standby import HEARTBEAT_S, Patch, StandbyWorld

from arrow_schemas.standby import BucketKey, MemberRecord, StandbySettings
from spark_state_ext.standby import assignment
from spark_state_ext.standby.members import Members, Membership, MemberWatch, RecordName, Seen
from spark_state_ext.standby.placement import Placing

__all__ = ["BROKEN_STANDBY"]

_ASSIGN, _LOOK, _OBSERVE = assignment.assign, Membership.look, MemberWatch.observe


def _find_newest(names: Iterable[str]) -> dict[str, RecordName]:
    parsed = sorted(name for name in map(RecordName.parse, names) if name is not None)
    return {name.host: name for name in parsed}


def _compare_times_of_day(world: StandbyWorld) -> Any:
    """The time of a record, by its writer's clock, is compared with the reader's clock."""

    def observe(self: MemberWatch, names: Iterable[str], now_s: float) -> Seen:
        watcher = next(service for service in world.running.values() if service.membership.watch is self)
        wall_s = 1e9 + world.now_s + watcher.wall_skew_s
        return Seen(
            {
                host: name
                for host, name in _find_newest(names).items()
                if wall_s - world.written_wall_s.get(host, wall_s) < 3 * HEARTBEAT_S
            }
        )

    return observe


def _live_while_record_exists(_: StandbyWorld) -> Any:
    """A host counts as alive while its record exists."""
    return lambda self, names, now_s: Seen(_find_newest(names))


def _die_after_one_heartbeat(_: StandbyWorld) -> Any:
    """A host counts as dead if its record did not change since the last look."""

    def observe(self: MemberWatch, names: Iterable[str], now_s: float) -> Seen:
        names = list(names)
        before = set(self._first_seen_s)
        _OBSERVE(self, names, now_s)
        return Seen({host: name for host, name in _find_newest(names).items() if not before or name.text not in before})

    return observe


def _see_itself_only(_: StandbyWorld) -> Any:
    """A host sees only itself."""

    def look(self: Membership) -> Members:
        return Members(tuple(record for record in _LOOK(self).records if record.host == self._host))

    return look


def _give_up_at_once(_: StandbyWorld) -> Any:
    """A replica that moves is given up before the new replica exists."""

    def find_buckets_to_hold(
        host: str, assigned: Mapping[BucketKey, tuple[str, ...]], _: object
    ) -> frozenset[BucketKey]:
        return frozenset(key for key, hosts in assigned.items() if host in hosts)

    return find_buckets_to_hold


def _never_give_up(_: StandbyWorld) -> Any:
    """A replica that moves is never given up."""

    def find_buckets_to_hold(
        host: str, assigned: Mapping[BucketKey, tuple[str, ...]], members: Iterable[MemberRecord]
    ) -> frozenset[BucketKey]:
        own_keys = {key for key, hosts in assigned.items() if host in hosts}
        return frozenset(
            own_keys.union(*({replica.key for replica in member.replicas} for member in members if member.host == host))
        )

    return find_buckets_to_hold


def _place_on_active_host(_: StandbyWorld) -> Any:
    """The host of a bucket's active task is ignored."""

    def assign(buckets: Mapping[BucketKey, str | None], members: Any, settings: StandbySettings) -> Any:
        return _ASSIGN(dict.fromkeys(buckets), members, settings)

    return assign


def _forget_existing(_: StandbyWorld) -> Any:
    """Existing replicas are ignored."""
    return lambda self: None


def _compare_keys_only(_: StandbyWorld) -> Any:
    """A generation changes only if the set of replicas changes, not if one gets in sync."""
    return property(lambda self: tuple(replica.key for replica in self.replicas))


def _begin_with_same_generation(_: StandbyWorld) -> Any:
    """Each service begins with the same generation."""
    original_init = Membership.__init__

    def init(self: Membership, *args: Any, **options: Any) -> None:
        original_init(self, *args, **options)
        self._generation = 0

    return init


BROKEN_STANDBY: dict[str, tuple[Patch, ...]] = {
    "clocks are compared": ((MemberWatch, "observe", _compare_times_of_day),),
    "a host is alive while its record exists": ((MemberWatch, "observe", _live_while_record_exists),),
    "a host is dead after one missed heartbeat": ((MemberWatch, "observe", _die_after_one_heartbeat),),
    "a host sees only itself": ((Membership, "look", _see_itself_only),),
    "replicas are given up at once": ((assignment, "buckets_to_hold", _give_up_at_once),),
    "replicas are never given up": ((assignment, "buckets_to_hold", _never_give_up),),
    "replicas are placed on the active host": ((assignment, "assign", _place_on_active_host),),
    "assignments are not sticky": ((Placing, "keep", _forget_existing),),
    "generations do not reflect in-sync replicas": ((MemberRecord, "decided_by", _compare_keys_only),),
    "generations begin with 0 at each start": ((Membership, "__init__", _begin_with_same_generation),),
}
