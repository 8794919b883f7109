"""Scenarios of a bucket's commits with real local stores, real files, and backends that hang or fail.

They follow the tests of Samza's asynchronous commit (TestTaskInstance, TestTaskStorageCommitManager,
TestBlobStoreBackupManager).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from life import RETAINED, Life

from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name, parse_file_name
from arrow_schemas.pointer import ReplicationStatus
from spark_state_ext.backends import CleanUp
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.errors import (
    CommitTimeoutError,
    LostFilesError,
    MissingCheckpointError,
    StorageError,
    UploadFailedError,
)
from spark_state_ext.store import LocalStore, View
from spark_state_ext.testing.model import SCHEMA
from tests.helpers.clock import VirtualClock
from tests.helpers.waiting import WAIT_S

# -- order -----------------------------------------------------------------------------------------


def test_a_commit_snapshots_then_uploads_then_confirms(life: Life) -> None:
    life.names = ("a", "b")
    gate_of_b = life.manager("b").gate
    gate_of_b.clear()
    pointer = life.batch()
    # The call ends before one backend has begun its upload.
    assert [delta.ref for delta in pointer.inline] == [pointer.ref]
    assert pointer.replication == {"a": ReplicationStatus(None), "b": ReplicationStatus(None)}
    assert life.told[:4] == ["a init", "b init", "a snapshot 1", "b snapshot 1"]
    assert "b has 1.delta" not in life.told
    gate_of_b.set()
    life.settle()
    assert life.told.index("a snapshot 1") < life.told.index("a has 1.delta")
    assert {"a has 1.delta", "b has 1.delta"} <= set(life.told)
    # The next pointer confirms the uploads and drops the inline delta.
    after = life.batch({})
    assert after.replication == {"a": ReplicationStatus(pointer.ref), "b": ReplicationStatus(pointer.ref)}
    assert after.inline == ()
    assert pointer.ref is not None
    assert after.markers == {name: {"state": file_name(pointer.ref, DELTA)} for name in ("a", "b")}


def test_state_is_restored_from_inline_deltas(life: Life) -> None:
    """The process dies before any upload."""
    life.manager("a").gate.clear()
    for _ in range(3):
        life.batch()
    assert life.files("a", DELTA) == []
    assert life.restored(life.pointers[-1]) == life.models[-1]
    assert life.restored(life.pointers[-2]) == life.models[-2]


def test_uploads_of_a_dead_process_are_restarted(life: Life) -> None:
    life.manager("a").gate.clear()
    for _ in range(2):
        life.batch()
    old_uploads, life.uploads = life.uploads, WorkerUploads()
    old_uploads.owner = life.uploads.owner = "1 0"  # a process that does not exist, so the uploads have no owner
    life.uploads.owner = WorkerUploads().owner
    gate, life.managers = life.managers["a"].gate, {}
    life.batch()
    life.settle()
    assert life.files("a", DELTA) == [1, 2, 3]
    assert life.batch({}).inline == ()
    gate.set()


def test_a_running_upload_of_another_live_process_is_not_repeated(life: Life) -> None:
    """Two workers of one machine take turns; a worker does not repeat a running upload of the other."""
    life.manager("a").gate.clear()
    life.batch()
    first, life.uploads = life.uploads, WorkerUploads()
    gate, life.managers = life.managers["a"].gate, {}
    # Both owners are this process, which is alive; the second one does not know the uploads of the first.
    life.uploads.owner = f"{life.uploads.owner} again"
    life.batch()
    assert "a snapshot 2" in life.told
    assert life.told.count("a snapshot 1") == 1
    gate.set()
    life.options = replace(life.options, commit_delay_ms_max=0)
    assert life.batch({}).inline == ()
    assert first is not life.uploads


# -- skip, block, fail -----------------------------------------------------------------------------


def test_a_commit_continues_then_waits_then_fails_if_a_backend_hangs(life: Life, clock: VirtualClock) -> None:
    life.names = ("a", "b")
    life.options = CommitOptions(commit_delay_ms_max=1_500, commit_timeout_ms=4_000)
    life.batches_retained = 100
    life.batch()
    life.settle()
    hung = life.manager("b")
    hung.gate.clear()
    began_s = clock.now_s
    committed = 0
    while True:
        started_s = clock.now_s
        try:
            life.batch()
        except CommitTimeoutError as error:
            failed_s, waited_s, text = clock.now_s - began_s, clock.now_s - started_s, str(error)
            break
        assert clock.now_s == started_s, "the commit continues without waiting"
        committed += 1
        clock.sleep(0.2)
    assert committed > 2
    assert "b: 2_" in text
    assert "commit_timeout_ms is 4000" in text
    # Commits continue for 1.5 seconds, then wait, and fail four seconds after the upload began.
    assert failed_s == pytest.approx(4.0)
    assert waited_s == pytest.approx(2.4)
    # No state is lost, and a restart continues once the backend responds again.
    assert life.restored(life.pointers[-1]) == life.models[-1]
    hung.gate.set()
    life.next_stage()
    life.batch()
    life.settle()
    assert life.batch({}).inline == ()
    assert life.restored(life.pointers[-1], "b") == life.models[-1]


def test_a_commit_waits_if_an_inline_delta_is_as_old_as_spark_retains(life: Life, clock: VirtualClock) -> None:
    """An inline delta is at most as many batches old as Spark retains, however long the delay may be."""
    life.batches_retained = 3
    life.manager("a").gate.clear()
    for _ in range(4):
        life.batch()
    assert [delta.heartbeat for delta in life.pointers[-1].inline] == [1, 2, 3, 4]
    started_s = clock.now_s
    clock.after(0.4, life.manager("a").gate.set)
    assert [delta.heartbeat for delta in life.batch().inline] == [5]
    assert clock.now_s - started_s >= 0.4


def test_a_commit_waits_only_until_the_upload_is_done(life: Life, clock: VirtualClock) -> None:
    life.options = CommitOptions(commit_delay_ms_max=100, commit_timeout_ms=20_000)
    life.manager("a").gate.clear()
    life.batch()
    clock.sleep(0.15)
    started_s = clock.now_s
    clock.after(0.4, life.manager("a").gate.set)
    pointer = life.batch()
    # It checks about once a second.
    assert 0.4 <= clock.now_s - started_s < 2
    # The previous delta is confirmed, so only the new one is inline.
    assert [delta.ref for delta in pointer.inline] == [pointer.ref]


def test_a_job_that_was_stopped_for_long_does_not_time_out(life: Life, clock: VirtualClock) -> None:
    """The age of a delta counts from the start of its upload in this process."""
    life.options = CommitOptions(commit_delay_ms_max=200, commit_timeout_ms=400)
    life.manager("a").gate.clear()
    pointer = life.batch()
    life.pointers[-1] = replace(pointer, inline=tuple(replace(delta, made_ms=1) for delta in pointer.inline))
    life.store.record({}, list(life.store.records()))
    life.uploads, life.managers = WorkerUploads(), {}
    life.batch()


def test_a_commit_waits_if_inline_deltas_exceed_their_limit(life: Life, clock: VirtualClock) -> None:
    life.manager("a").gate.clear()
    size = len(life.batch().inline[0].data)
    life.options = CommitOptions(inline_bytes_max=int(2.5 * size))
    assert len(life.batch().inline) == 2
    clock.after(0.3, life.manager("a").gate.set)
    started_s = clock.now_s
    pointer = life.batch()
    assert clock.now_s - started_s >= 0.3
    assert pointer.inline == ()
    assert pointer.replication == {"a": ReplicationStatus(pointer.ref)}
    assert life.restored(pointer, "a") == life.models[-1]


def test_deferred_uploads_are_waited_for_at_the_end_of_a_task(life: Life) -> None:
    life.options = CommitOptions(inline_bytes_max=10)
    life.manager("a").gate.clear()
    pointer = life.batch(may_defer=True)
    # The pointer claims that every file has arrived, which is true after the task's last call has waited.
    assert (pointer.inline, pointer.replication) == ((), {"a": ReplicationStatus(pointer.ref)})
    assert pointer.ref is not None
    assert [upload.file for upload in life.left] == [file_name(pointer.ref, DELTA)]
    assert not any(upload.done.done() for upload in life.left)
    life.manager("a").gate.set()
    life.bucket().committer.await_all(life.left)
    assert life.restored(pointer) == life.models[-1]


def test_a_commit_without_a_journal_waits_for_its_upload(life: Life, clock: VirtualClock) -> None:
    life.options = CommitOptions(journal=False)
    clock.after(0.3, life.manager("a").gate.set)
    life.manager("a").gate.clear()
    started_s = clock.now_s
    pointer = life.batch()
    assert clock.now_s - started_s >= 0.3
    assert (pointer.inline, pointer.replication) == ((), {"a": ReplicationStatus(pointer.ref)})


def test_inline_deltas_are_uploaded_after_the_journal_is_turned_off(life: Life, clock: VirtualClock) -> None:
    life.manager("a").gate.clear()
    assert len([life.batch() for _ in range(3)][-1].inline) == 3
    life.options = CommitOptions(journal=False)
    clock.after(0.2, life.manager("a").gate.set)
    assert life.batch({}).inline == ()
    assert life.files("a", DELTA) == [1, 2, 3]


# -- failures --------------------------------------------------------------------------------------


def test_a_failed_upload_is_raised_by_the_next_commit(life: Life) -> None:
    life.manager("a").fails_with = PermissionError("not yours")
    first = life.batch()
    life.settle()
    with pytest.raises(UploadFailedError, match=r"1_\w+\.delta\.arrow to the backend a failed: .*not yours.*not lost"):
        life.batch()
    # The state is unchanged, and a restart sends the file again.
    assert life.restored(first) == life.models[-1]
    life.manager("a").fails_with = None
    life.next_stage()
    life.batch()
    life.settle()
    assert life.batch({}).inline == ()
    assert life.files("a", DELTA) == [1, 2]


def test_a_commit_that_waits_raises_the_error_of_its_upload(life: Life) -> None:
    life.options = CommitOptions(journal=False)
    life.manager("a").fails_with = MissingCheckpointError("gone")
    with pytest.raises(MissingCheckpointError, match="gone"):
        life.batch()
    life.manager("a").fails_with = None
    life.batch()


def test_an_uncommitted_pointer_does_not_change_the_state(life: Life) -> None:
    """If Spark could not write a pointer, the next attempt starts from the previous one."""
    life.options = replace(life.options, commit_delay_ms_max=0)
    for _ in range(3):
        life.batch()
    uncommitted = life.batch()
    life.settle()
    life.pointers.pop()
    life.models.pop()
    for _ in range(3):
        life.batch()
    life.settle()
    life.batch({})
    assert uncommitted.ref is not None
    assert uncommitted.ref in [parsed[0] for name in life.folder("a").names() if (parsed := parse_file_name(name))]
    assert life.restored(life.pointers[-1], "a") == life.models[-1]


def test_a_backend_with_deleted_files_gets_a_new_full_backup(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    life.names = ("a", "b")
    life.history(5)
    for name in life.folder("b").names()[:3]:
        life.folder("b").remove(name)
    pointer = life.pointers[-1]
    head = pointer.replication["b"].through
    assert head is not None
    with pytest.raises(LostFilesError, match="deleted"):
        life.manager("b").clean_up(CleanUp(pointer, head, RETAINED, lambda: None)).result(WAIT_S)
    life.bucket().committer.snapshots.note_lost("b", pointer.heartbeats)
    after = life.batch()
    assert "files were deleted from b: it gets a new full backup" in caplog.text
    assert after.replication["b"] == ReplicationStatus(after.ref, since=after.ref)
    life.settle()
    after = life.batch()
    life.settle()
    after = life.batch({})
    assert after.replication["b"] == ReplicationStatus(after.ref)
    assert life.restored(after, "b") == life.models[-1]
    assert len(life.files("b", SNAPSHOT)) == 1


def test_a_sole_backend_that_lost_its_files_gets_a_full_backup_before_the_pointer(life: Life) -> None:
    life.options = replace(life.options, commit_delay_ms_max=0)
    for _ in range(3):
        life.batch()
    life.settle()
    for name in life.folder("a").names():
        life.folder("a").remove(name)
    life.bucket().committer.snapshots.note_lost("a", life.pointers[-1].heartbeats)
    pointer = life.batch()
    assert pointer.replication == {"a": ReplicationStatus(pointer.ref)}
    assert life.restored(pointer) == life.models[-1]


def _lose_all(life: Life, name: str) -> None:
    """Delete a backend's files, and note that they are lost."""
    for file in life.folder(name).names():
        life.folder(name).remove(file)
    life.bucket().committer.snapshots.note_lost(name, life.pointers[-1].heartbeats)


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_lost_files_are_still_replaced_after_a_failed_commit(life: Life, names: tuple[str, ...]) -> None:
    life.names = names
    life.history(4)
    _lose_all(life, names[-1])
    life.manager("a").fails_with = life.manager(names[-1]).fails_with = PermissionError("not yet")
    if len(names) == 1:
        with pytest.raises(StorageError):
            life.batch()
    else:
        life.options = replace(life.options, journal=False)
        with pytest.raises(UploadFailedError):
            life.batch()
    life.manager("a").fails_with = life.manager(names[-1]).fails_with = None
    life.next_stage()
    for _ in range(3):
        life.batch()
        life.settle()
    assert life.restored(life.batch({}), names[-1]) == life.models[-1]


