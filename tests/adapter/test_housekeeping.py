"""Clean-up of checkpoint files and of spill files that a call starts in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from life import Life

from spark_state_ext.engine import housekeeping
from spark_state_ext.engine.housekeeping import CleanUps, Housekeeping
from spark_state_ext.engine.replicas import Leases
from spark_state_ext.engine.spill_folders import spill_folder
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.errors import CleanUpFailedError, LiveRunError, StorageError
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.ownership.holds import HoldWatch
from spark_state_ext.worker.background import Background
from tests.helpers.waiting import WAIT_S

DUE = 10


@pytest.fixture(autouse=True)
def background(monkeypatch: pytest.MonkeyPatch) -> Iterator[Background]:
    """Give each test a worker process of its own."""
    worker_background = Background()
    monkeypatch.setattr(Process, "housekeeping", Housekeeping(worker_background, HoldWatch()), raising=False)
    yield worker_background
    assert worker_background.wait(WAIT_S)


class Process:
    """The worker process of a test."""

    housekeeping: Housekeeping


def make_clean_ups(life: Life) -> CleanUps:
    return CleanUps(
        life.bucket(), life.replicas(), Leases(()), life.batches_retained, Folder(str(life.local)), Process.housekeeping
    )


def raise_denied(*args: object, **kwargs: object) -> None:
    raise StorageError("403") from PermissionError("may not delete")


def test_the_next_commit_reports_a_clean_up_that_was_denied(
    life: Life, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.history(40)
    pointer, before = life.pointers[-1], life.files("a", "delta")
    housekeeping_of_worker = Process.housekeeping
    monkeypatch.setattr(Folder, "remove", raise_denied)
    make_clean_ups(life).in_turn(pointer, replace(pointer, calls=DUE - pointer.bucket))
    assert background.wait(WAIT_S)
    with pytest.raises(CleanUpFailedError, match=r"backend a cannot be deleted: 403.*clean_up=False"):
        make_clean_ups(life).raise_failed()
    # The error is raised only once, and no file is lost.
    make_clean_ups(life).raise_failed()
    assert life.files("a", "delta") == before
    monkeypatch.undo()
    monkeypatch.setattr(Process, "housekeeping", housekeeping_of_worker, raising=False)
    make_clean_ups(life).in_turn(pointer, replace(pointer, calls=DUE - pointer.bucket))
    assert background.wait(WAIT_S)
    deleted = len(before) - len(life.files("a", "delta"))
    assert deleted > 0
    make_clean_ups(life).raise_failed()
    # The metrics count each file once.
    assert make_clean_ups(life).deleted_files() >= deleted
    assert make_clean_ups(life).deleted_files() == 0


def test_a_clean_up_that_failed_for_a_moment_is_not_reported(
    life: Life, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_busy(*args: object) -> None:
        raise StorageError("503") from ConnectionError("busy")

    life.history(40)
    pointer = life.pointers[-1]
    monkeypatch.setattr(Folder, "remove", raise_busy)
    make_clean_ups(life).in_turn(pointer, replace(pointer, calls=DUE - pointer.bucket))
    assert background.wait(WAIT_S)
    make_clean_ups(life).raise_failed()


def test_lost_files_are_noticed_again_if_restoring_the_operator_file_failed(
    life: Life, background: Background, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clean-up runs within the call here, and its error must not fail the call."""

    def raise_away() -> None:
        raise StorageError("503") from ConnectionError("away")

    life.history(40)
    for name in life.folder("a").names():
        life.folder("a").remove(name)
    monkeypatch.setattr(CleanUps, "_is_crowded", lambda *args: True)
    args = (
        life.bucket(),
        life.replicas(),
        Leases(()),
        life.batches_retained,
        Folder(str(life.local)),
        Process.housekeeping,
    )
    due = DUE - life.pointers[-1].bucket
    CleanUps(*args, raise_away).in_turn(life.pointers[-1], replace(life.pointers[-1], calls=due))
    assert "no files are cleaned up in a: 503" in caplog.text
    life.batch({})
    assert "gets a new full backup" not in caplog.text
    restored: list[str] = []
    CleanUps(*args, lambda: restored.append("back")).in_turn(life.pointers[-1], replace(life.pointers[-1], calls=due))
    assert restored == ["back"]
    life.batch({})
    assert "files were deleted from a: it gets a new full backup" in caplog.text


