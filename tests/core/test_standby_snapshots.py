"""Replicas and snapshots: kept for peers, listed late, and completed if a task that died had restored them lazily."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from lazy_bucket import Later
from standby_support import World, changes, covering

from arrow_schemas.blocks import digest_crcs
from arrow_schemas.equality import IndexArray
from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.files.sealed_body import read_announced_index
from spark_state_ext.restore.lazy import LazyRestore
from spark_state_ext.restore.load_plan import Chain
from spark_state_ext.restore.loader import Loader
from spark_state_ext.store import compaction
from spark_state_ext.store.compaction import is_outgrown
from spark_state_ext.store.lazy_file import LazyFile, LazyOptions
from spark_state_ext.store.runs import Run
from spark_state_ext.testing.model import KEYS, Row

SNAPSHOTS_OFTEN = SnapshotCadence(3, 5)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "world")
    yield world
    world.close()


@pytest.fixture
def snapshots_often(world: World) -> None:
    world.cadence = SNAPSHOTS_OFTEN


@pytest.mark.usefixtures("snapshots_often")
def test_a_snapshot_replaces_runs_that_are_too_large_to_be_merged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_state_ext.store.local.is_outgrown", lambda sizes, _: is_outgrown(sizes, 4_000))
    for number in range(40):
        world.batch(changes(number))
        assert world.follower.step().is_caught_up
        assert world.adopted() == 0
        assert covering(world.task()) <= world.committed
    assert len(world.task().runs()) <= 10


@pytest.mark.parametrize("why", ["large", "peers ask", "neither"])
@pytest.mark.usefixtures("snapshots_often")
def test_a_replica_keeps_the_snapshot_that_tasks_on_other_hosts_start_from(
    world: World, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It can give the snapshot to them as a peer: if the snapshot is large, or if peers may ask for it."""
    if why == "large":
        monkeypatch.setattr("spark_state_ext.store.local.is_outgrown", lambda sizes, _: is_outgrown(sizes, 1_000))
        merge = compaction.choose_runs_to_compact
        monkeypatch.setattr(
            "spark_state_ext.store.local.choose_runs_to_compact", lambda runs, _, *how: merge(runs, 1_000, *how)
        )
    world.stores.close()
    world.follow(gives_bytes_min=1 if why == "peers ask" else None)
    monkeypatch.setattr("spark_state_ext.files.checkpoint._INGESTED_BYTES_MIN", 0)
    checked = missing = 0
    for number in range(40):
        world.batch(changes(number))
        assert world.follower.step().is_caught_up
        begins = world.pointer.lineage[0].ref
        data = world.files.get(name) if (name := file_name(begins, SNAPSHOT)) in world.names() else b""
        if data and begins != world.pointer.ref:

            def read_range(start: int, end: int, whole: bytes = data) -> bytes:
                return whole[start:end]

            _, index = read_announced_index(read_range, len(data), name)
            assert index is not None
            whole_file = world.follower.store().lazy.whole_file(begins, digest_crcs(index.blocks()))
            checked += 1
            if whole_file is None:
                assert why == "neither"
                missing += 1
                continue
            path, body_bytes = whole_file
            assert path.read_bytes()[:body_bytes] == data[: index.body_bytes]
            assert world.follower.store().lazy.whole_file(begins, "0" * 32) is None
    assert checked > 10
    assert (missing > 5) == (why == "neither")
    assert len(world.task().runs()) <= 10
    assert world.adopted() == 0


class _Large:
    """A bucket with much state after its first batch, and a change of one key in each later batch."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("spark_state_ext.files.checkpoint._INGESTED_BYTES_MIN", 0)
        world.cadence = SnapshotCadence(16, 17)
        self.world = world
        self.read: list[CheckpointRef] = []
        replace = Loader.replace_runs

        def replace_runs(loader: Loader, chain: Chain, ref: CheckpointRef) -> bool:
            self.read.append(ref)
            return replace(loader, chain, ref)

        monkeypatch.setattr(Loader, "replace_runs", replace_runs)
        world.batch({key: Row(0, "y" * 20_000) for key in KEYS})
        self.bytes = world.follower.step().size_bytes
        world.stores.close()

    def batch(self, number: int) -> None:
        self.world.batch({KEYS[number % len(KEYS)]: Row(number, "x" * (20_000 + 200 * number))})

    def step(self) -> Sequence[Run]:
        """Run one step of the follower, and return the runs of the committed checkpoint."""
        result = self.world.follower.step()
        assert (result.error, result.is_caught_up) == (None, True)
        return self.world.follower.store().view(result.committed).runs


def test_a_follower_that_lists_snapshots_late_keeps_them_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    large = _Large(world, monkeypatch)
    world.follow(gives_bytes_min=1)
    begins: set[CheckpointRef] = set()
    for number in range(1, 120):
        large.batch(number)
        if number % 5 > 1:
            runs = large.step()
            assert len(runs) <= 10
            if number > 20:
                assert runs[-1].file_bytes
                begins.add(runs[-1].newest)
    assert len(begins) == 6
    assert len(large.read) == len(set(large.read)) > 1
    assert world.adopted() == 0


@pytest.mark.parametrize("factor", [0.5, 1.1, 1.5, 1.8, 5.0])
def test_a_snapshot_is_never_read_twice(world: World, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Before a replica is large enough for peers to ask for it, its runs are merged in another way."""
    large = _Large(world, monkeypatch)
    world.follow(gives_bytes_min=int(factor * large.bytes))
    for number in range(1, 100):
        large.batch(number)
        large.step()
    assert len(set(large.read)) == len(large.read)
    if factor in (0.5, 5.0):
        assert (len(large.read) >= 3) == (factor < 1)
    assert world.adopted() == 0