def test_lost_files_are_still_replaced_after_another_attempt_is_committed(life: Life) -> None:
    """The other attempt runs on a machine that does not know of the loss, and Spark commits its pointer."""
    life.history(4)
    previous = life.pointers[-1]
    _lose_all(life, "a")
    repaired = life.batch()
    assert life.restored(repaired) == life.models[-1]
    life.pointers.pop()
    life.models.pop()
    store = LocalStore.at(life.local / "elsewhere", SCHEMA)
    life.stores.append(store)
    own_store, life.store = life.store, store
    # This store has the state, and its attempt trusts the pointer.
    for run in sorted(own_store.runs(), key=lambda run: run.newest.version):
        rows = list(View(own_store, [run]).scan(keep_tombstones=not run.base))
        store.restore(rows, run.newest, run.parent, snapshot=run.base)
    committed = life.batch()
    assert committed.parent == previous.ref
    assert committed.replication["a"].through != committed.ref, "no full backup was sent"
    life.settle()
    life.store = own_store
    after = life.batch()
    assert after.replication == {"a": ReplicationStatus(after.ref)}
    assert life.restored(after) == life.models[-1]
    # The full backup is committed, so there are no further ones.
    snapshots = life.files("a", SNAPSHOT)
    for _ in range(3):
        life.batch()
        life.settle()
    assert life.files("a", SNAPSHOT) == snapshots
    assert not [name for name in own_store.records() if "lost" in name or "answered" in name]
