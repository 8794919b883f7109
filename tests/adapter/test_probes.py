"""Existence probes: the first call of a run looks whether backends still have the files that they confirmed."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable

import pytest
from core_support import buffer_of
from life import Life

from arrow_schemas.lineage import DELTA, SNAPSHOT
from arrow_schemas.pointer import ReplicationStatus
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.engine import probes
from spark_state_ext.engine.housekeeping import CleanUps, Housekeeping
from spark_state_ext.engine.replicas import Leases
from spark_state_ext.errors import InterruptedRestoreError, LiveRunError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.holds import HoldWatch
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_record import RunIdentity
from spark_state_ext.testing.model import KEYS, Row
from spark_state_ext.worker.background import Background
from tests.helpers.waiting import WAIT_S


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "housekeeping", Housekeeping(Background(), HoldWatch()), raising=False)


class Process:
    """The worker process of a test."""

    housekeeping: Housekeeping


def make_clean_ups(life: Life, leases: Leases, restore_operator_file: Callable[[], None] = lambda: None) -> CleanUps:
    retained, folder = life.batches_retained, Folder(str(life.local))
    return CleanUps(
        life.bucket(), life.replicas(), leases, retained, folder, Process.housekeeping, restore_operator_file
    )


def probe(life: Life, run: str = "run", restored: list[str] | None = None) -> None:
    def restore_operator_file() -> None:
        if restored is not None:
            restored.append("back")

    clean_ups = make_clean_ups(life, Leases(()), restore_operator_file)
    clean_ups.probe(life.pointers[-1], run)
    clean_ups.probed()


def remove_root(life: Life, name: str) -> None:
    shutil.rmtree(life.folder(name).root)


def test_a_removed_root_is_noticed_even_if_the_local_store_is_warm(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    life.history(5)
    restored: list[str] = []
    probe(life, restored=restored)
    assert restored == []
    assert not caplog.text
    remove_root(life, "a")
    probe(life, restored=restored)
    assert restored == [], "this run has probed already"
    probe(life, "another run", restored)
    assert restored == ["back"]
    assert "a no longer has the state" in caplog.text
    assert f"state of {life.local}/3 that it had confirmed: the backend was removed" in caplog.text
    # The commit of the same call sends a full backup.
    pointer = life.batch()
    assert "files were deleted from a: it gets a new full backup" in caplog.text
    assert life.files("a", SNAPSHOT) == [pointer.version]
    assert pointer.replication == {"a": ReplicationStatus(pointer.ref)}
    assert life.restored(pointer) == life.models[-1]


def test_a_probe_includes_files_that_were_confirmed_after_the_pointer(life: Life) -> None:
    """The pointer holds them inline, and the commit would drop them because the upload records say that they arrived."""
    life.batch()
    life.settle()
    assert life.pointers[-1].replication["a"].through is None
    remove_root(life, "a")
    probe(life)
    pointer = life.batch()
    assert life.restored(pointer) == life.models[-1]


def test_a_root_removed_between_uploads_is_noticed_although_it_has_the_newest_delta(life: Life) -> None:
    life.history(5)
    remove_root(life, "a")
    for _ in range(3):
        life.batch()
        life.settle()
    life.batch({})
    probe(life)
    pointer = life.batch()
    assert life.files("a", SNAPSHOT) == [pointer.version]
    assert life.restored(pointer) == life.models[-1]


@pytest.mark.parametrize("lost", [False, True])
def test_missing_snapshots_are_ignored_if_the_deltas_before_them_exist(
    life: Life, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A pointer's lineage begins with an unconfirmed snapshot; the deltas before it also lead to the state."""
    life.cadence = SnapshotCadence(2, 3)
    life.history(12)
    assert life.pointers[-1].lineage[0].ref.version > 4
    for name in life.folder("a").names():
        if f".{SNAPSHOT}." in name or (lost and name.startswith("1_")):
            life.folder("a").remove(name)
    caplog.clear()
    probe(life)
    assert ("a no longer has the state" in caplog.text) == lost


