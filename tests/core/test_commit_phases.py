"""The commit-order scenarios of Samza's asynchronous commit (TestTaskInstance, TestTaskStorageCommitManager,
TestBlobStoreBackupManager), as scenarios of a bucket: real local stores, real files, and backends that hang or fail."""

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


def test_the_phases_come_in_order(life: Life) -> None:
    life.names = ("a", "b")
    gate_of_b = life.manager("b").gate
    gate_of_b.clear()
    pointer = life.batch()
    # The call is over, and one backend has not even begun.
    assert [delta.ref for delta in pointer.inline] == [pointer.ref]
    assert pointer.replication == {"a": ReplicationStatus(None), "b": ReplicationStatus(None)}
    assert life.told[:4] == ["a init", "b init", "a snapshot 1", "b snapshot 1"]
    assert "b has 1.delta" not in life.told
    gate_of_b.set()
    life.settle()
    assert life.told.index("a snapshot 1") < life.told.index("a has 1.delta")
    assert {"a has 1.delta", "b has 1.delta"} <= set(life.told)
    # The next pointer says so, and drops what it held.
    after = life.batch({})
    assert after.replication == {"a": ReplicationStatus(pointer.ref), "b": ReplicationStatus(pointer.ref)}
    assert after.inline == ()
    assert pointer.ref is not None
    assert after.markers == {name: {"state": file_name(pointer.ref, DELTA)} for name in ("a", "b")}


def test_what_is_inline_is_enough(life: Life) -> None:
    """The process dies before anything was sent."""
    life.manager("a").gate.clear()
    for _ in range(3):
        life.batch()
    assert life.files("a", DELTA) == []
    assert life.restored(life.pointers[-1]) == life.models[-1]
    assert life.restored(life.pointers[-2]) == life.models[-2]


def test_uploads_of_a_process_that_died_are_begun_anew(life: Life) -> None:
    life.manager("a").gate.clear()
    for _ in range(2):
        life.batch()
    died, life.uploads = life.uploads, WorkerUploads()
    died.owner = life.uploads.owner = "1 0"  # a process that never was: nobody is at it any more
    life.uploads.owner = WorkerUploads().owner
    gate, life.managers = life.managers["a"].gate, {}
    life.batch()
    life.settle()
    assert life.files("a", DELTA) == [1, 2, 3]
    assert life.batch({}).inline == ()
    gate.set()


def test_another_process_that_lives_is_waited_for(life: Life) -> None:
    """Two workers of one machine take turns; what one has under way the other does not send again."""
    life.manager("a").gate.clear()
    life.batch()
    first, life.uploads = life.uploads, WorkerUploads()
    gate, life.managers = life.managers["a"].gate, {}
    # Both are this process, which lives; the second one does not know what the first one has.
    life.uploads.owner = f"{life.uploads.owner} again"
    life.batch()
    assert "a snapshot 2" in life.told
    assert life.told.count("a snapshot 1") == 1
    gate.set()
    life.options = replace(life.options, commit_delay_ms_max=0)
    assert life.batch({}).inline == ()
    assert first is not life.uploads


# -- skip, block, fail -----------------------------------------------------------------------------


def test_a_commit_goes_on_then_waits_then_fails(life: Life, clock: VirtualClock) -> None:
    life.names = ("a", "b")
    life.options = CommitOptions(commit_delay_ms_max=1_500, commit_timeout_ms=4_000)
    life.batches_retained = 100
    life.batch()
    life.settle()
    hung = life.manager("b")
    hung.gate.clear()
    began_s = clock.now_s
    went_on = 0
    while True:
        started_s = clock.now_s
        try:
            life.batch()
        except CommitTimeoutError as error:
            failed_s, waited_s, text = clock.now_s - began_s, clock.now_s - started_s, str(error)
            break
        assert clock.now_s == started_s, "goes on without waiting"
        went_on += 1
        clock.sleep(0.2)
    assert went_on > 2
    assert "b: 2_" in text
    assert "commit_timeout_ms is 4000" in text
    # It went on for one and a half seconds, and gave up after four, counted from when the upload began.
    assert failed_s == pytest.approx(4.0)
    assert waited_s == pytest.approx(2.4)
    # Nothing is lost, and another start goes on; what hung comes back.
    assert life.restored(life.pointers[-1]) == life.models[-1]
    hung.gate.set()
    life.next_stage()
    life.batch()
    life.settle()
    assert life.batch({}).inline == ()
    assert life.restored(life.pointers[-1], "b") == life.models[-1]


