"""A restore that is told to end does so soon, whatever its backends do; and each backend's gaps are told."""

from __future__ import annotations

import logging
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
from typing import Any

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
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptStoreError, InterruptedRestoreError, LiveRunError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Row, scan
from spark_state_ext.worker import retry
from spark_state_ext.worker.retry import call_with_retries
from spark_state_ext.worker.threads import DaemonPool, map_ahead, map_in_parallel
from tests.helpers.waiting import WAIT_S, eventually

# What each request takes, and after which time at most all must be over: the speed of the machine does not matter.
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

    def asked(self, name: str) -> list[str]:
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
    # Fewer deltas than make a snapshot due.
    life.history(9)
    with ExitStack() as exits:
        yield Restores(life, tmp_path, exits)


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    return DaemonPool("test").submit(work)


# -- interrupted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_ends_while_it_restores(life: Life, tmp_path: Path, number: signal.Signals) -> None:
    """Not only the caller's thread: an interpreter that ends waits for threads of `ThreadPoolExecutor`."""
    life.history(12)
    (tmp_path / "pointer").write_bytes(life.pointers[-1].encode())
    script = Path(__file__).with_name("restoring_job.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment, stderr=subprocess.PIPE)
    try:
        eventually(lambda: (tmp_path / "asked").exists() or process.poll() is not None)
        process.send_signal(number)
        _, said = process.communicate(timeout=ENDS_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (3 if number == signal.SIGTERM else -signal.SIGINT), said.decode()


def test_a_restore_that_is_closed_ends_though_no_backend_answers(restores: Restores) -> None:
    bucket = restores.bucket(restores.replica("a", takes_s=TAKES_S), restores.replica("b", takes_s=TAKES_S))
    reading = _in_thread(lambda: bucket.read(scan))
    eventually(lambda: restores.asked("a"))
    bucket.close()
    with pytest.raises(InterruptedRestoreError, match="was told to stop"):
        reading.result(ENDS_S)


def test_what_is_asked_meanwhile_may_end_a_restore(restores: Restores) -> None:
    """As when another run has taken the state over."""

    def lost() -> None:
        raise LiveRunError("another run has it")

    bucket = restores.bucket(restores.replica("a", takes_s=TAKES_S), while_waiting=lost)
    with pytest.raises(LiveRunError):
        _in_thread(lambda: bucket.read(scan)).result(ENDS_S)


def test_a_file_that_cannot_be_read_ends_the_reads_of_the_others(restores: Restores) -> None:
    """They would be tried again for ten minutes, for nobody."""
    replica = restores.replica("a", timeout_s=TAKES_S, fails="refused")
    files = replica.restore.restore()

    class FirstDenied(FilesRestore):
        def restore(self) -> Any:
            return _FirstDenied(files)

        def close(self) -> None:
            replica.restore.close()

    # Other tests have left some that hang.
    before = set(threading.enumerate())
    bucket = restores.bucket(replace(replica, restore=FirstDenied(Folder(str(restores.folder)), 0.0)))
    reading = _in_thread(lambda: bucket.read(scan))
    with pytest.raises(StorageError, match="no permission"):
        reading.result(ENDS_S)
    # And the threads have gone: nothing is asked any more.
    eventually(lambda: not [it for it in set(threading.enumerate()) - before if it.name == "spark_state_ext load"])


class _FirstDenied:
    """Files of which the first that is asked for is refused."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self._first = threading.Lock()

    def size(self, name: str) -> int:
        if self._first.acquire(blocking=False):
            time.sleep(0.2)  # the others are at it by then, or are not begun any more
            raise StorageError(f"{name}: no permission")
        size: int = self._files.size(name)
        return size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def test_a_pause_between_two_tries_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_WAIT_S_MIN", 1e6)
    monkeypatch.setattr(retry, "_WAIT_S_MAX", 1e6)
    stop, failed = threading.Event(), threading.Event()

    def work() -> None:
        failed.set()
        raise ConnectionError("away")

    trying = _in_thread(lambda: call_with_retries(work, 1e7, stop))
    assert failed.wait(WAIT_S)
    stop.set()
    with pytest.raises(InterruptedRestoreError):
        trying.result(ENDS_S)


def test_a_store_that_is_built_anew_in_the_middle_of_a_restore_is_restored(
    restores: Restores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no end: the same backends are read again."""
    real = LocalStore.restore
    fails = [True]

    def restore(self: LocalStore, *args: Any, **kwargs: Any) -> Any:
        if fails:
            fails.clear()
            raise CorruptStoreError("damaged, once")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LocalStore, "restore", restore)
    assert restores.bucket(restores.replica("a")).read(scan) == restores.life.models[-1]


def test_a_closed_pool_ends_its_threads_and_drops_what_waits() -> None:
    pool = DaemonPool("closed")
    gate = threading.Event()
    first = pool.submit(gate.wait, WAIT_S)
    eventually(first.running)
    second = pool.submit(int)
    pool.close()
    assert second.cancelled()
    gate.set()
    assert first.result(WAIT_S)
    eventually(lambda: not [it for it in threading.enumerate() if it.name == "spark_state_ext closed"])


def test_side_by_side_results_are_in_order_and_the_first_error_is_raised() -> None:
    assert map_in_parallel("p", 4, lambda n: n * n, range(50)) == [n * n for n in range(50)]
    with pytest.raises(ZeroDivisionError):
        map_in_parallel("p", 4, lambda n: 1 // (n - 30), range(50))
    assert map_in_parallel("p", 4, int, []) == []


def test_results_are_made_ahead_in_order_and_no_further_than_asked() -> None:
    begun: list[int] = []

    def work(n: int) -> int:
        begun.append(n)
        return 1 // (n - 7)

    results = map_ahead("p", 3, work, range(50))
    assert begun == []
    assert [next(results) for _ in range(7)] == [1 // (n - 7) for n in range(7)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert sorted(begun) == list(range(max(begun) + 1))
    assert max(begun) < 7 + 3
    assert list(map_ahead("p", 3, int, [])) == []


def test_nothing_is_left_at_work_when_results_are_not_wanted_any_more() -> None:
    at_work = threading.Semaphore(0)
    done: list[int] = []

    def work(n: int) -> int:
        if n:
            at_work.release()
            time.sleep(0.2)
        done.append(n)
        return n

    results = map_ahead("p", 3, work, range(50))
    assert next(results) == 0
    assert at_work.acquire(timeout=WAIT_S)
    results.close()
    begun = sorted(done)
    time.sleep(0.3)
    assert sorted(done) == begun, "a thread went on"


def test_a_load_that_fails_for_a_snapshot_fails_the_commit(restores: Restores, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has closed the restore managers, so whoever uses them has to begin anew."""
    life = restores.life
    monkeypatch.setattr("spark_state_ext.engine.bucket.snapshot_due", lambda *_: True)
    pin = LocalStore.pin

    def damaged(self: LocalStore, *args: Any) -> Any:
        monkeypatch.setattr(LocalStore, "pin", pin)
        raise CorruptStoreError("a page is damaged")

    monkeypatch.setattr(LocalStore, "pin", damaged)
    bucket = life.bucket()
    for replica in bucket._replicas:
        monkeypatch.setattr(replica.restore, "restore", lambda: _Failing())
    with pytest.raises(StorageError, match="503"):
        bucket.commit(buffer_of({KEYS[0]: Row(1)}, life.local))
    # The next attempt has others.
    life.batch()
    assert life.bucket().read(scan) == life.models[-1]


class _Failing:
    """Files none of which can be read now."""

    def where(self, name: str) -> str:
        return name

    def __getattr__(self, name: str) -> Any:
        raise StorageError("503")


# -- a backend that does not answer ----------------------------------------------------------------


@pytest.mark.parametrize("fails", ["refused", "timeout", "denied"])
@pytest.mark.parametrize("prefer", ["b", None])
def test_a_backend_that_does_not_answer_is_asked_once(
    restores: Restores, fails: str, prefer: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of a dozen files would wait for it otherwise, for a minute as a rule."""
    broken, whole = restores.replica("b", fails=fails), restores.replica("a")
    bucket = restores.bucket(broken, whole, prefer=prefer)
    assert bucket.read(scan) == restores.life.models[-1]
    assert len(restores.asked("b")) == 1
    assert bucket.fetched_files == 9
    told = [it.getMessage() for it in caplog.records if "only for files that no other one has" in it.getMessage()]
    assert len(told) == 1
    assert "cannot be restored from the backend b" in told[0]


def test_what_only_a_backend_has_that_did_not_answer_is_asked_of_it(restores: Restores) -> None:
    """It may be back; and if not, that is the error, not what the other one lacks."""
    name = file_name(restores.life.pointers[-1].lineage[-1].ref, DELTA)
    restores.life.folder("a").remove(name)
    bucket = restores.bucket(restores.replica("b", fails="refused"), restores.replica("a"))
    with pytest.raises(StorageError, match="refused"):
        bucket.read(scan)
    assert sum(name in line for line in restores.asked("b")) in (1, 2)


PATIENT = CommitOptions(commit_delay_ms_max=0, commit_timeout_ms=int(1000 * WAIT_S))


def _hours_pass(monkeypatch: pytest.MonkeyPatch, while_: Callable[[], object]) -> None:
    """Whenever somebody looks at the clock while something is so. Apart from that it goes as it does."""
    ahead_s = 0.0

    def monotonic() -> float:
        nonlocal ahead_s
        ahead_s += 3_600.0 if while_() else 0.0
        return time.monotonic() + ahead_s

    monkeypatch.setattr("spark_state_ext.restore.sources.time", SimpleNamespace(monotonic=monotonic))


def test_a_backend_that_is_silent_is_done_without(restores: Restores, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives no error either, as a network drive whose server is gone."""
    _hours_pass(monkeypatch, lambda: restores.asked("b") and not restores.asked("a"))
    bucket = restores.bucket(restores.replica("b", takes_s=TAKES_S), restores.replica("a"), prefer="b", options=PATIENT)
    assert _in_thread(lambda: bucket.read(scan)).result(ENDS_S) == restores.life.models[-1]
    assert len(restores.asked("b")) == 1


def test_a_sole_backend_that_is_silent_ends_the_restore(restores: Restores) -> None:
    options = CommitOptions(commit_delay_ms_max=0, commit_timeout_ms=500)
    bucket = restores.bucket(restores.replica("b", takes_s=TAKES_S), options=options)
    with pytest.raises(StorageError, match="the backend b has neither answered nor failed"):
        _in_thread(lambda: bucket.read(scan)).result(ENDS_S)


def test_a_backend_that_is_slow_over_a_file_but_answers_is_waited_for(
    restores: Restores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said how large the file is, and takes hours to give it."""
    _hours_pass(monkeypatch, lambda: any("cat_file" in line for line in restores.asked("a")))
    bucket = restores.bucket(restores.replica("a", takes_s=0.2), options=PATIENT)
    assert bucket.read(scan) == restores.life.models[-1]


def test_a_backend_that_cannot_even_be_opened_is_done_without(restores: Restores) -> None:
    class Away(FilesRestore):
        def init(self, checkpoint: Checkpoint) -> None:
            raise StorageError("no route to host")

    away = replace(restores.replica("b"), restore=Away(Folder(str(restores.folder)), 0.0))
    assert restores.bucket(away, restores.replica("a")).read(scan) == restores.life.models[-1]
    with pytest.raises(StorageError, match="no route to host"):
        restores.bucket(away).read(scan)


def test_backends_are_opened_before_any_file_is_asked_for(restores: Restores) -> None:
    """Files are asked for side by side; none may find half a list of backends."""

    class Slow(FilesRestore):
        def init(self, checkpoint: Checkpoint) -> None:
            time.sleep(0.3)

    replicas = [replace(it, restore=Slow(restores.life.folder(it.name), 0.0)) for it in map(restores.replica, "ab")]
    assert restores.bucket(*replicas).read(scan) == restores.life.models[-1]


# -- gaps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [V1, BOTH, None])
def test_all_gaps_of_a_preferred_backend_are_told(
    restores: Restores, write: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """With pointers of old releases too, which do not name backends: then the root is what they stand for."""
    pointer = restores.life.pointers[-1]
    if write is not None:
        pointer = Pointer.decode(replace(pointer, inline=()).encode(write), V1)
        assert not pointer.replication
    names = [it for it in restores.life.folder("a").names() if it.endswith(".arrow")]
    for name in names[2:8:2]:
        restores.life.folder("a").remove(name)
    restores.life.folder("a").put(names[1], b"damaged")
    bucket = restores.bucket(restores.replica("a"), restores.replica("b"), prefer="a", pointer=pointer)
    assert bucket.read(scan) == restores.life.models[-1]
    told = [it for it in caplog.records if "that it should have" in it.getMessage()]
    assert len(told) == 1
    assert told[0].levelno == logging.ERROR
    for name in (names[1], *names[2:8:2]):
        assert name in told[0].getMessage()
    assert "bucket 3 of operator 'counts'" in told[0].getMessage()
    assert bucket.restore_gaps == 4
