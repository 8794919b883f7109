"""Counters of failovers and lost members: each service has its own, and a metrics query adds them up."""

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
    with job_of(tmp_path) as job:
        yield job


def get_counts(hosts: Hosts) -> dict[str, dict[tuple[str, bool], int]]:
    """Return the takeovers that each service has counted."""
    return {name: dict(host.part.failovers.takeovers) for name, host in hosts.running.items()}


def move_tasks(job: Job, host: str, number: int) -> None:
    """Run the tasks of all buckets on another host, beginning with the given batch."""
    job.host = host
    job.batch(changes(number))


def start_hosts(base: Path, job: Job, heartbeats: int) -> Hosts:
    """Start hosts a, b and c: a is active, b and c follow every bucket. Let some heartbeats pass after the last batch."""
    write_settings(Folder(str(base / "root")), StandbySettings(standby_replicas=2))
    job.batch(changes(0))
    hosts = Hosts(base, "a", "b", "c")
    hosts.pass_heartbeats(5)
    job.batch(changes(1))
    hosts.pass_heartbeats(heartbeats)
    return hosts


def test_the_new_active_host_counts_takeovers_with_and_without_a_replica(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spark_state_ext")
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "a", "b", "c")
    hosts.pass_heartbeats(5)
    job.batch(changes(1))
    hosts.pass_heartbeats(1)
    held = hosts.running["b"].held()
    assert 0 < len(held) < BUCKETS
    move_tasks(job, "b", 2)
    hosts.pass_heartbeats(4)
    counts = {"a": {}, "b": {(REPLICA, False): len(held), (NO_REPLICA, False): BUCKETS - len(held)}, "c": {}}
    assert get_counts(hosts) == counts
    assert sum("moved from a to b: " in record.getMessage() for record in caplog.records) == BUCKETS
    assert {record.levelname for record in caplog.records if "moved from" in record.getMessage()} == {"INFO"}
    # Host b no longer follows the buckets that it is active for.
    hosts.pass_heartbeats(6)
    assert hosts.running["b"].held() == set()
    assert hosts.running["a"].held() | hosts.running["c"].held() == set(range(BUCKETS))
    job.batch(changes(3))
    hosts.pass_heartbeats(4)
    assert get_counts(hosts) == counts


def test_a_replica_is_kept_until_its_own_follower_has_seen_the_takeover(tmp_path: Path, job: Job) -> None:
    """Another host may report the move first. Only the follower of the new host knows how recent its replica was."""
    hosts = start_hosts(tmp_path, job, 1)
    move_tasks(job, "b", 2)
    # Buckets without recent writes are looked at once in half a minute: b will look then, and c looks now.
    for name, wait_s in (("b", 30.0), ("c", 0.0)):
        for held in hosts.running[name].part.follower._held.values():
            held.due_s = hosts.clock() + wait_s
    hosts.pass_heartbeats(2)
    assert {replica.active for replica in hosts.running["c"].part.last.replicas} == {"b"}
    assert hosts.running["b"].held() == set(range(BUCKETS))
    assert get_counts(hosts)["b"] == {}
    hosts.pass_heartbeats(5)
    assert hosts.running["b"].held() == set()
    assert get_counts(hosts) == {"a": {}, "b": {(REPLICA, False): BUCKETS}, "c": {}}


def test_a_takeover_from_a_host_that_died_counts_as_a_failure(tmp_path: Path, job: Job) -> None:
    hosts = start_hosts(tmp_path, job, 1)
    hosts.end("a")
    move_tasks(job, "b", 2)
    hosts.pass_heartbeats(8)
    assert get_counts(hosts) == {"b": {(REPLICA, True): BUCKETS}, "c": {}}
    # Its tasks ran elsewhere long before it was considered dead.
    assert [dict(host.part.failovers.members_lost) for host in hosts.running.values()] == [{"active": 1}] * 2


def test_another_service_counts_a_takeover_by_a_host_without_a_service(tmp_path: Path, job: Job) -> None:
    hosts = start_hosts(tmp_path, job, 1)
    move_tasks(job, "d", 2)
    hosts.pass_heartbeats(6)
    assert get_counts(hosts) == {"a": {(NO_SERVICE, False): BUCKETS}, "b": {}, "c": {}}