def test_a_commit_waits_where_clean_up_would_not_know_of_what_is_late(life: Life, clock: VirtualClock) -> None:
    """However patient it is: what is in Spark's own state only is as many batches old as Spark retains at most."""
    life.batches_retained = 3
    life.manager("a").gate.clear()
    for _ in range(4):
        life.batch()
    assert [delta.heartbeat for delta in life.pointers[-1].inline] == [1, 2, 3, 4]
    started_s = clock.now_s
    clock.after(0.4, life.manager("a").gate.set)
    assert [delta.heartbeat for delta in life.batch().inline] == [5]
    assert clock.now_s - started_s >= 0.4


def test_a_commit_waits_no_longer_than_the_upload_takes(life: Life, clock: VirtualClock) -> None:
    life.options = CommitOptions(commit_delay_ms_max=100, commit_timeout_ms=20_000)
    life.manager("a").gate.clear()
    life.batch()
    clock.sleep(0.15)
    started_s = clock.now_s
    clock.after(0.4, life.manager("a").gate.set)
    pointer = life.batch()
    # It looks about once a second.
    assert 0.4 <= clock.now_s - started_s < 2
    # What went before is confirmed, and only the new one is inline.
    assert [delta.ref for delta in pointer.inline] == [pointer.ref]


def test_a_job_that_was_down_for_long_is_not_late(life: Life, clock: VirtualClock) -> None:
    """Age counts from when an upload began here."""
    life.options = CommitOptions(commit_delay_ms_max=200, commit_timeout_ms=400)
    life.manager("a").gate.clear()
    pointer = life.batch()
    life.pointers[-1] = replace(pointer, inline=tuple(replace(it, made_ms=1) for it in pointer.inline))
    life.store.record({}, list(life.store.records()))
    life.uploads, life.managers = WorkerUploads(), {}
    life.batch()


def test_over_the_bound_a_commit_waits(life: Life, clock: VirtualClock) -> None:
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


def test_the_last_call_of_a_task_waits_for_the_others(life: Life) -> None:
    life.options = CommitOptions(inline_bytes_max=10)
    life.manager("a").gate.clear()
    pointer = life.batch(may_defer=True)
    # It says that everything is there, which holds once what is left has been waited for.
    assert (pointer.inline, pointer.replication) == ((), {"a": ReplicationStatus(pointer.ref)})
    assert [upload.file for upload in life.left] == [file_name(pointer.ref, DELTA)] if pointer.ref else []
    assert not any(upload.done.done() for upload in life.left)
    life.manager("a").gate.set()
    life.bucket().committer.await_all(life.left)
    assert life.restored(pointer) == life.models[-1]


def test_without_a_journal_the_call_waits(life: Life, clock: VirtualClock) -> None:
    life.options = CommitOptions(journal=False)
    clock.after(0.3, life.manager("a").gate.set)
    life.manager("a").gate.clear()
    started_s = clock.now_s
    pointer = life.batch()
    assert clock.now_s - started_s >= 0.3
    assert (pointer.inline, pointer.replication) == ((), {"a": ReplicationStatus(pointer.ref)})


