"""Takeovers and dead hosts: counted once, whoever lives, and not forgotten."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reading_support import Job
from standby_hosts import BUCKETS, Host, Hosts, changes, job_of

from arrow_schemas.standby import StandbySettings
from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.failovers import BEHIND, NO_REPLICA, NO_SERVICE, REPLICA, Sighting, judge
from spark_state_ext.standby.members import write_settings
from spark_state_ext.standby.metrics import StandbyCollector
from spark_state_ext.standby.succession import Takeover


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with job_of(tmp_path) as made:
        yield made


def counts_of(hosts: Hosts) -> dict[str, dict[tuple[str, bool], int]]:
    """What each service tells that it has counted."""
    return {name: dict(host.part.failovers.takeovers) for name, host in hosts.running.items()}


def moved(job: Job, host: str, number: int) -> None:
    """The tasks of all buckets run on another host: a batch, and one more, which proves it committed."""
    job.host = host
    job.batch(changes(number))
    job.batch(changes(number + 1))


def all_followed(base: Path, job: Job, heartbeats: int) -> Hosts:
    """Hosts a, b and c; a is active, the others follow every bucket, and some heartbeats have passed since the last batch."""
    write_settings(Folder(str(base / "root")), StandbySettings(standby_replicas=2))
    job.batch(changes(0))
    hosts = Hosts(base, "a", "b", "c")
    hosts.pass_heartbeats(5)
    job.batch(changes(1))
    hosts.pass_heartbeats(heartbeats)
    return hosts


def test_who_takes_over_is_counted_once(tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_state_ext")
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "a", "b", "c")
    hosts.pass_heartbeats(5)
    job.batch(changes(1))
    hosts.pass_heartbeats(1)
    held = hosts.running["b"].held()
    # The task of every bucket runs on one host now.
    job.host = "b"
    job.batch(changes(2))
    hosts.pass_heartbeats(4)
    # It follows them until others know how new its copy was.
    assert hosts.running["b"].held() >= held
    assert counts_of(hosts) == {"a": {}, "b": {}, "c": {}}
    job.batch(changes(3))
    hosts.pass_heartbeats(3)
    counts = counts_of(hosts)
    assert counts["b"][REPLICA, False] == len(held)
    assert sum(it.get((NO_REPLICA, False), 0) for it in counts.values()) == BUCKETS - len(held)
    assert sum(n for it in counts.values() for n in it.values()) == BUCKETS
    assert sum("moved from a to b in batch 2: " in it.getMessage() for it in caplog.records) == BUCKETS
    # What it has become active for, it follows no more, once others have it.
    hosts.pass_heartbeats(6)
    assert hosts.running["b"].held() == set()
    assert hosts.running["a"].held() | hosts.running["c"].held() == set(range(BUCKETS))
    assert counts_of(hosts) == counts


def test_a_replica_is_kept_until_its_host_has_seen_that_it_takes_over(tmp_path: Path, job: Job) -> None:
    """Another host may see it first, and tells so. Only the new host itself knows how new its replica was."""
    hosts = all_followed(tmp_path, job, 1)
    moved(job, "b", 2)
    # As where nobody has written the buckets for long: b looks at them once in half a minute, and c does so now.
    for name, wait_s in (("b", 30.0), ("c", 0.0)):
        for held in hosts.running[name].part.follower._held.values():
            held.due_s = hosts.clock() + wait_s
    hosts.pass_heartbeats(2)
    assert {it.active for it in hosts.running["c"].part.last.replicas} == {"b"}
    assert hosts.running["b"].held() == set(range(BUCKETS))
    hosts.pass_heartbeats(5)
    assert counts_of(hosts) == {"a": {}, "b": {(REPLICA, False): BUCKETS}, "c": {}}


def test_counts_outlive_the_service(tmp_path: Path, job: Job) -> None:
    hosts = all_followed(tmp_path, job, 1)
    moved(job, "b", 2)
    hosts.pass_heartbeats(4)
    assert counts_of(hosts) == {"a": {}, "b": {(REPLICA, False): BUCKETS}, "c": {}}
    hosts.end("b")
    # While it is away the buckets move on, and back to it.
    moved(job, "c", 4)
    hosts.pass_heartbeats(8)
    assert counts_of(hosts) == {"a": {}, "c": {(REPLICA, True): BUCKETS}}
    # Its tasks ran elsewhere long before it was taken for dead.
    assert [hosts.running[name].part.failovers.members_lost["active"] for name in "ac"] == [1, 1]
    moved(job, "b", 6)
    hosts.pass_heartbeats(8)
    assert counts_of(hosts) == {"a": {(NO_SERVICE, False): BUCKETS}, "c": {(REPLICA, True): BUCKETS}}
    hosts.start("b")
    hosts.pass_heartbeats(8)
    everything = {
        "a": {(NO_SERVICE, False): BUCKETS},
        "b": {(REPLICA, False): BUCKETS},
        "c": {(REPLICA, True): BUCKETS},
    }
    assert counts_of(hosts) == everything
    # Whoever comes again has counted what its record says.
    for name in "abc":
        hosts.end(name)
        hosts.start(name)
    hosts.pass_heartbeats(8)
    assert counts_of(hosts) == everything


def test_what_the_dead_have_counted_is_not_counted_again(tmp_path: Path, job: Job) -> None:
    hosts = all_followed(tmp_path, job, 2)
    # b and c followed all, and each follows half of them from now on.
    write_settings(Folder(str(tmp_path / "root")), StandbySettings(standby_replicas=1))
    hosts.pass_heartbeats(5)
    moved(job, "b", 2)
    hosts.pass_heartbeats(8)
    before = counts_of(hosts)
    assert sum(n for it in before.values() for n in it.values()) == BUCKETS
    # What c alone has counted nobody else knows; b follows these buckets again when it is not active for them any more.
    counted = hosts.running["c"].part.failovers.counted.keys() - hosts.running["b"].part.failovers.counted.keys()
    assert counted
    hosts.end("c")
    hosts.pass_heartbeats(5)
    moved(job, "a", 4)
    hosts.pass_heartbeats(12)
    assert hosts.running["b"].held() == set(range(BUCKETS))
    after = counts_of(hosts)
    assert sum(n for it in after.values() for n in it.values()) + sum(before["c"].values()) == 2 * BUCKETS


def test_what_was_counted_stays_where_the_record_before_cannot_be_deleted(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = all_followed(tmp_path, job, 1)
    moved(job, "b", 2)

    def failing(folder: Folder, name: str) -> None:
        raise StorageError(f"{folder.where(name)} cannot be removed")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "remove", failing)
        hosts.pass_heartbeats(4)
        assert "cannot be removed" in hosts.running["b"].service.errors[hosts.running["b"].part.name]
    hosts.pass_heartbeats(4)
    assert hosts.running["b"].service.errors == {}
    assert counts_of(hosts) == {"a": {}, "b": {(REPLICA, False): BUCKETS}, "c": {}}


def test_what_moved_while_no_service_lived_is_counted_later(tmp_path: Path, job: Job) -> None:
    hosts = all_followed(tmp_path, job, 2)
    for name in "abc":
        hosts.end(name)
    moved(job, "b", 2)
    for name in "bca":
        hosts.start(name)
    hosts.pass_heartbeats(15)
    assert counts_of(hosts) == {"a": {}, "b": {(NO_SERVICE, False): BUCKETS}, "c": {}}


def test_the_next_one_counts_where_the_new_host_dies(tmp_path: Path, job: Job) -> None:
    hosts = all_followed(tmp_path, job, 2)
    job.host = "b"
    job.batch(changes(2))
    hosts.pass_heartbeats(1)
    hosts.end("b")
    job.batch(changes(3))
    hosts.pass_heartbeats(12)
    assert counts_of(hosts) == {"a": {(REPLICA, False): BUCKETS}, "c": {}}
    hosts.start("b")
    hosts.pass_heartbeats(12)
    assert counts_of(hosts) == {"a": {(REPLICA, False): BUCKETS}, "b": {}, "c": {}}


def seen(before: str, now: str, order: str, *, lag: int | None = 0, replica: bool | None = None, looks: int = 2) -> Any:
    """A takeover, as records told of it when everybody had the first heartbeat."""
    return Sighting(Takeover(before, now, 7, 6, lag), tuple(order), replica, {before: 1, now: 1}, looks)


@pytest.mark.parametrize(
    ("sighting", "me", "alive", "outcome"),
    [
        (seen("a", "b", "bc"), "b", "abc", (REPLICA, False)),
        (seen("a", "b", "bc"), "b", "bc", (REPLICA, True)),
        (seen("a", "b", "b", lag=2), "b", "b", (BEHIND, True)),
        (seen("a", "b", "b", lag=None), "b", "b", (NO_REPLICA, True)),
        # It is the new host's turn, for some time.
        (seen("a", "b", "bc"), "c", "abc", None),
        (seen("a", "b", "bc", replica=True, looks=11), "c", "abc", (REPLICA, False)),
        (seen("a", "b", "bc", replica=True), "c", "ac", (REPLICA, False)),
        (seen("a", "b", "bc", replica=False), "c", "c", (BEHIND, True)),
        (seen("a", "d", "ce"), "c", "cde", (NO_REPLICA, True)),
        (seen("a", "d", "ce"), "e", "cde", None),
        (seen("a", "d", "ce"), "e", "de", (NO_REPLICA, True)),
        (seen("a", "d", "c"), "c", "ac", (NO_SERVICE, False)),
        # Who had not told of itself yet comes after the others.
        (seen("a", "d", "c"), "e", "ce", None),
        (seen("a", "d", "c"), "e", "e", (NO_SERVICE, True)),
    ],
)
def test_one_host_counts_a_takeover(sighting: Sighting, me: str, alive: str, outcome: Any) -> None:
    found = judge(sighting, me, dict.fromkeys(alive, 2), came_back=False)
    assert (None if found is None else (found.outcome, found.died)) == outcome


def test_nobody_counts_before_it_is_clear_who_lives() -> None:
    sighting = seen("a", "b", "bc")
    assert judge(sighting, "b", {"a": 1, "b": 2}, came_back=False) is None
    assert judge(sighting, "b", {"a": 2, "b": 2}, came_back=False) is not None
    assert judge(sighting, "b", {"b": 2}, came_back=False) is not None
    assert judge(sighting, "c", {"a": 2, "b": 1, "c": 2}, came_back=False) is None


def test_no_counter_is_told_before_what_was_counted_is_known(tmp_path: Path, job: Job) -> None:
    """A counter that goes back to 0 and up again counts twice for who watches it."""

    def told(host: Host) -> set[str]:
        return {it.name.rpartition("standby_")[2] for it in StandbyCollector(host.service).collect() if it.samples}

    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")
    assert told(hosts.running["b"]) & {"takeovers", "members_lost"} == set()
    hosts.pass_heartbeats(1)
    assert told(hosts.running["b"]) >= {"takeovers", "members_lost"}
