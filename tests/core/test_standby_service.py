"""The standby service: hosts that agree on who follows what, and what each tells, counts and answers."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_support import WRITER
from reading_support import Job
from standby_support import FAULTY, Faults

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.failovers import BEHIND, NO_REPLICA, NO_SERVICE, REPLICA, Sighting, judge
from spark_state_ext.standby.members import record_numbers, write_settings
from spark_state_ext.standby.metrics import StandbyCollector
from spark_state_ext.standby.roots import RootFollower
from spark_state_ext.standby.service import RootService, StandbyService
from spark_state_ext.standby.status import StandbyStatus, survey
from spark_state_ext.standby.succession import Takeover
from spark_state_ext.standby.values import Followed, FollowedRoot
from spark_state_ext.standby.web import Web
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Model, Row, scanned
from tests.helpers.clock import VirtualClock
from tests.helpers.waiting import WAIT_S

BUCKETS = 4
ROOT = Path(__file__).parents[2]
UNITS = ROOT / "docs" / "operating" / "standby"


class Host:
    """A host with a service, whose time a test lets pass."""

    def __init__(self, base: Path, name: str, clock: VirtualClock, options: dict[str, Any] | None = None) -> None:
        (base / name).mkdir(exist_ok=True)
        self.name = name
        self.root = FollowedRoot(str(base / "root"), options or {}, str(base / name))
        follower = RootFollower(self.root, clock=clock)
        self.part = RootService(self.root, name, None, follower, clock)
        self.service = StandbyService([self.part], 86_400.0, clock)
        self.stop = threading.Event()

    def turn(self) -> None:
        """What is due, to the end."""
        self.service.turn(self.stop)
        assert self.part.follower.drain(WAIT_S)
        self.part.follower.tick()

    def held(self) -> set[int]:
        return {key.bucket for key in self.part.follower.held()}

    def close(self) -> None:
        self.part.close()


class Hosts:
    """Hosts of one root, on one clock."""

    def __init__(self, base: Path, *names: str, options: dict[str, Any] | None = None) -> None:
        self.base, self.options, self.clock = base, options, VirtualClock()
        self.running: dict[str, Host] = {}
        for name in names:
            self.start(name)

    def start(self, name: str) -> Host:
        self.running[name] = Host(self.base, name, self.clock, self.options)
        return self.running[name]

    def end(self, name: str) -> None:
        self.running.pop(name).close()

    def pass_heartbeats(self, count: int) -> None:
        for _ in range(count):
            for _ in range(5):
                self.clock.sleep(2.0)
                for host in self.running.values():
                    host.turn()

    def survey(self, keys: list[BucketKey]) -> StandbyStatus:
        def sleep(seconds: float) -> None:
            self.clock.sleep(seconds)
            for host in self.running.values():
                host.turn()

        return survey(Folder(str(self.base / "root")), keys, self.clock, sleep)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "scratch").mkdir()
    made = Job(tmp_path / "root", tmp_path / "scratch", buckets=BUCKETS, host="a")
    yield made
    made.close()


def keys_of(job: Job) -> list[BucketKey]:
    return [BucketKey(job.operator, job.folder.name, bucket) for bucket in range(BUCKETS)]


def changes(number: int) -> dict[Any, Row | None]:
    return {key: Row(number) for key in KEYS}


def adopted(host: Host, job: Job, bucket: int) -> tuple[Model, int]:
    """What a task on a host reads of a bucket, and how many files it fetches for it."""
    key = BucketKey(job.operator, job.folder.name, bucket)
    store = LocalStore.at(host.root.store_folder(key, 0), SCHEMA)
    try:
        replicas = sole_replica(job.folder.child(str(bucket)), job.scratch, "fsspec")
        it = Bucket(store, replicas, job.pointers[-1][bucket], WRITER, CommitContext(job.scratch))
        return it.read(scanned), it.fetched_files
    finally:
        store.close()


def test_every_bucket_has_its_replica_elsewhere(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "a", "b", "c")
    hosts.pass_heartbeats(5)
    for number in (1, 2):
        job.batch(changes(number))
        hosts.pass_heartbeats(1)
    held = {name: host.held() for name, host in hosts.running.items()}
    assert held["a"] == set()
    assert held["b"] | held["c"] == set(range(BUCKETS))
    assert len(held["b"]) == len(held["c"])
    models = [adopted(hosts.running[name], job, bucket) for name in "bc" for bucket in held[name]]
    assert all(fetched == 0 for _, fetched in models)
    assert {key: row for model, _ in models for key, row in model.items()} == job.models[-1]
    status = hosts.survey(keys_of(job))
    assert status.lacking() == {}
    assert set(status.buckets.values()) == {"a"}
    assert sorted(status.records) == ["a", "b", "c"]
    assert [status.removal(name).safe for name in "abc"] == [True, True, True]


def test_a_host_dies_and_its_replicas_are_made_elsewhere(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b", "c")
    hosts.pass_heartbeats(4)
    assert hosts.running["b"].held() | hosts.running["c"].held() == set(range(BUCKETS))
    hosts.end("c")
    hosts.pass_heartbeats(5)
    assert hosts.running["b"].held() == set(range(BUCKETS))
    status = hosts.survey(keys_of(job))
    assert status.silent == ("c",)
    assert status.lacking() == {}
    assert hosts.running["b"].part.failovers.members_lost == {"standby": 1}
    # With its disk, it knows at once what it had.
    c = hosts.start("c")
    c.turn()
    assert len(c.held()) == BUCKETS // 2


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


def test_who_takes_over_is_counted_once(tmp_path: Path, job: Job) -> None:
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
    # What it has become active for, it follows no more, once others have it.
    hosts.pass_heartbeats(6)
    assert hosts.running["b"].held() == set()
    assert hosts.running["a"].held() | hosts.running["c"].held() == set(range(BUCKETS))
    assert counts_of(hosts) == counts


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


def test_standby_can_be_turned_off_and_on(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    root = Folder(str(tmp_path / "root"))
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(3)
    assert hosts.running["b"].held() == set(range(BUCKETS))
    write_settings(root, StandbySettings(enabled=False))
    hosts.pass_heartbeats(1)
    assert hosts.running["b"].held() == set()
    assert hosts.survey(keys_of(job)).lacking() == {}
    write_settings(root, StandbySettings(standby_replicas=2))
    hosts.pass_heartbeats(2)
    assert hosts.running["b"].held() == set(range(BUCKETS))
    assert sum(hosts.survey(keys_of(job)).lacking().values()) == BUCKETS
    assert any("too few hosts" in it for it in hosts.running["b"].part.last.problems)


def test_a_store_that_fails_ends_nothing(tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b", options=FAULTY)
    hosts.pass_heartbeats(3)
    job.batch(changes(1))
    caplog.set_level(logging.INFO, "spark_state_ext")
    Faults.fail(1)
    try:
        hosts.pass_heartbeats(3)
    finally:
        Faults.heal()
    b = hosts.running["b"]
    assert b.held() == set(range(BUCKETS))
    assert "the disk fails" in b.service.errors[b.part.name]
    assert b.service.ails() == ""
    hosts.pass_heartbeats(8)
    assert b.service.errors == {}
    assert [adopted(b, job, bucket)[1] for bucket in range(BUCKETS)] == [0] * BUCKETS
    told = [it.getMessage() for it in caplog.records]
    assert sum("it is tried again" in it for it in told) == 1
    assert sum("works again" in it for it in told) == 1


def test_a_damaged_file_that_nobody_follows_keeps_no_host_from_telling(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "a")
    hosts.pass_heartbeats(5)
    assert hosts.running["a"].held() == set()
    for path in (Path(job.folder.root) / "0").iterdir():
        path.write_bytes(b"damaged")
    before = record_numbers(Folder(str(tmp_path / "root")))["a"]
    hosts.pass_heartbeats(3)
    a = hosts.running["a"]
    assert record_numbers(Folder(str(tmp_path / "root")))["a"] >= before + 3
    assert a.service.errors == {}
    assert a.held() == set()
    assert sum("no Arrow file" in it for it in a.part.last.problems) == 1


def test_stores_that_cannot_be_removed_end_nothing(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")

    def failing(keep_s: float) -> list[Path]:
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(hosts.running["b"].part.follower, "reclaim", failing)
    hosts.clock.sleep(3_600.0)
    hosts.pass_heartbeats(3)
    assert hosts.running["b"].held() == set(range(BUCKETS))
    assert sum("the disk fails" in it.getMessage() for it in caplog.records) == 1


def test_a_replica_of_which_a_look_does_not_end_is_not_in_sync(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(5)
    b = hosts.running["b"]

    def in_sync(turns: int) -> list[bool]:
        for _ in range(turns):
            hosts.clock.sleep(10.0)
            b.service.turn(b.stop)
            others = [it.step for it in b.part.follower._held.values() if it.step not in (None, hanging)]
            assert not wait(others, WAIT_S).not_done
        return [it.in_sync for it in b.part.last.replicas]

    hanging: Future[Followed] = Future()
    assert in_sync(1) == [True] * BUCKETS
    held = b.part.follower._held[keys_of(job)[0]]
    held.step = hanging
    assert in_sync(6) == [False, *[True] * (BUCKETS - 1)]
    assert held.last is not None
    hanging.set_result(held.last)
    assert in_sync(2) == [True] * BUCKETS


def test_a_root_without_state_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(3)
    told = [it.getMessage() for it in caplog.records if "nothing to follow yet" in it.getMessage()]
    assert len(told) == 1
    assert str(tmp_path / "root") in told[0]


def test_a_service_that_stands_still_ails(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(1)
    hosts.clock.sleep(99.0)
    assert hosts.running["b"].service.ails() == ""
    hosts.clock.sleep(2.0)
    assert hosts.running["b"].service.ails() == "it has stood still for 101 s"


def test_metrics_and_health(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(3)
    service = hosts.running["b"].service
    ails = [""]
    web = Web("127.0.0.1", 0, lambda: ails[0], StandbyCollector(service))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{web.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        where = f'root="{tmp_path / "root"}"'
        assert f'spark_state_ext_standby_replicas_in_sync{{operator="counts",{where}}} 4.0' in lines
        assert f"spark_state_ext_standby_root_up{{{where}}} 1.0" in lines
        assert f'spark_state_ext_standby_takeovers_total{{failed="true",outcome="replica",{where}}} 0.0' in lines
        (read,) = [it for it in lines if it.startswith("spark_state_ext_standby_read_files_total")]
        assert float(read.split()[1]) >= BUCKETS
        assert f"spark_state_ext_standby_recover_s{{{where}}} 0.0" in lines
        with urllib.request.urlopen(f"http://127.0.0.1:{web.port}/healthz") as answer:
            assert answer.read() == b"ok\n"
        ails[0] = "it has stood still"
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{web.port}/healthz")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{web.port}/")
        with pytest.raises(StorageError, match=r"cannot listen on .* Give another --port"):
            Web("127.0.0.1", web.port, lambda: "", StandbyCollector(service))
    finally:
        web.close()


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


def test_who_can_be_taken_away() -> None:
    keys = [BucketKey("counts", "query", at) for at in range(3)]
    has = [StandbyReplica(key, 7, in_sync=True, active="a") for key in keys]
    records = [MemberRecord("b", replicas=(has[0], has[1])), MemberRecord("c", replicas=(has[1],))]
    status = StandbyStatus.of(StandbySettings(), records, {"d"}, keys)
    assert status.lacking() == {keys[2]: 1}
    removal = status.removal("a")
    # Nobody knows who is active for the last one.
    assert (removal.safe, removal.exposed, removal.replicas) == (False, (keys[2],), 0)
    late = replace(has[2], in_sync=False)
    status = StandbyStatus.of(StandbySettings(), [*records, MemberRecord("e", replicas=(late,))], {"d"}, keys)
    assert status.removal("a").exposed == (keys[2],)
    assert status.removal("b").safe
    assert status.removal("b").replicas == 2


# -- the commands ---------------------------------------------------------------------------------


def command(*arguments: str, host: str = "c") -> list[str]:
    return [sys.executable, "-m", "spark_state_ext", "standby", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=ROOT)


def test_the_service_as_a_process(tmp_path: Path, job: Job) -> None:
    for number in range(2):
        job.batch(changes(number))
    root = str(tmp_path / "root")
    done = run("settings", root, "--heartbeat", "0.2", "-o", "json")
    assert json.loads(done.stdout) == {"enabled": True, "standby_replicas": 1, "heartbeat_s": 0.2}
    assert run("status", root).returncode == 1
    (tmp_path / "c").mkdir()
    environment = {**os.environ, "SPARK_STATE_EXT_HOST": "c"}
    # Without a command, it is `run`.
    service = subprocess.Popen(
        command(f"{root}/", "--local-dir", str(tmp_path / "c"), "--port", "0", "--address", "127.0.0.1"),
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    try:
        assert service.stderr is not None
        told = service.stderr.readline()
        assert told.startswith(f"standby of {root}/ on c; port "), told
        done = run("status", root, "--wait", "--timeout", str(WAIT_S), "--replicas", "-o", "json")
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)
        assert [(row["bucket"], row["active"], row["host"], row["in_sync"]) for row in rows] == [
            (bucket, "a", "c", True) for bucket in range(BUCKETS)
        ]
        # Where a task finds it whose job has the root with that slash.
        stores = FollowedRoot(f"{root}/", {}, str(tmp_path / "c"))
        assert all(stores.store_folder(key, 0).is_dir() for key in keys_of(job))
        assert run("status", root, "--safe-to-remove", "a").returncode == 0
        done = run("status", root, "--safe-to-remove", "a.example.org")
        assert done.returncode == 2
        assert "no host a.example.org is known" in done.stderr
        assert done.stderr.rstrip().endswith("Known are: a, c")
        port = told.split("port ")[1].split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
            assert answer.status == 200
        service.send_signal(signal.SIGTERM)
        assert service.wait(WAIT_S) == 0
        assert service.stderr.read().splitlines()[-1] == "stopped"
    finally:
        service.kill()
        service.wait()
    done = run("status", root, "-o", "jsonl")
    assert done.returncode == 1
    hosts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(it["host"], it["alive"], it["replicas"]) for it in hosts] == [("c", False, 0)]


def test_a_root_given_twice_is_refused(tmp_path: Path) -> None:
    done = run("run", f"{tmp_path}", f"{tmp_path}/", "--local-dir", str(tmp_path / "c"))
    assert done.returncode == 2
    assert f"{tmp_path} and {tmp_path}/ are one root" in done.stderr


def test_a_wrong_root_is_refused(tmp_path: Path) -> None:
    done = run("status", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


# -- the files for systemd and Kubernetes ---------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not on this machine")
def test_the_unit_is_one(tmp_path: Path) -> None:
    text = (UNITS / "spark-state-ext-standby.service").read_text()
    # Only what is on this machine can be verified.
    program = tmp_path / "spark-state-ext"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "spark-state-ext-standby.service"
    unit.write_text(
        text.replace("/opt/spark/venv/bin/spark-state-ext", str(program)).replace("User=spark", "User=root")
    )
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    about_it = [line for line in done.stderr.splitlines() if "spark-state-ext" in line]
    assert about_it == []


def test_the_daemon_set_runs_the_command() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with moto, whose server other tests need")
    (found,) = yaml.safe_load_all((UNITS / "daemonset.yaml").read_text())
    assert (found["kind"], found["apiVersion"]) == ("DaemonSet", "apps/v1")
    pod = found["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["hostPID"] is True
    assert container["command"] == ["spark-state-ext", "standby", "run"]
    arguments = container["args"]
    # Typer itself says whether it knows them.
    done = run("run", *arguments[:-1], "--help")
    assert done.returncode == 0, done.stderr
    (mount,) = container["volumeMounts"]
    assert arguments[arguments.index("--local-dir") + 1] == mount["mountPath"]
    ports = {it["name"]: it["containerPort"] for it in container["ports"]}
    assert arguments[arguments.index("--port") + 1] == str(ports["metrics"])
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