def test_a_journal_that_is_left_out_is_emptied_first(life: Life, clock: VirtualClock) -> None:
    life.manager("a").gate.clear()
    assert len([life.batch() for _ in range(3)][-1].inline) == 3
    life.options = CommitOptions(journal=False)
    clock.after(0.2, life.manager("a").gate.set)
    assert life.batch({}).inline == ()
    assert life.files("a", DELTA) == [1, 2, 3]


# -- failures --------------------------------------------------------------------------------------


def test_a_failed_upload_surfaces_at_the_next_commit(life: Life) -> None:
    life.manager("a").fails_with = PermissionError("not yours")
    first = life.batch()
    life.settle()
    with pytest.raises(UploadFailedError, match=r"1_\w+\.delta\.arrow to the backend a failed: .*not yours.*not lost"):
        life.batch()
    # The state is as it was, and another start sends it again.
    assert life.restored(first) == life.models[-1]
    life.manager("a").fails_with = None
    life.next_stage()
    life.batch()
    life.settle()
    assert life.batch({}).inline == ()
    assert life.files("a", DELTA) == [1, 2]


def test_a_failed_upload_that_is_waited_for_is_raised_as_it_is(life: Life) -> None:
    life.options = CommitOptions(journal=False)
    life.manager("a").fails_with = MissingCheckpointError("gone")
    with pytest.raises(MissingCheckpointError, match="gone"):
        life.batch()
    life.manager("a").fails_with = None
    life.batch()


def test_a_pointer_that_was_not_committed(life: Life) -> None:
    """Spark could not write it: the next attempt begins from the pointer before, and what was sent is swept away."""
    life.options = replace(life.options, commit_delay_ms_max=0)
    for _ in range(3):
        life.batch()
    abandoned = life.batch()
    life.settle()
    life.pointers.pop()
    life.models.pop()
    for _ in range(3):
        life.batch()
    life.settle()
    life.batch({})
    assert abandoned.ref is not None
    assert abandoned.ref in [parsed[0] for it in life.folder("a").names() if (parsed := parse_file_name(it))]
    assert life.restored(life.pointers[-1], "a") == life.models[-1]


def test_files_that_somebody_deleted_are_answered_with_a_fresh_full_backup(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_where_all_was_deleted_the_backup_comes_before_the_pointer(life: Life) -> None:
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
    """Somebody deletes a backend's files, and that is found out."""
    for file in life.folder(name).names():
        life.folder(name).remove(file)
    life.bucket().committer.snapshots.note_lost(name, life.pointers[-1].heartbeats)


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_what_is_lost_is_not_forgotten_by_a_commit_that_fails(life: Life, names: tuple[str, ...]) -> None:
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


def test_what_is_lost_is_not_forgotten_by_the_pointer_of_another_attempt(life: Life) -> None:
    """On another machine, which does not know of it, and whose pointer is the one that counts."""
    life.history(4)
    before = life.pointers[-1]
    _lose_all(life, "a")
    answered = life.batch()
    assert life.restored(answered) == life.models[-1]
    life.pointers.pop()
    life.models.pop()
    store = LocalStore.at(life.local / "elsewhere", SCHEMA)
    life.stores.append(store)
    here, life.store = life.store, store
    # It has the state, and takes what the pointer says for so.
    for run in sorted(here.runs(), key=lambda run: run.newest.version):
        rows = list(View(here, [run]).scan(keep_tombstones=not run.base))
        store.restore(rows, run.newest, run.parent, snapshot=run.base)
    counted = life.batch()
    assert counted.parent == before.ref
    assert counted.replication["a"].through != counted.ref, "nothing was sent in full"
    life.settle()
    life.store = here
    after = life.batch()
    assert after.replication == {"a": ReplicationStatus(after.ref)}
    assert life.restored(after) == life.models[-1]
    # Answered, and committed: that is all.
    snapshots = life.files("a", SNAPSHOT)
    for _ in range(3):
        life.batch()
        life.settle()
    assert life.files("a", SNAPSHOT) == snapshots
    assert not [name for name in here.records() if "lost" in name or "answered" in name]
