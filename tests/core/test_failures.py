"""Failures count for the run that saw them: in all attempts at a task, and in no other run."""

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


def _new_process(life: Life) -> None:
    """The worker ended: what it had under way is gone."""
    uploads, life.uploads = life.uploads, WorkerUploads()
    # They hang until the test is over.
    life.managers = {f"{name} of {len(life.managers)}": manager for name, manager in life.managers.items()}
    for name, value in life.store.records().items():
        record = UploadRecord.decode(value)
        if record is not None and record.owner == uploads.owner:
            life.store.record({name: replace(record, owner="1 0").encode()})


@pytest.fixture
def other_process() -> Iterator[str]:
    """The token of another process, which lives."""
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
        # Told in stage 4: to all attempts in that stage, and to an action that is still at work.
        (Run("r", 1), Run("r", 4), 4, True),
        (Run("r", 1), Run("r", 3), 4, True),
        # The same plan, started again.
        (Run("r", 1), Run("r", 5), 4, False),
        (Run("r", 4), Run("r", 5), 4, False),
        # What that one sees itself counts.
        (Run("r", 5), Run("r", 6), 4, True),
    ],
)
def test_what_counts_for_a_call(noted: Run, now: Run, ended: int | None, expected: bool) -> None:
    assert still_counts(noted, now, ended) is expected


def test_the_stage_that_a_run_ended_in_is_known_to_all_its_buckets(tmp_path: Path) -> None:
    one, other = FailedStage(tmp_path / "1"), FailedStage(tmp_path / "2")
    assert one.read(Run("r", 7)) is None
    one.note(Run("r", 4))
    assert (other.read(Run("r", 7)), other.read(Run("s", 7))) == (4, None)
    # A late attempt at an earlier task.
    one.note(Run("r", 3))
    assert other.read(Run("r", 7)) == 4
    other.note(Run("s", 1))
    assert (one.read(Run("r", 7)), one.read(Run("s", 7))) == (None, 1)
    (path,) = tmp_path.iterdir()
    path.write_text("[")
    assert one.read(Run("s", 7)) is None


def test_a_stage_that_cannot_be_noted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FailedStage(tmp_path / "gone" / "1").note(Run("r", 4))
    assert "the end of a failed run could not be noted" in caplog.text


def test_the_note_goes_with_the_stores_beside_it(tmp_path: Path) -> None:
    bucket = tmp_path / "stores" / "operator" / "home" / "s0" / "1"
    bucket.mkdir(parents=True)
    FailedStage(bucket).note(Run("r", 4))
    remove_unused(tmp_path / "stores", tmp_path / "scratch", 100.0)
    assert FailedStage(bucket).read(Run("r", 5)) == 4
    remove_unused(tmp_path / "stores", tmp_path / "scratch", 100.0, now_s=time.time() + 200)
    assert not (tmp_path / "stores" / "operator").exists()


def test_clocks_are_for_attempts_at_the_same_task() -> None:
    made = StartTimes(Run("r", 4), {"a": 1.5}).encode()
    assert StartTimes.decode(made, Run("r", 4)) == {"a": 1.5}
    for value, run in ((made, Run("r", 5)), (made, Run("s", 4)), (None, Run("r", 4)), (b"7", Run("r", 4))):
        assert StartTimes.decode(value, run) == {}
    assert StartTimes.decode(StartTimes(Run(), {"a": 1.5}).encode(), Run()) == {}
    assert UploadRecord.decode(made) is None


def test_notes_of_earlier_releases_are_of_no_run() -> None:
    assert UploadRecord.decode(b'["failed", "1 2", 3.5, {}, "why"]') == UploadRecord(
        FAILED, "1 2", 3.5, {}, "why", Run()
    )
    record = UploadRecord(RUNNING, "1 2", 3.5, run=Run("r", 4))
    assert UploadRecord.decode(record.encode()) == record


# -- failures --------------------------------------------------------------------------------------


def _buckets(folder: Path) -> list[Life]:
    """Buckets whose local stores lie beside each other."""
    lives = [Life(folder / f"bucket-{at}") for at in range(BUCKETS)]
    for at, life in enumerate(lives):
        life.store.close()
        life.store = LocalStore.at(folder / "stores" / str(at), SCHEMA)
        life.stores.append(life.store)
    return lives


def _task(lives: list[Life]) -> StateError | None:
    """Calls all buckets, in a process that ends with the first error."""
    try:
        for life in lives:
            life.batch()
    except StateError as error:
        for life in lives:
            _new_process(life)
        return error
    return None


