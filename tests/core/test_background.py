"""Work that runs in the background, so that batches need not wait for it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from core_support import WRITER, buffer_of, first_pointer, state_at

from arrow_schemas import Pointer
from arrow_schemas.lineage import SNAPSHOT, parse_file_name
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Model, Row, apply_changes
from spark_state_ext.worker import background as background_module
from spark_state_ext.worker.background import Background, Foreground
from tests.helpers.waiting import WAIT_S, eventually


def test_work_runs_in_order_and_once_per_name() -> None:
    background, gate = Background(), threading.Event()
    numbers: list[int] = []

    def run_first() -> None:
        assert gate.wait(WAIT_S)
        numbers.append(1)

    assert background.submit("first", run_first)
    eventually(lambda: background.busy("first"))
    assert background.submit("second", lambda: numbers.append(2))
    assert not background.submit("second", lambda: numbers.append(3)), "work of this name is already waiting"
    assert background.busy("second")
    gate.set()
    assert background.wait(WAIT_S)
    assert numbers == [1, 2]
    assert not background.busy("second")


def test_work_that_hangs_does_not_block_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "HUNG_S", 0.2)
    background, gate, done = Background(), threading.Event(), threading.Event()
    assert background.submit("hangs", lambda: gate.wait(WAIT_S))
    # Work that hangs is no longer busy, so an unconfirmed snapshot whose upload hangs counts as missed.
    eventually(lambda: not background.busy("hangs"))
    assert background.submit("goes on", done.set)
    assert done.wait(WAIT_S)
    gate.set()
    assert background.wait(WAIT_S)
    # The thread that hung has ended; the other one continues.
    done.clear()
    assert background.submit("goes on again", done.set)
    assert done.wait(WAIT_S)


def test_work_that_hangs_does_not_block_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "_WAITING_MAX", 2)
    background, gate, done, running = Background(), threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        running.set()
        gate.wait(WAIT_S)

    assert background.submit("hangs", hang)
    assert running.wait(WAIT_S)
    accepted = [background.submit(name, done.set) for name in ("first", "second", "third")]
    assert accepted == [True, True, False]
    # Only from here on, or a pause of this thread before would already replace the one that hangs.
    monkeypatch.setattr(background_module, "HUNG_S", 0.2)

    # Each call replaces a thread that hangs, even if the work of the call itself is refused.
    def submit_and_wait() -> bool:
        background.submit("first", done.set)
        return done.wait(0.05)

    eventually(submit_and_wait)
    gate.set()
    assert background.wait(WAIT_S)


def test_failures_are_logged_and_the_thread_continues(caplog: pytest.LogCaptureFixture) -> None:
    background = Background()

    def fail() -> None:
        raise StorageError("the disk is gone")

    def fail_unexpectedly() -> None:
        raise ZeroDivisionError("an unexpected fault")

    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        background.submit("one", fail)
        background.submit("two", fail_unexpectedly)
        done = threading.Event()
        background.submit("three", done.set)
        assert done.wait(WAIT_S)
    assert "one: the disk is gone" in caplog.text
    assert "two failed" in caplog.text
    assert "an unexpected fault" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_is_replaced() -> None:
    background, done = Background(), threading.Event()

    def leave() -> None:
        raise KeyboardInterrupt

    assert background.submit("leaves", leave)
    assert background.wait(WAIT_S)
    eventually(lambda: background._thread is None or not background._thread.is_alive())
    assert background.submit("goes on", done.set)
    assert done.wait(WAIT_S)


def test_work_is_refused_if_too_much_is_waiting() -> None:
    background, gate = Background(), threading.Event()
    accepted = [background.submit(str(i), lambda: (gate.wait(WAIT_S), None)[1]) for i in range(300)]
    gate.set()
    assert 200 < sum(accepted) < 300
    assert background.wait(WAIT_S)


class GatedFolder(Folder):
    """A folder in which writing a file waits for a gate."""

    def __init__(self, root: str, gate: threading.Event) -> None:
        super().__init__(root)
        self.gate = gate

    def put_file(self, name: str, local_path: object) -> None:
        assert self.gate.wait(WAIT_S)
        super().put_file(name, str(local_path))


def test_a_slow_snapshot_does_not_block_batches(tmp_path: Path) -> None:
    """Batches continue, merge and prune while a snapshot is being written; the late snapshot has the pinned rows."""
    gate, background = threading.Event(), Background()
    files = GatedFolder(str(tmp_path / "root"), gate)
    store = LocalStore.at(tmp_path / "store", SCHEMA, chunk_rows=4)
    pointers: list[Pointer] = [first_pointer()]
    models: list[Model] = [{}]
    for i in range(20):
        changes = {KEYS[i % 9]: Row(i), KEYS[(i + 5) % 9]: Row(-i, "x")}
        context = CommitContext(tmp_path, cadence=SnapshotCadence(3, 3), runner=background)
        bucket = Bucket(store, sole_replica(files, tmp_path), pointers[-1], WRITER, context)
        pointers.append(bucket.commit(buffer_of(changes, tmp_path)).pointer)
        models.append(apply_changes(models[-1], changes))
    assert not [n for n in files.names() if n.endswith("snapshot.arrow")]
    # All snapshots are unconfirmed and missing, so a load follows the deltas back to the beginning.
    assert max(len(pointer.lineage) for pointer in pointers) <= 4
    fresh = LocalStore.at(tmp_path / "fresh", SCHEMA)
    assert state_at(fresh, files, pointers[-1], tmp_path) == models[-1]
    gate.set()
    assert background.wait(WAIT_S)
    arrived = [parsed[0] for n in files.names() if (parsed := parse_file_name(n)) and parsed[1] == SNAPSHOT]
    assert len(arrived) >= 4
    for pointer, model in zip(pointers, models, strict=True):
        if pointer.ref in arrived:
            new = LocalStore.at(tmp_path / str(pointer.version), SCHEMA)
            bucket = Bucket(new, sole_replica(files, tmp_path), pointer, WRITER, CommitContext(tmp_path))
            assert state_at(new, files, pointer, tmp_path) == model
            new.close()
    assert store._environment.read(lambda txn: list(txn.items(b"pins"))) == [], "every pin was released"
    store.close()
    fresh.close()


@dataclass(frozen=True)
class IdleRunner:
    """A runner that never executes any work; it accepts all of it or none."""

    accepts: bool

    def submit(self, name: str, work: object) -> bool:
        return self.accepts

    def busy(self, name: str) -> bool:
        return False


def test_a_call_writes_a_snapshot_itself_after_two_missed_ones(tmp_path: Path) -> None:
    """If background work never ends, the call itself writes the third snapshot."""
    files = Folder(str(tmp_path / "root"))
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    pointer = first_pointer()
    model: Model = {}
    counts: list[int] = []
    for i in range(20):
        changes = {KEYS[i % 9]: Row(i)}
        context = CommitContext(tmp_path, cadence=SnapshotCadence(2, 2), runner=IdleRunner(accepts=True))
        bucket = Bucket(store, sole_replica(files, tmp_path), pointer, WRITER, context)
        pointer = bucket.commit(buffer_of(changes, tmp_path)).pointer
        model = apply_changes(model, changes)
        counts.append(len([n for n in files.names() if n.endswith("snapshot.arrow")]))
    # The snapshots of batches 3 and 5 (one missed) are unconfirmed; batch 7 (two missed) writes its own, and so on.
    assert counts[5] == 0
    assert counts[6] == 1
    assert counts[-1] >= 2
    fresh = LocalStore.at(tmp_path / "fresh", SCHEMA)
    assert state_at(fresh, files, pointer, tmp_path) == model
    fresh.close()
    store.close()


def test_a_call_writes_a_snapshot_itself_if_the_background_keeps_refusing(tmp_path: Path) -> None:
    """The call does so if the lineage has become twice as long as it should be."""
    files = Folder(str(tmp_path / "root"))
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    pointer = first_pointer()
    lengths = []
    for i in range(12):
        changes = {KEYS[i % 9]: Row(i)}
        context = CommitContext(tmp_path, cadence=SnapshotCadence(2, 3), runner=IdleRunner(accepts=False))
        bucket = Bucket(store, sole_replica(files, tmp_path), pointer, WRITER, context)
        pointer = bucket.commit(buffer_of(changes, tmp_path)).pointer
        lengths.append(len(pointer.lineage))
    assert lengths == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    assert [name.split("_")[0] for name in files.names() if name.endswith("snapshot.arrow")] == ["11", "6"]
    store.close()


def test_background_work_pauses_while_a_batch_waits() -> None:
    foreground = Foreground()
    began, go, stood_back = threading.Event(), threading.Event(), threading.Event()
    foreground.stand_back(60.0, 60.0)  # returns at once: no batch has waited yet

    def wait() -> None:
        with foreground.awaited():
            began.set()
            go.wait(WAIT_S)

    def fill() -> None:
        foreground.stand_back(0.0, WAIT_S)
        stood_back.set()

    batch, filling = threading.Thread(target=wait), threading.Thread(target=fill)
    batch.start()
    assert began.wait(WAIT_S)
    # It waits no longer than its limit.
    foreground.stand_back(0.0, 0.001)
    filling.start()
    assert not stood_back.wait(0.01)
    go.set()
    batch.join()
    filling.join()
    assert stood_back.is_set()


def test_a_failed_wait_is_no_longer_counted() -> None:
    foreground = Foreground()
    with pytest.raises(StorageError), foreground.awaited():
        raise StorageError("the store is away")
    assert foreground.waiting == 0
