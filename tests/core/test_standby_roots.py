"""Following many buckets of a root: which buckets there are, how often they are listed, and which results are reported."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_support import WRITER
from reading_support import Job, as_model, operator_file
from rescaled_query import bucket_in
from standby_support import FAULTY, Faults
from test_rescale import old_job, rescaled

from arrow_schemas import BucketMap
from arrow_schemas.lineage import DELTA, file_name
from arrow_schemas.operator import operator_file_name
from arrow_schemas.standby import BucketKey
from spark_state_ext import open_live
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptFileError, StorageError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.start_records import note_detached
from spark_state_ext.standby.buckets_below_root import Finder, select_query_folders
from spark_state_ext.standby.follower import BucketFollower
from spark_state_ext.standby.roots import Pace, RootFollower, next_wait_s
from spark_state_ext.standby.values import FollowedRoot
from spark_state_ext.store import LocalStore
from spark_state_ext.store.committed_record import CommittedRecord, read_committed, write_committed
from spark_state_ext.testing.model import KEYS, SCHEMA, Model, Row, scan
from tests.helpers.clock import VirtualClock
from tests.helpers.waiting import WAIT_S


class Host:
    """A host with a follower of a root and a virtual clock."""

    def __init__(self, base: Path, **given: Any) -> None:
        (base / "b").mkdir(exist_ok=True)
        self.clock = VirtualClock()
        options = given.pop("storage_options", {})
        self.root = FollowedRoot(str(base / "root"), options, str(base / "b"))
        self.follower = RootFollower(self.root, clock=self.clock, **given)

    def hold_all(self) -> None:
        self.follower.hold(self.follower.find().operators)

    def pass_time(self, seconds: float = 0.0) -> None:
        """Let time pass, and finish all steps that are due."""
        self.clock.sleep(seconds)
        self.follower.tick()
        assert self.follower.drain(WAIT_S)
        self.follower.tick()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "scratch").mkdir()
    job = Job(tmp_path / "root", tmp_path / "scratch")
    yield job
    job.close()


def changes(number: int) -> dict[Any, Row | None]:
    return {key: Row(number) for key in KEYS}


def read_as_task(host: Host, job: Job) -> tuple[Model, int]:
    """Return the state that tasks on the host read, and the number of files that they fetch."""
    model: Model = {}
    fetched = 0
    for bucket, pointer in enumerate(job.pointers[-1]):
        key = BucketKey(job.operator, job.folder.name, bucket)
        store = LocalStore.at(host.root.store_folder(key, 0), SCHEMA)
        replicas = sole_replica(job.folder.child(str(bucket)), job.scratch, "fsspec")
        opened = Bucket(store, replicas, pointer, WRITER, CommitContext(job.scratch))
        model |= opened.read(scan)
        fetched += opened.fetched_files
    return model, fetched


def test_a_host_follows_all_buckets_of_a_job(tmp_path: Path, job: Job) -> None:
    host = Host(tmp_path)
    for number in range(5):
        job.batch(changes(number))
        host.hold_all()
        host.pass_time(1.0)
        assert read_as_task(host, job) == (job.models[-1], 0)
        followed = host.follower.collect_results()
        assert {key.bucket for key in followed} == {0, 1, 2, 3}
        assert all(
            result.is_caught_up and result.batch == number and result.host == "host" for result in followed.values()
        )
    host.follower.close()


def test_a_replica_serves_queryable_state_of_its_host(tmp_path: Path, job: Job) -> None:
    for number in range(6):
        job.batch(changes(number))
        # A process cannot open an LMDB store twice, so the follower ends before the reader starts.
        host = Host(tmp_path)
        host.hold_all()
        host.pass_time(1.0)
        host.follower.close()
        # Only the next batch proves that the last one is committed.
        if number:
            with open_live(str(tmp_path / "b"), "counts", root=str(tmp_path / "root")) as live:
                model: Model = {}
                for part in live.scan():
                    assert part.batch == number - 1
                    assert part.age_ms < 60_000
                    model |= as_model(part.rows)
                assert model == job.models[number - 1]
                name, x = KEYS[0]
                assert live.get((name, x)).rows.to_pylist()[0]["count"] == number - 1


def test_a_newer_committed_record_of_a_task_is_not_overwritten(tmp_path: Path, job: Job) -> None:
    host = Host(tmp_path)
    for number in range(2):
        job.batch(changes(number))
    host.hold_all()
    host.pass_time(1.0)
    key = BucketKey(job.operator, job.folder.name, 0)
    folder = host.root.store_folder(key, 0)
    record = read_committed(folder)
    assert record is not None
    assert record.batch == 0
    newer = CommittedRecord(record.ref, 7, record.called_ms + 3_600_000, "plan", record.namespace)
    operator = operator_file(job.operator, job.query_id, job.buckets)
    write_committed(folder, newer, operator)
    job.batch(changes(2))
    host.pass_time(1.0)
    assert read_committed(folder) == newer
    # An older record, from before the newest file was written: the bucket has moved to another host since.
    older = replace(newer, called_ms=record.called_ms)
    write_committed(folder, older, operator)
    job.batch(changes(3))
    host.pass_time(1.0)
    last = read_committed(folder)
    assert last is not None
    assert (last.batch, last.ref) == (2, job.pointers[-2][0].ref)
    host.follower.close()


def test_the_finder_returns_only_folders_of_buckets(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    root = Folder(str(tmp_path / "root"))
    root.child("_standby", "members").put("a.1.1.json", b"{}")
    root.child("counts", "spill").put("x", b"")
    root.child("counts", "starting").put("x", b"")
    root.child("counts", "query", "lease").put("1.json", b"{}")
    root.child("counts", "query", "parents", "0").put("x", b"")
    root.child("counts", "query", "007").put("x", b"")
    root.child("counts", "query", "4").put("x", b"")
    root.child("nothing", "here").put("x", b"")
    findings = Finder(root).find()
    assert sorted(findings.operators) == [BucketKey("counts", "query", bucket) for bucket in range(4)]
    assert not findings.errors


def test_the_finder_reports_an_unreadable_operator_and_returns_the_other_ones(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    root = Folder(str(tmp_path / "root"))
    root.child("others", "q", "0").put("x", b"")
    good = operator_file("others", "q", 1).encode()
    root.child("others", "q").put(operator_file_name(0), good)
    finder = Finder(root)
    assert len(finder.find().operators) == 5
    root.child("others", "q").put(operator_file_name(1), b"{}")
    findings = finder.find()
    assert isinstance(findings.errors["others"], CorruptFileError)
    # Its bucket is known from before.
    assert len(findings.operators) == 5


def test_only_query_folders_with_recent_files_are_followed() -> None:
    day_ms = 86_400_000
    moved = {"q": 1_000, "q.r0123456789ab": 2_000, "q.rba9876543210": 1_500}
    assert select_query_folders(moved) == ["q.r0123456789ab"]
    # The query went back to the old number of buckets.
    assert select_query_folders({**moved, "q": 3_000}) == ["q"]
    # Two queries are live; of the next pair, one was given up.
    assert select_query_folders({"p": 1_000, "q": 2_000}) == ["p", "q"]
    assert select_query_folders({"p": 1_000, "q": 1_001 + day_ms}) == ["q"]
    # If the store does not report times, all folders are followed.
    assert select_query_folders({"p": None, "q": None}) == ["p", "q"]


def test_a_query_with_a_new_query_folder_is_followed_there(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    host = Host(tmp_path)
    host.hold_all()
    host.pass_time()
    moved = Path(job.folder.root).with_name("query.r0123456789ab")
    shutil.copytree(job.folder.root, moved)
    # The old folder is followed until a batch in the new one is known to be committed.
    assert {key.query_folder for key in host.follower.find().operators} == {"query"}
    note_detached(Folder(str(moved)))
    later_s = moved.stat().st_mtime + 100
    for path in moved.rglob("*"):
        os.utime(path, (later_s, later_s))
    keys = host.follower.find().operators
    assert {key.query_folder for key in keys} == {moved.name}
    host.follower.hold(keys)
    host.pass_time(1.0)
    assert {key.query_folder for key in host.follower.collect_results()} == {moved.name}
    with pytest.raises(UsageError, match="call find"):
        host.follower.hold([BucketKey("counts", "query", 0)])
    host.follower.close()


def test_the_wait_of_a_bucket_grows_with_idle_time_and_failures() -> None:
    pace = Pace(poll_s=1.0, idle_s_max=30.0, failed_s_max=60.0)
    assert [next_wait_s(pace, 1.0, False, idle_s) for idle_s in (0, 8, 16, 240, 1e9)] == [1, 1, 2, 30, 30]
    waits = [0.0]
    for _ in range(8):
        waits.append(next_wait_s(pace, waits[-1], True, 0.0))
    assert waits[1:] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_an_idle_bucket_is_listed_less_often(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.batch(changes(0))
    host = Host(tmp_path)
    host.hold_all()
    steps = count_steps(monkeypatch)
    for _ in range(600):
        host.pass_time(1.0)
    # Each of the 4 buckets is listed after an eighth of its idle time, and every 30 s in the end.
    assert 4 * (8 + 600 / 30 - 240 / 30) <= len(steps) <= 4 * 60
    last = len(steps)
    for _ in range(60):
        host.pass_time(1.0)
    assert len(steps) - last == 8
    # After a write, a bucket is listed every second again.
    job.batch(changes(1))
    host.pass_time(30.0)
    last = len(steps)
    host.pass_time(1.0)
    assert len(steps) - last == 4
    assert read_as_task(host, job) == (job.models[-1], 0)
    host.follower.close()


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[BucketKey]:
    steps: list[BucketKey] = []
    step = BucketFollower.step

    def count_step(self: BucketFollower) -> Any:
        steps.append(self.key)
        return step(self)

    monkeypatch.setattr(BucketFollower, "step", count_step)
    return steps


def test_a_failing_store_is_listed_less_often_and_logged_once_for_each_bucket(
    tmp_path: Path, job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "spark_state_ext")
    job.batch(changes(0))
    Faults.heal()
    host = Host(tmp_path, storage_options=FAULTY, threads_max=1)
    host.hold_all()
    host.pass_time()
    job.batch(changes(1))
    Faults.fail(1)
    steps = count_steps(monkeypatch)
    for _ in range(600):
        host.pass_time(1.0)
    assert len(steps) <= 4 * (600 / 60 + 7)
    followed = host.follower.collect_results()
    assert all(isinstance(result.error, StorageError) and not result.is_caught_up for result in followed.values())
    warnings = [record for record in caplog.records if "is not as new as its files" in record.message]
    assert len(warnings) == 4
    with pytest.raises(StorageError):
        host.follower.find()
    Faults.heal()
    host.pass_time(60.0)
    assert all(result.is_caught_up for result in host.follower.collect_results().values())
    assert len([record for record in caplog.records if "can be followed again" in record.message]) == 4
    assert read_as_task(host, job) == (job.models[-1], 0)
    host.follower.close()


def test_a_damaged_file_of_one_bucket_does_not_affect_other_buckets(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    ref = job.pointers[-1][2].ref
    assert ref is not None
    job.folder.child("2").put(file_name(ref, DELTA), b"no checkpoint file")
    host = Host(tmp_path)
    host.hold_all()
    host.pass_time()
    followed = host.follower.collect_results()
    caught_up = {key.bucket: result.is_caught_up for key, result in followed.items()}
    assert caught_up == {0: True, 1: True, 2: False, 3: True}
    host.follower.close()


def test_an_unexpected_error_of_a_step_is_raised(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.batch(changes(0))
    host = Host(tmp_path)
    host.hold_all()

    def fail(self: BucketFollower) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(BucketFollower, "step", fail)
    with pytest.raises(ZeroDivisionError):
        host.pass_time()
    host.follower.close()


def test_only_replicas_that_are_no_longer_held_are_reclaimed(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    host = Host(tmp_path)
    host.hold_all()
    host.pass_time()
    keys = sorted(host.follower.collect_results())
    folders = {key: host.root.store_folder(key, 0) for key in keys}
    host.follower.hold(keys[:2])
    for folder in folders.values():
        for path in folder.rglob("*"):
            os.utime(path, (1, 1))
    # The replicas that are held count as used even without a write.
    host.pass_time(1.0)
    removed = host.follower.reclaim(3_600.0)
    assert sorted(removed) == [folders[key] for key in keys[2:]]
    assert all(folders[key].is_dir() for key in keys[:2])
    host.follower.hold(keys)
    host.pass_time(1.0)
    assert read_as_task(host, job) == (job.models[-1], 0)
    host.follower.close()


def test_followers_use_a_newer_operator_file(tmp_path: Path, job: Job) -> None:
    job.batch(changes(0))
    host = Host(tmp_path)
    host.hold_all()
    host.pass_time()
    newer = replace(operator_file("counts", "query", 4), schema_id=1)
    job.folder.put(operator_file_name(1), newer.encode())
    host.follower.find()
    host.pass_time(1.0)
    key = BucketKey("counts", "query", 1)
    store = LocalStore.at(host.root.store_folder(key, 1), SCHEMA)
    ref = job.pointers[-1][1].ref
    assert ref is not None
    assert store.has(ref)
    host.follower.close()


@pytest.mark.parametrize("given", [{"threads_max": 0}, {"bandwidth_max_bytes_s": 0}, {"bandwidth_max_bytes_s": -1.0}])
def test_invalid_limits_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RootFollower(FollowedRoot(str(tmp_path)), **given)


def test_replicas_of_a_rescaled_query_start_from_its_parents(tmp_path: Path) -> None:
    """There is no snapshot yet: the follower makes it from the files of the parents, as a task does."""
    old = old_job(tmp_path, 3, [{key: Row(at) for at, key in enumerate(KEYS)}])
    query = rescaled(tmp_path, old, BucketMap(8))
    query.start()
    query.batch({key: Row(7) for key in KEYS[:9]})
    query.folder.put(operator_file_name(0), query.job.operator_file(query.name).encode())
    assert not list((tmp_path / "new").rglob("*.snapshot.arrow"))
    (tmp_path / "b").mkdir()
    root = FollowedRoot(query.job.options.root, local_dir=str(tmp_path / "b"))
    follower = RootFollower(root, clock=VirtualClock())
    follower.hold(follower.find().operators)
    follower.tick()
    assert follower.drain(WAIT_S)
    follower.tick()
    followed = follower.collect_results()
    # A bucket without changes has no files of its own yet, so the follower does not find it.
    assert {str(key.bucket) for key in followed} == set(query.folder.names()) & {str(bucket) for bucket in range(8)}
    assert len(followed) > 3
    assert all(result.is_caught_up for result in followed.values())
    for key in followed:
        pointer = query.pointers[key.bucket]
        rows = scan(LocalStore.at(root.store_folder(key, 0), SCHEMA).view(pointer.ref))
        assert rows == {
            name: row for name, row in query.model.items() if bucket_in(query.bucket_map, name) == key.bucket
        }
    follower.close()
    old.close()
