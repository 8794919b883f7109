"""The standby assignment: properties of every decision, and that repeated decisions become stable."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.standby.assignment import (
    assign,
    buckets_to_hold,
    describe_shortfall,
    find_active_buckets,
    find_active_hosts,
    find_unfollowed,
)
from tests.helpers.soak import examples

_EXAMPLES = settings(max_examples=examples(150))
Assignment = Mapping[BucketKey, tuple[str, ...]]


@dataclass(frozen=True)
class Scene:
    """Generate buckets, and hosts of which some have replicas."""

    buckets: dict[BucketKey, str | None]
    members: tuple[MemberRecord, ...]
    settings: StandbySettings

    @property
    def hosts(self) -> list[str]:
        return [member.host for member in self.members]

    def assigned(self) -> dict[BucketKey, tuple[str, ...]]:
        return assign(self.buckets, self.members, self.settings)

    def obeyed(self, assignment: Assignment) -> Scene:
        """Return the scene in which each host has exactly its assigned replicas, in sync."""
        members = []
        for member in self.members:
            held = (StandbyReplica(key, 5, in_sync=True) for key, hosts in assignment.items() if member.host in hosts)
            members.append(replace(member, replicas=tuple(held)))
        return replace(self, members=tuple(members))

    def settled(self) -> Scene:
        """Return the scene after the assignment has become stable."""
        scene = self
        for _ in range(50):
            following = scene.obeyed(scene.assigned())
            if following == scene:
                return scene
            scene = following
        raise AssertionError("the assignment never becomes stable")

    @property
    def held(self) -> dict[BucketKey, set[str]]:
        holders: dict[BucketKey, set[str]] = {key: set() for key in self.buckets}
        for member in self.members:
            for replica in member.replicas:
                if replica.key in holders:
                    holders[replica.key].add(member.host)
        return holders

    def without(self, host: str) -> Scene:
        return replace(self, members=tuple(member for member in self.members if member.host != host))

    def bound(self) -> int:
        """Compute the result independently, as the design defines it."""
        hosts = self.hosts
        total = sum(
            min(self.settings.replicas, len([host for host in hosts if host != active]))
            for active in self.buckets.values()
        )
        return max(-(-total // len(hosts)), int(1.25 * total / len(hosts))) if hosts else 0


@st.composite
def scenes(draw: st.DrawFn, hosts_min: int = 0) -> Scene:
    count, buckets = draw(st.integers(hosts_min, 9)), draw(st.integers(0, 40))
    racks, chance = draw(st.integers(0, 3)), random.Random(draw(st.integers(0, 2**32)))
    hosts = [f"host-{at}" for at in range(count)]
    # Some active hosts have no standby service or are unknown; some hosts are active for most buckets.
    places = [*hosts, *hosts[: draw(st.integers(0, 2))] * 20, "elsewhere", None]
    keys = [BucketKey(chance.choice("ab"), "q", at) for at in range(buckets)]
    share = draw(st.sampled_from([0.0, 0.1, 0.5]))
    members = []
    for at, host in enumerate(hosts):
        held = [key for key in keys if chance.random() < share] + [BucketKey("gone", "q", at)] * (at % 2)
        rack = f"rack-{at % racks}" if racks and chance.random() < 0.9 else None
        replicas = (StandbyReplica(key, chance.randrange(9), in_sync=chance.random() < 0.7) for key in held)
        members.append(MemberRecord(host, rack, replicas=tuple(replicas)))
    standby = StandbySettings(standby_replicas=draw(st.integers(0, 3)))
    return Scene({key: chance.choice(places) for key in keys}, tuple(members), standby)


def _load(assignment: Assignment) -> Counter[str]:
    return Counter(host for hosts in assignment.values() for host in hosts)


def _moved(before: Mapping[BucketKey, set[str]], after: Assignment) -> int:
    return sum(len(set(hosts) - before[key]) for key, hosts in after.items())


# -- every decision --------------------------------------------------------------------------------


@_EXAMPLES
@given(scenes())
def test_each_bucket_has_all_possible_replicas_but_none_on_its_active_host(scene: Scene) -> None:
    assignment = scene.assigned()
    assert list(assignment) == sorted(scene.buckets)
    short = 0
    for key, hosts in assignment.items():
        assert list(hosts) == sorted(set(hosts))
        possible = set(scene.hosts) - {scene.buckets[key] or ""}
        assert set(hosts) <= possible
        assert len(hosts) == min(scene.settings.replicas, len(possible))
        short += len(hosts) < scene.settings.replicas
    said = describe_shortfall(assignment, scene.settings)
    assert (said is None) == (short == 0)
    if said is not None:
        assert f"{short} of {len(assignment)} buckets have fewer than {scene.settings.replicas} replicas" in said


@_EXAMPLES
@given(scenes(1))
def test_no_host_exceeds_its_bound_while_another_has_room(scene: Scene) -> None:
    scene = scene.settled()
    held, load, bound = scene.held, _load(scene.assigned()), scene.bound()
    for host in (host for host in load if load[host] > bound):
        mine = [key for key, hosts in held.items() if host in hosts]
        assert mine
        for key, other in itertools.product(mine, scene.hosts):
            assert load[other] >= bound or other in held[key] or other == scene.buckets[key]


@_EXAMPLES
@given(scenes(2))
def test_no_host_stays_underused_if_it_could_take_a_replica(scene: Scene) -> None:
    scene = replace(scene, members=tuple(replace(member, rack=None) for member in scene.members)).settled()
    held, load = scene.held, _load(scene.assigned())
    total = sum(load.values())
    for poor in (host for host in scene.hosts if load[host] < 0.8 * total / len(scene.hosts)):
        if load[poor] >= total // len(scene.hosts):
            continue
        for key, hosts in held.items():
            if poor not in hosts and poor != scene.buckets[key]:
                assert all(load[host] < load[poor] + 2 for host in hosts)


@_EXAMPLES
@given(scenes(), st.randoms())
def test_the_decision_does_not_depend_on_the_order_of_records(scene: Scene, chance: random.Random) -> None:
    buckets, members = list(scene.buckets.items()), list(scene.members)
    chance.shuffle(buckets)
    chance.shuffle(members)
    other = Scene(dict(buckets), tuple(members), scene.settings)
    assert other.assigned() == scene.assigned()
    assert list(other.assigned()) == list(scene.assigned())
    for host in scene.hosts:
        assert buckets_to_hold(host, other.assigned(), members) == buckets_to_hold(
            host, scene.assigned(), scene.members
        )


@_EXAMPLES
@given(scenes(1))
def test_a_decision_stays_until_its_input_changes(scene: Scene) -> None:
    scene = scene.settled()
    assert scene.obeyed(scene.assigned()) == scene


# -- hosts that come and go ------------------------------------------------------------------------


@_EXAMPLES
@given(scenes(1), st.data())
def test_at_most_one_nth_of_the_replicas_moves_to_an_nth_host(scene: Scene, data: st.DataObject) -> None:
    scene = scene.settled()
    rack = data.draw(st.sampled_from([None, "rack-0", "rack-7"]))
    grown = replace(scene, members=(*scene.members, MemberRecord(data.draw(st.sampled_from(["a", "z"])), rack)))
    after = grown.assigned()
    missing = sum(len(hosts) - len(scene.held[key]) for key, hosts in after.items())
    most = -(-sum(map(len, after.values())) // len(grown.hosts))
    assert _moved(scene.held, after) <= most + missing


@_EXAMPLES
@given(scenes(2), st.data())
def test_if_a_host_leaves_only_its_replicas_move(scene: Scene, data: st.DataObject) -> None:
    """Balancing may move a few more replicas, which is rare."""
    scene = scene.settled()
    host = data.draw(st.sampled_from(scene.hosts))
    left = scene.without(host)
    after = left.assigned()
    its = {key for key, hosts in scene.held.items() if host in hosts}
    total = sum(map(len, after.values()))
    moved = sum(len(set(hosts) - scene.held[key]) for key, hosts in after.items() if key not in its)
    load = _load({key: tuple(hosts - {host}) for key, hosts in scene.held.items()})
    poor = sum(
        total // len(left.hosts) - load[host] for host in left.hosts if load[host] < 0.8 * total / len(left.hosts)
    )
    # If all other hosts are full, a replica that can move may make room.
    assert moved <= max(0, poor) + len(its)


def test_few_replicas_move_between_many_hosts() -> None:
    """1,000 buckets on 20 hosts in 5 racks, with exact limits."""
    keys = [BucketKey("counts", "q", at) for at in range(1_000)]
    hosts = [f"host-{at}" for at in range(20)]
    members = tuple(MemberRecord(host, f"rack-{at % 5}") for at, host in enumerate(hosts))
    scene = Scene({key: hosts[key.bucket % 20] for key in keys}, members, StandbySettings(standby_replicas=2)).settled()
    load = _load(scene.assigned())
    assert max(load.values()) <= 125
    rack = {member.host: member.rack for member in members}
    for key, placed in scene.assigned().items():
        assert len({rack[host] for host in (*placed, scene.buckets[key] or "")}) == 3
    without_host = scene.without("host-7").assigned()
    assert _moved(scene.held, without_host) == load["host-7"]
    back = scene.without("host-7").obeyed(without_host)
    with_new_host = replace(back, members=(*back.members, replace(members[7], host="new"))).assigned()
    assert _moved(back.held, with_new_host) == _load(with_new_host)["new"] == 100


def test_replicas_stay_if_a_bucket_gets_another_active_host() -> None:
    """Only the replica on the new active host is replaced; all others stay."""
    keys = [BucketKey("counts", "q", at) for at in range(60)]
    members = tuple(MemberRecord(f"host-{at}") for at in range(6))
    scene = Scene(dict.fromkeys(keys, "elsewhere"), members, StandbySettings()).settled()
    (holder,) = scene.held[keys[5]]
    moved = replace(scene, buckets={**scene.buckets, keys[5]: holder}).assigned()
    assert {key for key in keys if set(moved[key]) != scene.held[key]} == {keys[5]}
    assert moved[keys[5]] != (holder,)


# -- racks -----------------------------------------------------------------------------------------


@_EXAMPLES
@given(scenes(1))
def test_new_replicas_go_to_other_racks_that_have_room(scene: Scene) -> None:
    """Assign one new bucket at a time, so that others do not use up the room."""
    rack = {member.host: member.rack for member in scene.members}
    empty = replace(scene, members=tuple(replace(member, replicas=()) for member in scene.members))
    for key, active in scene.buckets.items():
        used = Counter({rack[active or ""]: 1} if rack.get(active or "") else {})
        (hosts,) = assign({key: active}, empty.members, scene.settings).values()
        used.update(rack[host] for host in hosts if rack[host])
        free = {rack[host] for host in empty.hosts if host != active and host not in hosts and rack[host] not in used}
        # Two share a rack only if no rack was left; a host without a rack counts as its own rack.
        assert max(used.values(), default=1) == 1 or not free


# -- what stays until it can go --------------------------------------------------------------------


_KEY = BucketKey("counts", "q", 0)


def _has(host: str, version: int = 7, in_sync: bool = True, active: str | None = None) -> MemberRecord:
    return MemberRecord(host, replicas=(StandbyReplica(_KEY, version, in_sync=in_sync, active=active),))


@pytest.mark.parametrize(
    ("members", "assigned", "holding"),
    [
        # The replica moves from a to b, which has not begun, is catching up, and is in sync.
        ([_has("a"), MemberRecord("b")], ("b",), "ab"),
        ([_has("a"), _has("b", 3, in_sync=False)], ("b",), "ab"),
        ([_has("a"), _has("b")], ("b",), "b"),
        # Of two hosts that should give it up, the one with more of it keeps it.
        ([_has("a", 3, in_sync=False), _has("b", 5, in_sync=False), MemberRecord("c")], ("c",), "bc"),
        ([_has("a", 9, in_sync=False), _has("b", 5), MemberRecord("c")], ("c",), "bc"),
        ([_has("a"), _has("b"), MemberRecord("c"), MemberRecord("d")], ("c", "d"), "abcd"),
        ([_has("a"), _has("b"), _has("c"), MemberRecord("d")], ("c", "d"), "acd"),
        # The active host has the state in any case.
        ([_has("a", active="a"), MemberRecord("b")], ("b",), "b"),
        ([_has("a", active="x"), _has("b", 8, in_sync=False, active="a")], ("b",), "b"),
        # No host should have it any longer.
        ([_has("a"), _has("b")], (), ""),
    ],
)
def test_a_replica_stays_until_the_new_one_is_in_sync(
    members: list[MemberRecord], assigned: tuple[str, ...], holding: str
) -> None:
    for order in itertools.permutations(members):
        assert "".join(host for host in "abcd" if _KEY in buckets_to_hold(host, {_KEY: assigned}, order)) == holding
    # The replica of a bucket that no longer exists is given up.
    assert buckets_to_hold("a", {}, members) == frozenset()


@_EXAMPLES
@given(scenes())
def test_hosts_keep_extra_replicas_only_while_assigned_ones_are_not_in_sync(scene: Scene) -> None:
    assignment = scene.assigned()
    holding = {host: buckets_to_hold(host, assignment, scene.members) for host in scene.hosts}
    synced = {(member.host, replica.key) for member in scene.members for replica in member.replicas if replica.in_sync}
    for key, hosts in assignment.items():
        holders = {host for host in scene.hosts if key in holding[host]}
        assert set(hosts) <= holders
        waited_for = sum((host, key) not in synced for host in hosts)
        assert len(holders) <= len(hosts) + waited_for
        # No host gives up a replica before others exist.
        usable = {host for host in scene.held[key] if (host, key) in synced}
        assert len(usable & holders) >= min(len(usable), len(hosts))
    assert all(key in assignment for held in holding.values() for key in held)


def test_the_active_host_is_that_of_the_newest_file() -> None:
    def seen(host: str, version: int, lag: int, active: str | None) -> MemberRecord:
        return MemberRecord(host, replicas=(StandbyReplica(_KEY, version, lag_versions=lag, active=active),))

    other = BucketKey("counts", "q", 1)
    members = [seen("a", 9, 0, "x"), seen("b", 2, 8, "y"), seen("c", 99, 0, None)]
    for order in itertools.permutations(members):
        assert find_active_hosts([other, _KEY], order) == {_KEY: "y", other: None}
    # Two attempts wrote the same version: every host chooses the same.
    assert find_active_hosts([_KEY], [seen("a", 5, 0, "x"), seen("b", 5, 0, "z")])[_KEY] == "z"


def test_a_host_reports_its_active_buckets_even_if_no_host_follows_them() -> None:
    """Otherwise an only host would follow its bucket, see that it is active, give up, and repeat."""
    alone = MemberRecord("a", replicas=(StandbyReplica(_KEY, 5, active="a"),))
    member = MemberRecord("a", active=find_active_buckets("a", [_KEY], [alone]))
    assert member.active == {_KEY: 5}
    assert find_active_buckets("a", [_KEY], [member]) == member.active
    assert assign(find_active_hosts([_KEY], [member]), [member], StandbySettings()) == {_KEY: ()}
    # This ends with a newer file of another host, or if the bucket no longer exists.
    other = MemberRecord("b", replicas=(StandbyReplica(_KEY, 6, active="c"),))
    assert find_active_buckets("a", [_KEY], [member, other]) == {}
    assert find_active_buckets("a", [], [member]) == {}
    assert find_active_buckets("c", [_KEY], [member, other]) == {_KEY: 6}
    # While no host follows the bucket, no other host sees that.
    assert find_unfollowed("a", [_KEY], [member, MemberRecord("b")]) == {_KEY}
    assert find_unfollowed("a", [_KEY], [member, _has("b", 5, active="a")]) == frozenset()


def test_disabled_standby_assigns_no_replicas() -> None:
    buckets, members = {_KEY: None}, [_has("a"), MemberRecord("b")]
    off = StandbySettings(enabled=False)
    assert assign(buckets, members, off) == {_KEY: ()}
    assert buckets_to_hold("a", assign(buckets, members, off), members) == frozenset()
    assert describe_shortfall({_KEY: ()}, off) is None
    assert assign(buckets, [], StandbySettings()) == {_KEY: ()}
    assert assign({}, members, StandbySettings()) == {}