def test_a_backend_that_was_added_late_has_the_whole_state(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    life.history(4)
    life.names = ("a", "b")
    for _ in range(3):
        life.batch()
        life.settle()
    assert life.batch({}).replication["b"].since is None
    assert 1 not in life.files("b", DELTA)
    probe(life)
    assert not caplog.text


def test_a_bucket_without_changes_gets_a_full_backup_too(life: Life) -> None:
    life.history(5)
    remove_root(life, "a")
    probe(life)
    pointer = life.batch({})
    assert life.files("a", SNAPSHOT) == [pointer.version]
    assert life.restored(pointer) == life.models[-1]


def test_a_full_backup_without_a_pointer_is_made_again(life: Life) -> None:
    """Another attempt at the batch gets the pointer from before the backup."""
    life.history(5)
    remove_root(life, "a")
    probe(life)
    life.bucket().commit(buffer_of({KEYS[0]: Row(1)}, life.local))
    probe(life, "another process")
    pointer = life.batch()
    assert pointer.replication == {"a": ReplicationStatus(pointer.ref)}
    assert life.restored(pointer) == life.models[-1]


def test_the_removed_one_of_two_backends_gets_a_full_backup(life: Life) -> None:
    life.names = ("a", "b")
    life.history(5)
    remove_root(life, "b")
    probe(life)
    for _ in range(3):
        life.batch()
        life.settle()
    pointer = life.batch({})
    assert pointer.replication["b"] == ReplicationStatus(pointer.ref)
    assert life.restored(pointer, "b") == life.models[-1]


def test_a_backend_that_has_only_a_snapshot_has_the_whole_state(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    life.history(5)
    remove_root(life, "a")
    probe(life)
    pointer = life.batch()
    ref = pointer.replication["a"].through
    assert ref is not None
    life.settle()
    life.folder("a").remove(f"{ref}.delta.arrow")
    caplog.clear()
    probe(life, "another run")
    assert not caplog.text


def test_a_backend_that_cannot_be_reached_is_probed_again(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_away(self: Folder, name: str) -> int:
        raise StorageError("503") from ConnectionError("away")

    life.history(5)
    remove_root(life, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "size", raise_away)
        probe(life)
    assert "still has what it confirmed: 503" in caplog.text
    assert "deleted" not in caplog.text
    probe(life)
    # Commits do not wait for a backend that did not answer just now, so wait here.
    Process.housekeeping.probes.thread.submit(lambda: None).result(WAIT_S)
    life.batch()
    assert "files were deleted from a" in caplog.text


def test_a_probe_that_the_end_of_its_call_interrupts_is_made_again(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_interrupted(self: Folder, name: str) -> int:
        raise InterruptedRestoreError("the restore was stopped")

    life.history(5)
    remove_root(life, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "size", raise_interrupted)
        probe(life)
    assert not caplog.text, "the call has its own error, if it failed"
    probe(life)
    life.batch()
    assert "files were deleted from a" in caplog.text


def test_a_run_that_lost_its_lease_restores_no_operator_file(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_live_run(self: Leases) -> None:
        raise LiveRunError("another run has it")

    life.history(5)
    remove_root(life, "a")
    monkeypatch.setattr(Leases, "check", raise_live_run)
    restored: list[str] = []
    probe(life, restored=restored)
    assert restored == []
    assert life.store.records().keys() == {name for name in life.store.records() if "lost" not in name}


def test_files_that_a_late_task_misses_may_have_been_cleaned_up(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    """A task whose result is no longer needed probes for a checkpoint that is old by now."""
    life.history(5)
    old = life.pointers[-1]
    life.history(40)
    ref = old.replication["a"].through
    assert ref is not None
    life.folder("a").remove(f"{ref}.delta.arrow")
    life.pointers.append(old)
    probe(life)
    life.pointers.pop()
    life.batch()
    assert "gets a new full backup" not in caplog.text


def test_a_query_folder_removed_under_a_running_query_is_probed_again(life: Life) -> None:
    lease = Lease(Folder(str(life.local / "home")), RunIdentity("app", "plan", "query", "host"), 30_000)
    lease.hold()
    life.history(5)

    def probe_again() -> bool:
        clean_ups = make_clean_ups(life, Leases((lease,)))
        clean_ups.probe(life.pointers[-1], "run")
        return clean_ups.probed()

    assert probe_again()
    assert not probe_again()
    shutil.rmtree(life.local / "home")
    lease._look("")
    assert probe_again()
    assert not probe_again()


def test_a_call_waits_only_shortly_for_a_probe_that_hangs(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started, end = threading.Event(), threading.Event()

    def hang(self: Folder, name: str) -> int:
        started.set()
        assert end.wait(WAIT_S)
        return 1

    life.history(5)
    monkeypatch.setattr(Folder, "size", hang)
    monkeypatch.setattr(probes, "_WAIT_S_MAX", 0.05)
    clean_ups = make_clean_ups(life, Leases(()))
    clean_ups.probe(life.pointers[-1], "run")
    assert started.wait(WAIT_S)
    clean_ups.probed()
    assert "a backend does not answer whether it still has what it confirmed" in caplog.text
    housekeeping = Process.housekeeping
    monkeypatch.undo()
    # For a while, the next calls do not wait at all.
    housekeeping.probes._wait_from_s = math.inf
    clean_ups.probed()
    life.batch()
    end.set()
