"""Ways in which hot standby could have been built wrong. The simulator of standby services has to find each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sim_standby import HEARTBEAT_S, Patch, StandbyWorld

from arrow_schemas.standby import BucketKey, MemberRecord, StandbySettings
from spark_state_ext.standby import assignment
from spark_state_ext.standby.members import Members, Membership, MemberWatch, RecordName, Seen
from spark_state_ext.standby.placement import Placing

__all__ = ["BROKEN_STANDBY"]

_assign, _look, _observe = assignment.assign, Membership.look, MemberWatch.observe


def _newest(names: Iterable[str]) -> dict[str, RecordName]:
    parsed = sorted(it for it in map(RecordName.parse, names) if it is not None)
    return {it.host: it for it in parsed}


def _by_the_time_of_day(world: StandbyWorld) -> Any:
    """The time of a record, by its writer's clock, is compared with that of whoever looks."""

    def observed(self: MemberWatch, names: Iterable[str], now_s: float) -> Seen:
        watcher = next(it for it in world.running.values() if it.membership.watch is self)
        wall_s = 1e9 + world.now_s + watcher.wall_skew_s
        return Seen(
            {
                host: name
                for host, name in _newest(names).items()
                if wall_s - world.wrote_wall_s.get(host, wall_s) < 3 * HEARTBEAT_S
            }
        )

    return observed


def _by_being_there(_: StandbyWorld) -> Any:
    """A host lives while its record is there."""
    return lambda self, names, now_s: Seen(_newest(names))


def _after_one_missed(_: StandbyWorld) -> Any:
    """A host is dead when it has not changed since the last look."""

    def observed(self: MemberWatch, names: Iterable[str], now_s: float) -> Seen:
        names = list(names)
        before = set(self._first_seen_s)
        _observe(self, names, now_s)
        return Seen({host: name for host, name in _newest(names).items() if not before or name.text not in before})

    return observed


def _itself_only(_: StandbyWorld) -> Any:
    """A host sees nobody but itself."""

    def looked(self: Membership) -> Members:
        return Members(tuple(it for it in _look(self).records if it.host == self._host))

    return looked


def _at_once(_: StandbyWorld) -> Any:
    """A replica that moves is given up before the new one is there."""

    def held(host: str, assigned: Mapping[BucketKey, tuple[str, ...]], _: object) -> frozenset[BucketKey]:
        return frozenset(key for key, hosts in assigned.items() if host in hosts)

    return held


def _for_ever(_: StandbyWorld) -> Any:
    """A replica that moves is never given up."""

    def held(
        host: str, assigned: Mapping[BucketKey, tuple[str, ...]], members: Iterable[MemberRecord]
    ) -> frozenset[BucketKey]:
        mine = {key for key, hosts in assigned.items() if host in hosts}
        return frozenset(mine.union(*({it.key for it in member.replicas} for member in members if member.host == host)))

    return held


def _beside_the_active(_: StandbyWorld) -> Any:
    """Where a bucket's active task runs does not matter."""

    def assigned(buckets: Mapping[BucketKey, str | None], members: Any, settings: StandbySettings) -> Any:
        return _assign(dict.fromkeys(buckets), members, settings)

    return assigned


def _anew(_: StandbyWorld) -> Any:
    """What is held does not matter."""
    return lambda self: None


def _held_alone(_: StandbyWorld) -> Any:
    """A generation changes only with what is held, not with whether it is in sync."""
    return property(lambda self: tuple(it.key for it in self.replicas))


def _generation_of_the_first(_: StandbyWorld) -> Any:
    """Each service begins with the same generation."""
    made = Membership.__init__

    def init(self: Membership, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self._generation = 0

    return init


BROKEN_STANDBY: dict[str, tuple[Patch, ...]] = {
    "clocks are compared": ((MemberWatch, "observe", _by_the_time_of_day),),
    "alive while a record is there": ((MemberWatch, "observe", _by_being_there),),
    "dead after one missed heartbeat": ((MemberWatch, "observe", _after_one_missed),),
    "a host counts itself only": ((Membership, "look", _itself_only),),
    "given up at once": ((assignment, "buckets_to_hold", _at_once),),
    "never given up": ((assignment, "buckets_to_hold", _for_ever),),
    "beside the active": ((assignment, "assign", _beside_the_active),),
    "not sticky": ((Placing, "keep", _anew),),
    "generations of what is held only": ((MemberRecord, "decided_by", _held_alone),),
    "generations begin anew": ((Membership, "__init__", _generation_of_the_first),),
}
