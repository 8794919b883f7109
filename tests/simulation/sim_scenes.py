"""Histories that reviews have found and that numbers find rarely, as scripts."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sim_parts import KEYS, UPLOAD, Attempt, Call, Changes, Config, Numbers, Variant
from sim_spark import TaskResult
from sim_stores import Fault, die_here
from sim_world import DRAWN, FIRST_BUCKET, NOW_S, World, scale_down

from arrow_schemas import Pointer
from spark_state_ext.backends import CleanUp
from spark_state_ext.commit.failures import Run
from spark_state_ext.files import retention

__all__ = ["SCENES", "Scene", "play_scene"]

RETAINED = 6
_NUMBERS = Numbers(b"no chance")


class Scene:
    """Two executors under Spark's checkpoint format 1, of which the file of the second one wins.

    Parameters
    ----------
    variant
        As for `World`.
    """

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self.world = World(Config(False, True, RETAINED, True), variant)

    def begin(self, **config: Any) -> None:
        """Begin with another configuration."""
        self.world.close()
        self.world = World(replace(self.world.config, **config), self._variant)

    def task(self, executor: int, changes: Changes, heartbeat: bool = True, cleans: bool = False) -> TaskResult:
        """A task of the next batch."""
        world, batch = self.world, self.world.batch + 1
        partition = world._handed_out(executor, batch)
        calls = {FIRST_BUCKET: Call(changes)}
        now_ms = world.planned.get(batch, (True, 0))[1]
        made = world._run(Attempt(executor, batch, partition, calls, False, heartbeat, now_ms=now_ms), None, _NUMBERS)
        assert made is not None
        if cleans:
            self.clean(partition[FIRST_BUCKET].pointer)
        return made

    def draw(self, executor: int, to: int) -> TaskResult:
        """A task of the next batch, which has data, and gives its row to the bucket at `to`; the first has a timeout."""
        world, batch = self.world, self.world.batch + 1
        heartbeat, now_ms = world._plan(batch, True, Numbers(b"\x01\x05"))
        row = KEYS + batch % DRAWN
        calls = {
            bucket: Call({row: batch if at == to else None}, now_ms + 1 if at == 0 else None)
            for at, bucket in enumerate(world.buckets)
        }
        partition = world._handed_out(executor, batch)
        made = world._run(Attempt(executor, batch, partition, calls, False, heartbeat, 0, now_ms), None, _NUMBERS)
        assert made is not None
        return made

    def wait(self, executor: int) -> TaskResult:
        """A task of the next batch, which has no data, and calls what is due."""
        world, batch = self.world, self.world.batch + 1
        heartbeat, now_ms = world._plan(batch, False, Numbers(b"\x01\x05"))
        made = world._run(world._attempt(executor, batch, heartbeat, now_ms, Numbers(b"wait")), None, _NUMBERS)
        assert made is not None
        return made

    def attempt(self, executor: int, run: Run, fault: Fault | None = None, cleans: bool = False) -> TaskResult | None:
        """An attempt at a task of the next batch, of a stage, which may fail."""
        return self.world._run(replace(self.planned(executor), cleans=cleans, run=run), fault, _NUMBERS)

    def planned(self, executor: int) -> Attempt:
        """A task of the next batch."""
        world, batch = self.world, self.world.batch + 1
        return Attempt(executor, batch, world._handed_out(executor, batch), {FIRST_BUCKET: Call({1: batch})}, False)

    def idle(self, executor: int) -> TaskResult:
        """A task of the next batch in which the bucket is not called."""
        return self.world._idle(executor, self.world.batch + 1)

    def commit(self, *made: TaskResult) -> None:
        """The batch is over, and everybody gets to what waits."""
        self.world._commit(self.world.batch + 1, made, _NUMBERS)
        for executor in range(len(self.world.executors)):
            self.finish(executor)

    def finish(self, executor: int) -> None:
        """An executor gets to all that waits."""
        while self.world.executors[executor].waiting:
            self.world._work_off(self.world.executors[executor], 0)

    def send(self, executor: int) -> None:
        """An executor gets to its uploads, and not to snapshots."""
        waiting = self.world.executors[executor].waiting
        while any(name == UPLOAD for name, _ in waiting):
            self.world._work_off(self.world.executors[executor], [name for name, _ in waiting].index(UPLOAD))

    def clean(self, pointer: Pointer) -> None:
        """A clean-up, and what every pointer gives after it."""
        if pointer.ref is not None:
            request = CleanUp(pointer, pointer.ref, self.world.config.retained, lambda: None)
            retention.clean_up(self.world.files, request, self.world.folder, NOW_S, known=self.world.known)
        self.world.check()

    def alone(self, batches: int, cleans: bool = True) -> None:
        """The first executor goes on alone."""
        for at in range(batches):
            self.commit(self.task(0, {at % 6: at}, cleans=cleans))

    def remove_root(self) -> None:
        """Somebody removes all that lies at the root; local disks stay as they are."""
        for files in self.world._all("a"):
            for name in files.names():
                files.remove(name)

    def start_again(self) -> None:
        """The query ends and is started again, which begins with a look."""
        self.world.looking = uuid.uuid4().hex
        for executor in self.world.executors:
            executor.die()

    def damage_snapshots(self) -> None:
        """All that are there; their headers can be read still."""
        for name in self.world.files.names():
            if ".snapshot." in name:
                data = bytearray(self.world.files.get(name))
                data[len(data) // 2] ^= 0xFF
                self.world.files.put(name, bytes(data))


def quiet_for_a_while(scene: Scene) -> None:
    """The quiet lineage's pointers are those that Spark retains, and its checkpoint an ancestor of the busy one's."""
    scene.alone(6)
    for at in range(RETAINED):
        scene.commit(scene.task(0, {at: at}, cleans=True), scene.task(2, {}))
    scene.alone(2 * RETAINED)


def called_by_timeouts_only(scene: Scene) -> None:
    """One lineage is called in many batches without data, the other in none of them; then it is what is committed."""
    scene.alone(6)
    scene.commit(scene.task(0, {1: 50}), scene.task(2, {}))
    for at in range(5 * RETAINED):
        scene.commit(scene.task(0, {2: at}, heartbeat=False, cleans=True), scene.idle(2))
    scene.commit(scene.task(0, {3: 1}, cleans=True), scene.task(2, {4: 7}))
    scene.world.check()


def renewed_just_now(scene: Scene) -> None:
    """The quiet lineage is renewed, and pointers from before that are retained still."""
    scene.alone(6)
    for at in range(4 * RETAINED):
        scene.commit(scene.task(0, {at % 6: at}, cleans=True), scene.task(2, {}))


def no_version_twice(scene: Scene) -> None:
    """The lineages have different numbers of versions, so that none of those left has two ids."""
    scene.alone(6)
    for at in range(2):
        scene.commit(scene.task(0, {at: at}), scene.task(2, {}))
    for at in range(4 * RETAINED):
        scene.commit(scene.task(0, {at % 6: at}, cleans=True), scene.task(2, {}))
    scene.commit(scene.task(0, {}, cleans=True), scene.task(2, {1: 1}))
    scene.alone(3 * RETAINED)


def damaged_before_anything_leans_on_them(scene: Scene) -> None:
    """No snapshot is whole, and the deltas from the first one on are all there is."""
    scene.alone(4 * RETAINED, cleans=False)
    scene.damage_snapshots()
    scene.alone(1)


def erased_when_a_quiet_lineage_ends(scene: Scene) -> None:
    """What it renewed last is named by the pointer that counted when the window began."""
    for together in (8, 9):
        scene.begin(erase_window_ms=80, retained=40)
        for at in range(30):
            scene.world.planned[scene.world.batch + 1] = True, at * 10
            busy = scene.task(0, {at % 6: at}, cleans=at > 6)
            scene.commit(busy, *([scene.task(2, {1: 1} if at == 0 else {})] if at < together else []))
            scene.world.check()


def back_to_the_oldest_batch(scene: Scene) -> None:
    """The query starts again at the oldest batch that Spark retains, and again."""
    for _ in range(3):
        scene.alone(4 * RETAINED)
        scene.world.spark.go_back(scene.world.batch - RETAINED)
        for executor in scene.world.executors:
            executor.die()
            executor.machine.lose()


def uploads_that_lag(scene: Scene) -> None:
    """One executor's uploads do not get on, however long; the other one's files are cleaned up."""
    world = scene.world
    world.config = replace(world.config, journal=True, retained=1)
    scene.alone(6)
    for at in range(20):
        made = [scene.task(executor, {at % 6: at}, cleans=executor == 0) for executor in (0, 2)]
        world._commit(world.batch + 1, made, _NUMBERS)
        scene.finish(0)


def one_upload_hangs(scene: Scene) -> None:
    """And what another process of the same machine sends after it arrives; that hands deltas inline, then waits for them."""
    world = scene.world
    world.executors[1].machine = world.executors[0].machine
    for inline_bytes_max in (1 << 20, 0):
        world.config = replace(world.config, journal=True)
        scene.alone(2, cleans=False)
        world._commit(world.batch + 1, [scene.task(0, {1: 1})], _NUMBERS)
        world.config = replace(world.config, inline_bytes_max=inline_bytes_max)
        for at in range(3):
            world._commit(world.batch + 1, [scene.task(1, {2: at})], _NUMBERS)
            scene.send(1)
            world.check()


def dead_when_the_task_is_over(scene: Scene) -> None:
    """Nothing goes inline, so that at the end of its task everything must have arrived."""
    world = scene.world
    world.config = replace(world.config, journal=True, inline_bytes_max=0)
    for at in range(8):
        world._commit(world.batch + 1, [scene.task(0, {at % 6: at})], _NUMBERS)
        world.executors[0].die()
        world.check()


def neighbours_without_data(scene: Scene) -> None:
    """Two attempts draw differently; the first one's executor goes on from memory, without data, and writes what is due."""
    scene.begin(buckets=2, changelog=True, timeouts=True)
    scene.commit(scene.draw(0, to=0), scene.draw(2, to=1))
    scene.commit(scene.wait(0))
    scene.world.executors[0].die()
    scene.commit(scene.draw(1, to=0))
    scene.world.check()


