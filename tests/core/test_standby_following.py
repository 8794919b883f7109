"""A host that follows a bucket's files has its state at hand: against a dict, with attempts, damage and failures."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from core_support import buffer_of, change_sets, clean_up_at
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from standby_support import FAULTY, Faults, World, changes, covering

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, Writer, file_name
from arrow_schemas.operator import operator_file_name
from spark_state_ext.commit import cadence
from spark_state_ext.errors import (
    CorruptFileError,
    CorruptStoreError,
    InterruptedRestoreError,
    MissingCheckpointError,
    StateError,
    StorageError,
)
from spark_state_ext.files.listing import Entry
from spark_state_ext.files.retention import clean_up
from spark_state_ext.standby.followed_stores import FollowedStores
from spark_state_ext.standby.following import BucketFollower
from spark_state_ext.standby.line import Line, judged
from spark_state_ext.standby.listed import Listing
from spark_state_ext.standby.metered import Bandwidth
from spark_state_ext.standby.values import Lag
from spark_state_ext.store import LocalStore, compaction
from spark_state_ext.testing.model import Key, Row
from spark_state_ext.worker.boot import boot_id
from tests.helpers.clock import VirtualClock
from tests.helpers.soak import examples
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
from spark_state_ext.testing.model import scanned
from arrow_schemas.lineage import CheckpointRef
store = LocalStore.at(Path({str(world.follower.store_folder)!r}), operator_file("counts", "query", 8).row_schema())
print(len(scanned(store.view(CheckpointRef(int(sys.argv[1]), sys.argv[2])))))
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


class PrunesToTheNewest(BucketFollower):
    """A follower that takes the newest file for committed."""

    def _tidy(self, listing: Listing, line: Line) -> None:
        super()._tidy(listing, replace(line, head=_its_own_parent(line.head)))


def _its_own_parent(head: LineageHeader) -> LineageHeader:
    child = replace(head.ref, version=head.ref.version + 1)
    return replace(head, ref=child, parent=head.ref, lineage=(*head.lineage, head.ref))


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
    world.go_back(3, "run 2")
    world.batch(changes(50))
    found = world.follower.step()
    assert (found.newest, found.committed, found.is_caught_up) == (world.pointer.ref, world.pointer.parent, True)
    assert world.adopted() == 0
    # A task of the old run wakes up, and writes the highest version of all.
    world.run_id = "run"
    world.bucket(world.active, old).commit(buffer_of(changes(77), world.scratch))
    # And tasks whose runs user code has named anew, both of which go on from what is committed.
    world.attempt(changes(77))
    world.run_id = "run 2"
    for number in range(51, 60):
        world.batch(changes(number))
        assert world.follower.step().newest == world.pointer.ref
        assert world.adopted() == 0


def test_a_copy_that_begins_anew_knows_which_run_is_the_last(world: World) -> None:
    """All files are looked at again then, those of the run before too, which wrote a higher version."""
    for number in range(4):
        world.batch(changes(number))
        world.follower.step()
    world.go_back(2, "run 2")
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
    world.go_back(3, "run 2")
    world.batch(changes(20))
    for at in (0, 1, 0):
        world.attempt(changes(99), at=at)
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def header_of(version: int, parent: int | None, run: str, which: str = "a", since: int | None = None) -> LineageHeader:
    def ref(number: int, name: str = "a") -> CheckpointRef:
        return CheckpointRef(number, name * 32)

    begin = max(1, (parent or 0) - 3) if since is None else since
    lineage = () if parent is None else tuple(ref(number) for number in range(begin, parent + 1))
    above = lineage[-1] if lineage else None
    return LineageHeader(
        DELTA, "counts", 3, ref(version, which), above, lineage, 0, Writer("q", run, version, "h"), "1"
    )


def test_what_is_built_upon_is_no_zombies_file() -> None:
    """Misjudged by its time, it counts as soon as something is built upon it."""
    line, _ = judged(None, header_of(9, 8, "run"))
    line, counts = judged(line, header_of(5, 4, "run", "b"))
    assert not counts
    assert line.head.ref.version == 9
    child = replace(header_of(6, 4, "run", "b"), lineage=(), parent=None)
    child = replace(child, parent=line.ignored[-1], lineage=(line.ignored[-1],))
    line, counts = judged(line, child)
    assert counts
    # Where the run went back, its first file says so.
    line, _ = judged(None, header_of(9, 8, "run"))
    line, counts = judged(line, header_of(5, 4, "run 2", "b"))
    assert (counts, line.head.ref.version, line.past) == (True, 5, ("run",))
    assert not judged(line, header_of(10, 9, "run"))[1]
    assert not judged(line, header_of(10, 9, "run", since=8))[1]
    # Far behind, lineages do not reach down to what was committed then.
    line, counts = judged(judged(None, header_of(9, 8, "run"))[0], header_of(90, 89, "run 2"))
    assert (counts, line.head.ref.version) == (True, 90)


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


# -- damage and failures --------------------------------------------------------------------------


def test_a_damaged_file_is_told_and_the_next_step_goes_on(world: World) -> None:
    world.batch(changes(0))
    world.follower.step()
    world.batch(changes(1))
    ref = world.pointer.ref
    assert ref is not None
    name = file_name(ref, DELTA)
    whole = world.files.get(name)
    for at in (20, len(whole) // 2):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        world.files.put(name, bytes(damaged))
        found = world.follower.step()
        assert isinstance(found.error, CorruptFileError)
        assert name in str(found.error)
        assert (found.is_caught_up, found.lag.versions) == (False, 1)
    world.files.put(name, whole)
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def test_a_damaged_attempt_keeps_nobody_from_the_other_one(world: World) -> None:
    world.batch(changes(0))
    bad = world.attempt(changes(1))[0].ref
    assert bad is not None
    name = file_name(bad, DELTA)
    world.files.put(name, world.files.get(name)[:-40])
    world.batch(changes(1))
    found = world.follower.step()
    assert isinstance(found.error, CorruptFileError)
    assert found.newest == world.pointer.ref
    assert world.adopted() == 0
    # And is forgotten once there is something newer.
    world.batch(changes(2))
    assert world.follower.step().is_caught_up


@pytest.mark.parametrize("at", range(1, 9))
def test_a_store_that_fails_at_any_read(world: World, at: int) -> None:
    for number in range(3):
        world.batch(changes(number))
    world.follow(storage_options=FAULTY)
    Faults.fail(at)
    found = world.follower.step()
    failed = Faults.reads >= at
    Faults.heal()
    assert isinstance(found.error, StorageError) == failed
    assert found.is_caught_up != failed
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def test_every_read_of_a_step_is_among_those(world: World) -> None:
    for number in range(3):
        world.batch(changes(number))
    world.follow(storage_options=FAULTY)
    Faults.fail(1 << 62)
    assert world.follower.step().is_caught_up
    assert 4 <= Faults.reads < 9


def test_a_store_that_was_removed_or_replaced_is_filled_again(world: World) -> None:
    for number in range(3):
        world.batch(changes(number))
    world.follower.step()
    # Taken for unused, as by `reclaim`.
    shutil.rmtree(world.follower.store_folder)
    found = world.follower.step()
    assert (found.is_caught_up, found.files_read) == (True, 3)
    assert world.adopted() == 0
    # Taken for damaged, by a task.
    world.task().rebuild()
    assert world.follower.step().files_read == 3
    assert world.adopted() == 0


def test_a_step_that_is_told_to_stop(world: World) -> None:
    world.batch(changes(0))
    world.follower._stop.set()
    found = world.follower.step()
    assert isinstance(found.error, InterruptedRestoreError)
    assert not found.is_caught_up


def test_nothing_is_written_in_the_query_folder(world: World) -> None:
    for number in range(5):
        world.batch(changes(number))
    before = world.query_folder.tree()
    world.follower.step()
    assert world.query_folder.tree() == before


def test_a_folder_that_did_not_change_is_not_listed_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    world.follower = BucketFollower(world.at, world.key, world.operator, world.stores, clock=clock)
    listings: list[float] = []
    entries = world.follower._folder.entries

    def listed() -> list[Entry]:
        listings.append(clock.now_s)
        return entries()

    monkeypatch.setattr(world.follower._folder, "entries", listed)
    for number in range(3):
        world.batch(changes(number))
        for _ in range(10):
            found = world.follower.step()
            assert (found.is_caught_up, found.newest) == (True, world.pointer.ref)
            clock.sleep(1.0)
    # A change that has the time of the one before it is seen, as a time counts once it is 2 s old.
    assert listings == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    # What is not whole is looked at each time.
    ref = world.attempt(changes(3))[0].ref
    assert ref is not None
    world.files.put(file_name(ref, DELTA), b"nothing")
    for _ in range(5):
        assert world.follower.step().error is not None
        clock.sleep(1.0)
    assert listings[9:] == [30, 31, 32, 33, 34]


def test_a_copy_that_tidying_found_damaged_is_filled_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    world.follower = BucketFollower(world.at, world.key, world.operator, world.stores, clock=clock)
    world.batch(changes(0))
    world.batch(changes(1))

    def damaged(*args: object) -> None:
        raise CorruptStoreError("a chunk differs from its checksum")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "compact", damaged)
        assert world.follower.step().newest is None
    assert world.task().runs() == []
    # However late the next look is, and though nobody writes.
    clock.sleep(60.0)
    found = world.follower.step()
    assert (found.is_caught_up, found.newest) == (True, world.pointer.ref)
    assert world.adopted() == 0


def test_bandwidth_bounds_bytes_by_the_second(world: World) -> None:
    for number in range(10):
        world.batch(changes(number))
    clock = VirtualClock()
    world.follower = BucketFollower(
        world.at, world.key, world.operator, world.stores, Bandwidth(1_000, clock, clock.sleep)
    )
    found = world.follower.step()
    assert found.is_caught_up
    assert found.bytes_read > 20_000
    assert found.bytes_read / 1_000 - 1 <= clock.now_s <= found.bytes_read / 1_000
    # What is not used for long does not add up.
    clock.sleep(1_000)
    began_s = clock.now_s
    world.batch(changes(11))
    found = world.follower.step()
    assert clock.now_s - began_s == pytest.approx(found.bytes_read / 1_000 - 1)


def test_lag_is_told_by_the_stores_clock(world: World) -> None:
    world.batch(changes(0))
    world.follower.step()
    for number in range(1, 4):
        world.batch(changes(number))
    behind = world.follower.step().behind
    assert (behind.versions, behind.seconds) == (3, 3.0)
    names = [name for name in world.names() if not name.startswith("1_")]
    assert behind.size_bytes == sum(world.files.size(name) for name in names)
    assert world.follower.step().behind == Lag()


# -- against a dict -------------------------------------------------------------------------------


class FollowerMachine(RuleBasedStateMachine):
    """The active and a follower, between any two steps of each other; `World` plays Spark."""

    follower_class: type[BucketFollower] = BucketFollower

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="follower-machine-"))
        self.world = World(self.base / "world", follower_class=self.follower_class)
        self.runs = 0
        # Nothing was written since the service began: of what it finds then, times alone tell which line it is on.
        self.unsure = False

    def teardown(self) -> None:
        self.world.close()
        shutil.rmtree(self.base, ignore_errors=True)

    @rule(changed=change_sets(max_size=5), attempts=st.integers(1, 3), follows=st.booleans(), data=st.data())
    def batch(self, changed: dict[Key, Row | None], attempts: int, follows: bool, data: st.DataObject) -> None:
        made = []
        for _ in range(attempts):
            made.append(self.world.attempt(changed))
            if follows:
                self.world.follower.step()
        self.world.commit(data.draw(st.sampled_from(made)))
        self.unsure = False

    @rule(changed=change_sets(max_size=5))
    def batch_on_the_followers_host(self, changed: dict[Key, Row | None]) -> None:
        self.world.batch(changed, store=self.world.task())
        self.unsure = False

    @precondition(lambda self: len(self.world.history) > 2)
    @rule(changed=change_sets(max_size=3), data=st.data())
    def zombie(self, changed: dict[Key, Row | None], data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.world.history) - 2))
        self.world.attempt(changed, at=at)

    @precondition(lambda self: len(self.world.history) > 2)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        self.runs += 1
        self.world.go_back(data.draw(st.integers(1, len(self.world.history) - 2)), f"run {self.runs}")
        # Pointers of old batches may need what is merged or pruned by now.
        self.unsure = True

    @rule()
    def service_begins_again(self) -> None:
        self.world.stores.close()
        self.world.follow()
        self.unsure = True

    @rule()
    def store_is_removed(self) -> None:
        """By `reclaim` of another process. The task's process is this one here, and has it open no more."""
        self.world.task().close()
        shutil.rmtree(self.world.at.stores, ignore_errors=True)

    @rule()
    def follow(self) -> None:
        found = self.world.follower.step()
        assert found.error is None
        assert found.is_caught_up
        if not self.unsure:
            assert self.world.adopted() == 0
        assert covering(self.world.task()) <= self.world.committed

    @rule()
    def a_task_finds_its_state_anyhow(self) -> None:
        self.world.adopted()


