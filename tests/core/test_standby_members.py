"""Members: which hosts are alive, what a heartbeat reads and writes, and which problems are reported."""

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
_EXAMPLES = settings(max_examples=examples(100))


class Clock:
    """A clock that the test moves."""

    def __init__(self, now_s: float = 500.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Counted(Folder):
    """A folder that counts the requests to its store."""

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
    return [record.host for record in membership.look().records]


# -- names -----------------------------------------------------------------------------------------


@_EXAMPLES
@given(
    st.text(min_size=1, max_size=12) | st.from_regex(r"\.?[a-z.=%/]{1,8}(\.[0-9]{1,4}){0,3}", fullmatch=True),
    st.integers(0, 10**17),
)
def test_a_record_name_is_a_safe_file_name_and_parses_back(host: str, number: int) -> None:
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
def test_other_file_names_are_not_record_names(name: str) -> None:
    assert RecordName.parse(name) is None


def test_hosts_without_a_possible_name_are_refused(root: Counted, clock: Clock) -> None:
    for host in ("", "h" * 151, "ü" * 26):
        with pytest.raises(UsageError, match="SPARK_STATE_EXT_HOST"):
            _member(root, host, clock)


# -- liveness --------------------------------------------------------------------------------------


def _name(host: str, heartbeat: int, generation: int = 1) -> str:
    return RecordName(host, heartbeat, generation).text


def test_a_host_lives_for_three_heartbeats_after_its_last_change() -> None:
    watch = MemberWatch(HEARTBEAT_S)
    seen = [sorted(watch.observe([_name("a", at), _name("b", min(at, 2))], 10.0 * at).alive) for at in range(8)]
    assert seen == [["a", "b"]] * 5 + [["a"]] * 3
    # The host is alive again with its next record, whatever its number.
    assert sorted(watch.observe([_name("a", 8), _name("b", 1)], 80.0).alive) == ["a", "b"]


def test_a_new_watch_counts_every_host_as_alive_at_first() -> None:
    watch = MemberWatch(HEARTBEAT_S)
    dead = [_name(f"dead-{at}", 10**9) for at in range(3)]
    assert [len(watch.observe(dead, 7.0 + 10 * at).alive) for at in range(5)] == [3, 3, 3, 0, 0]


def test_time_between_observations_far_apart_does_not_count() -> None:
    """A host that stalled for an hour, or whose store did, does not take all others for dead."""
    watch = MemberWatch(HEARTBEAT_S)
    names = [_name("a", 1), _name("b", 1)]
    watch.observe(names, 0.0)
    assert sorted(watch.observe(names, 3_600.0).alive) == ["a", "b"]
    assert sorted(watch.observe(names, 3_610.0).alive) == ["a", "b"]
    assert sorted(watch.observe(names, 3_620.0).alive) == []
    # Time that goes backwards is ignored.
    assert sorted(watch.observe([_name("a", 2)], 10.0).alive) == ["a"]


def test_a_listing_that_misses_a_record_does_not_end_a_host() -> None:
    watch = MemberWatch(HEARTBEAT_S)
    watch.observe([_name("a", 1)], 0.0)
    assert watch.observe([], 10.0).alive == {"a": RecordName("a", 1, 1)}
    assert watch.observe([], 20.0).alive
    assert not watch.observe([], 30.0).alive


@_EXAMPLES
@given(st.lists(st.integers(0, 3), min_size=4, max_size=30), st.integers(0, 10**6))
def test_liveness_does_not_depend_on_listing_order_or_start_time(written: list[int], begin_s: int) -> None:
    numbers, listings = [1, 1], []
    for which in written:
        numbers = [number + (which >> at & 1) for at, number in enumerate(numbers)]
        listings.append([_name("a", numbers[0]), _name("b", numbers[1])])
    one, other = MemberWatch(HEARTBEAT_S), MemberWatch(HEARTBEAT_S)
    for at, names in enumerate(listings):
        assert one.observe(names, 10.0 * at) == other.observe(names[::-1], begin_s + 10.0 * at)


def test_records_not_renewed_for_100_heartbeats_are_old() -> None:
    watch = MemberWatch(HEARTBEAT_S)
    for at in range(100):
        assert watch.observe([_name("a", 1), _name("b", at), _name("b", 10**6)], 10.0 * at).old == ()
    assert watch.observe([_name("a", 1), _name("b", 100), _name("b", 10**6)], 1_000.0).old == (
        _name("a", 1),
        _name("b", 10**6),
    )


def test_two_services_under_one_name_are_detected() -> None:
    watch = MemberWatch(HEARTBEAT_S)
    doubled = []
    for at in range(6):
        names = [_name("a", at), _name("two", 2 + at, 41_200_530_118), _name("two", at, 902_113_774_025)]
        doubled.append(watch.observe(names, 10.0 * at).doubled)
    assert doubled == [(), (), ("two",), ("two",), ("two",), ("two",)]
    # One service ends: after a few observations the name is no longer reported.
    later = [
        watch.observe([_name("a", at), _name("two", 2 + at, 41_200_530_118)], 10.0 * at).doubled for at in range(6, 11)
    ]
    assert later[-1] == ()


def test_one_service_is_not_taken_for_two() -> None:
    """A service may be observed between writing and deleting, or restarted with an old record left."""
    watch = MemberWatch(HEARTBEAT_S)
    listings = [[1], [2, 3], [4], [5], [5, 6], [5, 7], [5, 8], [9], [9, 10]]
    for at, numbers in enumerate(listings):
        assert watch.observe([_name("a", number) for number in numbers], 10.0 * at).doubled == ()
    # On a busy host every observation may fall in between, with several records if deletes fail.
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
    # Lags change with every batch: no host reads a record for that.
    root.asked.clear()
    members[0].heartbeat(MemberRecord(records[0].host, replicas=(_replica(0, version=9, lag_versions=1),)))
    assert members[1].look().records[0] == members[2].look().records[0]
    assert "get" not in root.asked
    # A change that affects decisions makes every host read the record.
    members[0].heartbeat(MemberRecord(records[0].host, replicas=(_replica(0, version=9, in_sync=True),)))
    assert [member.look().records[0].replicas[0].in_sync for member in members] == [True] * 5
    assert root.asked["get"] == 4


def test_all_hosts_see_the_same_records(root: Counted, clock: Clock) -> None:
    members = {host: _member(root, host, clock) for host in ("b.1.2", "a/..", "ü 7")}
    for host, member in members.items():
        member.heartbeat(MemberRecord(host, "rack", replicas=(_replica(3, version=5),), addresses={"flight": "x:1"}))
    looks = [member.look() for member in members.values()]
    assert [record.host for record in looks[0].records] == ["a/..", "b.1.2", "ü 7"]
    assert all(look == looks[0] for look in looks)
    assert not looks[0].problems
    assert len(_files(root).names()) == 3


def test_a_host_that_leaves_is_dead_after_three_heartbeats(root: Counted, clock: Clock) -> None:
    a, b = _member(root, "a", clock), _member(root, "b", clock)
    a.heartbeat(MemberRecord("a"))
    b.heartbeat(MemberRecord("b"))
    assert _hosts(a) == ["a", "b"]
    b.leave()
    b.leave()
    assert len(_files(root).names()) == 1
    assert [record.host for record in b.look().records] == ["a"]
    for expected in (["a", "b"], ["a", "b"], ["a"]):
        clock.now_s += HEARTBEAT_S
        a.heartbeat(MemberRecord("a"))
        assert _hosts(a) == expected


def test_a_restarted_service_continues_its_heartbeat_numbers(root: Counted, clock: Clock) -> None:
    """It deletes its old record, and other hosts read the new one instead of the old one."""
    other = _member(root, "b", clock)
    other.heartbeat(MemberRecord("b"))
    first = _member(root, "a", clock)
    first.heartbeat(MemberRecord("a", replicas=(_replica(1),)))
    assert [record.host for record in other.look().records] == ["a", "b"]
    again = _member(root, "a", clock)
    again.heartbeat(MemberRecord("a"))
    assert [RecordName.parse(name)[:2] for name in _files(root).names()] == [("a", 2), ("b", 1)]  # type: ignore[index]
    look = other.look()
    assert (look.records[0].replicas, look.problems) == ((), ())
    assert again.look().problems == ()


def test_two_services_of_one_host_are_reported_by_the_others(root: Counted, clock: Clock) -> None:
    one, two, other = (_member(root, host, clock) for host in ("a", "a", "b"))
    reported = []
    for _ in range(5):
        for member, host in ((one, "a"), (two, "a"), (other, "b")):
            member.heartbeat(MemberRecord(host))
        reported.append([member.look().problems for member in (one, two, other)])
        clock.now_s += HEARTBEAT_S
    assert all("two standby services run under the host name 'a'" in problems[0] for problems in reported[-1])
    # The first service with the shared name reports it at once.
    assert reported[0][0]


def test_a_damaged_record_is_reported_and_its_host_has_no_replicas(root: Counted, clock: Clock) -> None:
    me, other, newer = (_member(root, host, clock) for host in ("a", "b", "c"))
    for member, host in ((me, "a"), (other, "b"), (newer, "c")):
        member.heartbeat(MemberRecord(host, "rack", replicas=(_replica(1),)))
    _, damaged, skewed = _files(root).names()
    whole = _files(root).get(damaged)
    _files(root).put(damaged, whole.replace(b"rack", b"rick"))
    _files(root).put(skewed, _files(root).get(skewed).replace(b'"format": 2', b'"format": 3'))
    _files(root).put("notes.txt", b"who is who")
    look = me.look()
    assert [(record.host, len(record.replicas)) for record in look.records] == [("a", 1), ("b", 0), ("c", 0)]
    strange, b, c = sorted(look.problems, key=lambda problem: ("notes" not in problem, problem))
    assert "notes.txt is not a member record" in strange
    assert damaged in b
    assert "fails its checksum" in b
    assert "format 3" in c
    # The repaired record is read again.
    _files(root).put(damaged, whole)
    assert [(record.host, len(record.replicas)) for record in me.look().records][:2] == [("a", 1), ("b", 1)]
    # A copied folder may hold another host's record under this name.
    _files(root).put("d.1.1.json", whole)
    assert any("is the record of b" in problem for problem in me.look().problems)


def test_a_record_renamed_before_it_is_read_is_read_under_its_next_name(
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
    assert [(record.host, len(record.replicas)) for record in me.look().records] == [("b", 1)]
    # If that fails twice in a row, the host is reported as unread.
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
    # Another host keeps the record that it read before.
    other.heartbeat(MemberRecord("b", replicas=(_replica(1), _replica(2))))
    assert [(record.host, len(record.replicas)) for record in me.look().records] == [("b", 1)]
    assert me.look().unread == ()


def test_the_heartbeat_after_a_failed_write_removes_both_older_records(
    root: Counted, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert [RecordName.parse(name)[1] for name in _files(root).names()] == [3]  # type: ignore[index]
    assert me.look().problems == ()


def test_records_of_hosts_that_died_long_ago_are_removed(root: Counted, clock: Clock) -> None:
    dead, me = _member(root, "dead", clock), _member(root, "me", clock)
    dead.heartbeat(MemberRecord("dead"))
    for _ in range(102):
        me.heartbeat(MemberRecord("me"))
        me.look()
        clock.now_s += HEARTBEAT_S
    assert [RecordName.parse(name)[0] for name in _files(root).names()] == ["me"]  # type: ignore[index]
    # A host that was taken for dead comes back with its next record.
    dead.heartbeat(MemberRecord("dead"))
    assert _hosts(me) == ["dead", "me"]


def test_a_host_cannot_write_the_record_of_another_host(root: Counted, clock: Clock) -> None:
    with pytest.raises(UsageError, match="record of b"):
        _member(root, "a", clock).heartbeat(MemberRecord("b"))


def test_commands_do_not_list_the_standby_folder_as_an_operator(root: Counted, clock: Clock) -> None:
    _member(root, "a", clock).heartbeat(MemberRecord("a"))
    root.child("counts", "q").put("operator_0.json", b"{}")
    assert list(list_operators(root)) == ["counts"]


# -- settings --------------------------------------------------------------------------------------


def test_settings_are_read_back_and_damaged_ones_are_refused(root: Counted) -> None:
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
