"""A restore that is stopped ends soon, whatever its backends do; and gaps of each backend are reported."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from core_support import WRITER, buffer_of
from life import Life
from stalling_disk import STORE

from arrow_schemas import Pointer
from arrow_schemas.lineage import DELTA, file_name
from arrow_schemas.pointer import BOTH, V1
from spark_state_ext.backends import Checkpoint
from spark_state_ext.backends.files import FilesRestore
from spark_state_ext.backends.replication import Replica
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptStoreError, InterruptedRestoreError, LiveRunError, StorageError
from spark_state_ext.files.folder import Folder, Readable
from spark_state_ext.restore.sources import _Source
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Row, scan
from spark_state_ext.worker import retry
from spark_state_ext.worker.retry import call_with_retries
from spark_state_ext.worker.threads import DaemonPool, map_ahead, map_in_parallel
from tests.helpers.waiting import WAIT_S, eventually

# Duration of each request, and the time within which a test must end: the speed of the machine does not matter.
TAKES_S = 3_600.0
ENDS_S = 600.0


class Restores:
    """Restores of a life's last checkpoint, from stores that stall or fail."""

    def __init__(self, life: Life, folder: Path, exits: ExitStack) -> None:
        self.life = life
        self.folder = folder
        self._exits = exits

    def replica(self, name: str, *, timeout_s: float = 0.0, **options: Any) -> Replica:
        options = {"implementation": STORE, "log": str(self.log(name)), **options}
        files = Folder(str(self.life.local / name), options).child("3")
        return Replica(name, self.life.manager(name), FilesRestore(files, timeout_s), root=name == "a")

    def log(self, name: str) -> Path:
        return self.folder / f"asked-{name}"

    def requests(self, name: str) -> list[str]:
        return self.log(name).read_text().splitlines() if self.log(name).exists() else []

    def bucket(
        self,
        *replicas: Replica,
        prefer: str | None = None,
        pointer: Pointer | None = None,
        options: CommitOptions | None = None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> Bucket:
        store = LocalStore.at(self.folder / f"disk-{time.monotonic_ns()}", SCHEMA)
        self._exits.callback(store.close)
        return Bucket(
            store,
            replicas,
            pointer or self.life.pointers[-1],
            WRITER,
            CommitContext(
                self.folder,
                options=options or CommitOptions(journal=False),
                runner=self.life.background,
                while_waiting=while_waiting,
            ),
            restore_from=prefer,
        )


@pytest.fixture
def restores(life: Life, tmp_path: Path) -> Any:
    life.names = ("a", "b")
    # So few deltas do not make a snapshot due.
    life.history(9)
    with ExitStack() as exits:
        yield Restores(life, tmp_path, exits)


def _start_thread(work: Callable[[], Any]) -> Future[Any]:
    return DaemonPool("test").submit(work)


# -- interrupted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_gets_a_signal_while_it_restores_ends(
    life: Life, tmp_path: Path, number: signal.Signals
) -> None:
    """The threads of the restore must end too: at its end, an interpreter waits for threads of `ThreadPoolExecutor`."""
    life.history(12)
    (tmp_path / "pointer").write_bytes(life.pointers[-1].encode())
    script = Path(__file__).with_name("restoring_job.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment, stderr=subprocess.PIPE)
    try:
        eventually(lambda: (tmp_path / "asked").exists() or process.poll() is not None)
        process.send_signal(number)
        _, errors = process.communicate(timeout=ENDS_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (3 if number == signal.SIGTERM else -signal.SIGINT), errors.decode()


def test_a_closed_restore_ends_even_if_no_backend_answers(restores: Restores) -> None:
    bucket = restores.bucket(restores.replica("a", takes_s=TAKES_S), restores.replica("b", takes_s=TAKES_S))
    reading = _start_thread(lambda: bucket.read(scan))
    eventually(lambda: restores.requests("a"))
    bucket.close()
    with pytest.raises(InterruptedRestoreError, match="was told to stop"):
        reading.result(ENDS_S)


def test_an_error_of_the_waiting_callback_ends_a_restore(restores: Restores) -> None:
    """Such a call fails, for example, if another run has taken the state over."""

    def fail_as_replaced() -> None:
        raise LiveRunError("another run has it")

    bucket = restores.bucket(restores.replica("a", takes_s=TAKES_S), while_waiting=fail_as_replaced)
    with pytest.raises(LiveRunError):
        _start_thread(lambda: bucket.read(scan)).result(ENDS_S)


def test_a_file_that_cannot_be_read_ends_the_reads_of_other_files(restores: Restores) -> None:
    """Otherwise they would be tried again for ten minutes, although their results are no longer needed."""
    replica = restores.replica("a", timeout_s=TAKES_S, fails="refused")
    files = replica.restore.restore()

    class FirstDenied(FilesRestore):
        def restore(self) -> Any:
            return _FirstDenied(files)

        def close(self) -> None:
            replica.restore.close()

    # Other tests have left threads that hang.
    before = set(threading.enumerate())
    bucket = restores.bucket(replace(replica, restore=FirstDenied(Folder(str(restores.folder)), 0.0)))
    reading = _start_thread(lambda: bucket.read(scan))
    with pytest.raises(StorageError, match="no permission"):
        reading.result(ENDS_S)
    # The threads have ended and make no further requests.
    eventually(
        lambda: not [thread for thread in set(threading.enumerate()) - before if thread.name == "spark_state_ext load"]
    )


class _FirstDenied:
    """Files of which the first requested one is refused."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self._first = threading.Lock()

    def size(self, name: str) -> int:
        if self._first.acquire(blocking=False):
            time.sleep(0.2)  # by then, the other reads have begun, or they never begin
            raise StorageError(f"{name}: no permission")
        size: int = self._files.size(name)
        return size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def test_a_pause_between_two_tries_ends_when_the_restore_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_WAIT_S_MIN", 1e6)
    monkeypatch.setattr(retry, "_WAIT_S_MAX", 1e6)
    stop, failed = threading.Event(), threading.Event()

    def fail() -> None:
        failed.set()
        raise ConnectionError("away")

    trying = _start_thread(lambda: call_with_retries(fail, 1e7, stop))
    assert failed.wait(WAIT_S)
    stop.set()
    with pytest.raises(InterruptedRestoreError):
        trying.result(ENDS_S)


def test_a_local_store_that_is_rebuilt_during_a_restore_is_restored(
    restores: Restores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is not an interruption: the restore reads the same backends again."""
    restore_real = LocalStore.restore
    failures = [True]

    def fail_once(self: LocalStore, *args: Any, **kwargs: Any) -> Any:
        if failures:
            failures.clear()
            raise CorruptStoreError("damaged, once")
        return restore_real(self, *args, **kwargs)

    monkeypatch.setattr(LocalStore, "restore", fail_once)
    assert restores.bucket(restores.replica("a")).read(scan) == restores.life.models[-1]


def test_a_closed_pool_ends_its_threads_and_cancels_waiting_work() -> None:
    pool = DaemonPool("closed")
    gate = threading.Event()
    first = pool.submit(gate.wait, WAIT_S)
    eventually(first.running)
    second = pool.submit(int)
    pool.close()
    assert second.cancelled()
    gate.set()
    assert first.result(WAIT_S)
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "spark_state_ext closed"])