def test_the_counters_of_a_restarted_service_start_at_0(tmp_path: Path, job: Job) -> None:
    hosts = start_hosts(tmp_path, job, 1)
    move_tasks(job, "b", 2)
    hosts.pass_heartbeats(6)
    assert get_counts(hosts)["b"] == {(REPLICA, False): BUCKETS}
    hosts.end("b")
    b = hosts.start("b")
    metrics = StandbyCollector(b.service).collect()
    names = {metric.name.rpartition("standby_")[2] for metric in metrics if metric.samples}
    assert names >= {"takeovers", "members_lost"}, "unused counters must be exported as 0"
    hosts.pass_heartbeats(6)
    # The service does not know which host a bucket had before the service started.
    assert get_counts(hosts) == {"a": {}, "b": {}, "c": {}}
    move_tasks(job, "c", 3)
    hosts.pass_heartbeats(6)
    assert get_counts(hosts) == {"a": {}, "b": {}, "c": {(REPLICA, False): BUCKETS}}


def members(**heartbeats: int) -> Members:
    """Return hosts that are alive, each with a replica."""
    records = tuple(MemberRecord(host, replicas=(StandbyReplica(KEY),)) for host in heartbeats)
    return Members(records, heartbeats=heartbeats)


def count_takeovers(me: str, now: str, followed: Followed | None, *looks: Members) -> Counter[tuple[str, bool]]:
    """Return what a service counts if a bucket moves from a at the first look; the look before saw a, b and c alive."""
    failovers = Failovers(me)
    failovers.see({KEY: "a"}, {}, members(a=1, b=1, c=1))
    for look in looks:
        failovers.see({KEY: now}, {} if followed is None else {KEY: followed}, look)
    return failovers.takeovers


@pytest.mark.parametrize(
    ("followed", "outcome"),
    [
        (Followed(KEY, host="b", missing_at_move=0), REPLICA),
        (Followed(KEY, host="b", missing_at_move=2), BEHIND),
        (Followed(KEY, host="b"), NO_REPLICA),
        (None, NO_REPLICA),
    ],
)
def test_the_outcome_of_a_takeover_depends_on_the_follower_of_the_new_host(
    followed: Followed | None, outcome: str
) -> None:
    assert count_takeovers("b", "b", followed, members(a=2, b=2), members(a=3, b=3)) == {(outcome, False): 1}


def test_a_takeover_is_counted_only_once_it_is_clear_which_hosts_are_alive() -> None:
    followed = Followed(KEY, host="b", missing_at_move=0)
    silent = members(a=2, b=3, c=3)
    assert count_takeovers("b", "b", followed, members(a=2, b=2, c=2), silent, silent) == {}
    assert count_takeovers("b", "b", followed, silent, members(b=4, c=4)) == {(REPLICA, True): 1}
    # The service of the new host counts, unless it has died.
    assert count_takeovers("a", "b", None, members(a=2, b=2), members(a=3, b=3), members(a=4, b=4)) == {}
    assert count_takeovers("a", "b", None, members(a=2, b=2), members(a=3, b=2), members(a=4)) == {
        (NO_SERVICE, False): 1
    }


def test_a_takeover_is_not_counted_while_a_record_is_unread() -> None:
    """The unread record is missing then, so that the records of other hosts may be older."""
    failovers, alive = Failovers("b"), members(a=1, b=1)
    failovers.see({KEY: "b"}, {}, alive)
    failovers.see({KEY: "a"}, {}, Members(alive.records, unread=("c",), heartbeats=alive.heartbeats))
    for number in (2, 3):
        failovers.see({KEY: "b"}, {}, members(a=number, b=number))
    failovers.see({KEY: None}, {}, members(a=4, b=4))
    failovers.see({KEY: "b"}, {}, members(a=5, b=5))
    assert failovers.takeovers == {}


def test_lost_members_are_counted_as_active_or_standby() -> None:
    failovers = Failovers("b")
    failovers.see({KEY: "a"}, {}, members(a=1, b=1, c=1))
    failovers.see({KEY: "b"}, {}, members(b=2))
    assert failovers.members_lost == {"active": 1, "standby": 2}


def test_a_takeover_by_a_replica_that_is_behind_is_counted_as_such(tmp_path: Path, job: Job) -> None:
    hosts = start_hosts(tmp_path, job, 1)
    # The follower is behind when the task starts on its host.
    for held in hosts.running["b"].part.follower._held.values():
        held.due_s = hosts.clock() + 1e9
    job.batch(changes(2))
    move_tasks(job, "b", 3)
    for held in hosts.running["b"].part.follower._held.values():
        held.due_s = hosts.clock()
    hosts.pass_heartbeats(6)
    assert get_counts(hosts)["b"] == {(BEHIND, False): BUCKETS}
