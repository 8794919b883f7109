"""Upload failures count in the run in which they happened: in all attempts at a task, and in no other run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from life import Life

from arrow_schemas.lineage import DELTA
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.failures import FailedStage, Run, StartTimes, still_counts
from spark_state_ext.commit.ledger import FAILED, RUNNING, UploadRecord, record_name
from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.errors import CommitTimeoutError, StateError, UploadFailedError
from spark_state_ext.store import LocalStore
from spark_state_ext.store.reclaim import remove_unused
from spark_state_ext.testing.model import SCHEMA
from spark_state_ext.worker import process
from tests.helpers.clock import VirtualClock

BUCKETS = 4
REFUSED = PermissionError(13, "credentials expired")


def _replace_process(life: Life) -> None:
    """Replace the worker process; its running uploads are lost."""
    uploads, life.uploads = life.uploads, WorkerUploads()
    # The old managers hang until the test is over, so keep them under other names.
    life.managers = {f"{name} of {len(life.managers)}": manager for name, manager in life.managers.items()}
    for name, value in life.store.records().items():
        record = UploadRecord.decode(value)
        if record is not None and record.owner == uploads.owner:
            life.store.record({name: replace(record, owner="1 0").encode()})


@pytest.fixture
def other_process() -> Iterator[str]:
    """Start another process and return its token."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield f"{child.pid} {process.get_start_ticks(child.pid)}"
        child.communicate(b"\n")


# -- decisions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noted", "now", "ended", "expected"),
    [
        (Run("r", 1), Run("r", 1), None, True),
        (Run("r", 1), Run("r", 5), None, True),
        (Run("r", 1), Run("other", 5), None, False),
        (Run(), Run("r", 5), None, False),
        # The run failed in stage 4: the failure counts for all attempts in that stage, and for an action that still runs.
        (Run("r", 1), Run("r", 4), 4, True),
        (Run("r", 1), Run("r", 3), 4, True),
        # The same plan was started again.
        (Run("r", 1), Run("r", 5), 4, False),
        (Run("r", 4), Run("r", 5), 4, False),
        # A failure that the new start has itself counts.
        (Run("r", 5), Run("r", 6), 4, True),
    ],
)
def test_a_failure_counts_for_calls_of_its_run_up_to_the_failed_stage(
    noted: Run, now: Run, ended: int | None, expected: bool
) -> None:
    assert still_counts(noted, now, ended) is expected


def test_all_buckets_of_a_run_know_the_stage_in_which_it_failed(tmp_path: Path) -> None:
    first, other = FailedStage(tmp_path / "1"), FailedStage(tmp_path / "2")
    assert first.read(Run("r", 7)) is None
    first.note(Run("r", 4))
    assert (other.read(Run("r", 7)), other.read(Run("s", 7))) == (4, None)
    # A late attempt at an earlier task does not change the note.
    first.note(Run("r", 3))
    assert other.read(Run("r", 7)) == 4
    other.note(Run("s", 1))
    assert (first.read(Run("r", 7)), first.read(Run("s", 7))) == (None, 1)
    (path,) = tmp_path.iterdir()
    path.write_text("[")
    assert first.read(Run("s", 7)) is None


def test_a_failed_stage_that_cannot_be_noted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FailedStage(tmp_path / "gone" / "1").note(Run("r", 4))
    assert "the end of a failed run could not be noted" in caplog.text


def test_the_note_of_a_failed_stage_is_removed_with_the_local_stores(tmp_path: Path) -> None:
    bucket = tmp_path / "stores" / "operator" / "home" / "s0" / "1"
    bucket.mkdir(parents=True)
    FailedStage(bucket).note(Run("r", 4))
    remove_unused(tmp_path / "stores", tmp_path / "scratch", 100.0)
    assert FailedStage(bucket).read(Run("r", 5)) == 4
    remove_unused(tmp_path / "stores", tmp_path / "scratch", 100.0, now_s=time.time() + 200)
    assert not (tmp_path / "stores" / "operator").exists()


