"""The tap: deltas reach the replicas of their bucket while they are committed, or are read from the store as before."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from peer_support import SECRET
from standby_support import QUERY, World

from arrow_schemas import Pointer, Writer
from arrow_schemas.lineage import DELTA, file_name
from arrow_schemas.peers import PeerDelta, PeerSecret
from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptFileError
from spark_state_ext.files.folder import Folder
from spark_state_ext.peers.asking import Peers
from spark_state_ext.peers.finding import ADDRESS_KIND
from spark_state_ext.peers.server import PeerServer
from spark_state_ext.peers.settings import PeerSettings
from spark_state_ext.peers.tap import DeltaTap
from spark_state_ext.standby.members import Membership
from spark_state_ext.standby.roots import RootFollower
from spark_state_ext.standby.shelf import ReplicaShelf
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, Changes, Row
from tests.helpers.clock import VirtualClock
from tests.helpers.waiting import WAIT_S, eventually


@dataclass
class Tapping(World):
    """A bucket whose task has a tap."""

    tap: DeltaTap | None = None

    def bucket(self, store: LocalStore, pointer: Pointer, host: str = "a") -> Bucket:
        writer = Writer(QUERY, self.run_id, pointer.batch + 1, host)
        context = CommitContext(self.scratch, batches_retained=self.retained, tap=self.tap)
        return Bucket(store, sole_replica(self.files, self.scratch), pointer, writer, context)


def changes(number: int) -> Changes:
    return {key: Row(number) for key in KEYS}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Tapping]:
    made = Tapping(tmp_path / "world", f"memory://tap-{tmp_path.name}")
    yield made
    made.close()


def tap_to(world: Tapping, server: PeerServer, secret: PeerSecret = SECRET) -> DeltaTap:
    """A tap to one peer, which has a replica."""
    address = {ADDRESS_KIND: f"{server.scheme}://127.0.0.1:{server.port}"}
    record = MemberRecord("b", replicas=(StandbyReplica(world.key, 1),), addresses=address)
    Membership(Folder(world.root), "b", 10.0).heartbeat(record)
    return DeltaTap(Peers(Folder(world.root), PeerSettings(secret, answer_s_max=WAIT_S), "a", VirtualClock()))


def sent(world: Tapping) -> tuple[str, bytes]:
    """The last delta, as a task sends it."""
    ref = world.pointer.ref
    assert ref is not None
    name = file_name(ref, DELTA)
    return name, world.files.get(name)


def test_a_delta_that_was_sent_is_not_read(world: Tapping) -> None:
    for number in range(6):
        world.batch(changes(number))
        world.follower._tapped.put(world.key, *sent(world))
        found = world.follower.step()
        assert (found.is_caught_up, found.newest) == (True, world.pointer.ref)
        assert found.files_read == 0
        assert world.adopted() == 0
        assert world.follower._tapped.of(world.key) == {}, "it is needed no more"
    world.batch(changes(7))
    assert world.follower.step().files_read == 1


def test_a_delta_counts_once_the_store_shows_it(world: Tapping) -> None:
    world.batch(changes(0))
    before = world.follower.step()
    world.batch(changes(1))
    name, data = sent(world)
    world.files.remove(name)
    world.follower._tapped.put(world.key, name, data)
    found = world.follower.step()
    assert (found.newest, found.is_caught_up) == (before.newest, True)
    assert set(world.follower._tapped.of(world.key)) == {name}, "it waits"
    world.files.put(name, data)
    found = world.follower.step()
    assert (found.newest, found.files_read) == (world.pointer.ref, 0)


@pytest.mark.parametrize("harm", ["another size", "another byte"])
def test_what_was_sent_is_not_trusted(world: Tapping, harm: str) -> None:
    world.batch(changes(0))
    world.follower.step()
    world.batch(changes(1))
    name, data = sent(world)
    at = len(data) // 2
    harmed = data + b"x" if harm == "another size" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    world.follower._tapped.put(world.key, name, harmed)
    found = world.follower.step()
    if harm == "another byte":
        assert isinstance(found.error, CorruptFileError)
        found = world.follower.step()
    assert (found.newest, found.is_caught_up, found.files_read) == (world.pointer.ref, True, 1)
    assert world.adopted() == 0


def test_deltas_go_from_a_task_to_a_replica(world: Tapping) -> None:
    world.batch(changes(0))
    clock = VirtualClock()
    follower = RootFollower(world.at, clock=clock)
    shelf = ReplicaShelf([follower])
    server = PeerServer("127.0.0.1", 0, SECRET, shelf, take=shelf.take)
    try:
        follower.hold(follower.find().operators)
        settled(follower)
        before = follower.work.read_files
        clock.sleep(200.0)
        settled(follower)
        assert follower.tick() > 0
        world.tap = tap_to(world, server)
        for number in range(1, 5):
            world.batch(changes(number))
            eventually(partial(has_taken, server, number))
            # Nobody would have looked for seconds.
            settled(follower)
            assert follower.followed()[world.key].newest == world.pointer.ref
        assert follower.work.read_files == before
        assert (world.tap.dropped, world.tap.taken) == (0, 4)
        assert server.work.taken_bytes > 0
        # Of a bucket that is not followed it takes nothing.
        follower.hold(())
        world.batch(changes(6))
        world.tap.offer(BucketKey("counts", "other", 1), *sent(world))
        world.batch(changes(7))
        eventually(lambda: world.tap is not None and world.tap._waiting == 0)
        assert server.work.taken_deltas == 4
    finally:
        follower.close()
        server.close()


def has_taken(server: PeerServer, deltas: int) -> bool:
    return server.work.taken_deltas == deltas


def settled(follower: RootFollower) -> None:
    """What is due is done."""
    follower.tick()
    assert follower.drain(WAIT_S)
    follower.tick()


def test_what_there_is_too_much_of_is_dropped(world: Tapping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_state_ext.peers.tap._WAITING_DELTAS_MAX", 2)
    taking, go_on = threading.Event(), threading.Event()

    def take(delta: PeerDelta) -> bool:
        taking.set()
        return go_on.wait(WAIT_S)

    server = PeerServer("127.0.0.1", 0, SECRET, ReplicaShelf([]), take=take)
    try:
        world.tap = tap_to(world, server)
        # No commit waits for the peer, which takes its time.
        for number in range(6):
            world.batch(changes(number))
        assert taking.wait(WAIT_S)
        assert world.tap.dropped == 4
        go_on.set()
        eventually(lambda: world.tap is not None and world.tap._waiting == 0)
        assert world.tap._waiting_bytes == 0
        name, _ = sent(world)
        for data in (None, b"", bytes((4 << 20) + 1)):
            world.tap.offer(world.key, name, data)
        world.tap.offer(BucketKey("counts", "", 3), name, b"x")
        assert world.tap.dropped == 8
    finally:
        go_on.set()
        server.close()
    assert world.follower.step().is_caught_up


@pytest.mark.parametrize("why", ["another secret", "gone", "no record"])
def test_a_peer_that_takes_nothing_costs_a_job_nothing(
    world: Tapping, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    server = PeerServer("127.0.0.1", 0, SECRET, ReplicaShelf([]), take=lambda _: True)
    tap = tap_to(world, server, PeerSecret.of("another secret altogether") if why == "another secret" else SECRET)
    if why != "another secret":
        server.close()
    if why == "no record":
        Membership(Folder(world.root), "b", 10.0).heartbeat(MemberRecord("b"))
    world.tap = tap
    try:
        for number in range(4):
            world.batch(changes(number))
        eventually(lambda: tap._waiting == 0)
        assert tap.taken == 0
        assert server.work.taken_deltas == 0
        assert sum("does not give" in it.getMessage() for it in caplog.records) == (why != "no record")
        assert world.follower.step().is_caught_up
    finally:
        tap.close()
        server.close()