@pytest.mark.parametrize("again", ["another plan", "the same plan"])
def test_mend_it_and_start_again_takes_one_start(tmp_path: Path, again: str) -> None:
    lives = _buckets(tmp_path)
    for life in lives:
        life.manager("a").fails_with = REFUSED
    assert _task(lives) is None
    for life in lives:
        life.settle()
        life.run = Run("a run", 9)
    # Spark tries the task again, and each attempt is told.
    for _ in range(4):
        error = _task(lives)
        assert isinstance(error, UploadFailedError)
        assert "credentials expired" in str(error)
    for life in lives:
        life.run = Run("a run", 12) if again == "the same plan" else Run("another", 1)
    assert _task(lives) is None
    for life in lives:
        life.settle()
        assert life.batch({}).inline == ()
        assert life.files("a", DELTA) == [1, 2]
        for store in life.stores:
            store.close()


def test_what_fails_again_after_another_start_is_told_again(life: Life) -> None:
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


def test_a_failure_of_an_upload_that_is_waited_for_ends_a_run_too(tmp_path: Path) -> None:
    """What it left behind in other buckets does not count for the same plan's next start."""
    waits, other, *_ = lives = _buckets(tmp_path)
    waits.options = CommitOptions(journal=False)
    for life in (waits, other):
        life.manager("a").fails_with = REFUSED
    other.batch()
    other.settle()
    waits.run = other.run
    with pytest.raises(UploadFailedError):
        waits.batch()
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


def _waited_s(life: Life) -> float:
    """How long a commit waits until it fails."""
    started_s = life.clock_s()
    with pytest.raises(CommitTimeoutError):
        life.batch()
    return life.clock_s() - started_s


def test_an_attempt_at_a_task_that_took_too_long_has_no_more_time(life: Life, clock: VirtualClock) -> None:
    life.options = SHORT
    life.manager("a").gate.clear()
    life.batch()
    clock.sleep(0.3)
    assert _waited_s(life) > 0.8
    for _ in range(3):
        _new_process(life)
        life.manager("a").gate.clear()
        assert _waited_s(life) < 0.5
    # Another start has all of it.
    life.next_stage()
    _new_process(life)
    life.manager("a").gate.clear()
    life.batch()
    clock.sleep(0.3)
    assert _waited_s(life) > 0.8


def test_an_attempt_that_waits_for_its_own_delta_has_no_more_time(life: Life, clock: VirtualClock) -> None:
    life.options = replace(SHORT, journal=False)
    life.manager("a").gate.clear()
    assert _waited_s(life) > 1.2
    for _ in range(3):
        _new_process(life)
        life.manager("a").gate.clear()
        assert _waited_s(life) < 0.5
    life.next_stage()
    _new_process(life)
    life.manager("a").gate.clear()
    assert _waited_s(life) > 1.2


def test_an_attempt_goes_on_with_the_clocks_of_one_that_died(life: Life, clock: VirtualClock) -> None:
    """Which was not told of anything, as its process was killed."""
    life.options = SHORT
    life.manager("a").gate.clear()
    life.batch()
    life.batch()
    # The second one was not committed.
    life.pointers.pop(), life.models.pop()
    life.run = replace(life.run, stage=life.run.stage - 1)
    clock.sleep(0.8)
    _new_process(life)
    life.manager("a").gate.clear()
    assert _waited_s(life) < 1.0


def test_a_later_batch_does_not_count_the_time_in_which_nobody_tried(life: Life, clock: VirtualClock) -> None:
    """A worker that is idle ends, and what it had under way ends with it."""
    life.options = SHORT
    life.manager("a").gate.clear()
    life.batch()
    _new_process(life)
    life.manager("a").gate.clear()
    clock.sleep(1.7)
    started_s = clock.now_s
    life.batch()
    assert clock.now_s - started_s < 1.0


def test_an_upload_that_hangs_since_a_run_that_is_over_is_begun_anew(life: Life, clock: VirtualClock) -> None:
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


def test_another_process_that_hangs_since_a_run_that_is_over_is_not_waited_for(
    life: Life, clock: VirtualClock, other_process: str
) -> None:
    life.options = SHORT
    life.manager("a").gate.clear()
    life.batch()
    (name,) = [name for name in life.store.records() if name.startswith(record_name("a", ""))]
    found = UploadRecord.decode(life.store.records()[name])
    assert found is not None
    uploads, life.uploads, managers, life.managers = life.uploads, WorkerUploads(), life.managers, {}
    life.store.record({name: replace(found, owner=other_process, since_s=found.since_s - 60).encode()})
    # Within its run it is, and it has taken too long.
    assert _waited_s(life) < 0.5
    life.store.record({name: replace(found, owner=other_process, since_s=found.since_s - 60).encode()})
    life.run = Run("another", 1)
    life.batch()
    life.settle()
    assert life.batch({}).inline == ()
    managers["a"].gate.set()
    assert uploads is not life.uploads
