"""A host that follows a bucket's files has its state: with attempts, restarts, clean-up and newer schemas."""

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
from spark_state_ext.commit.cadence import SnapshotCadence
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
    world = World(tmp_path / "world")
    yield world
    world.close()


@pytest.fixture
def snapshots_often(world: World) -> None:
    world.cadence = SnapshotCadence(3, 5)


# -- one batch after the other --------------------------------------------------------------------


@pytest.mark.usefixtures("snapshots_often")
def test_a_task_on_a_followers_host_fetches_no_files(world: World) -> None:
    assert world.follower.step().is_caught_up
    for number in range(25):
        world.batch(changes(number))
        result = world.follower.step()
        assert (result.newest, result.committed) == (world.pointer.ref, world.pointer.parent)
        assert (result.host, result.batch, result.is_new, result.error) == ("a", number, True, None)
        assert result.is_caught_up
        assert result.behind.versions == 1
        # Only the delta is read, and only once; snapshots of the same rows are not read.
        assert world.pointer.ref is not None
        assert (result.files_read, result.bytes_read) == (1, world.files.size(file_name(world.pointer.ref, DELTA)))
        assert world.adopted() == 0
        again = world.follower.step()
        assert (again.is_new, again.files_read, again.bytes_read, again.is_caught_up) == (False, 0, 0, True)
        assert (again.newest, again.host) == (result.newest, "a")
    # A follower merges and prunes runs, as a task does.
    runs = world.task().runs()
    assert len(runs) <= 7
    assert covering(world.task()) <= world.committed
    assert any(name.endswith(f".{SNAPSHOT}.arrow") for name in world.names())


def test_an_error_of_the_local_disk_is_the_result_of_the_step(world: World) -> None:
    world.batch(changes(0))
    assert world.follower.step().is_caught_up
    used = world.follower.store_folder / boot_id() / "used"
    used.unlink(missing_ok=True)
    # The link refers to itself, so that opening it fails.
    used.symlink_to("used")
    world.batch(changes(1))
    assert isinstance(world.follower.step().error, StorageError)
    used.unlink()
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def test_a_task_fetches_only_the_files_that_the_replica_does_not_have(world: World) -> None:
    for number in range(4):
        world.batch(changes(number))
    assert world.follower.step().behind.versions == 4
    for number in range(4, 7):
        world.batch(changes(number))
    assert world.adopted() == 3


def test_a_follower_does_not_read_deltas_that_a_task_has_fetched(world: World) -> None:
    world.batch(changes(0))
    world.follower.step()
    world.batch(changes(1))
    world.batch(changes(2))
    assert world.adopted() == 2
    # Only headers are read again, because they show what is committed.
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def test_a_task_in_another_process_can_read_the_replica(world: World) -> None:
    """Both processes have the LMDB store open."""
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
    # The follower writes here while the other process keeps its reader open.
    world.batch(changes(3))
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0
    child.communicate(timeout=WAIT_S)
    assert child.returncode == 0


# -- attempts, zombies, going back ----------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("between", [False, True])
def test_a_replica_has_both_of_two_attempts(world: World, kept: int, between: bool) -> None:
    for number in range(8):
        attempts = [world.attempt(changes(number))]
        if between:
            world.follower.step()
        attempts.append(world.attempt(changes(number)))
        assert world.follower.step().is_caught_up
        world.commit(attempts[kept])
        assert world.adopted() == 0
        assert covering(world.task()) <= world.committed


def test_the_test_of_two_attempts_detects_a_follower_that_prunes_to_the_newest_file(tmp_path: Path) -> None:
    world = World(tmp_path / "world", follower_class=PrunesToTheNewest)
    with pytest.raises(AssertionError):
        test_a_replica_has_both_of_two_attempts(world, 0, True)
    world.close()


def test_a_zombies_file_without_descendants_is_ignored(world: World) -> None:
    for number in range(6):
        world.batch(changes(number))
        world.follower.step()
    late = world.attempt(changes(99), at=2)[0].ref
    assert late is not None
    result = world.follower.step()
    assert (result.newest, result.is_caught_up, result.error) == (world.pointer.ref, True, None)
    # Only its header is read: its parent is no longer in the store.
    assert result.files_read == 1
    assert not world.task().has(late)
    for number in range(6, 12):
        world.batch(changes(number))
        assert world.follower.step().files_read == 1
        assert world.adopted() == 0
    assert covering(world.task()) <= world.committed


