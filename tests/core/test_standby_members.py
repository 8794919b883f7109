"""Members: who lives by the names of records alone, what a host reads and writes, and what it says of what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.cli.paths import list_operators
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, StorageError, UsageError, VersionSkewError
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.members import (
    MEMBERS_FOLDER,
    STANDBY_FOLDER,
    Membership,
    MemberWatch,
    RecordName,
    read_settings,
    write_settings,
)
from tests.helpers.soak import examples

HEARTBEAT_S = 10.0
_UNHURRIED = settings(max_examples=examples(100), deadline=None)


class Clock:
    """A clock that the test moves."""

    def __init__(self, now_s: float = 500.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Counted(Folder):
    """A folder that counts what it asks of its store, and in which a file can be gone when it is read."""

    asked: dict[str, int]
    before_get: Any = None

    def child(self, *names: str) -> Folder:
        made = super().child(*names)
        made.__class__ = Counted
        return made

    def _count(self, what: str) -> None:
        self.asked[what] = self.asked.get(what, 0) + 1

    def names(self) -> list[str]:
        self._count("list")
        return super().names()

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._count("put")
        super().put(name, data)

    def remove(self, name: str) -> None:
        self._count("remove")
        super().remove(name)

    def get(self, name: str) -> bytes:
        self._count("get")
        return super().get(name)


@pytest.fixture
def root(tmp_path: Path) -> Counted:
    folder = Counted(str(tmp_path / "root"))
    folder.asked = {}
    return folder


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _replica(bucket: int, **fields: Any) -> StandbyReplica:
    return StandbyReplica(BucketKey("counts", "q", bucket), **fields)


def _files(root: Folder) -> Folder:
    return root.child(STANDBY_FOLDER, MEMBERS_FOLDER)


def _member(root: Folder, host: str, clock: Clock) -> Membership:
    return Membership(root, host, HEARTBEAT_S, clock)


def _hosts(membership: Membership) -> list[str]:
    return [it.host for it in membership.look().records]


# -- names -----------------------------------------------------------------------------------------


@_UNHURRIED
@given(
    st.text(min_size=1, max_size=12) | st.from_regex(r"\.?[a-z.=%/]{1,8}(\.[0-9]{1,4}){0,3}", fullmatch=True),
    st.integers(0, 10**17),
)
def test_every_host_has_a_name_of_its_own_that_is_safe(host: str, number: int) -> None:
    name = RecordName(host, number, number // 2)
    assert re.fullmatch(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*", name.text)
    assert RecordName.parse(name.text) == name


@pytest.mark.parametrize(
    "name",
    [
        "settings.json",
        "a.1.json",
        "a.01.1.json",
        "a.1.1.json.tmp",
        ".a.1.1.json",
        "a=.1.1.json",
        "a=41.1.1.json",
        "=FF.1.1.json",
    ],
)
def test_other_names_are_none(name: str) -> None:
    assert RecordName.parse(name) is None


def test_hosts_without_a_possible_name_are_refused(root: Counted, clock: Clock) -> None:
    for host in ("", "h" * 151, "ü" * 26):
        with pytest.raises(UsageError, match="SPARK_STATE_EXT_HOST"):
            _member(root, host, clock)


# -- who lives -------------------------------------------------------------------------------------


def _name(host: str, heartbeat: int, generation: int = 1) -> str:
    return RecordName(host, heartbeat, generation).text


def test_a_host_lives_for_three_heartbeats_after_its_last_change() -> None:
    watch = MemberWatch(HEARTBEAT_S)
    seen = [sorted(watch.observe([_name("a", at), _name("b", min(at, 2))], 10.0 * at).alive) for at in range(8)]
    assert seen == [["a", "b"]] * 5 + [["a"]] * 3
    # And comes back with its next record, whatever its number.
    assert sorted(watch.observe([_name("a", 8), _name("b", 1)], 80.0).alive) == ["a", "b"]


def test_who_has_just_started_counts_everybody_as_alive() -> None:
    watch = MemberWatch(HEARTBEAT_S)
    dead = [_name(f"dead-{at}", 10**9) for at in range(3)]
    assert [len(watch.observe(dead, 7.0 + 10 * at).alive) for at in range(5)] == [3, 3, 3, 0, 0]


def test_time_counts_only_while_somebody_looks() -> None:
    """Who stood still for an hour, or whose store did, does not take everybody for dead."""
    watch = MemberWatch(HEARTBEAT_S)
    names = [_name("a", 1), _name("b", 1)]
    watch.observe(names, 0.0)
    assert sorted(watch.observe(names, 3_600.0).alive) == ["a", "b"]
    assert sorted(watch.observe(names, 3_610.0).alive) == ["a", "b"]
    assert sorted(watch.observe(names, 3_620.0).alive) == []
    # A clock that goes back is broken, and counts for nothing.
    assert sorted(watch.observe([_name("a", 2)], 10.0).alive) == ["a"]


def test_a_listing_that_misses_a_record_does_not_end_a_host() -> None:
    watch = MemberWatch(HEARTBEAT_S)
    watch.observe([_name("a", 1)], 0.0)
    assert watch.observe([], 10.0).alive == {"a": RecordName("a", 1, 1)}
    assert watch.observe([], 20.0).alive
    assert not watch.observe([], 30.0).alive


@_UNHURRIED
@given(st.lists(st.integers(0, 3), min_size=4, max_size=30), st.integers(0, 10**6))
def test_the_order_and_the_time_of_day_do_not_matter(written: list[int], begin_s: int) -> None:
    numbers, listings = [1, 1], []
    for which in written:
        numbers = [it + (which >> at & 1) for at, it in enumerate(numbers)]
        listings.append([_name("a", numbers[0]), _name("b", numbers[1])])
    one, other = MemberWatch(HEARTBEAT_S), MemberWatch(HEARTBEAT_S)
    for at, names in enumerate(listings):
        assert one.observe(names, 10.0 * at) == other.observe(names[::-1], begin_s + 10.0 * at)


def test_records_that_nobody_renews_are_removed_after_long() -> None:
    watch = MemberWatch(HEARTBEAT_S)
    for at in range(100):
        assert watch.observe([_name("a", 1), _name("b", at), _name("b", 10**6)], 10.0 * at).old == ()
    assert watch.observe([_name("a", 1), _name("b", 100), _name("b", 10**6)], 1_000.0).old == (
        _name("a", 1),
        _name("b", 10**6),
    )


def test_two_services_under_one_name_are_found() -> None:
    watch = MemberWatch(HEARTBEAT_S)
    found = []
    for at in range(6):
        names = [_name("a", at), _name("two", 2 + at, 41_200_530_118), _name("two", at, 902_113_774_025)]
        found.append(watch.observe(names, 10.0 * at).doubled)
    assert found == [(), (), ("two",), ("two",), ("two",), ("two",)]
    # One ends: after a few looks nothing is said any more.
    later = [
        watch.observe([_name("a", at), _name("two", 2 + at, 41_200_530_118)], 10.0 * at).doubled for at in range(6, 11)
    ]
    assert later[-1] == ()


def test_one_service_is_not_taken_for_two() -> None:
    """Once seen between writing one record and deleting the other, once started again beside what was left."""
    watch = MemberWatch(HEARTBEAT_S)
    listings = [[1], [2, 3], [4], [5], [5, 6], [5, 7], [5, 8], [9], [9, 10]]
    for at, numbers in enumerate(listings):
        assert watch.observe([_name("a", it) for it in numbers], 10.0 * at).doubled == ()
    # On a busy host each look may find it between the two, and more of them where it cannot delete.
    for at in range(20):
        names = [_name("a", 100 + 3 * at + of, 7 + at + of // 2) for of in range(3)]
        assert watch.observe(names, 100.0 + 10 * at).doubled == ()


# -- a host among others ---------------------------------------------------------------------------


def test_a_heartbeat_costs_a_listing_a_write_and_a_delete(root: Counted, clock: Clock) -> None:
    members = [_member(root, f"host-{at}.example", clock) for at in range(5)]
    records = [MemberRecord(f"host-{at}.example", replicas=(_replica(at),)) for at in range(5)]
    for number in range(4):
        root.asked.clear()
        for member, record in zip(members, records, strict=True):
            member.heartbeat(record)
            assert len(member.look().records) == (5 if number else members.index(member) + 1)
        clock.now_s += HEARTBEAT_S
        if number > 1:
            assert root.asked == {"put": 5, "remove": 5, "list": 5}
    # Lags change with every batch, and nobody reads anything for that.
    root.asked.clear()
    members[0].heartbeat(MemberRecord(records[0].host, replicas=(_replica(0, version=9, lag_versions=1),)))
    assert members[1].look().records[0] == members[2].look().records[0]
    assert "get" not in root.asked
    # But all do for a change by which they decide.
    members[0].heartbeat(MemberRecord(records[0].host, replicas=(_replica(0, version=9, in_sync=True),)))
    assert [it.look().records[0].replicas[0].in_sync for it in members] == [True] * 5
    assert root.asked["get"] == 4


def test_everybody_sees_the_same(root: Counted, clock: Clock) -> None:
    members = {host: _member(root, host, clock) for host in ("b.1.2", "a/..", "ü 7")}
    for host, member in members.items():
        member.heartbeat(MemberRecord(host, "rack", replicas=(_replica(3, version=5),), addresses={"flight": "x:1"}))
    looks = [member.look() for member in members.values()]
    assert [it.host for it in looks[0].records] == ["a/..", "b.1.2", "ü 7"]
    assert all(look == looks[0] for look in looks)
    assert not looks[0].problems
    assert len(_files(root).names()) == 3


def test_who_leaves_is_gone_after_three_heartbeats(root: Counted, clock: Clock) -> None:
    a, b = _member(root, "a", clock), _member(root, "b", clock)
    a.heartbeat(MemberRecord("a"))
    b.heartbeat(MemberRecord("b"))
    assert _hosts(a) == ["a", "b"]
    b.leave()
    b.leave()
    assert len(_files(root).names()) == 1
    assert [it.host for it in b.look().records] == ["a"]
    for expected in (["a", "b"], ["a", "b"], ["a"]):
        clock.now_s += HEARTBEAT_S
        a.heartbeat(MemberRecord("a"))
        assert _hosts(a) == expected


def test_a_service_that_is_started_again_goes_on(root: Counted, clock: Clock) -> None:
    """It deletes what was left, its numbers go on, and nobody takes its new record for the old one."""
    other = _member(root, "b", clock)
    other.heartbeat(MemberRecord("b"))
    first = _member(root, "a", clock)
    first.heartbeat(MemberRecord("a", replicas=(_replica(1),)))
    assert [it.host for it in other.look().records] == ["a", "b"]
    again = _member(root, "a", clock)
    again.heartbeat(MemberRecord("a"))
    assert [RecordName.parse(it)[:2] for it in _files(root).names()] == [("a", 2), ("b", 1)]  # type: ignore[index]
    look = other.look()
    assert (look.records[0].replicas, look.problems) == ((), ())
    assert again.look().problems == ()


def test_two_services_of_one_host_tell_it(root: Counted, clock: Clock) -> None:
    one, two, other = (_member(root, host, clock) for host in ("a", "a", "b"))
    said = []
    for _ in range(5):
        for member, host in ((one, "a"), (two, "a"), (other, "b")):
            member.heartbeat(MemberRecord(host))
        said.append([member.look().problems for member in (one, two, other)])
        clock.now_s += HEARTBEAT_S
    assert all("two standby services run under the host name 'a'" in problem for problem in (it[0] for it in said[-1]))
    # Its own sees it at once.
    assert said[0][0]


def test_a_damaged_record_is_told_and_its_host_counts_without_replicas(root: Counted, clock: Clock) -> None:
    me, other, newer = (_member(root, host, clock) for host in ("a", "b", "c"))
    for member, host in ((me, "a"), (other, "b"), (newer, "c")):
        member.heartbeat(MemberRecord(host, "rack", replicas=(_replica(1),)))
    _, damaged, skewed = _files(root).names()
    whole = _files(root).get(damaged)
    _files(root).put(damaged, whole.replace(b"rack", b"rick"))
    _files(root).put(skewed, _files(root).get(skewed).replace(b'"format": 2', b'"format": 3'))
    _files(root).put("notes.txt", b"who is who")
    look = me.look()
    assert [(it.host, len(it.replicas)) for it in look.records] == [("a", 1), ("b", 0), ("c", 0)]
    strange, b, c = sorted(look.problems, key=lambda it: ("notes" not in it, it))
    assert "notes.txt is not a member record" in strange
    assert damaged in b
    assert "fails its checksum" in b
    assert "format 3" in c
    # The next one is right again.
    _files(root).put(damaged, whole)
    assert [(it.host, len(it.replicas)) for it in me.look().records][:2] == [("a", 1), ("b", 1)]
    # Another host's record under this name, as a copy of the folder may have.
    _files(root).put("d.1.1.json", whole)
    assert any("is the record of b" in it for it in me.look().problems)


def test_a_record_that_is_gone_when_it_is_read_is_caught_at_its_next_name(
    root: Counted, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, other = _member(root, "a", clock), _member(root, "b", clock)
    other.heartbeat(MemberRecord("b", replicas=(_replica(1),)))
    get, times = Counted.get, [1]

    def moves_on(self: Counted, name: str) -> bytes:
        if times[0]:
            times[0] -= 1
            other.heartbeat(MemberRecord("b", replicas=(_replica(1),)))
        return get(self, name)

    monkeypatch.setattr(Counted, "get", moves_on)
    assert [(it.host, len(it.replicas)) for it in me.look().records] == [("b", 1)]
    # Twice in a row: then it is told that nothing is known of it.
    stranger = _member(root, "c", clock)

    def never_there(self: Counted, name: str) -> bytes:
        raise MissingCheckpointError(name)

    monkeypatch.setattr(Counted, "get", never_there)
    look = stranger.look()
    assert (look.unread, look.problems, look.records) == (
        ("b",),
        (),
        (MemberRecord("b", generation=look.records[0].generation),),
    )
    # What was read of it before stays.
    other.heartbeat(MemberRecord("b", replicas=(_replica(1), _replica(2))))
    assert [(it.host, len(it.replicas)) for it in me.look().records] == [("b", 1)]
    assert me.look().unread == ()


def test_a_write_that_fails_is_made_up_for(root: Counted, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    me = _member(root, "a", clock)
    me.heartbeat(MemberRecord("a"))
    put = Counted.put

    def late(self: Counted, name: str, data: bytes | memoryview) -> None:
        put(self, name, data)
        raise StorageError("no answer")

    monkeypatch.setattr(Counted, "put", late)
    with pytest.raises(StorageError):
        me.heartbeat(MemberRecord("a"))
    monkeypatch.setattr(Counted, "put", put)
    assert len(_files(root).names()) == 2
    me.heartbeat(MemberRecord("a"))
    assert [RecordName.parse(it)[1] for it in _files(root).names()] == [3]  # type: ignore[index]
    assert me.look().problems == ()


def test_records_of_hosts_that_died_long_ago_are_removed(root: Counted, clock: Clock) -> None:
    dead, me = _member(root, "dead", clock), _member(root, "me", clock)
    dead.heartbeat(MemberRecord("dead"))
    for _ in range(102):
        me.heartbeat(MemberRecord("me"))
        me.look()
        clock.now_s += HEARTBEAT_S
    assert [RecordName.parse(it)[0] for it in _files(root).names()] == ["me"]  # type: ignore[index]
    # A zombie goes on where it was.
    dead.heartbeat(MemberRecord("dead"))
    assert _hosts(me) == ["dead", "me"]


def test_nobody_writes_another_hosts_record(root: Counted, clock: Clock) -> None:
    with pytest.raises(UsageError, match="record of b"):
        _member(root, "a", clock).heartbeat(MemberRecord("b"))


def test_commands_do_not_take_the_records_for_an_operator(root: Counted, clock: Clock) -> None:
    _member(root, "a", clock).heartbeat(MemberRecord("a"))
    root.child("counts", "q").put("operator_0.json", b"{}")
    assert list(list_operators(root)) == ["counts"]


# -- settings --------------------------------------------------------------------------------------


def test_settings(root: Counted) -> None:
    assert read_settings(root) == StandbySettings(True, 1, 10.0)
    write_settings(root, StandbySettings(False, 3, 2.5))
    assert read_settings(root) == StandbySettings(False, 3, 2.5)
    files = root.child(STANDBY_FOLDER)
    data = files.get("settings.json")
    files.put("settings.json", data[:-5])
    with pytest.raises(
        CorruptFileError, match=r"settings\.json is not a valid standby settings file.*Write the settings again"
    ):
        read_settings(root)
    files.put("settings.json", data.replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(VersionSkewError, match="format 2"):
        read_settings(root)
