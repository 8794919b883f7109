"""A host that follows a bucket's files has its state at hand: with attempts, restarts, clean-up and newer schemas."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from core_support import buffer_of, clean_up_at
from standby_support import PrunesToTheNewest, World, changes, covering

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, Writer, file_name
from arrow_schemas.operator import operator_file_name
from spark_state_ext.commit import cadence
from spark_state_ext.errors import (
    MissingCheckpointError,
    StorageError,
)
from spark_state_ext.files.retention import clean_up
from spark_state_ext.standby.line import judge
from spark_state_ext.timeline.epochs import Epoch, Epochs, Position
from spark_state_ext.timeline.records import EpochLog
from spark_state_ext.worker.boot import boot_id
from tests.helpers.waiting import WAIT_S


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "world")
    yield made
    made.close()


@pytest.fixture
def snapshots_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "DELTAS_MIN", 3)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 5)


# -- one batch after the other --------------------------------------------------------------------


@pytest.mark.usefixtures("snapshots_often")
def test_a_follower_has_each_batch_and_a_task_there_fetches_nothing(world: World) -> None:
    assert world.follower.step().is_caught_up
    for number in range(25):
        world.batch(changes(number))
        found = world.follower.step()
        assert (found.newest, found.committed) == (world.pointer.ref, world.pointer.parent)
        assert (found.host, found.batch, found.is_new, found.error) == ("a", number, True, None)
        assert found.is_caught_up
        assert found.behind.versions == 1
        # The delta, once, and nothing else; not the snapshots, that others write of the same rows.
        assert world.pointer.ref is not None
        assert (found.files_read, found.bytes_read) == (1, world.files.size(file_name(world.pointer.ref, DELTA)))
        assert world.adopted() == 0
        again = world.follower.step()
        assert (again.is_new, again.files_read, again.bytes_read, again.is_caught_up) == (False, 0, 0, True)
        assert (again.newest, again.host) == (found.newest, "a")
    # Runs are merged and pruned, as a task does.
    runs = world.task().runs()
    assert len(runs) <= 7
    assert covering(world.task()) <= world.committed
    assert any(name.endswith(f".{SNAPSHOT}.arrow") for name in world.names())


def test_a_local_disk_that_fails_is_an_error_of_the_step(world: World) -> None:
    world.batch(changes(0))
    assert world.follower.step().is_caught_up
    used = world.follower.store_folder / boot_id() / "used"
    used.unlink(missing_ok=True)
    # It leads to itself.
    used.symlink_to("used")
    world.batch(changes(1))
    assert isinstance(world.follower.step().error, StorageError)
    used.unlink()
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def test_a_task_fetches_only_what_the_copy_lacks(world: World) -> None:
    for number in range(4):
        world.batch(changes(number))
    assert world.follower.step().behind.versions == 4
    for number in range(4, 7):
        world.batch(changes(number))
    assert world.adopted() == 3


def test_what_a_task_has_fetched_is_not_read_again(world: World) -> None:
    world.batch(changes(0))
    world.follower.step()
    world.batch(changes(1))
    world.batch(changes(2))
    assert world.adopted() == 2
    # Headers are, as they say what is committed.
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def test_a_task_in_another_process_has_the_copy_at_hand(world: World) -> None:
    """LMDB tells processes apart; here both have the store open."""
    for number in range(3):
        world.batch(changes(number))
    world.follower.step()
    code = f"""
