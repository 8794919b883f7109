"""The standby service: how hosts share the replicas, report problems and answer HTTP requests."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path

import pytest
from core_support import WRITER
from reading_support import Job
from standby_hosts import BUCKETS, Host, Hosts, changes, job_of, keys_of
from standby_support import FAULTY, Faults

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.cli.standby import build_host_rows, build_replica_rows, build_replica_table, describe_failures
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.members import record_numbers, write_settings
from spark_state_ext.standby.metrics import StandbyCollector
from spark_state_ext.standby.service import StandbyService
from spark_state_ext.standby.status import StandbyStatus
from spark_state_ext.standby.values import Followed
from spark_state_ext.standby.web import Web
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import SCHEMA, Model, scan
from tests.helpers.waiting import WAIT_S


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with job_of(tmp_path) as job:
        yield job


def read_bucket(host: Host, job: Job, bucket: int) -> tuple[Model, int]:
    """Read a bucket as a task on the host; return its rows and the number of files fetched."""
    key = BucketKey(job.operator, job.folder.name, bucket)
    store = LocalStore.at(host.root.store_folder(key, 0), SCHEMA)
    try:
        replicas = sole_replica(job.folder.child(str(bucket)), job.scratch, "fsspec")
        opened = Bucket(store, replicas, job.pointers[-1][bucket], WRITER, CommitContext(job.scratch))
        return opened.read(scan), opened.fetched_files
    finally:
        store.close()


def test_every_bucket_has_a_replica_on_a_host_that_is_not_active(tmp_path: Path, job: Job) -> None:
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
    models = [read_bucket(hosts.running[name], job, bucket) for name in "bc" for bucket in held[name]]
    assert all(fetched == 0 for _, fetched in models)
    assert {key: row for model, _ in models for key, row in model.items()} == job.models[-1]
    status = hosts.survey(keys_of(job))
    assert status.lacking() == {}
    assert set(status.buckets.values()) == {"a"}
    assert sorted(status.records) == ["a", "b", "c"]
    assert [status.removal(name).safe for name in "abc"] == [True, True, True]


def test_the_replicas_of_a_dead_host_move_to_another_host(tmp_path: Path, job: Job) -> None:
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
    # Restarted with its disk, the host has its replicas at once.
    c = hosts.start("c")
    c.turn()
    assert len(c.held()) == BUCKETS // 2


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
    assert any("too few hosts" in problem for problem in hosts.running["b"].part.last.problems)


def test_a_shorter_heartbeat_does_not_make_hosts_look_dead(tmp_path: Path, job: Job) -> None:
    """Hosts read the new setting at different times; until then they write at the old interval."""
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(1)
    for _ in range(3):
        hosts.clock.sleep(2.0)
        hosts.running["b"].turn()
    hosts.start("c")
    hosts.pass_heartbeats(4)
    held = {name: host.held() for name, host in hosts.running.items()}
    assert len(held["b"]) == len(held["c"]) == BUCKETS // 2
    write_settings(Folder(str(tmp_path / "root")), StandbySettings(heartbeat_s=1.0))
    for _ in range(15):
        hosts.clock.sleep(1.0)
        for name, host in hosts.running.items():
            host.turn()
            assert host.held() == held[name]
    assert [host.part.last.settings.heartbeat_s for host in hosts.running.values()] == [1.0, 1.0]
    assert [host.part.failovers.members_lost for host in hosts.running.values()] == [{}, {}]
    hosts.end("c")
    for _ in range(40):
        hosts.clock.sleep(1.0)
        hosts.running["b"].turn()
    assert hosts.running["b"].held() == set(range(BUCKETS))


def test_a_failing_store_does_not_end_the_service(tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture) -> None:
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
    assert [read_bucket(b, job, bucket)[1] for bucket in range(BUCKETS)] == [0] * BUCKETS
    messages = [record.getMessage() for record in caplog.records]
    assert sum("trying again" in message for message in messages) == 1
    assert sum("works again" in message for message in messages) == 1


def test_a_damaged_file_of_an_unassigned_bucket_does_not_stop_heartbeats(tmp_path: Path, job: Job) -> None:
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
    assert sum("not an Arrow file" in problem for problem in a.part.last.problems) == 1


def test_failing_to_remove_local_stores_does_not_end_the_service(
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
    assert sum("the disk fails" in record.getMessage() for record in caplog.records) == 1


def test_a_replica_whose_check_hangs_is_not_in_sync(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(5)
    b = hosts.running["b"]

    def in_sync(turns: int) -> list[bool]:
        for _ in range(turns):
            hosts.clock.sleep(10.0)
            b.service.turn(b.stop)
            others = [held.step for held in b.part.follower._held.values() if held.step not in (None, hanging)]
            assert not wait(others, WAIT_S).not_done
        return [replica.in_sync for replica in b.part.last.replicas]

    hanging: Future[Followed] = Future()
    assert in_sync(1) == [True] * BUCKETS
    held = b.part.follower._held[keys_of(job)[0]]
    held.step = hanging
    assert in_sync(6) == [False, *[True] * (BUCKETS - 1)]
    assert held.last is not None
    hanging.set_result(held.last)
    assert in_sync(2) == [True] * BUCKETS


def test_a_root_without_state_is_logged_and_not_created(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(3)
    (message,) = [record.getMessage() for record in caplog.records if "standby of" in record.getMessage()]
    assert f"there is nothing in {tmp_path / 'root'}: no job has written there yet" in message
    # The service must not create a folder for a mistyped root.
    assert not (tmp_path / "root").exists()
    write_settings(Folder(str(tmp_path / "root")), StandbySettings())
    hosts.pass_heartbeats(3)
    assert hosts.running["b"].service.errors == {}
    assert sum("nothing to follow yet" in record.getMessage() for record in caplog.records) == 1


def test_a_root_that_disappears_is_not_recreated(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(5)
    b, root = hosts.running["b"], tmp_path / "root"

    def up() -> list[float]:
        (root_up,) = [metric for metric in StandbyCollector(b.service).collect() if metric.name.endswith("root_up")]
        return [sample.value for sample in root_up.samples]

    assert up() == [1.0]
    root.rename(tmp_path / "elsewhere")
    hosts.pass_heartbeats(5)
    assert not root.exists()
    assert up() == [0.0]
    assert b.service.ails() == ""
    (tmp_path / "elsewhere").rename(root)
    job.batch(changes(1))
    hosts.pass_heartbeats(2)
    assert up() == [1.0]
    assert b.held() == set(range(BUCKETS))
    assert [read_bucket(b, job, bucket)[1] for bucket in range(BUCKETS)] == [0] * BUCKETS


def test_the_status_gives_the_reason_of_each_failing_replica(tmp_path: Path, job: Job) -> None:
    """Replica 0 has only a damaged file, replica 1 a damaged newest file; the other two are healthy."""
    job.batch(changes(0))
    folders = [Path(job.folder.root) / str(bucket) for bucket in range(BUCKETS)]
    (only,) = folders[0].glob("*.delta.arrow")
    only.write_bytes(b"damaged")
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(3)
    before = set(folders[1].iterdir())
    job.batch(changes(1))
    for path in set(folders[1].iterdir()) - before:
        path.write_bytes(b"damaged")
    hosts.pass_heartbeats(5)
    status = hosts.survey(keys_of(job))
    never, late, *others = build_replica_rows(status)
    assert [row["in_sync"] for row in (never, late, *others)] == [False, False, True, True]
    assert [row["failing"] for row in others] == [None, None]
    assert "CorruptFileError: " in never["failing"]
    assert str(only) in never["failing"]
    assert late["version"] == 1
    # It lags since the host was given the replica.
    assert never["lag_s"] >= 60.0
    assert [row["failing"] for row in build_host_rows(status)] == [0, 2]
    assert not status.is_well()
    assert [line.partition(":")[0] for line in describe_failures(status)] == [
        f"b cannot follow {key}" for key in keys_of(job)[:2]
    ]
    assert [row["replica"] for row in build_replica_table(status).to_pylist()] == [
        "failing",
        "failing",
        "in sync",
        "in sync",
    ]


def test_two_services_with_one_host_name_are_reported(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")
    hosts.running["other"] = Host(tmp_path, "b", hosts.clock)
    hosts.pass_heartbeats(4)
    status = hosts.survey(keys_of(job))
    assert sum("two standby services run under the host name 'b'" in problem for problem in status.problems) == 1
    assert (status.lacking(), status.is_well()) == ({}, False)
    for host in hosts.running.values():
        assert "two standby services run under the host name 'b'" in host.service.warnings()[0]
    hosts.end("other")
    hosts.pass_heartbeats(4)
    assert hosts.running["b"].service.warnings() == []
    assert hosts.survey(keys_of(job)).is_well()


def test_a_service_that_made_no_turn_for_100_s_is_unhealthy(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(1)
    hosts.clock.sleep(99.0)
    assert hosts.running["b"].service.ails() == ""
    hosts.clock.sleep(2.0)
    assert hosts.running["b"].service.ails() == "it has stood still for 101 s"


def test_the_web_server_answers_metrics_and_health(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    hosts = Hosts(tmp_path, "b")
    hosts.pass_heartbeats(3)
    service = hosts.running["b"].service
    ails, warnings = [""], ["two services have one name"]
    web = Web("127.0.0.1", 0, lambda: ails[0], StandbyCollector(service), lambda: warnings)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{web.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        where = f'root="{tmp_path / "root"}"'
        assert f'spark_state_ext_standby_replicas_in_sync{{operator="counts",{where}}} 4.0' in lines
        assert f"spark_state_ext_standby_root_up{{{where}}} 1.0" in lines
        assert f'spark_state_ext_standby_takeovers_total{{failed="true",outcome="replica",{where}}} 0.0' in lines
        (read,) = [line for line in lines if line.startswith("spark_state_ext_standby_read_files_total")]
        assert float(read.split()[1]) >= BUCKETS
        assert f"spark_state_ext_standby_recover_s{{{where}}} 0.0" in lines
        with urllib.request.urlopen(f"http://127.0.0.1:{web.port}/healthz") as answer:
            assert answer.read() == b"ok\ntwo services have one name\n"
        ails[0] = "it has stood still"
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{web.port}/healthz")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{web.port}/")
        with pytest.raises(StorageError, match=r"cannot listen on .* Give another --port"):
            Web("127.0.0.1", web.port, lambda: "", StandbyCollector(service))
    finally:
        web.close()


def test_idle_connections_do_not_block_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    # No connection is too old before the test says so, however slow the machine is.
    monkeypatch.setattr("spark_state_ext.standby.web._CONNECTION_S_MAX", WAIT_S)
    web = Web("127.0.0.1", 0, lambda: "", StandbyCollector(StandbyService([], 1.0)))
    try:
        with contextlib.ExitStack() as opened:
            where = ("127.0.0.1", web.port)
            idle = [opened.enter_context(socket.create_connection(where, WAIT_S)) for _ in range(60)]
            with urllib.request.urlopen(f"http://127.0.0.1:{web.port}/healthz") as answer:
                assert answer.read() == b"ok\n"
            # The server closed the oldest connections for newer ones.
            assert [connection.recv(1) for connection in idle[:29]] == [b""] * 29
            idle[-1].settimeout(0.05)
            with pytest.raises(TimeoutError):
                idle[-1].recv(1)
            monkeypatch.setattr("spark_state_ext.standby.web._CONNECTION_S_MAX", 0.0)
            idle[-1].settimeout(WAIT_S)
            assert idle[-1].recv(1) == b""
    finally:
        web.close()


def test_the_status_says_which_hosts_can_be_removed_safely() -> None:
    keys = [BucketKey("counts", "query", at) for at in range(3)]
    has = [StandbyReplica(key, 7, in_sync=True, active="a") for key in keys]
    records = [MemberRecord("b", replicas=(has[0], has[1])), MemberRecord("c", replicas=(has[1],))]
    status = StandbyStatus.of(StandbySettings(), records, {"d"}, keys)
    assert status.lacking() == {keys[2]: 1}
    removal = status.removal("a")
    # The active host of the last bucket is unknown.
    assert (removal.safe, removal.exposed, removal.replicas) == (False, (keys[2],), 0)
    late = replace(has[2], in_sync=False)
    status = StandbyStatus.of(StandbySettings(), [*records, MemberRecord("e", replicas=(late,))], {"d"}, keys)
    assert status.removal("a").exposed == (keys[2],)
    assert status.removal("b").safe
    assert status.removal("b").replicas == 2
