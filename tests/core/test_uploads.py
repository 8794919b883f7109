"""Uploads in the background of batches: their order, failures, processes that die, and threads that hang."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from arrow_schemas import CheckpointRef
from spark_state_ext.backends import STATE, Checkpoint, CleanUp, Markers
from spark_state_ext.commit.committer import await_all
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.failures import Run
from spark_state_ext.commit.ledger import DONE, FAILED, RUNNING, UploadRecord, record_name
from spark_state_ext.commit.tally import Tally
from spark_state_ext.commit.uploads import THREADS_MAX, Upload, WorkerUploads
from spark_state_ext.errors import CommitTimeoutError, StorageError, UploadFailedError
from spark_state_ext.files.sealed_file import SealedFile
from spark_state_ext.store import LocalStore
from spark_state_ext.store.environment import Environment
from spark_state_ext.testing.model import SCHEMA, Refs
from spark_state_ext.worker import process
from spark_state_ext.worker.threads import DaemonPool
from tests.helpers.waiting import WAIT_S


class Manager:
    """A backend whose uploads call a function of the test."""

    def __init__(self, executor: Executor, work: Callable[[str], None] = lambda name: None) -> None:
        self.executor = executor
        self.work = work
        self.kept: list[str] = []
        self.threads: set[str] = set()

    def init(self, checkpoint: Checkpoint | None) -> None: ...

    def snapshot(self, ref: CheckpointRef, files: Mapping[str, SealedFile]) -> Markers:
        return {store: f"marker of {file.name}" for store, file in files.items()}

    def upload(self, ref: CheckpointRef, markers: Markers) -> Future[Markers]:
        def send() -> Markers:
            self.threads.add(threading.current_thread().name)
            self.work(markers[STATE])
            self.kept.append(markers[STATE])
            return markers

        return self.executor.submit(send)

    def clean_up(self, request: CleanUp) -> Future[int]:
        raise NotImplementedError("these tests only upload")

    def close(self) -> None: ...


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    opened = LocalStore.at(tmp_path / "store", SCHEMA)
    yield opened
    opened.close()


def make_upload(store: LocalStore, manager: Manager, ref: CheckpointRef, backend: str = "a") -> Upload:
    sealed = SealedFile.of(f"{ref}.delta.arrow", b"x")
    markers = manager.snapshot(ref, {STATE: sealed})
    return Upload(store, backend, manager, ref, sealed.name, markers, time.monotonic())


def record_and_submit(store: LocalStore, uploads: WorkerUploads, submitted: list[Upload]) -> None:
    """Record uploads and then submit them, as the committer does."""
    records: dict[str, bytes] = {}
    for upload in submitted:
        records |= upload.record(RUNNING, uploads.owner)
    store.record(records)
    uploads.submit(submitted)


def read_record(store: LocalStore, upload: Upload) -> UploadRecord | None:
    value = store.records().get(record_name(upload.backend, upload.file))
    return None if value is None else UploadRecord.decode(value)


def test_files_of_a_bucket_are_uploaded_in_order_and_recorded(store: LocalStore) -> None:
    uploads, refs, under_way = WorkerUploads(), Refs(), []

    def check_alone(name: str) -> None:
        under_way.append(name)
        assert len(under_way) == 1
        time.sleep(0.01)
        under_way.pop()

    manager = Manager(uploads.pool("a"), check_alone)
    submitted = [make_upload(store, manager, refs.next(version)) for version in range(1, 9)]
    uploads.submit(submitted)
    assert uploads.find(store, "a", submitted[-1].file) is submitted[-1]
    await_all(submitted, uploads, CommitOptions())
    assert manager.kept == [upload.markers[STATE] for upload in submitted]
    for upload in submitted:
        assert uploads.find(store, "a", upload.file) is None
        record = read_record(store, upload)
        assert record is not None
        assert (record.state, record.markers, record.owner) == (DONE, upload.markers, process.get_process_token())


def test_buckets_are_uploaded_in_parallel_by_a_bounded_number_of_threads(tmp_path: Path) -> None:
    uploads, running, running_max = WorkerUploads(), [0], [0]
    lock, all_at_work = threading.Lock(), threading.Event()

    def count_running(name: str) -> None:
        with lock:
            running[0] += 1
            running_max[0] = max(running_max[0], running[0])
        if running_max[0] >= THREADS_MAX:
            all_at_work.set()
        assert all_at_work.wait(WAIT_S)
        with lock:
            running[0] -= 1

    manager = Manager(uploads.pool("a"), count_running)
    stores = [LocalStore.at(tmp_path / str(bucket), SCHEMA) for bucket in range(THREADS_MAX + 16)]
    submitted = [make_upload(store, manager, Refs().next(1)) for store in stores]
    uploads.submit(submitted)
    await_all(submitted, uploads, CommitOptions())
    assert running_max[0] == THREADS_MAX
    assert len(manager.threads) == 1, "all threads must have the name of their pool"
    for store in stores:
        store.close()


def test_files_after_a_failed_upload_are_not_sent(store: LocalStore) -> None:
    uploads, refs = WorkerUploads(), Refs()

    def fail_third(name: str) -> None:
        if name.startswith("marker of 3_"):
            raise PermissionError("not yours")

    manager = Manager(uploads.pool("a"), fail_third)
    submitted = [make_upload(store, manager, refs.next(version)) for version in range(1, 6)]
    record_and_submit(store, uploads, submitted)
    with pytest.raises(UploadFailedError, match=r"3_\w+\.delta\.arrow to the backend a failed: PermissionError"):
        await_all(submitted, uploads, CommitOptions())
    assert len(manager.kept) == 2
    states = [None if (record := read_record(store, upload)) is None else record.state for upload in submitted]
    # The last two were not started and have no records, so the next call starts them.
    assert states == [DONE, DONE, FAILED, None, None]
    with pytest.raises(StorageError, match="was not sent, because"):
        submitted[-1].done.result(WAIT_S)
    # Metrics count each upload once. An upload that was not sent is not a failure.
    tally = uploads.sent(store)
    assert (tally.confirmed, tally.failures) == (2, 1)
    assert uploads.sent(store) == Tally()
    later = make_upload(store, manager, refs.next(6))
    uploads.submit([later])
    await_all([later], uploads, CommitOptions())


def test_the_cause_is_reported_if_an_upload_fails_after_it_was_looked_at(store: LocalStore) -> None:
    uploads, refs = WorkerUploads(), Refs()
    manager = Manager(uploads.pool("a"), lambda name: None)
    first, second = (make_upload(store, manager, refs.next(version)) for version in (1, 2))

    class FailsThen(Future[Any]):
        """An upload that fails as soon as somebody has seen that it is not done."""

        def done(self) -> bool:
            was_done = super().done()
            if not was_done:
                self.set_exception(PermissionError("not yours"))
                second.done.set_exception(StorageError(f"{second.file} was not sent, because {first.file} failed"))
            return was_done

    with pytest.raises(UploadFailedError, match=rf"{first.file} to the backend a failed: PermissionError"):
        await_all([replace(first, done=FailsThen()), second], uploads, CommitOptions())


def test_a_failed_upload_of_one_run_does_not_affect_a_later_run(store: LocalStore) -> None:
    """The previous run sent a sibling, which no pointer names."""
    uploads, refs, gate = WorkerUploads(), Refs(), threading.Event()

    def fail_first(name: str) -> None:
        if name.startswith("marker of 1_"):
            assert gate.wait(WAIT_S)
            raise PermissionError("not yours")

    manager = Manager(uploads.pool("a"), fail_first)
    before = [
        replace(make_upload(store, manager, refs.next(version)), run=Run("before", version)) for version in (1, 2)
    ]
    now = [replace(make_upload(store, manager, refs.next(version)), run=Run("now", 7)) for version in (3, 4)]
    record_and_submit(store, uploads, [*before, *now])
    gate.set()
    await_all(now, uploads, CommitOptions())
    with pytest.raises(StorageError, match="was not sent, because"):
        before[1].done.result(WAIT_S)


def test_a_backend_that_hangs_does_not_delay_another_one(store: LocalStore) -> None:
    uploads, gate, ref = WorkerUploads(), threading.Event(), Refs().next(1)
    hanging = Manager(uploads.pool("west"), lambda name: (gate.wait(WAIT_S), None)[1])
    stuck, quick = make_upload(store, hanging, ref, "west"), make_upload(store, Manager(uploads.pool("a")), ref)
    uploads.submit([stuck, quick])
    await_all([quick], uploads, CommitOptions())
    with pytest.raises(CommitTimeoutError, match=r"west: 1_\w+.*commit_timeout_ms is 300") as raised:
        await_all([stuck, quick], uploads, CommitOptions(commit_timeout_ms=300))
    assert isinstance(raised.value, TimeoutError)
    assert time.monotonic() - stuck.since_s >= 0.3
    # The upload was given up: the next one has its own thread, and does not wait for it.
    assert uploads.find(store, "west", stuck.file) is None
    hanging.work = lambda name: None
    following = make_upload(store, hanging, Refs().next(2), "west")
    uploads.submit([following])
    await_all([following], uploads, CommitOptions())
    gate.set()
    assert stuck.done.result(WAIT_S) == stuck.markers


@pytest.mark.parametrize("first", [0, 1])
def test_files_behind_an_abandoned_upload_can_be_submitted_again(store: LocalStore, first: int) -> None:
    uploads, gate, refs = WorkerUploads(), threading.Event(), Refs()
    manager = Manager(uploads.pool("a"), lambda name: (gate.wait(WAIT_S), None)[1])
    submitted = [make_upload(store, manager, refs.next(version)) for version in range(1, 5)]
    record_and_submit(store, uploads, submitted)
    uploads.give_up([submitted[first]])
    assert [uploads.find(store, "a", upload.file) is upload for upload in submitted] == [
        first == 1,
        False,
        False,
        False,
    ]
    # Waiting callers get an error, and other processes do not see these uploads as running.
    for upload in submitted[1:]:
        with pytest.raises(
            StorageError, match=rf"{upload.file} was not sent, because {submitted[first].file} took too long"
        ):
            upload.done.result(0)
        assert read_record(store, upload) is None
    again = [make_upload(store, manager, upload.ref) for upload in submitted[first:]]
    uploads.submit(again)
    gate.set()
    await_all([*submitted[:1], *again], uploads, CommitOptions())
    assert {*manager.kept} == {upload.markers[STATE] for upload in submitted}


def test_the_owner_of_an_upload_record_shows_whether_its_process_is_alive(store: LocalStore) -> None:
    uploads = WorkerUploads()
    assert uploads.is_alive(uploads.owner)
    script = "from spark_state_ext.worker import process; print(process.get_process_token(), flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    owner = child.stdout.readline().strip()
    assert uploads.is_alive(owner)
    child.kill()
    child.communicate()
    assert not uploads.is_alive(owner)
    # The same process id with another start time is another process.
    pid, start = owner.split()
    assert not uploads.is_alive(f"{os.getpid()} {start}")
    assert pid


def test_busy_threads_do_not_keep_a_process_alive(tmp_path: Path) -> None:
    script = (
        "import time\nfrom spark_state_ext.worker.threads import DaemonPool\npool = DaemonPool('p')\n"
        "pool.submit(time.sleep, 3600)\nprint('over')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "over\n"


_ENDS_INSIDE_ARROW = """
import atexit
import threading
import pyarrow as pa