def root_removed_between_batches(scene: Scene) -> None:
    """The first pointer after that needs no local disk, nor what waits in the background, whatever was inline before."""
    for journal, batches, late in itertools.product((False, True), (1, 6), (0, 2)):
        scene.begin(journal=journal)
        scene.alone(batches, cleans=False)
        scene.remove_root()
        for at in range(late):
            # Of the run before: it sends deltas there.
            scene.world._commit(scene.world.batch + 1, [scene.task(0, {at: 40})], _NUMBERS)
            scene.send(0)
        scene.start_again()
        made = scene.task(0, {1: 50})
        scene.world._check_with(made.partition[FIRST_BUCKET].pointer, ["a"])
        scene.commit(made)
        scene.commit(scene.task(2, {2: 60}))


def sent_again(scene: Scene) -> None:
    """Another executor sends what is confirmed once more, and dies; a rename does not replace anything."""
    for at in range(4):
        scene.begin(replaces=False, journal=True)
        scene.commit(scene.task(0, {1: 1}))
        made = scene.task(0, {2: 2})
        scene.attempt(2, scene.world.stage(), Fault(at, die_here, False))
        scene.send(2)
        # Before a snapshot holds the same.
        scene.world._commit(scene.world.batch + 1, [made], _NUMBERS)
        scene.world.check()


