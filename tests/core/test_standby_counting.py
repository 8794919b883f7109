"""Failovers and lost members: each service counts its own in its process, and a query adds them up."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from reading_support import Job
from standby_hosts import BUCKETS, Hosts, changes, job_of

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.failovers import BEHIND, NO_REPLICA, NO_SERVICE, REPLICA, Failovers
from spark_state_ext.standby.members import Members, write_settings
from spark_state_ext.standby.metrics import StandbyCollector
from spark_state_ext.standby.values import Followed

KEY = BucketKey("counts", "q", 3)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with job_of(tmp_path) as made:
        yield made


def counts_of(hosts: Hosts) -> dict[str, dict[tuple[str, bool], int]]:
    """What each service has counted."""
    return {name: dict(host.part.failovers.takeovers) for name, host in hosts.running.items()}


def moved(job: Job, host: str, number: int) -> None:
    """The tasks of all buckets run on another host from a batch on."""
    job.host = host
    job.batch(changes(number))


def all_followed(base: Path, job: Job, heartbeats: int) -> Hosts:
    """Hosts a, b and c; a is active, the others follow every bucket, and some heartbeats have passed since the last batch."""
    write_settings(Folder(str(base / "root")), StandbySettings(standby_replicas=2))
    job.batch(changes(0))
    hosts = Hosts(base, "a", "b", "c")
    hosts.pass_heartbeats(5)
    job.batch(changes(1))
    hosts.pass_heartbeats(heartbeats)
    return hosts


def test_the_new_host_counts_what_its_tasks_found(tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_state_ext")
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "a", "b", "c")
    hosts.pass_heartbeats(5)
    job.batch(changes(1))
    hosts.pass_heartbeats(1)
    held = hosts.running["b"].held()
    assert 0 < len(held) < BUCKETS
    moved(job, "b", 2)
    hosts.pass_heartbeats(4)
    everything = {"a": {}, "b": {(REPLICA, False): len(held), (NO_REPLICA, False): BUCKETS - len(held)}, "c": {}}
    assert counts_of(hosts) == everything
    assert sum("moved from a to b: " in it.getMessage() for it in caplog.records) == BUCKETS
    assert {it.levelname for it in caplog.records if "moved from" in it.getMessage()} == {"INFO"}
    # It no longer follows what it is active for.
    hosts.pass_heartbeats(6)
    assert hosts.running["b"].held() == set()
    assert hosts.running["a"].held() | hosts.running["c"].held() == set(range(BUCKETS))
    job.batch(changes(3))
    hosts.pass_heartbeats(4)
    assert counts_of(hosts) == everything


def test_a_replica_is_kept_until_its_follower_has_seen_that_its_host_takes_over(tmp_path: Path, job: Job) -> None:
    """Another host may see it first and say so in its record. Only the follower of the new host knows how new its replica was."""
    hosts = all_followed(tmp_path, job, 1)
    moved(job, "b", 2)
    # As if nobody had written the buckets for long: b looks at them once in half a minute, and c does so now.
    for name, wait_s in (("b", 30.0), ("c", 0.0)):
        for held in hosts.running[name].part.follower._held.values():
            held.due_s = hosts.clock() + wait_s
    hosts.pass_heartbeats(2)
    assert {it.active for it in hosts.running["c"].part.last.replicas} == {"b"}
    assert hosts.running["b"].held() == set(range(BUCKETS))
    assert counts_of(hosts)["b"] == {}
    hosts.pass_heartbeats(5)
    assert hosts.running["b"].held() == set()
    assert counts_of(hosts) == {"a": {}, "b": {(REPLICA, False): BUCKETS}, "c": {}}


def test_a_host_that_dies_has_failed(tmp_path: Path, job: Job) -> None:
    hosts = all_followed(tmp_path, job, 1)
    hosts.end("a")
    moved(job, "b", 2)
    hosts.pass_heartbeats(8)
    assert counts_of(hosts) == {"b": {(REPLICA, True): BUCKETS}, "c": {}}
    # Its tasks ran elsewhere long before it was taken for dead.
    assert [dict(host.part.failovers.members_lost) for host in hosts.running.values()] == [{"active": 1}] * 2


def test_one_of_the_others_counts_for_a_host_without_a_service(tmp_path: Path, job: Job) -> None:
    hosts = all_followed(tmp_path, job, 1)
    moved(job, "d", 2)
    hosts.pass_heartbeats(6)
    assert counts_of(hosts) == {"a": {(NO_SERVICE, False): BUCKETS}, "b": {}, "c": {}}


def test_a_service_that_starts_again_begins_at_0(tmp_path: Path, job: Job) -> None:
    hosts = all_followed(tmp_path, job, 1)
    moved(job, "b", 2)
    hosts.pass_heartbeats(6)
    assert counts_of(hosts)["b"] == {(REPLICA, False): BUCKETS}
    hosts.end("b")
    b = hosts.start("b")
    names = {it.name.rpartition("standby_")[2] for it in StandbyCollector(b.service).collect() if it.samples}
    assert names >= {"takeovers", "members_lost"}, "counters of which nothing was counted are 0"
    hosts.pass_heartbeats(6)
    # What a bucket's host was before it started it does not know.
    assert counts_of(hosts) == {"a": {}, "b": {}, "c": {}}
    moved(job, "c", 3)
    hosts.pass_heartbeats(6)
    assert counts_of(hosts) == {"a": {}, "b": {}, "c": {(REPLICA, False): BUCKETS}}


def members(**heartbeats: int) -> Members:
    """Hosts that live, each with a replica."""
    records = tuple(MemberRecord(host, replicas=(StandbyReplica(KEY),)) for host in heartbeats)
    return Members(records, heartbeats=heartbeats)


def takeovers(me: str, now: str, found: Followed | None, *looks: Members) -> Counter[tuple[str, bool]]:
    """What a service counts of a bucket that moves from a at the first look; the look before saw a, b and c."""
    failovers = Failovers(me)
    failovers.see({KEY: "a"}, {}, members(a=1, b=1, c=1))
    for look in looks:
        failovers.see({KEY: now}, {} if found is None else {KEY: found}, look)
    return failovers.takeovers


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (Followed(KEY, host="b", missing_at_move=0), REPLICA),
        (Followed(KEY, host="b", missing_at_move=2), BEHIND),
        (Followed(KEY, host="b"), NO_REPLICA),
        (None, NO_REPLICA),
    ],
)
def test_the_outcome_is_what_the_follower_of_the_new_host_has_seen(found: Followed | None, outcome: str) -> None:
    assert takeovers("b", "b", found, members(a=2, b=2), members(a=3, b=3)) == {(outcome, False): 1}


def test_nothing_is_counted_before_it_is_clear_who_lives() -> None:
    found = Followed(KEY, host="b", missing_at_move=0)
    silent = members(a=2, b=3, c=3)
    assert takeovers("b", "b", found, members(a=2, b=2, c=2), silent, silent) == {}
    assert takeovers("b", "b", found, silent, members(b=4, c=4)) == {(REPLICA, True): 1}
    # Its own service counts, unless that has died.
    assert takeovers("a", "b", None, members(a=2, b=2), members(a=3, b=3), members(a=4, b=4)) == {}
    assert takeovers("a", "b", None, members(a=2, b=2), members(a=3, b=2), members(a=4)) == {(NO_SERVICE, False): 1}


def test_nothing_is_compared_while_a_record_is_unread() -> None:
    """What its host tells is missing then, so that what others tell of may be older."""
    failovers, alive = Failovers("b"), members(a=1, b=1)
    failovers.see({KEY: "b"}, {}, alive)
    failovers.see({KEY: "a"}, {}, Members(alive.records, unread=("c",), heartbeats=alive.heartbeats))
    for number in (2, 3):
        failovers.see({KEY: "b"}, {}, members(a=number, b=number))
    failovers.see({KEY: None}, {}, members(a=4, b=4))
    failovers.see({KEY: "b"}, {}, members(a=5, b=5))
    assert failovers.takeovers == {}


def test_lost_members_are_counted_by_what_they_had() -> None:
    failovers = Failovers("b")
    failovers.see({KEY: "a"}, {}, members(a=1, b=1, c=1))
    failovers.see({KEY: "b"}, {}, members(b=2))
    assert failovers.members_lost == {"active": 1, "standby": 2}


def test_a_follower_tells_what_its_copy_lacked(tmp_path: Path, job: Job) -> None:
    hosts = all_followed(tmp_path, job, 1)
    # The follower is behind when the task begins there.
    for held in hosts.running["b"].part.follower._held.values():
        held.due_s = hosts.clock() + 1e9
    job.batch(changes(2))
    moved(job, "b", 3)
    for held in hosts.running["b"].part.follower._held.values():
        held.due_s = hosts.clock()
    hosts.pass_heartbeats(6)
    assert counts_of(hosts)["b"] == {(BEHIND, False): BUCKETS}