def test_start_times_are_only_used_by_attempts_at_the_same_task() -> None:
    encoded = StartTimes(Run("r", 4), {"a": 1.5}).encode()
    assert StartTimes.decode(encoded, Run("r", 4)) == {"a": 1.5}
    for value, run in ((encoded, Run("r", 5)), (encoded, Run("s", 4)), (None, Run("r", 4)), (b"7", Run("r", 4))):
        assert StartTimes.decode(value, run) == {}
    assert StartTimes.decode(StartTimes(Run(), {"a": 1.5}).encode(), Run()) == {}
    assert UploadRecord.decode(encoded) is None


def test_upload_records_of_earlier_releases_belong_to_no_run() -> None:
    assert UploadRecord.decode(b'["failed", "1 2", 3.5, {}, "why"]') == UploadRecord(
        FAILED, "1 2", 3.5, {}, "why", Run()
    )
    record = UploadRecord(RUNNING, "1 2", 3.5, run=Run("r", 4))
    assert UploadRecord.decode(record.encode()) == record


# -- failures --------------------------------------------------------------------------------------


def _make_buckets(folder: Path) -> list[Life]:
    """Make buckets whose local stores are in one folder."""
    lives = [Life(folder / f"bucket-{bucket}") for bucket in range(BUCKETS)]
    for bucket, life in enumerate(lives):
        life.store.close()
        life.store = LocalStore.at(folder / "stores" / str(bucket), SCHEMA)
        life.stores.append(life.store)
    return lives


def _run_task(lives: list[Life]) -> StateError | None:
    """Call all buckets in a process that ends with the first error; return that error."""
    try:
        for life in lives:
            life.batch()
    except StateError as error:
        for life in lives:
            _replace_process(life)
        return error
    return None


@pytest.mark.parametrize("plan", ["another plan", "the same plan"])
def test_one_restart_is_enough_after_the_cause_of_a_failure_was_fixed(tmp_path: Path, plan: str) -> None:
    lives = _make_buckets(tmp_path)
    for life in lives:
        life.manager("a").fails_with = REFUSED
    assert _run_task(lives) is None
    for life in lives:
        life.settle()
        life.run = Run("a run", 9)
    # Spark tries the task again, and each attempt gets the error.
    for _ in range(4):
        error = _run_task(lives)
        assert isinstance(error, UploadFailedError)
        assert "credentials expired" in str(error)
    for life in lives:
        life.run = Run("a run", 12) if plan == "the same plan" else Run("another", 1)
    assert _run_task(lives) is None
    for life in lives:
        life.settle()
        assert life.batch({}).inline == ()
        assert life.files("a", DELTA) == [1, 2]
        for store in life.stores:
            store.close()


def test_an_upload_that_fails_again_after_a_restart_is_reported_again(life: Life) -> None:
    life.manager("a").fails_with = REFUSED
    life.batch()
    life.settle()
    with pytest.raises(UploadFailedError):
        life.batch()
    life.next_stage()
    life.batch()
    life.settle()
    for _ in range(2):
        with pytest.raises(UploadFailedError, match="credentials expired"):
            life.batch()


def test_a_failure_of_an_upload_that_the_commit_waits_for_also_ends_the_run(tmp_path: Path) -> None:
    """Failures that are recorded in other buckets do not count for the next start of the same plan."""
    waiting, other, *_ = lives = _make_buckets(tmp_path)
    waiting.options = CommitOptions(journal=False)
    for life in (waiting, other):
        life.manager("a").fails_with = REFUSED
    other.batch()
    other.settle()
    waiting.run = other.run
    with pytest.raises(UploadFailedError):
        waiting.batch()
    other.manager("a").fails_with = None
    other.next_stage()
    other.batch()
    other.settle()
    assert other.files("a", DELTA) == [1, 2]
    for life in lives:
        for store in life.stores:
            store.close()


# -- clocks ----------------------------------------------------------------------------------------

SHORT = CommitOptions(commit_delay_ms_max=200, commit_timeout_ms=1_500)