# The first registered function is called last.
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if thread.name.startswith("spark_state_ext")]))
from spark_state_ext.worker.threads import DaemonPool
from spark_state_ext.worker.{module} import {pool}

begun = threading.Event()

def write():
    begun.set()
    with open("/dev/null", "wb") as null, pa.PythonFile(null, mode="w") as file:
        for _ in range(20_000):
            file.write(b"x" * 1_000)
    print("written")

{pool}().submit("p", write) if {pool}.__name__ == "Background" else {pool}("p").submit(write)
idle = DaemonPool("idle")
idle.submit(int).result()
begun.wait()
"""


@pytest.mark.parametrize(("module", "pool"), [("threads", "DaemonPool"), ("background", "Background")])
def test_a_process_that_ends_while_a_thread_is_inside_arrow_is_not_aborted(module: str, pool: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS_INSIDE_ARROW.format(module=module, pool=pool)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "written\n[]\n", ""), (
        "busy and idle threads must have ended"
    )


def test_a_pool_returns_results_and_raises_errors() -> None:
    pool = DaemonPool("p")
    pool.threads_max = 4
    assert [future.result(WAIT_S) for future in [pool.submit(pow, 2, n) for n in range(50)]] == [
        2**n for n in range(50)
    ]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(WAIT_S)


class SlowQueue(queue.SimpleQueue[Any]):
    """A queue whose first item is returned to its thread only once the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.handed = threading.Event()
        self.go_on = threading.Event()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        if not self.handed.is_set():
            self.handed.set()
            assert self.go_on.wait(WAIT_S)
        return item