import sys
from pathlib import Path
from reading_support import operator_file
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import scan
from arrow_schemas.lineage import CheckpointRef
store = LocalStore.at(Path({str(world.follower.store_folder)!r}), operator_file("counts", "query", 8).row_schema())
print(len(scan(store.view(CheckpointRef(int(sys.argv[1]), sys.argv[2])))))
sys.stdin.read()
"""
    ref = world.pointer.ref
    assert ref is not None
    here = str(Path(__file__).parent)
    child = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {here!r})\n{code}", str(ref.version), ref.id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert int(child.stdout.readline()) == len(world.model)
    # Both write: the follower here, and that process's reader stays open meanwhile.
    world.batch(changes(3))
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0
    child.communicate(timeout=WAIT_S)
    assert child.returncode == 0


# -- attempts, zombies, going back ----------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("between", [False, True])
def test_either_of_two_attempts_is_at_hand(world: World, kept: int, between: bool) -> None:
    for number in range(8):
        attempts = [world.attempt(changes(number))]
        if between:
            world.follower.step()
        attempts.append(world.attempt(changes(number)))
        assert world.follower.step().is_caught_up
        world.commit(attempts[kept])
        assert world.adopted() == 0
        assert covering(world.task()) <= world.committed


def test_a_follower_that_prunes_to_the_newest_file_is_found(tmp_path: Path) -> None:
    world = World(tmp_path / "world", follower_class=PrunesToTheNewest)
    with pytest.raises(AssertionError):
        test_either_of_two_attempts_is_at_hand(world, 0, True)
    world.close()


def test_a_zombies_file_that_nobody_builds_upon_comes_to_nothing(world: World) -> None:
    for number in range(6):
        world.batch(changes(number))
        world.follower.step()
    late = world.attempt(changes(99), at=2)[0].ref
    assert late is not None
    found = world.follower.step()
    assert (found.newest, found.is_caught_up, found.error) == (world.pointer.ref, True, None)
    # Its header alone is looked at: what it was built upon is no longer here.
    assert found.files_read == 1
    assert not world.task().has(late)
    for number in range(6, 12):
        world.batch(changes(number))
        assert world.follower.step().files_read == 1
        assert world.adopted() == 0
    assert covering(world.task()) <= world.committed


def test_a_query_that_went_back_is_followed(world: World) -> None:
    for number in range(8):
        world.batch(changes(number))
        world.follower.step()
    old = world.pointer
    world.go_back(3)
    world.batch(changes(50))
    found = world.follower.step()
    assert (found.newest, found.committed, found.is_caught_up) == (world.pointer.ref, world.pointer.parent, True)
    assert world.adopted() == 0
    # A task of the old run wakes up, and writes the highest version of all.
    world.epoch = 1
    world.bucket(world.active, old).commit(buffer_of(changes(77), world.scratch))
    # And one that goes on from what is committed.
    world.attempt(changes(77))
    world.epoch = 2
    for number in range(51, 60):
        world.batch(changes(number))
        assert world.follower.step().newest == world.pointer.ref
        assert world.adopted() == 0


def test_a_copy_that_begins_anew_knows_which_run_is_the_last(world: World) -> None:
    """All files are looked at again then, those of the run before too, which wrote a higher version."""
    for number in range(4):
        world.batch(changes(number))
        world.follower.step()
    world.go_back(2)
    world.batch(changes(10))
    world.follower.step()
    shutil.rmtree(world.follower.store_folder)
    for attempt in range(3):
        made = world.attempt(changes(11))
        assert world.follower.step().is_caught_up, attempt
    world.commit(made)
    assert world.adopted() == 0
    assert world.follower.step().newest == world.pointer.ref


def test_zombies_that_wrote_last_hide_nothing_from_a_copy_that_begins_anew(world: World) -> None:
    """Neither the highest version nor the one written last is the query's, and there are too many files to see all."""
    for number in range(16):
        world.batch(changes(number))
    world.go_back(3)
    world.batch(changes(20))
    for at in (0, 1, 0):
        world.attempt(changes(99), at=at)
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def header_of(version: int, parent: int | None, epoch: int, which: str = "a") -> LineageHeader:
    def ref(number: int, name: str = "a") -> CheckpointRef:
        return CheckpointRef(number, name * 32)

    lineage = () if parent is None else tuple(ref(number) for number in range(max(1, parent - 3), parent + 1))
    above = lineage[-1] if lineage else None
    writer = Writer("q", "run", version, "h", epoch=epoch)
    return LineageHeader(DELTA, "counts", 3, ref(version, which), above, lineage, 0, writer, "1")


def test_the_newest_epoch_tells_which_files_count() -> None:
    runs = [Epoch(it, (it - 1,), f"plan {it}", "", Position("q", after, 0)) for it, after in ((1, 0), (2, 4), (3, 89))]
    one, two, three = (Epochs(tuple(runs[:it])) for it in (1, 2, 3))
    line, _ = judge(None, header_of(9, 8, 1), one)
    # A task of the same run that was late, and what the head was built upon.
    assert judge(line, header_of(5, 4, 1, "b"), one) == (line, False)
    assert judge(line, header_of(8, 7, 1), one) == (line, True)
    # The run after it went back: whatever the one before writes counts no more.
    line, counts = judge(line, header_of(5, 4, 2, "b"), two)
    assert (counts, line.head.ref.version) == (True, 5)
    assert judge(line, header_of(10, 9, 1), two) == (line, False)
    assert judge(line, header_of(4, 3, 1), two) == (line, True)
    # Whichever is seen first, and whosever numbers a copy has with which the query began.
    older, _ = judge(None, header_of(10, 9, 1), two)
    assert judge(older, header_of(5, 4, 2, "b"), two) == (line, True)
    copy = header_of(2, 1, 7)
    copy = replace(copy, writer=replace(copy.writer, query_id="another", heartbeat=0))
    assert judge(judge(None, copy, two)[0], header_of(5, 4, 2, "b"), two) == (line, True)
    # Far behind, lineages do not reach down to what was committed then.
    line, counts = judge(line, header_of(90, 89, 3), three)
    assert (counts, line.head.ref.version) == (True, 90)


