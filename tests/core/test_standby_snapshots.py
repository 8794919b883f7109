"""A replica and its task's snapshots: kept as files for peers, met late, and restored lazily by a task that died."""

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
from spark_state_ext.commit import cadence
from spark_state_ext.files.sealed_body import read_announced_index
from spark_state_ext.restore.lazy import LazyRestore
from spark_state_ext.restore.load_plan import Chain
from spark_state_ext.restore.loader import Loader
from spark_state_ext.store import compaction
from spark_state_ext.store.compaction import is_outgrown
from spark_state_ext.store.lazy_file import LazyFile, LazyOptions
from spark_state_ext.store.runs import Run
from spark_state_ext.testing.model import KEYS, Row


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "world")
    yield made
    made.close()


@pytest.fixture
def snapshots_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "DELTAS_MIN", 3)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 5)


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
def test_a_replica_has_the_snapshot_that_a_task_elsewhere_begins_with(
    world: World, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """So that it can give that to it as a peer, from the batch after it on: a large one, or where peers may ask."""
    if why == "large":
        monkeypatch.setattr("spark_state_ext.store.local.is_outgrown", lambda sizes, _: is_outgrown(sizes, 1_000))
        merge = compaction.choose_runs_to_compact
        monkeypatch.setattr(
            "spark_state_ext.store.local.choose_runs_to_compact", lambda runs, _, *how: merge(runs, 1_000, *how)
        )
    world.stores.close()
    world.follow(gives_bytes_min=1 if why == "peers ask" else None)
    monkeypatch.setattr("spark_state_ext.files.checkpoint._INGESTED_BYTES_MIN", 0)
    looked = lacked = 0
    for number in range(40):
        world.batch(changes(number))
        assert world.follower.step().is_caught_up
        begins = world.pointer.lineage[0].ref
        data = world.files.get(name) if (name := file_name(begins, SNAPSHOT)) in world.names() else b""
        if data and begins != world.pointer.ref:

            def part(start: int, end: int, whole: bytes = data) -> bytes:
                return whole[start:end]

            _, index = read_announced_index(part, len(data), name)
            assert index is not None
            found = world.follower.store().lazy.whole_file(begins, digest_crcs(index.blocks()))
            looked += 1
            if found is None:
                assert why == "neither"
                lacked += 1
                continue
            path, body_bytes = found
            assert path.read_bytes()[:body_bytes] == data[: index.body_bytes]
            assert world.follower.store().lazy.whole_file(begins, "0" * 32) is None
    assert looked > 10
    assert (lacked > 5) == (why == "neither")
    assert len(world.task().runs()) <= 10
    assert world.adopted() == 0


class _Large:
    """A bucket that has many bytes from its first batch on, and changes of one key in each later one."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("spark_state_ext.files.checkpoint._INGESTED_BYTES_MIN", 0)
        monkeypatch.setattr(cadence, "DELTAS_MIN", 16)
        monkeypatch.setattr(cadence, "DELTAS_MAX", 17)
        self.world = world
        self.read: list[CheckpointRef] = []
        replaced = Loader.replace_runs

        def replace_runs(loader: Loader, chain: Chain, ref: CheckpointRef) -> bool:
            self.read.append(ref)
            return replaced(loader, chain, ref)

        monkeypatch.setattr(Loader, "replace_runs", replace_runs)
        world.batch({key: Row(0, "y" * 20_000) for key in KEYS})
        self.bytes = world.follower.step().size_bytes
        world.stores.close()

    def batch(self, number: int) -> None:
        self.world.batch({KEYS[number % len(KEYS)]: Row(number, "x" * (20_000 + 200 * number))})

    def step(self) -> Sequence[Run]:
        """The follower's; gives the runs of the committed checkpoint."""
        found = self.world.follower.step()
        assert (found.error, found.is_caught_up) == (None, True)
        return self.world.follower.store().view(found.committed).runs


def test_a_follower_that_meets_snapshots_late_has_them_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("times", [0.5, 1.1, 1.5, 1.8, 5.0])
def test_no_snapshot_is_read_twice(world: World, monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """Where a copy comes to be so large that peers may ask for it, its runs were merged in other ways."""
    large = _Large(world, monkeypatch)
    world.follow(gives_bytes_min=int(times * large.bytes))
    for number in range(1, 100):
        large.batch(number)
        large.step()
    assert len(set(large.read)) == len(large.read)
    if times in (0.5, 5.0):
        assert (len(large.read) >= 3) == (times < 1)
    assert world.adopted() == 0


def test_runs_stay_few_where_no_snapshot_comes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where only another backend has them."""
    large = _Large(world, monkeypatch)
    world.follow(gives_bytes_min=1)
    for number in range(1, 160):
        large.batch(number)
        for name in world.names():
            if name.endswith(f".{SNAPSHOT}.arrow"):
                world.files.remove(name)
        assert len(large.step()) <= 12
    assert not large.read


# -- what a task has begun to restore lazily -------------------------------------------------------


class _Partly:
    """A task on the follower's host has begun to restore a snapshot lazily, and has died."""

    def __init__(self, base: Path) -> None:
        self.world = World(base / "world", root=f"memory://completed-{uuid.uuid4().hex}")
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
        (run,) = self.lacks()
        assert run.newest == self.begins
        self.size_bytes = run.size_bytes

    def lacks(self) -> list[Run]:
        """Runs of the newest checkpoint that are not whole."""
        ref = self.world.pointer.ref
        assert ref is not None
        return self.store.lazy.among(self.store.view(ref).runs)

    def lose_the_snapshot(self) -> None:
        self.world.files.remove(file_name(self.begins, SNAPSHOT))


@pytest.fixture
def partly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots_often: None) -> Iterator[_Partly]:
    monkeypatch.setattr("spark_state_ext.files.checkpoint._INGESTED_BYTES_MIN", 0)
    # So that it takes several requests.
    monkeypatch.setattr("spark_state_ext.restore.lazy._REQUEST_PIECES", 1)
    made = _Partly(tmp_path)
    yield made
    made.world.close()


@pytest.mark.parametrize("gone", [False, True], ids=["there", "gone"])
def test_what_a_task_has_restored_lazily_in_part_is_completed(partly: _Partly, gone: bool) -> None:
    """A replica is in sync once all of it is here: a task that adopts it waits for no store then."""
    world = partly.world
    if gone:
        # The deltas that it was made of are there.
        partly.lose_the_snapshot()
    found = world.follower.step()
    assert (found.is_caught_up, found.newest, found.error) == (True, world.pointer.ref, None)
    assert partly.lacks() == []
    assert found.bytes_read >= partly.size_bytes * (not gone)
    for name in world.names():
        world.files.remove(name)
    assert world.adopted() == 0


@pytest.mark.parametrize("what", ["lost", "closed"])
def test_completing_goes_on_whatever_others_do(partly: _Partly, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    world, fetched, fetches = partly.world, LazyRestore._fetch, []

    def fetch(restore: LazyRestore, lazy: LazyFile, pieces: IndexArray, in_background: bool) -> None:
        fetched(restore, lazy, pieces, in_background)
        fetches.append(len(pieces))
        if len(fetches) == 3:
            if what == "lost":
                # By a task, for which nobody had the rest.
                world.task().lazy.lose(lazy.run)
            else:
                # As the process has many stores open.
                partly.store.close()

    monkeypatch.setattr(LazyRestore, "_fetch", fetch)
    found = world.follower.step()
    assert len(fetches) >= 3
    assert (found.is_caught_up, found.error) == (True, None)
    assert partly.lacks() == []
    assert world.adopted() == 0


def test_what_a_task_of_this_host_restores_is_left_to_it(partly: _Partly, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have the rest from a backend that is not followed."""
    monkeypatch.setenv("SPARK_STATE_EXT_HOST", "a")
    partly.lose_the_snapshot()
    found = partly.world.follower.step()
    assert (found.host, found.error, len(partly.lacks())) == ("a", None, 1)