def test_a_query_restarted_from_an_earlier_batch_is_followed(world: World) -> None:
    for number in range(8):
        world.batch(changes(number))
        world.follower.step()
    old = world.pointer
    world.go_back(3)
    world.batch(changes(50))
    result = world.follower.step()
    assert (result.newest, result.committed, result.is_caught_up) == (world.pointer.ref, world.pointer.parent, True)
    assert world.adopted() == 0
    # A task of the old run wakes up, and writes the highest version.
    world.epoch = 1
    world.bucket(world.active, old).commit(buffer_of(changes(77), world.scratch))
    # Another task of the old run continues from the committed checkpoint.
    world.attempt(changes(77))
    world.epoch = 2
    for number in range(51, 60):
        world.batch(changes(number))
        assert world.follower.step().newest == world.pointer.ref
        assert world.adopted() == 0


def test_a_new_replica_follows_the_last_run_of_a_query_that_went_back(world: World) -> None:
    """It lists all files again, including those of the previous run, which wrote a higher version."""
    for number in range(4):
        world.batch(changes(number))
        world.follower.step()
    world.go_back(2)
    world.batch(changes(10))
    world.follower.step()
    shutil.rmtree(world.follower.store_folder)
    for attempt in range(3):
        attempted = world.attempt(changes(11))
        assert world.follower.step().is_caught_up, attempt
    world.commit(attempted)
    assert world.adopted() == 0
    assert world.follower.step().newest == world.pointer.ref


def test_a_new_replica_finds_the_state_behind_files_of_zombies(world: World) -> None:
    """Zombies wrote the highest version and the last file, and there are too many files to read all of them."""
    for number in range(16):
        world.batch(changes(number))
    world.go_back(3)
    world.batch(changes(20))
    for at in (0, 1, 0):
        world.attempt(changes(99), at=at)
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def make_header(version: int, parent: int | None, epoch: int, suffix: str = "a") -> LineageHeader:
    def ref(number: int, name: str = "a") -> CheckpointRef:
        return CheckpointRef(number, name * 32)

    lineage = () if parent is None else tuple(ref(number) for number in range(max(1, parent - 3), parent + 1))
    parent_ref = lineage[-1] if lineage else None
    writer = Writer("q", "run", version, "h", epoch=epoch)
    return LineageHeader(DELTA, "counts", 3, ref(version, suffix), parent_ref, lineage, 0, writer, "1")


def test_the_newest_epoch_determines_which_files_are_followed() -> None:
    runs = [
        Epoch(number, (number - 1,), f"plan {number}", "", Position("q", after, 0))
        for number, after in ((1, 0), (2, 4), (3, 89))
    ]
    one, two, three = (Epochs(tuple(runs[:count])) for count in (1, 2, 3))
    line, _ = judge(None, make_header(9, 8, 1), one)
    # A late task of the same run does not count; the parent of the head does.
    assert judge(line, make_header(5, 4, 1, "b"), one) == (line, False)
    assert judge(line, make_header(8, 7, 1), one) == (line, True)
    # The second run went back, so that new files of the first run no longer count.
    line, counts = judge(line, make_header(5, 4, 2, "b"), two)
    assert (counts, line.head.ref.version) == (True, 5)
    assert judge(line, make_header(10, 9, 1), two) == (line, False)
    assert judge(line, make_header(4, 3, 1), two) == (line, True)
    # The order does not matter, nor do the numbers in copied files from which the query started.
    older, _ = judge(None, make_header(10, 9, 1), two)
    assert judge(older, make_header(5, 4, 2, "b"), two) == (line, True)
    copy = make_header(2, 1, 7)
    copy = replace(copy, writer=replace(copy.writer, query_id="another", heartbeat=0))
    assert judge(judge(None, copy, two)[0], make_header(5, 4, 2, "b"), two) == (line, True)
    # After many versions, lineages no longer reach the checkpoint at which the third run began.
    line, counts = judge(line, make_header(90, 89, 3), three)
    assert (counts, line.head.ref.version) == (True, 90)


