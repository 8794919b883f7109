"""Histories that reviews found and that random search seldom finds, as scripts."""

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
    """Two executors under Spark's checkpoint format 1; the second executor's file overwrites the first one's.

    Parameters
    ----------
    variant
        As for `World`.
    """

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self.world = World(Config(False, True, RETAINED, True), variant)

    def begin(self, **config: Any) -> None:
        """Begin a new world with another configuration."""
        self.world.close()
        self.world = World(replace(self.world.config, **config), self._variant)

    def run_task(self, executor: int, changes: Changes, heartbeat: bool = True, cleans: bool = False) -> TaskResult:
        """Run a task of the next batch."""
        world, batch = self.world, self.world.batch + 1
        partition = world._hand_out(executor, batch)
        calls = {FIRST_BUCKET: Call(changes)}
        now_ms = world.planned.get(batch, (True, 0))[1]
        result = world._run(Attempt(executor, batch, partition, calls, False, heartbeat, now_ms=now_ms), None, _NUMBERS)
        assert result is not None
        if cleans:
            self.clean(partition[FIRST_BUCKET].pointer)
        return result

    def run_drawing_task(self, executor: int, to: int) -> TaskResult:
        """Run a task of the next batch, which has data; its row goes to the bucket at `to`, and the first has a timeout."""
        world, batch = self.world, self.world.batch + 1
        heartbeat, now_ms = world._plan(batch, True, Numbers(b"\x01\x05"))
        row = KEYS + batch % DRAWN
        calls = {
            bucket: Call({row: batch if at == to else None}, now_ms + 1 if at == 0 else None)
            for at, bucket in enumerate(world.buckets)
        }
        partition = world._hand_out(executor, batch)
        result = world._run(Attempt(executor, batch, partition, calls, False, heartbeat, 0, now_ms), None, _NUMBERS)
        assert result is not None
        return result

    def run_task_without_data(self, executor: int) -> TaskResult:
        """Run a task of the next batch, which has no data and calls the buckets that are due."""
        world, batch = self.world, self.world.batch + 1
        heartbeat, now_ms = world._plan(batch, False, Numbers(b"\x01\x05"))
        result = world._run(world._attempt(executor, batch, heartbeat, now_ms, Numbers(b"wait")), None, _NUMBERS)
        assert result is not None
        return result

    def attempt(self, executor: int, run: Run, fault: Fault | None = None, cleans: bool = False) -> TaskResult | None:
        """Run an attempt of a stage at a task of the next batch; it may fail."""
        return self.world._run(replace(self.plan_task(executor), cleans=cleans, run=run), fault, _NUMBERS)

    def plan_task(self, executor: int) -> Attempt:
        """Plan a task of the next batch."""
        world, batch = self.world, self.world.batch + 1
        return Attempt(executor, batch, world._hand_out(executor, batch), {FIRST_BUCKET: Call({1: batch})}, False)

    def run_idle_task(self, executor: int) -> TaskResult:
        """Run a task of the next batch in which the bucket is not called."""
        return self.world._idle(executor, self.world.batch + 1)

    def commit(self, *results: TaskResult) -> None:
        """Commit the batch, and let all executors do all their waiting work."""
        self.world._commit(self.world.batch + 1, results, _NUMBERS)
        for executor in range(len(self.world.executors)):
            self.work_all(executor)

    def work_all(self, executor: int) -> None:
        """Let an executor do all its waiting work."""
        while self.world.executors[executor].waiting:
            self.world._work_off(self.world.executors[executor], 0)

    def work_uploads(self, executor: int) -> None:
        """Let an executor do its uploads, but not its snapshots."""
        waiting = self.world.executors[executor].waiting
        while any(name == UPLOAD for name, _ in waiting):
            self.world._work_off(self.world.executors[executor], [name for name, _ in waiting].index(UPLOAD))

    def clean(self, pointer: Pointer) -> None:
        """Clean up, and check all pointers afterwards."""
        if pointer.ref is not None:
            request = CleanUp(pointer, pointer.ref, self.world.config.retained, lambda: None)
            retention.clean_up(self.world.files, request, self.world.folder, NOW_S, known=self.world.known_files)
        self.world.check()

    def run_alone(self, batches: int, cleans: bool = True) -> None:
        """Run batches on the first executor alone."""
        for at in range(batches):
            self.commit(self.run_task(0, {at % 6: at}, cleans=cleans))

    def remove_root(self) -> None:
        """Remove all files below the root; local disks stay as they are."""
        for files in self.world._list_folders("a"):
            for name in files.names():
                files.remove(name)

    def start_again(self) -> None:
        """Start the query again, so that its first calls probe for files."""
        self.world.probing_run = uuid.uuid4().hex
        for executor in self.world.executors:
            executor.die()

    def damage_snapshots(self) -> None:
        """Damage all snapshots; their headers stay readable."""
        for name in self.world.files.names():
            if ".snapshot." in name:
                data = bytearray(self.world.files.get(name))
                data[len(data) // 2] ^= 0xFF
                self.world.files.put(name, bytes(data))


def quiet_for_a_while(scene: Scene) -> None:
    """Spark retains pointers of the quiet lineage, whose checkpoint is an ancestor of the busy lineage."""
    scene.run_alone(6)
    for at in range(RETAINED):
        scene.commit(scene.run_task(0, {at: at}, cleans=True), scene.run_task(2, {}))
    scene.run_alone(2 * RETAINED)


def called_by_timeouts_only(scene: Scene) -> None:
    """One lineage is called in many batches without data, the other in none of them; then the other is committed."""
    scene.run_alone(6)
    scene.commit(scene.run_task(0, {1: 50}), scene.run_task(2, {}))
    for at in range(5 * RETAINED):
        scene.commit(scene.run_task(0, {2: at}, heartbeat=False, cleans=True), scene.run_idle_task(2))
    scene.commit(scene.run_task(0, {3: 1}, cleans=True), scene.run_task(2, {4: 7}))
    scene.world.check()


def renewed_just_now(scene: Scene) -> None:
    """The quiet lineage is renewed while Spark still retains earlier pointers."""
    scene.run_alone(6)
    for at in range(4 * RETAINED):
        scene.commit(scene.run_task(0, {at % 6: at}, cleans=True), scene.run_task(2, {}))


def versions_are_unique(scene: Scene) -> None:
    """The lineages have different numbers of versions, so that none of the remaining versions has two ids."""
    scene.run_alone(6)
    for at in range(2):
        scene.commit(scene.run_task(0, {at: at}), scene.run_task(2, {}))
    for at in range(4 * RETAINED):
        scene.commit(scene.run_task(0, {at % 6: at}, cleans=True), scene.run_task(2, {}))
    scene.commit(scene.run_task(0, {}, cleans=True), scene.run_task(2, {1: 1}))
    scene.run_alone(3 * RETAINED)


def damaged_before_clean_up_depends_on_them(scene: Scene) -> None:
    """All snapshots are damaged, so that all state depends on the deltas from the first one on."""
    scene.run_alone(4 * RETAINED, cleans=False)
    scene.damage_snapshots()
    scene.run_alone(1)


def erased_when_a_quiet_lineage_ends(scene: Scene) -> None:
    """The pointer that was committed when the window began names the last checkpoint that the quiet lineage renewed."""
    for together in (8, 9):
        scene.begin(erase_window_ms=80, retained=40)
        for at in range(30):
            scene.world.planned[scene.world.batch + 1] = True, at * 10
            busy = scene.run_task(0, {at % 6: at}, cleans=at > 6)
            scene.commit(busy, *([scene.run_task(2, {1: 1} if at == 0 else {})] if at < together else []))
            scene.world.check()


def back_to_the_oldest_batch(scene: Scene) -> None:
    """The query starts again several times, each time at the oldest batch that Spark retains."""
    for _ in range(3):
        scene.run_alone(4 * RETAINED)
        scene.world.spark.go_back(scene.world.batch - RETAINED)
        for executor in scene.world.executors:
            executor.die()
            executor.machine.lose()


def uploads_that_lag(scene: Scene) -> None:
    """One executor's uploads never make progress, while the other executor's files are cleaned up."""
    world = scene.world
    world.config = replace(world.config, journal=True, retained=1)
    scene.run_alone(6)
    for at in range(20):
        results = [scene.run_task(executor, {at % 6: at}, cleans=executor == 0) for executor in (0, 2)]
        world._commit(world.batch + 1, results, _NUMBERS)
        scene.work_all(0)


def one_upload_hangs(scene: Scene) -> None:
    """One process's upload hangs, while later uploads of another process arrive; its deltas are inline, then awaited."""
    world = scene.world
    world.executors[1].machine = world.executors[0].machine
    for inline_bytes_max in (1 << 20, 0):
        world.config = replace(world.config, journal=True)
        scene.run_alone(2, cleans=False)
        world._commit(world.batch + 1, [scene.run_task(0, {1: 1})], _NUMBERS)
        world.config = replace(world.config, inline_bytes_max=inline_bytes_max)
        for at in range(3):
            world._commit(world.batch + 1, [scene.run_task(1, {2: at})], _NUMBERS)
            scene.work_uploads(1)
            world.check()


def process_dies_when_the_task_has_ended(scene: Scene) -> None:
    """No delta is inline, so all uploads must have arrived when a task ends."""
    world = scene.world
    world.config = replace(world.config, journal=True, inline_bytes_max=0)
    for at in range(8):
        world._commit(world.batch + 1, [scene.run_task(0, {at % 6: at})], _NUMBERS)
        world.executors[0].die()
        world.check()


def neighbours_without_data(scene: Scene) -> None:
    """Two attempts draw differently; the first executor continues from memory, and writes what is due without data."""
    scene.begin(buckets=2, changelog=True, timeouts=True)
    scene.commit(scene.run_drawing_task(0, to=0), scene.run_drawing_task(2, to=1))
    scene.commit(scene.run_task_without_data(0))
    scene.world.executors[0].die()
    scene.commit(scene.run_drawing_task(1, to=0))
    scene.world.check()


def root_removed_between_batches(scene: Scene) -> None:
    """After the root is removed, the first new pointer needs neither a local disk nor background work."""
    for journal, batches, late in itertools.product((False, True), (1, 6), (0, 2)):
        scene.begin(journal=journal)
        scene.run_alone(batches, cleans=False)
        scene.remove_root()
        for at in range(late):
            # The previous run still sends deltas.
            scene.world._commit(scene.world.batch + 1, [scene.run_task(0, {at: 40})], _NUMBERS)
            scene.work_uploads(0)
        scene.start_again()
        result = scene.run_task(0, {1: 50})
        scene.world._check_with(result.partition[FIRST_BUCKET].pointer, ["a"])
        scene.commit(result)
        scene.commit(scene.run_task(2, {2: 60}))


def sent_again(scene: Scene) -> None:
    """Another executor sends a confirmed delta again, and dies; a rename does not replace files."""
    for at in range(4):
        scene.begin(replaces=False, journal=True)
        scene.commit(scene.run_task(0, {1: 1}))
        result = scene.run_task(0, {2: 2})
        scene.attempt(2, scene.world.stage(), Fault(at, die_here, False))
        scene.work_uploads(2)
        # At this time no snapshot holds the same rows.
        scene.world._commit(scene.world.batch + 1, [result], _NUMBERS)
        scene.world.check()


def failed_and_started_again(scene: Scene) -> None:
    """An upload fails; all attempts at the next batch report it, but no attempt of the next run, on any machine."""
    for same_run in (False, True):
        scene.begin(journal=True, same_run=same_run)
        world = scene.world
        scene.commit(scene.run_task(0, {1: 1}))
        first = world.stage()
        result = scene.attempt(0, first, world.make_failing(0, first))
        assert result is not None
        scene.commit(result)
        stage = world.stage()
        assert [scene.attempt(0, stage) for _ in range(3)] == [None] * 3
        world.start()
        result = scene.attempt(0, world.stage())
        assert result is not None
        scene.commit(result)


def failed_in_an_ended_run(scene: Scene) -> None:
    """An upload fails, and the query ends before any attempt reports it."""
    scene.begin(journal=True)
    world = scene.world
    scene.commit(scene.run_task(0, {1: 1}))
    run = world.stage()
    result = scene.attempt(0, run, world.make_failing(0, run))
    assert result is not None
    scene.commit(result)
    world.start()
    assert scene.attempt(0, world.stage()) is not None


def torn_on_its_way(scene: Scene) -> None:
    """A file has the right size, but some bytes are wrong."""
    for at, journal in itertools.product(range(4), (True, False)):
        scene.begin(journal=journal)
        scene.run_alone(1, cleans=False)
        world, run = scene.world, scene.world.stage()
        result = scene.attempt(0, run, world.make_torn(at, run, lambda: None))
        for _ in range(3):
            if result is not None:
                world._commit(world.batch + 1, [result], _NUMBERS)
            scene.work_uploads(0)
            world.check()
            result = world._run_until_success(scene.plan_task(0), _NUMBERS)


def bootstrapped_by_a_torn_snapshot(scene: Scene) -> None:
    """A joining backend's snapshot arrives damaged, its sender dies before it compares, and another machine continues."""
    # The operations after its delta, and after the snapshot for the backend that was there before.
    for at in range(10, 16):
        scene.begin()
        world = scene.world
        scene.run_alone(4, cleans=False)
        world.configured = ["a", "b"]
        result = scene.attempt(0, world.stage(), world.make_torn(at, None, die_here))
        if result is not None:
            world._commit(world.batch + 1, [result], _NUMBERS)
        scene.work_all(0)
        for _ in range(3):
            # At this time it has not sent its own snapshot.
            world._commit(world.batch + 1, [scene.run_task(2, {2: at})], _NUMBERS)
            scene.work_uploads(2)
            world.check()


def loss_noted_but_not_repaired(scene: Scene) -> None:
    """A clean-up notices an emptied backend; the attempt that repairs it dies, or another attempt's pointer counts."""
    for at in range(8):
        scene.begin()
        world = scene.world
        world.configured = ["a", "b"]
        scene.run_alone(8, cleans=False)
        world.raid("b")
        result = scene.attempt(0, world.stage(), cleans=True)
        assert result is not None
        scene.commit(result)
        run = world.stage()
        scene.attempt(0, run, Fault(at, die_here, False) if at < 7 else None)
        result = scene.attempt(0, run)
        assert result is not None
        scene.commit(result)
        world.check()


def play_scene(script: Callable[[Scene], None], variant: Variant) -> None:
    """Play a scene; raises `WrongStateError` if an invariant is violated."""
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
    versions_are_unique,
    damaged_before_clean_up_depends_on_them,
    back_to_the_oldest_batch,
    erased_when_a_quiet_lineage_ends,
    uploads_that_lag,
    one_upload_hangs,
    process_dies_when_the_task_has_ended,
    neighbours_without_data,
    root_removed_between_batches,
    sent_again,
    failed_and_started_again,
    failed_in_an_ended_run,
    torn_on_its_way,
    bootstrapped_by_a_torn_snapshot,
    loss_noted_but_not_repaired,
]