def test_a_thread_that_has_just_taken_work_does_not_count_as_idle() -> None:
    pool = DaemonPool("p")
    pool.threads_max = 2
    pool._work = work = SlowQueue()
    release = threading.Event()
    first = pool.submit(release.wait, WAIT_S)
    assert work.handed.wait(WAIT_S)
    assert pool.submit(pow, 2, 3).result(WAIT_S) == 8
    assert not first.done()
    work.go_on.set()
    # The first thread hangs in its work and the other one is idle, so no third thread is needed or allowed.
    assert [pool.submit(pow, 2, n).result(WAIT_S) for n in range(5)] == [1, 2, 4, 8, 16]
    assert len(pool._threads) == 2
    release.set()
    assert first.result(WAIT_S)


def test_work_is_not_queued_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DaemonPool("p")
    done: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(StorageError, match="cannot start a thread for p"):
            pool.submit(done.append, "refused")
    pool.submit(done.append, "taken").result(WAIT_S)
    assert done == ["taken"]


def test_invalid_upload_records_are_ignored(store: LocalStore) -> None:
    for value in (b"", b"{}", b"[1]", b"7", b"\xff"):
        assert UploadRecord.decode(value) is None
    record = UploadRecord(DONE, "1 2", 3.5, {"state": "m"}, "")
    assert UploadRecord.decode(record.encode()) == record
    store.record({"a": record.encode(), "b": b"x"})
    store.record({"c": b"y"}, ["b", "not there"])
    assert store.records() == {"a": record.encode(), "c": b"y"}


def test_recording_an_upload_does_not_leave_a_closed_store_open(store: LocalStore) -> None:
    """A process closes unused stores to limit its open files; uploads that end later are recorded nevertheless."""
    uploads, gate, refs = WorkerUploads(), threading.Event(), Refs()
    manager = Manager(uploads.pool("a"), lambda name: (gate.wait(WAIT_S), None)[1])
    submitted = [make_upload(store, manager, refs.next(version)) for version in range(1, 4)]
    record_and_submit(store, uploads, submitted)
    # The process may have opened the store again.
    other = LocalStore.at(store.folder, SCHEMA)
    store.close()
    gate.set()
    await_all(submitted, uploads, CommitOptions())
    assert not [folder for folder in Environment._environments if store.folder in folder.parents]
    assert all(UploadRecord.decode(value) for value in other.records().values())
    assert len(other.records()) == 3
    other.close()