def _measure_wait_s(life: Life) -> float:
    """Return how long a commit waits until it fails."""
    started_s = life.clock_s()
    with pytest.raises(CommitTimeoutError):
        life.batch()
    return life.clock_s() - started_s


def test_a_further_attempt_at_a_task_that_took_too_long_fails_at_once(life: Life, clock: VirtualClock) -> None:
    life.options = SHORT
    life.manager("a").gate.clear()
    life.batch()
    clock.sleep(0.3)
    assert _measure_wait_s(life) > 0.8
    for _ in range(3):
        _replace_process(life)
        life.manager("a").gate.clear()
        assert _measure_wait_s(life) < 0.5
    # Another start has the whole time again.
    life.next_stage()
    _replace_process(life)
    life.manager("a").gate.clear()
    life.batch()
    clock.sleep(0.3)
    assert _measure_wait_s(life) > 0.8


def test_a_further_attempt_fails_at_once_if_the_first_waited_too_long_for_its_own_delta(
    life: Life, clock: VirtualClock
) -> None:
    life.options = replace(SHORT, journal=False)
    life.manager("a").gate.clear()
    assert _measure_wait_s(life) > 1.2
    for _ in range(3):
        _replace_process(life)
        life.manager("a").gate.clear()
        assert _measure_wait_s(life) < 0.5
    life.next_stage()
    _replace_process(life)
    life.manager("a").gate.clear()
    assert _measure_wait_s(life) > 1.2


def test_an_attempt_continues_the_clocks_of_one_that_was_killed(life: Life, clock: VirtualClock) -> None:
    """The process of the earlier attempt was killed and reported no error."""
    life.options = SHORT
    life.manager("a").gate.clear()
    life.batch()
    life.batch()
    # The second batch was not committed.
    life.pointers.pop(), life.models.pop()
    life.run = replace(life.run, stage=life.run.stage - 1)
    clock.sleep(0.8)
    _replace_process(life)
    life.manager("a").gate.clear()
    assert _measure_wait_s(life) < 1.0


def test_a_later_batch_does_not_count_the_time_without_an_upload(life: Life, clock: VirtualClock) -> None:
    """An idle worker process ends, and its running uploads end with it."""
    life.options = SHORT
    life.manager("a").gate.clear()
    life.batch()
    _replace_process(life)
    life.manager("a").gate.clear()
    clock.sleep(1.7)
    started_s = clock.now_s
    life.batch()
    assert clock.now_s - started_s < 1.0


def test_an_upload_that_hangs_since_an_earlier_run_is_started_again(life: Life, clock: VirtualClock) -> None:
    life.options = SHORT
    life.manager("a").gate.clear()
    life.batch()
    life.batch()
    hanging, life.managers = life.managers["a"], {}
    life.run = Run("another", 1)
    clock.sleep(1.7)
    pointer = life.batch()
    assert len(pointer.inline) == 3
    life.settle()
    assert life.batch({}).inline == ()
    assert life.files("a", DELTA) == [1, 2, 3]
    hanging.gate.set()


def test_a_commit_does_not_wait_for_a_process_that_hangs_since_an_earlier_run(
    life: Life, clock: VirtualClock, other_process: str
) -> None:
    life.options = SHORT
    life.manager("a").gate.clear()
    life.batch()
    (name,) = [name for name in life.store.records() if name.startswith(record_name("a", ""))]
    record = UploadRecord.decode(life.store.records()[name])
    assert record is not None
    uploads, life.uploads, managers, life.managers = life.uploads, WorkerUploads(), life.managers, {}
    life.store.record({name: replace(record, owner=other_process, since_s=record.since_s - 60).encode()})
    # In the same run, a commit waits for it, and it has taken too long.
    assert _measure_wait_s(life) < 0.5
    life.store.record({name: replace(record, owner=other_process, since_s=record.since_s - 60).encode()})
    life.run = Run("another", 1)
    life.batch()
    life.settle()
    assert life.batch({}).inline == ()
    managers["a"].gate.set()
    assert uploads is not life.uploads