def test_the_number_of_runs_stays_small_without_snapshots(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots may be in another backend only."""
    large = _Large(world, monkeypatch)
    world.follow(gives_bytes_min=1)
    for number in range(1, 160):
        large.batch(number)
        for name in world.names():
            if name.endswith(f".{SNAPSHOT}.arrow"):
                world.files.remove(name)
        assert len(large.step()) <= 12
    assert not large.read


# -- partial lazy restores -------------------------------------------------------------------------


class _PartialRestore:
    """A task on the follower's host has begun to restore a snapshot lazily, and has died."""

    def __init__(self, base: Path) -> None:
        self.world = World(base / "world", root=f"memory://completed-{uuid.uuid4().hex}", cadence=SNAPSHOTS_OFTEN)
        world = self.world
        for number in range(20):
            world.batch({key: Row(number, f"{number} {key}" * 1_000) for key in KEYS})
            self.begins = world.pointer.lineage[0].ref
            if self.begins != world.pointer.ref and file_name(self.begins, SNAPSHOT) in world.names():
                break
        world.lazy = LazyOptions(1, 1, Later())
        world.bucket(world.task(), world.pointer, "b").read(lambda view: None)
        world.lazy = None
        self.store = world.follower.store()
        (run,) = self.find_incomplete_runs()
        assert run.newest == self.begins
        self.size_bytes = run.size_bytes

    def find_incomplete_runs(self) -> list[Run]:
        """Return the runs of the newest checkpoint that are incomplete."""
        ref = self.world.pointer.ref
        assert ref is not None
        return self.store.lazy.among(self.store.view(ref).runs)

    def lose_the_snapshot(self) -> None:
        self.world.files.remove(file_name(self.begins, SNAPSHOT))


@pytest.fixture
def partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_PartialRestore]:
    monkeypatch.setattr("spark_state_ext.files.checkpoint._INGESTED_BYTES_MIN", 0)
    # The restore needs several requests.
    monkeypatch.setattr("spark_state_ext.restore.lazy._REQUEST_PIECES", 1)
    restore = _PartialRestore(tmp_path)
    yield restore
    restore.world.close()


@pytest.mark.parametrize("lost", [False, True], ids=["snapshot exists", "snapshot lost"])
def test_a_partial_lazy_restore_of_a_task_is_completed(partial: _PartialRestore, lost: bool) -> None:
    """A replica is in sync only once it is complete, so that a task that uses it does not wait for the backend."""
    world = partial.world
    if lost:
        # The deltas from which it was made still exist.
        partial.lose_the_snapshot()
    result = world.follower.step()
    assert (result.is_caught_up, result.newest, result.error) == (True, world.pointer.ref, None)
    assert partial.find_incomplete_runs() == []
    assert result.bytes_read >= partial.size_bytes * (not lost)
    for name in world.names():
        world.files.remove(name)
    assert world.adopted() == 0


@pytest.mark.parametrize("what", ["lost", "closed"])
def test_a_lazy_restore_is_completed_if_its_store_is_closed_or_loses_the_snapshot(
    partial: _PartialRestore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    world, original_fetch, fetches = partial.world, LazyRestore._fetch, []

    def fetch(restore: LazyRestore, lazy: LazyFile, pieces: IndexArray, in_background: bool) -> None:
        original_fetch(restore, lazy, pieces, in_background)
        fetches.append(len(pieces))
        if len(fetches) == 3:
            if what == "lost":
                # A task that cannot fetch the rest drops the snapshot.
                world.task().lazy.lose(lazy.run)
            else:
                # A process with many open stores closes some of them.
                partial.store.close()

    monkeypatch.setattr(LazyRestore, "_fetch", fetch)
    result = world.follower.step()
    assert len(fetches) >= 3
    assert (result.is_caught_up, result.error) == (True, None)
    assert partial.find_incomplete_runs() == []
    assert world.adopted() == 0


def test_the_lazy_restore_of_a_task_of_the_active_host_is_not_completed(
    partial: _PartialRestore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task may fetch the rest from a backend that the standby service does not follow."""
    monkeypatch.setenv("SPARK_STATE_EXT_HOST", "a")
    partial.lose_the_snapshot()
    result = partial.world.follower.step()
    assert (result.host, result.error, len(partial.find_incomplete_runs())) == ("a", None, 1)
