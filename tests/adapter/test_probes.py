"""A probe for what backends had confirmed, when a run first comes to a bucket."""

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
from spark_state_ext.commit import cadence
from spark_state_ext.engine import probes
from spark_state_ext.engine.housekeeping import CleanUps, Housekeeping
from spark_state_ext.engine.replicas import Leases
from spark_state_ext.errors import LiveRunError, StorageError
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


def _clean_ups(life: Life, leases: Leases, bring_back: Callable[[], None] = lambda: None) -> CleanUps:
    retained, where = life.batches_retained, Folder(str(life.local))
    return CleanUps(life.bucket(), life.replicas(), leases, retained, where, Process.housekeeping, bring_back)


def _probe(life: Life, run: str = "run", brought: list[str] | None = None) -> None:
    def bring_back() -> None:
        if brought is not None:
            brought.append("back")

    clean_ups = _clean_ups(life, Leases(()), bring_back)
    clean_ups.probe(life.pointers[-1], run)
    clean_ups.probed()


def _remove(life: Life, name: str) -> None:
    shutil.rmtree(life.folder(name).root)


def test_a_root_that_was_removed_is_noticed_while_the_local_store_is_warm(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    life.history(5)
    brought: list[str] = []
    _probe(life, brought=brought)
    assert brought == []
    assert not caplog.text
    _remove(life, "a")
    _probe(life, brought=brought)
    assert brought == [], "this run has looked already"
    _probe(life, "another run", brought)
    assert brought == ["back"]
    assert "a no longer has the state" in caplog.text
    assert f"state of {life.local}/3 that it had confirmed: the backend was removed" in caplog.text
    # The commit of the same call.
    pointer = life.batch()
    assert "files were deleted from a: it gets a new full backup" in caplog.text
    assert life.files("a", SNAPSHOT) == [pointer.version]
    assert pointer.replication == {"a": ReplicationStatus(pointer.ref)}
    assert life.restored(pointer) == life.models[-1]


def test_what_was_confirmed_since_the_pointer_was_made_is_looked_for(life: Life) -> None:
    """The pointer holds all of it inline, and the commit would let go of that as the store has it by the records."""
    life.batch()
    life.settle()
    assert life.pointers[-1].replication["a"].through is None
    _remove(life, "a")
    _probe(life)
    pointer = life.batch()
    assert life.restored(pointer) == life.models[-1]


def test_a_root_that_went_while_deltas_were_sent_there_is_noticed_though_it_has_the_newest(life: Life) -> None:
    life.history(5)
    _remove(life, "a")
    for _ in range(3):
        life.batch()
        life.settle()
    life.batch({})
    _probe(life)
    pointer = life.batch()
    assert life.files("a", SNAPSHOT) == [pointer.version]
    assert life.restored(pointer) == life.models[-1]


@pytest.mark.parametrize("lost", [False, True])
def test_snapshots_that_never_came_are_passed_by(
    life: Life, lost: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pointer begins with one that it presumes; the deltas before lead to the state, while they are there."""
    monkeypatch.setattr(cadence, "DELTAS_MIN", 2)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 3)
    life.history(12)
    assert life.pointers[-1].lineage[0].ref.version > 4
    for name in life.folder("a").names():
        if f".{SNAPSHOT}." in name or (lost and name.startswith("1_")):
            life.folder("a").remove(name)
    caplog.clear()
    _probe(life)
    assert ("a no longer has the state" in caplog.text) == lost


def test_a_backend_that_joined_late_lacks_nothing(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    life.history(4)
    life.names = ("a", "b")
    for _ in range(3):
        life.batch()
        life.settle()
    assert life.batch({}).replication["b"].since is None
    assert 1 not in life.files("b", DELTA)
    _probe(life)
    assert not caplog.text


def test_a_quiet_bucket_is_written_in_full_too(life: Life) -> None:
    life.history(5)
    _remove(life, "a")
    _probe(life)
    pointer = life.batch({})
    assert life.files("a", SNAPSHOT) == [pointer.version]
    assert life.restored(pointer) == life.models[-1]


def test_a_full_backup_that_no_pointer_tells_of_is_made_again(life: Life) -> None:
    """Another attempt at the batch is handed the pointer from before that."""
    life.history(5)
    _remove(life, "a")
    _probe(life)
    life.bucket().commit(buffer_of({KEYS[0]: Row(1)}, life.local))
    _probe(life, "another process")
    pointer = life.batch()
    assert pointer.replication == {"a": ReplicationStatus(pointer.ref)}
    assert life.restored(pointer) == life.models[-1]


def test_of_two_backends_the_one_that_was_removed_gets_a_full_backup(life: Life) -> None:
    life.names = ("a", "b")
    life.history(5)
    _remove(life, "b")
    _probe(life)
    for _ in range(3):
        life.batch()
        life.settle()
    pointer = life.batch({})
    assert pointer.replication["b"] == ReplicationStatus(pointer.ref)
    assert life.restored(pointer, "b") == life.models[-1]


def test_a_backend_that_has_a_snapshot_only_lacks_nothing(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    life.history(5)
    _remove(life, "a")
    _probe(life)
    pointer = life.batch()
    ref = pointer.replication["a"].through
    assert ref is not None
    life.settle()
    life.folder("a").remove(f"{ref}.delta.arrow")
    caplog.clear()
    _probe(life, "another run")
    assert not caplog.text


def test_a_store_that_cannot_be_reached_is_looked_at_again(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(self: Folder, name: str) -> int:
        raise StorageError("503") from ConnectionError("away")

    life.history(5)
    _remove(life, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "size", away)
        _probe(life)
    assert "still has what it confirmed: 503" in caplog.text
    assert "deleted" not in caplog.text
    _probe(life)
    # No commit waits for a store that did not answer just now.
    Process.housekeeping.probes.thread.submit(lambda: None).result(WAIT_S)
    life.batch()
    assert "files were deleted from a" in caplog.text


def test_a_run_that_was_replaced_brings_nothing_back(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Leases) -> None:
        raise LiveRunError("another run has it")

    life.history(5)
    _remove(life, "a")
    monkeypatch.setattr(Leases, "check", lost)
    brought: list[str] = []
    _probe(life, brought=brought)
    assert brought == []
    assert life.store.records().keys() == {name for name in life.store.records() if "lost" not in name}


def test_what_a_late_task_misses_may_have_been_deleted_rightly(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that nobody waits for any more probes for a checkpoint that is old by now."""
    life.history(5)
    old = life.pointers[-1]
    life.history(40)
    ref = old.replication["a"].through
    assert ref is not None
    life.folder("a").remove(f"{ref}.delta.arrow")
    life.pointers.append(old)
    _probe(life)
    life.pointers.pop()
    life.batch()
    assert "gets a new full backup" not in caplog.text


def test_a_query_folder_that_is_removed_under_a_running_query_is_looked_for_again(life: Life) -> None:
    lease = Lease(Folder(str(life.local / "home")), RunIdentity("app", "plan", "query", "host"), 30_000)
    lease.hold()
    life.history(5)

    def probed() -> bool:
        clean_ups = _clean_ups(life, Leases((lease,)))
        clean_ups.probe(life.pointers[-1], "run")
        return clean_ups.probed()

    assert probed()
    assert not probed()
    shutil.rmtree(life.local / "home")
    lease._look("")
    assert probed()
    assert not probed()


def test_nobody_waits_long_for_a_look(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    began, ends = threading.Event(), threading.Event()

    def hangs(self: Folder, name: str) -> int:
        began.set()
        assert ends.wait(WAIT_S)
        return 1

    life.history(5)
    monkeypatch.setattr(Folder, "size", hangs)
    monkeypatch.setattr(probes, "_WAIT_S_MAX", 0.05)
    clean_ups = _clean_ups(life, Leases(()))
    clean_ups.probe(life.pointers[-1], "run")
    assert began.wait(WAIT_S)
    clean_ups.probed()
    assert "a backend does not answer whether it still has what it confirmed" in caplog.text
    mine = Process.housekeeping
    monkeypatch.undo()
    # The next ones do not wait at all, for a while.
    mine.probes._wait_from_s = math.inf
    clean_ups.probed()
    life.batch()
    ends.set()