def test_parallel_results_are_in_order_and_an_error_is_raised() -> None:
    assert map_in_parallel("p", 4, lambda n: n * n, range(50)) == [n * n for n in range(50)]
    with pytest.raises(ZeroDivisionError):
        map_in_parallel("p", 4, lambda n: 1 // (n - 30), range(50))
    assert map_in_parallel("p", 4, int, []) == []


def test_results_are_computed_ahead_in_order_up_to_the_given_number() -> None:
    started: list[int] = []

    def work(n: int) -> int:
        started.append(n)
        return 1 // (n - 7)

    results = map_ahead("p", 3, work, range(50))
    assert started == []
    assert [next(results) for _ in range(7)] == [1 // (n - 7) for n in range(7)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert sorted(started) == list(range(max(started) + 1))
    assert max(started) < 7 + 3
    assert list(map_ahead("p", 3, int, [])) == []


def test_closing_results_that_are_computed_ahead_waits_for_running_work() -> None:
    started = threading.Semaphore(0)
    done: list[int] = []

    def work(n: int) -> int:
        if n:
            started.release()
            time.sleep(0.2)
        done.append(n)
        return n

    results = map_ahead("p", 3, work, range(50))
    assert next(results) == 0
    assert started.acquire(timeout=WAIT_S)
    results.close()
    done_at_close = sorted(done)
    time.sleep(0.3)
    assert sorted(done) == done_at_close, "a thread continued to work"


def test_a_load_that_fails_for_a_snapshot_fails_the_commit(restores: Restores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed load has closed the restore managers, so the next attempt must open new ones."""
    life = restores.life
    # A snapshot is due with the next delta.
    life.cadence = SnapshotCadence(9, 9)
    pin = LocalStore.pin

    def fail_once(self: LocalStore, *args: Any) -> Any:
        monkeypatch.setattr(LocalStore, "pin", pin)
        raise CorruptStoreError("a page is damaged")

    monkeypatch.setattr(LocalStore, "pin", fail_once)
    bucket = life.bucket()
    for replica in bucket._replicas:
        monkeypatch.setattr(replica.restore, "restore", lambda: _Failing())
    with pytest.raises(StorageError, match="503"):
        bucket.commit(buffer_of({KEYS[0]: Row(1)}, life.local))
    # The next attempt opens new restore managers.
    life.batch()
    assert life.bucket().read(scan) == life.models[-1]


class _Failing:
    """Files that cannot be read."""

    def where(self, name: str) -> str:
        return name

    def __getattr__(self, name: str) -> Any:
        raise StorageError("503")


# -- a backend that does not answer ----------------------------------------------------------------


@pytest.mark.parametrize("fails", ["refused", "timeout", "denied"])
@pytest.mark.parametrize("prefer", ["b", None])
def test_a_backend_that_does_not_answer_is_asked_only_once(
    restores: Restores, fails: str, prefer: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise each of a dozen files would wait for the backend, usually for a minute."""
    broken, whole = restores.replica("b", fails=fails), restores.replica("a")
    bucket = restores.bucket(broken, whole, prefer=prefer)
    assert bucket.read(scan) == restores.life.models[-1]
    assert len(restores.requests("b")) == 1
    assert bucket.fetched_files == 9
    messages = [record.getMessage() for record in caplog.records]
    (message,) = [message for message in messages if "only for files that no other one has" in message]
    assert "cannot be restored from the backend b" in message


def test_a_file_that_no_other_backend_has_is_requested_from_one_that_did_not_answer(restores: Restores) -> None:
    """The backend may answer again; if not, its error is raised, and not that the other backend misses the file."""
    name = file_name(restores.life.pointers[-1].lineage[-1].ref, DELTA)
    restores.life.folder("a").remove(name)
    bucket = restores.bucket(restores.replica("b", fails="refused"), restores.replica("a"))
    with pytest.raises(StorageError, match="refused"):
        bucket.read(scan)
    assert sum(name in line for line in restores.requests("b")) in (1, 2)


PATIENT = CommitOptions(commit_delay_ms_max=0, commit_timeout_ms=int(1000 * WAIT_S))


def _skip_hours_while(monkeypatch: pytest.MonkeyPatch, condition: Callable[[], object]) -> None:
    """Let the clock of the restore jump ahead an hour at each look while a condition holds."""
    ahead_s = 0.0

    def monotonic() -> float:
        nonlocal ahead_s
        ahead_s += 3_600.0 if condition() else 0.0
        return time.monotonic() + ahead_s

    monkeypatch.setattr("spark_state_ext.restore.sources.time", SimpleNamespace(monotonic=monotonic))


def test_a_restore_uses_another_backend_if_one_is_silent(restores: Restores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a backend raises no error either, like a network drive whose server is down."""
    check_answer = _Source._check_answer

    def check_after_hours(source: _Source, until_s: float, *more: Any) -> bool:
        # Only b is late: a clock that jumps for both would also give up a, if that does not answer at once.
        return check_answer(source, -math.inf if source.name == "b" and restores.requests("b") else until_s, *more)

    monkeypatch.setattr(_Source, "_check_answer", check_after_hours)
    bucket = restores.bucket(restores.replica("b", takes_s=TAKES_S), restores.replica("a"), prefer="b", options=PATIENT)
    assert _start_thread(lambda: bucket.read(scan)).result(ENDS_S) == restores.life.models[-1]
    assert len(restores.requests("b")) == 1


def test_a_restore_fails_if_its_only_backend_is_silent(restores: Restores) -> None:
    options = CommitOptions(commit_delay_ms_max=0, commit_timeout_ms=500)
    bucket = restores.bucket(restores.replica("b", takes_s=TAKES_S), options=options)
    with pytest.raises(StorageError, match="the backend b has neither answered nor failed"):
        _start_thread(lambda: bucket.read(scan)).result(ENDS_S)


def test_a_restore_waits_for_a_slow_file_of_a_backend_that_has_answered(
    restores: Restores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend has returned the size of the file, and takes hours to return its contents."""
    _skip_hours_while(monkeypatch, lambda: any("cat_file" in line for line in restores.requests("a")))
    bucket = restores.bucket(restores.replica("a", takes_s=0.2), options=PATIENT)
    assert bucket.read(scan) == restores.life.models[-1]


def test_a_restore_uses_another_backend_if_one_cannot_be_opened(restores: Restores) -> None:
    class Unreachable(FilesRestore):
        def init(self, checkpoint: Checkpoint) -> None:
            raise StorageError("no route to host")

    unreachable = replace(restores.replica("b"), restore=Unreachable(Folder(str(restores.folder)), 0.0))
    assert restores.bucket(unreachable, restores.replica("a")).read(scan) == restores.life.models[-1]
    with pytest.raises(StorageError, match="no route to host"):
        restores.bucket(unreachable).read(scan)


def test_all_backends_are_opened_before_a_file_is_requested(restores: Restores) -> None:
    """Files are requested in parallel, and each request must see the whole list of backends."""

    opened: list[str] = []
    opened_at_requests: list[int] = []

    class Recording:
        def __init__(self, files: Readable) -> None:
            self._files = files

        def __getattr__(self, name: str) -> Any:
            if name != "where":
                opened_at_requests.append(len(opened))
            return getattr(self._files, name)

    class Slow(FilesRestore):
        def init(self, checkpoint: Checkpoint) -> None:
            time.sleep(0.1)
            opened.append(self._folder.root)

        def restore(self) -> Readable:
            return cast("Readable", Recording(super().restore()))

    replicas = [
        replace(replica, restore=Slow(restores.life.folder(replica.name), 0.0))
        for replica in map(restores.replica, "ab")
    ]
    assert restores.bucket(*replicas).read(scan) == restores.life.models[-1]
    assert set(opened_at_requests) == {2}


# -- gaps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [V1, BOTH, None])
def test_all_gaps_of_a_preferred_backend_are_logged(
    restores: Restores, write: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """This includes pointers of old releases: they do not name backends, and their files should be in the root."""
    pointer = restores.life.pointers[-1]
    if write is not None:
        pointer = Pointer.decode(replace(pointer, inline=()).encode(write), V1)
        assert not pointer.replication
    names = [name for name in restores.life.folder("a").names() if name.endswith(".arrow")]
    for name in names[2:8:2]:
        restores.life.folder("a").remove(name)
    restores.life.folder("a").put(names[1], b"damaged")
    bucket = restores.bucket(restores.replica("a"), restores.replica("b"), prefer="a", pointer=pointer)
    assert bucket.read(scan) == restores.life.models[-1]
    (record,) = [record for record in caplog.records if "that it should have" in record.getMessage()]
    assert record.levelno == logging.ERROR
    for name in (names[1], *names[2:8:2]):
        assert name in record.getMessage()
    assert "bucket 3 of operator 'counts'" in record.getMessage()
    assert bucket.restore_gaps == 4
