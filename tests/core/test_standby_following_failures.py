"""Followers with a failing store, disk or file, stopping a follower, and its resource limits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from standby_support import FAULTY, Faults, World, changes

from arrow_schemas.lineage import DELTA, file_name
from spark_state_ext.errors import (
    CorruptFileError,
    CorruptStoreError,
    InterruptedRestoreError,
    StorageError,
)
from spark_state_ext.files.listing import Entry
from spark_state_ext.standby.follower import BucketFollower, SharedStores
from spark_state_ext.standby.metered_reads import Bandwidth
from spark_state_ext.standby.values import Lag
from spark_state_ext.store import LocalStore
from tests.helpers.clock import VirtualClock


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "world")
    yield world
    world.close()


def test_a_damaged_file_is_reported_and_the_next_step_continues(world: World) -> None:
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
        result = world.follower.step()
        assert isinstance(result.error, CorruptFileError)
        assert name in str(result.error)
        assert (result.is_caught_up, result.lag.versions) == (False, 1)
    world.files.put(name, whole)
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def test_a_damaged_attempt_does_not_block_the_other_attempt(world: World) -> None:
    world.batch(changes(0))
    bad = world.attempt(changes(1))[0].ref
    assert bad is not None
    name = file_name(bad, DELTA)
    world.files.put(name, world.files.get(name)[:-40])
    world.batch(changes(1))
    result = world.follower.step()
    assert isinstance(result.error, CorruptFileError)
    assert result.newest == world.pointer.ref
    assert world.adopted() == 0
    # The damaged file is forgotten once there is a newer one.
    world.batch(changes(2))
    assert world.follower.step().is_caught_up


@pytest.mark.parametrize("at", range(1, 9))
def test_a_follower_recovers_from_a_failure_of_any_read(world: World, at: int) -> None:
    for number in range(3):
        world.batch(changes(number))
    world.follow(storage_options=FAULTY)
    Faults.fail(at)
    result = world.follower.step()
    failed = Faults.reads >= at
    Faults.heal()
    assert isinstance(result.error, StorageError) == failed
    assert result.is_caught_up != failed
    assert world.follower.step().is_caught_up
    assert world.adopted() == 0


def test_the_failing_reads_include_every_read_of_a_step(world: World) -> None:
    for number in range(3):
        world.batch(changes(number))
    world.follow(storage_options=FAULTY)
    Faults.fail(1 << 62)
    assert world.follower.step().is_caught_up
    assert 4 <= Faults.reads < 9


def test_a_removed_or_replaced_local_store_is_filled_again(world: World) -> None:
    for number in range(3):
        world.batch(changes(number))
    world.follower.step()
    # Removed as unused, as `reclaim` does.
    shutil.rmtree(world.follower.store_folder)
    result = world.follower.step()
    assert (result.is_caught_up, result.files_read) == (True, 3)
    assert world.adopted() == 0
    # Removed as damaged, as a task does.
    world.task().rebuild()
    assert world.follower.step().files_read == 3
    assert world.adopted() == 0


def test_a_replica_whose_pages_are_damaged_is_rebuilt(tmp_path: Path) -> None:
    """Each case runs in its own process, because LMDB aborts the process on some damaged pages."""
    page, ended, read = 2, 0, 0
    while True:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("damaged_replica.py")), str(tmp_path / str(page)), str(page)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        results = [json.loads(line) for line in done.stdout.splitlines()]
        read += sum(result["files_read"] for result in results)
        page += len(results)
        if done.returncode >= 0:
            break
        ended, page = ended + 1, page + 1
    assert done.returncode == 0, done.stderr
    # A step reads one new file. It reads more only when it rebuilds a damaged replica.
    assert read > page, "the replica must have been rebuilt"
    assert ended < page // 2


def test_a_step_ends_early_if_asked_to_stop(world: World) -> None:
    world.batch(changes(0))
    world.follower._stop.set()
    result = world.follower.step()
    assert isinstance(result.error, InterruptedRestoreError)
    assert not result.is_caught_up


def test_a_follower_never_writes_in_the_query_folder(world: World) -> None:
    for number in range(5):
        world.batch(changes(number))
    before = world.query_folder.tree()
    world.follower.step()
    assert world.query_folder.tree() == before


def test_an_unchanged_folder_is_not_listed_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
            result = world.follower.step()
            assert (result.is_caught_up, result.newest) == (True, world.pointer.ref)
            clock.sleep(1.0)
    # A change with the same time as the previous one is seen: a time is trusted once it is 2 s old.
    assert listings == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    # An incomplete replica is checked each time.
    ref = world.attempt(changes(3))[0].ref
    assert ref is not None
    world.files.put(file_name(ref, DELTA), b"nothing")
    for _ in range(5):
        assert world.follower.step().error is not None
        clock.sleep(1.0)
    assert listings[9:] == [30, 31, 32, 33, 34]


def test_a_replica_found_damaged_while_tidying_is_filled_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # This holds however late the next step is, and without new files.
    clock.sleep(60.0)
    result = world.follower.step()
    assert (result.is_caught_up, result.newest) == (True, world.pointer.ref)
    assert world.adopted() == 0


def test_the_bandwidth_limits_the_bytes_of_each_second(world: World) -> None:
    for number in range(10):
        world.batch(changes(number))
    clock = VirtualClock()
    world.follower = BucketFollower(
        world.at, world.key, world.operator, world.stores, Bandwidth(1_000, clock, clock.sleep)
    )
    result = world.follower.step()
    assert result.is_caught_up
    assert result.bytes_read > 20_000
    assert result.bytes_read / 1_000 - 1 <= clock.now_s <= result.bytes_read / 1_000
    # Unused bandwidth does not accumulate.
    clock.sleep(1_000)
    began_s = clock.now_s
    world.batch(changes(11))
    result = world.follower.step()
    assert clock.now_s - began_s == pytest.approx(result.bytes_read / 1_000 - 1)


def test_lag_is_measured_by_the_clock_of_the_store(world: World) -> None:
    world.batch(changes(0))
    world.follower.step()
    for number in range(1, 4):
        world.batch(changes(number))
    behind = world.follower.step().behind
    assert (behind.versions, behind.seconds) == (3, 3.0)
    names = [name for name in world.names() if not name.startswith("1_")]
    assert behind.size_bytes == sum(world.files.size(name) for name in names)
    assert world.follower.step().behind == Lag()


def test_the_number_of_open_stores_of_followers_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_state_ext.worker import descriptors

    monkeypatch.setattr(descriptors, "stores_max", lambda: 2)
    stores = SharedStores()
    world = World(tmp_path / "world")
    for bucket in range(5):
        stores.at(tmp_path / str(bucket), world.operator.row_schema())
    assert len(list(stores._stores)) == 2
    stores.close()
    world.close()