def test_what_a_release_without_epochs_builds_on_the_newest_file_is_followed() -> None:
    one = Epochs((Epoch(1, (0,), "plan", "", Position("q", 0, 0)),))
    line, _ = judge(None, header_of(9, 8, 1), one)
    line, counts = judge(line, header_of(10, 9, 0), one)
    assert (counts, line.head.ref.version) == (True, 10)
    assert judge(line, header_of(7, 6, 0, "b"), one) == (line, False)


def test_a_withdrawn_epoch_is_followed_no_more(world: World) -> None:
    """A task of another run was late, and began an epoch; the run that goes on takes it back."""
    for number in range(2):
        world.batch(changes(number))
        world.follower.step()
    world.epoch += 1
    world.attempt(changes(99), at=0)
    world.follower.step()
    world.epoch -= 1
    log = EpochLog(world.query_folder)
    number, epochs = log.newest()
    assert log.append(number + 1, epochs.with_epoch(replace(epochs.entries[-1], withdrawn=True)))
    world.batch(changes(2))
    assert world.follower.step().newest == world.pointer.ref
    assert world.adopted() == 0


# -- restarts, snapshots, clean-up ----------------------------------------------------------------


def test_a_service_that_begins_again_reads_a_header_and_no_more(world: World) -> None:
    for number in range(6):
        world.batch(changes(number))
    world.follower.step()
    world.stores.close()
    world.follow()
    found = world.follower.step()
    assert (found.is_caught_up, found.newest) == (True, world.pointer.ref)
    before = world.bucket(world.task(), world.pointer).fetched_files
    assert before == world.adopted() == 0


@pytest.mark.usefixtures("snapshots_often")
def test_far_behind_it_begins_with_the_newest_snapshot(world: World) -> None:
    world.batch(changes(0))
    world.follower.step()
    for number in range(1, 40):
        world.batch(changes(number))
    found = world.follower.step()
    assert found.is_caught_up
    assert found.behind.versions == 39
    whole = sum(world.files.size(name) for name in world.names())
    assert found.bytes_read < whole
    assert world.adopted() == 0


@pytest.mark.usefixtures("snapshots_often")
def test_clean_up_meanwhile(world: World) -> None:
    """Files go between a listing and their reading; there is a newer snapshot then."""
    for number in range(60):
        world.batch(changes(number))
        if number % 20 == 7:
            world.follower.step()
    listed = world.files.entries()
    deleted = clean_up(world.files, clean_up_at(world.pointer, 2), world.scratch, now_s=world.clock_s + 1e6)
    assert deleted > 10
    stale = [listed]
    entries = world.follower._folder.entries
    world.follower._folder.entries = lambda: stale.pop() if stale else entries()  # type: ignore[method-assign]
    found = world.follower.step()
    assert found.is_caught_up
    assert found.error is None
    assert world.adopted() == 0


def test_deleted_while_it_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest file of a listing is gone when it is read: the next listing tells what there is."""
    for number in range(3):
        world.batch(changes(number))
    ghost = world.attempt(changes(9))[0].ref
    assert ghost is not None
    listed = world.files.entries()
    world.files.remove(file_name(ghost, DELTA))
    stale = [listed]
    entries = world.follower._folder.entries
    monkeypatch.setattr(world.follower._folder, "entries", lambda: stale.pop() if stale else entries())
    found = world.follower.step()
    assert (found.is_caught_up, found.newest) == (True, world.pointer.ref)
    # A file that stays away, and that everything is built upon, is told.
    world.batch(changes(10))
    lost = world.pointer.ref
    assert lost is not None
    world.batch(changes(11))
    world.files.remove(file_name(lost, DELTA))
    found = world.follower.step()
    assert isinstance(found.error, MissingCheckpointError)
    assert not found.is_caught_up
    assert found.lag.versions == 2


# -- schemas --------------------------------------------------------------------------------------


def test_a_newer_operator_file_is_followed_into_its_own_store(world: World) -> None:
    for number in range(3):
        world.batch(changes(number))
    assert world.follower.step().is_caught_up
    old = world.follower.store_folder
    newer = replace(world.operator, schema_id=1)
    world.query_folder.put(operator_file_name(1), newer.encode())
    world.operator = newer
    world.history[-1] = (replace(world.pointer, schema_id=1), world.model)
    world.batch(changes(3))
    found = world.follower.step()
    assert (found.is_caught_up, found.newest) == (True, world.pointer.ref)
    assert world.follower.store_folder != old
    assert world.follower.store_folder.parts[-2:] == ("s1", "3")
    assert world.adopted() == 0
    # Told by the root's follower, before any file was written under it.
    newest = replace(newer, schema_id=2)
    world.operator = newest
    world.follower.use(newest)
    world.follower.use(newer)
    assert world.follower.step().is_caught_up
    assert world.follower.store_folder.parts[-2:] == ("s2", "3")
    assert world.adopted() == 0