def test_a_file_without_an_epoch_is_followed_if_it_continues_the_newest_file() -> None:
    one = Epochs((Epoch(1, (0,), "plan", "", Position("q", 0, 0)),))
    line, _ = judge(None, make_header(9, 8, 1), one)
    line, counts = judge(line, make_header(10, 9, 0), one)
    assert (counts, line.head.ref.version) == (True, 10)
    assert judge(line, make_header(7, 6, 0, "b"), one) == (line, False)


def test_a_withdrawn_epoch_is_no_longer_followed(world: World) -> None:
    """A late task of another run began an epoch; the current run withdraws it."""
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


def test_a_restarted_service_continues_with_the_same_store(world: World) -> None:
    for number in range(6):
        world.batch(changes(number))
    world.follower.step()
    world.stores.close()
    world.follow()
    result = world.follower.step()
    assert (result.is_caught_up, result.newest) == (True, world.pointer.ref)
    before = world.bucket(world.task(), world.pointer).fetched_files
    assert before == world.adopted() == 0


@pytest.mark.usefixtures("snapshots_often")
def test_a_follower_far_behind_starts_from_the_newest_snapshot(world: World) -> None:
    world.batch(changes(0))
    world.follower.step()
    for number in range(1, 40):
        world.batch(changes(number))
    result = world.follower.step()
    assert result.is_caught_up
    assert result.behind.versions == 39
    whole = sum(world.files.size(name) for name in world.names())
    assert result.bytes_read < whole
    assert world.adopted() == 0


@pytest.mark.usefixtures("snapshots_often")
def test_a_follower_tolerates_clean_up_between_listing_and_reading(world: World) -> None:
    """Files are deleted between a listing and their reading; a newer snapshot exists then."""
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
    result = world.follower.step()
    assert result.is_caught_up
    assert result.error is None
    assert world.adopted() == 0


def test_a_follower_lists_again_if_the_newest_file_was_deleted_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest file of a listing no longer exists when it is read, so the follower lists again."""
    for number in range(3):
        world.batch(changes(number))
    ghost = world.attempt(changes(9))[0].ref
    assert ghost is not None
    listed = world.files.entries()
    world.files.remove(file_name(ghost, DELTA))
    stale = [listed]
    entries = world.follower._folder.entries
    monkeypatch.setattr(world.follower._folder, "entries", lambda: stale.pop() if stale else entries())
    result = world.follower.step()
    assert (result.is_caught_up, result.newest) == (True, world.pointer.ref)
    # A missing file that all later files need is an error.
    world.batch(changes(10))
    lost = world.pointer.ref
    assert lost is not None
    world.batch(changes(11))
    world.files.remove(file_name(lost, DELTA))
    result = world.follower.step()
    assert isinstance(result.error, MissingCheckpointError)
    assert not result.is_caught_up
    assert result.lag.versions == 2


# -- schemas --------------------------------------------------------------------------------------


def test_a_newer_operator_file_has_its_own_store(world: World) -> None:
    for number in range(3):
        world.batch(changes(number))
    assert world.follower.step().is_caught_up
    old = world.follower.store_folder
    newer = replace(world.operator, schema_id=1)
    world.query_folder.put(operator_file_name(1), newer.encode())
    world.operator = newer
    world.history[-1] = (replace(world.pointer, schema_id=1), world.model)
    world.batch(changes(3))
    result = world.follower.step()
    assert (result.is_caught_up, result.newest) == (True, world.pointer.ref)
    assert world.follower.store_folder != old
    assert world.follower.store_folder.parts[-2:] == ("s1", "3")
    assert world.adopted() == 0
    # The root's follower may report the operator file before a checkpoint file is written with it.
    newest = replace(newer, schema_id=2)
    world.operator = newest
    world.follower.use(newest)
    world.follower.use(newer)
    assert world.follower.step().is_caught_up
    assert world.follower.store_folder.parts[-2:] == ("s2", "3")
    assert world.adopted() == 0
