"""A backend that refuses snapshots gets new attempts, which are counted, and in the end it is an error."""

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
    """The clock of a bucket with two backends, of which b refuses snapshots."""
    new_clock = life.clock_s = Clock()
    life.names = ("a", "b")
    life.manager("b").kinds = (SNAPSHOT,)
    life.manager("b").fails_with = PermissionError("no objects above 1 kB")
    return new_clock


def run_batch(life: Life, clock: Clock) -> Pointer:
    pointer = life.batch()
    life.settle()
    clock.now_s += BATCH_S
    return pointer


def run_until_refusal(life: Life, clock: Clock) -> float:
    """Run batches until b refuses a snapshot, and return the time of that batch."""
    for _ in range(40):
        began_s = clock.now_s
        run_batch(life, clock)
        if life.bucket().committer.snapshots.read_refusals():
            return began_s
    raise AssertionError("no snapshot was due")


def run_until_error(life: Life, clock: Clock) -> UploadFailedError:
    for _ in range(200):
        try:
            run_batch(life, clock)
        except UploadFailedError as error:
            return error
    raise AssertionError("b refuses snapshots, and no batch fails")


def start_another_process(life: Life) -> None:
    life.uploads, life.background = WorkerUploads(), Background()
    before, life.managers = life.managers, {}
    for name, manager in before.items():
        new_manager = life.manager(name)
        new_manager.kinds, new_manager.fails_with = manager.kinds, manager.fails_with
    life.store.close()
    life.stores.remove(life.store)
    life.store = LocalStore.at(life.store.folder, SCHEMA)
    life.stores.append(life.store)


def test_a_batch_fails_if_one_of_two_backends_has_refused_snapshots_for_long(life: Life, clock: Clock) -> None:
    first_s = run_until_refusal(life, clock)
    error = run_until_error(life, clock)
    assert TIMEOUT_S <= clock.now_s - first_s <= TIMEOUT_S + 3 * BATCH_S
    assert "the backend b has refused full snapshots for " in str(error)
    assert "no objects above 1 kB" in str(error)
    assert "No state is lost. Fix the cause and start the query again, or remove that backend." in str(error)
    # Delta uploads continued, so both backends have the state.
    for name in ("a", "b"):
        assert life.restored(life.pointers[-1], name) == life.models[-1]


def test_each_attempt_fails_and_the_next_run_starts_the_time_again(life: Life, clock: Clock) -> None:
    run_until_refusal(life, clock)
    run_until_error(life, clock)
    for _ in range(3):
        start_another_process(life)
        with pytest.raises(UploadFailedError, match="the backend b has refused full snapshots"):
            life.batch()
    # A new run without a fix fails again, after the same time.
    life.run = Run("another run", 1)
    first_s = run_until_refusal(life, clock)
    run_until_error(life, clock)
    assert clock.now_s - first_s >= TIMEOUT_S
    life.run = Run("a third run", 1)
    life.manager("b").fails_with = None
    for _ in range(40):
        run_batch(life, clock)
    assert life.files("b", SNAPSHOT)


def test_the_time_of_the_first_refusal_survives_processes(life: Life, clock: Clock) -> None:
    first_s = run_until_refusal(life, clock)
    for _ in range(int(TIMEOUT_S / BATCH_S) - 1):
        start_another_process(life)
        run_batch(life, clock)
    start_another_process(life)
    run_until_error(life, clock)
    assert clock.now_s - first_s <= TIMEOUT_S + 3 * BATCH_S


def test_an_accepted_snapshot_clears_the_refusals(life: Life, clock: Clock) -> None:
    first_s = run_until_refusal(life, clock)
    while clock.now_s - first_s < TIMEOUT_S - 4 * BATCH_S:
        run_batch(life, clock)
    life.manager("b").fails_with = None
    for _ in range(4):
        run_batch(life, clock)
    # The refused snapshot was sent again, before the next one was due.
    assert not life.bucket().committer.snapshots.read_refusals()
    assert life.files("b", SNAPSHOT)
    for _ in range(40):
        run_batch(life, clock)


def test_a_refused_snapshot_is_sent_again_before_a_batch_fails(life: Life, clock: Clock) -> None:
    """The stream had no data for a day, and the backend was repaired meanwhile."""
    run_until_refusal(life, clock)
    clock.now_s += 86_400
    life.manager("b").fails_with = None
    for _ in range(3):
        run_batch(life, clock)
    assert not life.bucket().committer.snapshots.read_refusals()


def test_a_batch_fails_if_a_new_backend_never_completes_its_bootstrap(life: Life, clock: Clock) -> None:
    life.names = ("a",)
    for _ in range(3):
        run_batch(life, clock)
    life.names = ("a", "b")
    began_s = clock.now_s
    run_until_error(life, clock)
    assert clock.now_s - began_s >= TIMEOUT_S
    assert not is_complete(life.pointers[-1].replication["b"])


def test_a_batch_fails_if_the_only_backend_refuses_snapshots(life: Life, clock: Clock) -> None:
    life.names = ("a",)
    life.manager("a").kinds, life.manager("a").fails_with = (SNAPSHOT,), PermissionError("no large objects")
    run_until_refusal(life, clock)
    assert "the backend a has refused" in str(run_until_error(life, clock))


def test_confirmed_and_failed_snapshots_are_counted(life: Life, clock: Clock) -> None:
    run_until_refusal(life, clock)
    tally = life.uploads.tallies.take(life.store)
    (name,) = (file for file in life.folder("a").names() if SNAPSHOT in file)
    assert (tally.confirmed, tally.size_bytes, tally.failures) == (1, life.folder("a").size(name), 1)
    assert life.uploads.tallies.take(life.store) == Tally()


def test_a_late_snapshot_clears_its_refusal(life: Life) -> None:
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


def test_records_of_one_kind_do_not_decode_as_another_kind() -> None:
    refused = Refusals(Run("a run", 3), 1.0, 2.0, 4, "full", 1.5)
    assert Refusals.decode(refused.encode()) == refused
    assert UploadRecord.decode(refused.encode()) is None
    assert UploadRecord.decode(b'["1_a", "2_b", "3_c", "4_d", "5_e"]') is None
    assert Refusals.decode(UploadRecord("done", "me", 1.0).encode()) is None
    assert Refusals.decode(None) is None
    assert not Refusals(NO_RUN, 0.0, 1e9).have_lasted(1.0), (
        "a single refusal is not enough: the backend may have been repaired"
    )