def failed_and_started_again(scene: Scene) -> None:
    """An upload fails, all attempts at the next batch are told, and the next run is not, on any machine."""
    for same_run in (False, True):
        scene.begin(journal=True, same_run=same_run)
        world = scene.world
        scene.commit(scene.task(0, {1: 1}))
        first = world.stage()
        made = scene.attempt(0, first, world.failing(0, first))
        assert made is not None
        scene.commit(made)
        told = world.stage()
        assert [scene.attempt(0, told) for _ in range(3)] == [None] * 3
        world.start()
        made = scene.attempt(0, world.stage())
        assert made is not None
        scene.commit(made)


def failed_in_a_run_that_is_over(scene: Scene) -> None:
    """An upload fails, and the query ends before anybody is told."""
    scene.begin(journal=True)
    world = scene.world
    scene.commit(scene.task(0, {1: 1}))
    run = world.stage()
    made = scene.attempt(0, run, world.failing(0, run))
    assert made is not None
    scene.commit(made)
    world.start()
    assert scene.attempt(0, world.stage()) is not None


def torn_on_its_way(scene: Scene) -> None:
    """A file of the right size is there, of which one byte is wrong."""
    for at, journal in itertools.product(range(4), (True, False)):
        scene.begin(journal=journal)
        scene.alone(1, cleans=False)
        world, run = scene.world, scene.world.stage()
        made = scene.attempt(0, run, world.torn(at, run, lambda: None))
        for _ in range(3):
            if made is not None:
                world._commit(world.batch + 1, [made], _NUMBERS)
            scene.send(0)
            world.check()
            made = world._surely(scene.planned(0), _NUMBERS)