def _run(machine: type[FollowerMachine], monkeypatch: pytest.MonkeyPatch, histories: int, fixed: bool = False) -> None:
    monkeypatch.setattr(cadence, "DELTAS_MIN", 2)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 4)
    # Runs are merged as soon as there are two.
    monkeypatch.setattr(compaction, "FANOUT", 2)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            derandomize=fixed,
            stateful_step_count=25,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_follower_against_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    _run(FollowerMachine, monkeypatch, examples(15))


class FollowsTheLastOneOnly(BucketFollower):
    """Of two attempts it loads the one that was written last."""

    def _follow(self, listing: Listing, candidates: Sequence[CheckpointRef]) -> dict[CheckpointRef, StateError]:
        return super()._follow(listing, candidates[-1:])


# The first that fails ends the search.
BROKEN_MAX = 200


class TakesItsStoreForGranted(BucketFollower):
    """It does not look whether the store is still what it was."""

    def _notice_new_store(self) -> None:
        pass


@pytest.mark.parametrize("broken", [PrunesToTheNewest, FollowsTheLastOneOnly, TakesItsStoreForGranted])
def test_broken_followers_are_found(monkeypatch: pytest.MonkeyPatch, broken: type[BucketFollower]) -> None:
    class Machine(FollowerMachine):
        follower_class = broken

    with pytest.raises(AssertionError):
        # The same ones each time: whether they find it is no matter of chance.
        _run(Machine, monkeypatch, BROKEN_MAX, fixed=True)


def test_stores_of_followers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_state_ext.worker import descriptors

    monkeypatch.setattr(descriptors, "stores_max", lambda: 2)
    stores = FollowedStores()
    world = World(tmp_path / "world")
    for bucket in range(5):
        stores.at(tmp_path / str(bucket), world.operator.row_schema())
    assert len(list(stores._stores)) == 2
    stores.close()
    world.close()