def test_a_run_that_lost_its_lease_deletes_no_files(
    life: Life, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_live_run(self: Leases) -> None:
        raise LiveRunError("another run has it")

    life.history(40)
    pointer, before = life.pointers[-1], life.files("a", "delta")
    monkeypatch.setattr(Leases, "check", raise_live_run)
    make_clean_ups(life).in_turn(pointer, replace(pointer, calls=DUE - pointer.bucket))
    assert background.wait(WAIT_S)
    assert life.files("a", "delta") == before
    make_clean_ups(life).raise_failed()


def test_a_clean_up_that_hangs_does_not_block_uploads_or_start_another_one(
    life: Life, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.history(40)
    pointer, before = life.pointers[-1], life.files("a", "delta")
    list_entries, end, calls = Folder.entries, threading.Event(), threading.Semaphore(0)

    def hang(self: Folder) -> list[Entry]:
        calls.release()
        assert end.wait(WAIT_S)
        return list_entries(self)

    monkeypatch.setattr(housekeeping, "_CLEAN_UP_S_MAX", 0.1)
    monkeypatch.setattr(Folder, "entries", hang)
    background.finished = 1
    try:
        for _ in range(3):
            make_clean_ups(life).in_turn(pointer, replace(pointer, calls=DUE - pointer.bucket))
            assert background.wait(WAIT_S)
        # With one bucket, uploads have two threads.
        life.options = replace(life.options, commit_timeout_ms=10_000)
        life.batch()
        assert calls.acquire(timeout=WAIT_S)
        assert not calls.acquire(timeout=0.1), "no second clean-up starts while one hangs"
    finally:
        end.set()
    housekeeping_of_worker = Process.housekeeping
    monkeypatch.undo()
    monkeypatch.setattr(Process, "housekeeping", housekeeping_of_worker, raising=False)
    abandoned = housekeeping_of_worker.abandoned[f"{life.local}/3", "a"]
    abandoned.result(WAIT_S)
    assert len(life.files("a", "delta")) < len(before)
    make_clean_ups(life).in_turn(pointer, replace(pointer, calls=DUE - pointer.bucket))
    assert background.wait(WAIT_S)
    assert (f"{life.local}/3", "a") not in housekeeping_of_worker.abandoned


@pytest.mark.parametrize("finished", [0, 1])
def test_spill_files_of_earlier_batches_are_deleted(finished: int, background: Background, tmp_path: Path) -> None:
    """The background deletes them; if it never gets to it, every few calls do."""
    background.finished = finished
    task, folder, began_s = TaskInfo("query", "run", 7), Folder(str(tmp_path)), 1_000_000.0
    for batch, made_s in ((3, began_s - 5), (7, began_s + 5)):
        folder.child(spill_folder("query", batch, made_s)).put("x.payloads", b"rows")
    for calls in (5, housekeeping._SPILL_EVERY_CALLS):
        Process.housekeeping.drop_spill_files(folder, task, calls, int(1000 * began_s))
        assert background.wait(WAIT_S)
    assert folder.child("query", "spill").names() == ["7-1000005"]


def test_spill_files_of_this_batch_stay_even_if_named_for_another_batch(background: Background, tmp_path: Path) -> None:
    """A sink's thread from batch 3 names batch 3 in later batches too, and may run at the same time as the sink."""
    folder, began_s = Folder(str(tmp_path)), 1_000_000.0
    for made_s in (began_s - 60, began_s + 5):
        folder.child(spill_folder("query", 3, made_s)).put("x.payloads", b"rows")
    Process.housekeeping.drop_spill_files(folder, TaskInfo("query", "run", 7), 5, int(1000 * began_s))
    assert background.wait(WAIT_S)
    assert folder.child("query", "spill").names() == ["3-1000005"]
    Process.housekeeping.drop_spill_files(folder, TaskInfo("query", "run", 8), 6, int(1000 * (began_s + 60)))
    assert background.wait(WAIT_S)
    assert folder.child("query", "spill").names() == []


@pytest.mark.parametrize("task", [TaskInfo("query", "run", 7), TaskInfo("", "", None)])
def test_files_of_tasks_that_did_not_know_their_query_are_deleted_too(
    task: TaskInfo, background: Background, tmp_path: Path
) -> None:
    """Spilled rows are deleted after a day and notes about first batches after a month, for every plan."""
    folder, now_s = Folder(str(tmp_path)), time.time()
    for ago_s in (100, 100_000):
        folder.child(spill_folder("", None, now_s - ago_s)).put("x.payloads", b"rows")
    records = [f"{int(1000 * (now_s - 86_400 * days))}-{'0' * 32}" for days in (29, 31)]
    for record in records:
        folder.child(STARTING_FOLDER).put(record, b"query")
    Process.housekeeping.drop_spill_files(folder, task, housekeeping._SPILL_EVERY_CALLS, int(1000 * now_s))
    assert background.wait(WAIT_S)
    assert folder.child("spill").names() == [f"t{int(now_s - 100)}"]
    assert folder.child(STARTING_FOLDER).names() == records[:1]


def test_a_late_deletion_leaves_spill_files(
    background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that went back to an earlier batch may be writing there."""
    monkeypatch.setattr(housekeeping, "_SPILL_LATE_S", 0.0)
    background.finished = 1
    folder = Folder(str(tmp_path))
    now_s = time.time()
    folder.child(spill_folder("query", 3, now_s - 5)).put("x.payloads", b"rows")
    Process.housekeeping.drop_spill_files(folder, TaskInfo("query", "run", 7), 5, int(1000 * now_s))
    assert background.wait(WAIT_S)
    assert folder.child("query", "spill").names() == [f"3-{int(now_s - 5)}"]