def joined_by_a_torn_snapshot(scene: Scene) -> None:
    """What a backend that joins is sent arrives damaged, and its sender dies before it compares; another machine goes on."""
    # After its delta, and the snapshot for the backend that was there before.
    for at in range(10, 16):
        scene.begin()
        world = scene.world
        scene.alone(4, cleans=False)
        world.configured = ["a", "b"]
        made = scene.attempt(0, world.stage(), world.torn(at, None, die_here))
        if made is not None:
            world._commit(world.batch + 1, [made], _NUMBERS)
        scene.finish(0)
        for _ in range(3):
            # Before it sends a snapshot of its own.
            world._commit(world.batch + 1, [scene.task(2, {2: at})], _NUMBERS)
            scene.send(2)
            world.check()


def lost_and_not_answered(scene: Scene) -> None:
    """One backend is emptied and a clean-up notices; the attempt that sees to it dies, or another one's pointer counts."""
    for at in range(8):
        scene.begin()
        world = scene.world
        world.configured = ["a", "b"]
        scene.alone(8, cleans=False)
        world.raid("b")
        noticed = scene.attempt(0, world.stage(), cleans=True)
        assert noticed is not None
        scene.commit(noticed)
        run = world.stage()
        scene.attempt(0, run, Fault(at, die_here, False) if at < 7 else None)
        made = scene.attempt(0, run)
        assert made is not None
        scene.commit(made)
        world.check()


def play_scene(script: Callable[[Scene], None], variant: Variant) -> None:
    """Play a scene; raises `WrongStateError` when anything is."""
    scene = Scene(variant)
    try:
        with scale_down(True, variant):
            script(scene)
    finally:
        scene.world.close()


SCENES: list[Callable[[Scene], None]] = [
    quiet_for_a_while,
    called_by_timeouts_only,
    renewed_just_now,
    no_version_twice,
    damaged_before_anything_leans_on_them,
    back_to_the_oldest_batch,
    erased_when_a_quiet_lineage_ends,
    uploads_that_lag,
    one_upload_hangs,
    dead_when_the_task_is_over,
    neighbours_without_data,
    root_removed_between_batches,
    sent_again,
    failed_and_started_again,
    failed_in_a_run_that_is_over,
    torn_on_its_way,
    joined_by_a_torn_snapshot,
    lost_and_not_answered,
]
