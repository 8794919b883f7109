"""Backends that refuse full snapshots: what is tried, what is counted, and when it is an error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from life import Life

from arrow_schemas.lineage import SNAPSHOT
from arrow_schemas.pointer import Pointer
from spark_state_ext.backends.replication import is_complete
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.failures import NO_RUN, Refusals, Run
from spark_state_ext.commit.ledger import UploadRecord
from spark_state_ext.commit.tally import Tally
from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.errors import UploadFailedError
from spark_state_ext.files.sealed_file import SealedFile
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import SCHEMA
from spark_state_ext.worker.background import Background
from tests.helpers.waiting import eventually

BATCH_S = 30.0
TIMEOUT_S = CommitOptions().commit_timeout_ms / 1000


@dataclass
class Clock:
    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(life: Life) -> Clock:
    """That of a bucket with two backends, of which b refuses snapshots."""
    made = life.clock_s = Clock()
    life.names = ("a", "b")
    life.manager("b").kinds = (SNAPSHOT,)
    life.manager("b").fails_with = PermissionError("no objects above 1 kB")
    return made


def _batch(life: Life, clock: Clock) -> Pointer:
    pointer = life.batch()
    life.settle()
    clock.now_s += BATCH_S
    return pointer


def _until_refused(life: Life, clock: Clock) -> float:
    """When b refused the first snapshot."""
    for _ in range(40):
        began_s = clock.now_s
        _batch(life, clock)
        if life.bucket().committer.snapshots.read_refusals():
            return began_s
    raise AssertionError("no snapshot was due")


def _until_error(life: Life, clock: Clock) -> UploadFailedError:
    for _ in range(200):
        try:
            _batch(life, clock)
        except UploadFailedError as error:
            return error
    raise AssertionError("b refuses snapshots, and nobody says so")


def _another_process(life: Life) -> None:
    life.uploads, life.background = WorkerUploads(), Background()
    before, life.managers = life.managers, {}
    for name, manager in before.items():
        made = life.manager(name)
        made.kinds, made.fails_with = manager.kinds, manager.fails_with
    life.store.close()
    life.stores.remove(life.store)
    life.store = LocalStore.at(life.store.folder, SCHEMA)
    life.stores.append(life.store)


def test_one_of_two_backends_that_refuses_snapshots_for_long_is_an_error(life: Life, clock: Clock) -> None:
    first_s = _until_refused(life, clock)
    error = _until_error(life, clock)
    assert TIMEOUT_S <= clock.now_s - first_s <= TIMEOUT_S + 3 * BATCH_S
    assert "the backend b has refused full snapshots for " in str(error)
    assert "no objects above 1 kB" in str(error)
    assert "No state is lost. Fix the cause and start the query again, or remove that backend." in str(error)
    # Deltas went on, so both hold the state.
    for name in ("a", "b"):
        assert life.restored(life.pointers[-1], name) == life.models[-1]


def test_every_attempt_at_a_task_is_told_and_the_next_start_begins_anew(life: Life, clock: Clock) -> None:
    _until_refused(life, clock)
    _until_error(life, clock)
    for _ in range(3):
        _another_process(life)
        with pytest.raises(UploadFailedError, match="the backend b has refused full snapshots"):
            life.batch()
    # Started again and not mended: told again, as late as the first time.
    life.run = Run("another run", 1)
    first_s = _until_refused(life, clock)
    _until_error(life, clock)
    assert clock.now_s - first_s >= TIMEOUT_S
    life.run = Run("a third run", 1)
    life.manager("b").fails_with = None
    for _ in range(40):
        _batch(life, clock)
    assert life.files("b", SNAPSHOT)


def test_the_clock_survives_processes(life: Life, clock: Clock) -> None:
    first_s = _until_refused(life, clock)
    for _ in range(int(TIMEOUT_S / BATCH_S) - 1):
        _another_process(life)
        _batch(life, clock)
    _another_process(life)
    _until_error(life, clock)
    assert clock.now_s - first_s <= TIMEOUT_S + 3 * BATCH_S


def test_a_backend_that_takes_a_snapshot_again_begins_anew(life: Life, clock: Clock) -> None:
    first_s = _until_refused(life, clock)
    while clock.now_s - first_s < TIMEOUT_S - 4 * BATCH_S:
        _batch(life, clock)
    life.manager("b").fails_with = None
    for _ in range(4):
        _batch(life, clock)
    # Not when the next one is due: it was sent again.
    assert not life.bucket().committer.snapshots.read_refusals()
    assert life.files("b", SNAPSHOT)
    for _ in range(40):
        _batch(life, clock)


def test_what_was_refused_once_is_tried_again_before_it_is_an_error(life: Life, clock: Clock) -> None:
    """The stream was quiet for a day, and the backend was mended meanwhile."""
    _until_refused(life, clock)
    clock.now_s += 86_400
    life.manager("b").fails_with = None
    for _ in range(3):
        _batch(life, clock)
    assert not life.bucket().committer.snapshots.read_refusals()


def test_a_backend_that_never_gets_to_catch_up_is_an_error(life: Life, clock: Clock) -> None:
    life.names = ("a",)
    for _ in range(3):
        _batch(life, clock)
    life.names = ("a", "b")
    began_s = clock.now_s
    _until_error(life, clock)
    assert clock.now_s - began_s >= TIMEOUT_S
    assert not is_complete(life.pointers[-1].replication["b"])


def test_a_sole_backend_that_refuses_snapshots_is_an_error(life: Life, clock: Clock) -> None:
    life.names = ("a",)
    life.manager("a").kinds, life.manager("a").fails_with = (SNAPSHOT,), PermissionError("no large objects")
    _until_refused(life, clock)
    assert "the backend a has refused" in str(_until_error(life, clock))


def test_snapshots_are_counted(life: Life, clock: Clock) -> None:
    _until_refused(life, clock)
    tally = life.uploads.tallies.take(life.store)
    (name,) = (it for it in life.folder("a").names() if SNAPSHOT in it)
    assert (tally.confirmed, tally.size_bytes, tally.failures) == (1, life.folder("a").size(name), 1)
    assert life.uploads.tallies.take(life.store) == Tally()


def test_a_snapshot_that_arrives_late_counts(life: Life) -> None:
    life.history(1)
    life.options = CommitOptions(commit_timeout_ms=1)
    manager, snapshots, ref = life.manager("a"), life.bucket().committer.snapshots, life.pointers[-1].ref
    assert ref is not None
    manager.gate.clear()
    with pytest.raises(UploadFailedError, match="could not be stored: TimeoutError"):
        snapshots.send(ref, SealedFile.of(f"{ref}.snapshot.arrow", b"Arrow"), ["a"])
    assert snapshots.read_refusals()["a"].error == "it took longer than commit_timeout_ms, 1"
    manager.gate.set()
    eventually(lambda: not snapshots.read_refusals())
    tally = life.uploads.tallies.take(life.store)
    assert (tally.confirmed, tally.size_bytes, tally.failures) == (1, 5, 1)


def test_notes_of_one_kind_are_not_taken_for_those_of_another() -> None:
    refused = Refusals(Run("a run", 3), 1.0, 2.0, 4, "full", 1.5)
    assert Refusals.decode(refused.encode()) == refused
    assert UploadRecord.decode(refused.encode()) is None
    assert UploadRecord.decode(b'["1_a", "2_b", "3_c", "4_d", "5_e"]') is None
    assert Refusals.decode(UploadRecord("done", "me", 1.0).encode()) is None
    assert Refusals.decode(None) is None
    assert not Refusals(NO_RUN, 0.0, 1e9).have_lasted(1.0), "one alone may have been mended since"
