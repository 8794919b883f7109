"""Histories of rescaling that chance seldom finds, each for what might go wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sim_parts import Call, Numbers, Variant, WrongStateError
from sim_rescale_parts import ALL_KEYS, MovedResult, PlannedAttempt, RescaleConfig, keys_of, only
from sim_rescale_savepoints import Saving
from sim_rescales import RescaleWorld, patch_for_rescaling
from sim_spark import TaskResult
from sim_world import scale_down

from arrow_schemas import BucketMap
from arrow_schemas.savepoint import NATIVE

__all__ = ["RESCALE_SCENES", "RescaleScene", "play_rescale_scene"]

_NUMBERS = Numbers(b"scene")
_QUIET = Numbers(bytes([11] * 100_000))
# Of keys that there are: none changes.
_NONE = (-1,)


class RescaleScene:
    """A query of two buckets, each in a partition of its own, under Spark's checkpoint format 1.

    Parameters
    ----------
    variant
        What is under test.
    retained
        How many batches Spark retains.
    """

    def __init__(self, variant: Variant, retained: int = 3) -> None:
        config = RescaleConfig(False, True, retained, False, buckets=2, partitions=2, timeouts=True, journal=True)
        self.world = RescaleWorld(config, variant)

    def attempt(self, executor: int, value: int, *, heartbeat: bool = True, keys: Sequence[int] = ()) -> PlannedAttempt:
        """A task of the next batch, which gives keys a value."""
        world, batch = self.world, self.world.batch + 1
        heartbeat, now_ms = world._plan(batch, heartbeat, Numbers(b"\x01\x05"))
        planned = world._attempt(executor, batch, heartbeat, now_ms, _NUMBERS, quiet=True, cleans=False)
        count = world.job.options.buckets if heartbeat else world.count
        changes = {
            bucket: {key: value for key in keys_of(BucketMap(count), bucket) if key in (keys or ALL_KEYS)}
            for bucket in range(count)
        }
        # The last bucket has the earliest timeout.
        calls = {
            bucket: Call(dict(changes[bucket]), now_ms + 4 - bucket)
            for bucket in range(count)
            if bucket in planned.calls
        }
        return replace(planned, calls=calls, run=world.stage())

    def run(self, attempt: PlannedAttempt) -> TaskResult:
        """It succeeds."""
        made = self.world._run(attempt, None, _QUIET)
        if made is None:
            raise WrongStateError(f"an attempt at batch {attempt.batch} fails, and nothing does")
        return made

    def go(self, value: int, executor: int = 0, **task: Any) -> None:
        """A batch of one attempt, as often as its query is started again."""
        attempt = self.attempt(executor, value, **task)
        made = self.world._run(attempt, None, _QUIET)
        if made is None:
            self.start(self.world.job.options.buckets)
            made = self.run(self.attempt(executor, value, **task))
        self.commit(made)

    def commit(self, *made: TaskResult) -> None:
        """A batch is over."""
        self.world._commit(self.world.batch + 1, made, _NUMBERS)
        self.world.check()

    def start(self, count: int) -> None:
        """The query starts again; its processes live on."""
        self.world.start()
        for executor in self.world.executors:
            executor.loaded.clear()
        self.world._starts(count)

    def work(self, wanted: Callable[[str], bool] = lambda name: True, which: int | None = None) -> None:
        """All executors, or one, get to what waits, by its name."""
        for executor in self.world.executors if which is None else [self.world.executors[which]]:
            while any(wanted(name) for name, _ in executor.waiting):
                at = next(at for at, (name, _) in enumerate(executor.waiting) if wanted(name))
                self.world._work_off(executor, at)

    def finish(self, value: int) -> None:
        """A batch of two attempts in one process, so that the first bucket has two turns."""
        made = []
        for _ in range(2):
            made.append(self.run(self.attempt(0, value)))
            self.work()
        self.commit(*made)


def overwritten_since_the_plan(scene: RescaleScene) -> None:
    """A late attempt's file takes the place of that whose pointers the plan has, in the second partition only."""
    scene.go(1)
    late = scene.attempt(2, 3)
    scene.go(2)
    scene.start(1)
    made = scene.world._run(late, None, _QUIET, zombie=True)
    assert made is not None, "nothing fails"
    scene.world.spark.overwrite(scene.world.batch, only(made, {1}))
    scene.go(4, keys=[0])
    scene.work()
    scene.go(5, keys=[0])


def without_data_first(scene: RescaleScene) -> None:
    """Batches without data come before the first one with data."""
    scene.go(1)
    scene.start(3)
    for value in (2, 3):
        scene.go(value, heartbeat=False)
    scene.go(4, keys=[2])
    scene.work()
    scene.go(5, keys=[2])


def begun_twice(scene: RescaleScene) -> None:
    """The driver dies in the first batch; the old number goes on, and then the query is rescaled again."""
    scene.go(1)
    scene.start(3)
    scene.run(scene.attempt(0, 2))
    scene.start(2)
    scene.go(3)
    scene.start(3)
    scene.go(4, keys=[0])
    scene.work()
    scene.go(5, keys=[0])


def rescaled_before_a_snapshot(scene: RescaleScene) -> None:
    """Twice, and no bucket has a snapshot of its own; then back to the first number."""
    scene.go(1)
    for value, count in enumerate((3, 4, 1, 2), 2):
        scene.start(count)
        scene.go(value, keys=[value])
        scene.world.executors[0].die()
        scene.world.executors[0].machine.lose()
        scene.world.check()
    scene.work()
    scene.go(9)


def only_one_bucket_has_a_snapshot(scene: RescaleScene) -> None:
    """The first bucket has one of its own, and the others need their parents, as nothing of theirs has been written."""
    scene.go(1)
    scene.start(3)
    scene.go(2, keys=[])
    waiting = scene.world.executors[0].waiting
    first = [at for at, (name, _) in enumerate(waiting) if name.startswith("snapshot") and "-0 " in name]
    others = [at for at, (name, _) in enumerate(waiting) if name.startswith("snapshot") and "-0 " not in name]
    assert first, waiting
    assert others, waiting
    for at in reversed(others):
        del waiting[at]
    scene.work()
    for value in (3, 4, 5, 6):
        scene.go(value, keys=[0])
        scene.work(_of_the_first_bucket)


def gone_back_to_before(scene: RescaleScene) -> None:
    """The query goes back to where it had the old number of buckets, and on with that."""
    scene.go(1)
    before = scene.world.batch
    scene.start(4)
    for value in (2, 3):
        scene.go(value)
        scene.work()
    scene.world.spark.go_back(before)
    scene.start(2)
    scene.go(4)


def backends_in_another_order(scene: RescaleScene) -> None:
    """A second backend joins, and is the first one, while buckets need their parents."""
    scene.go(1)
    scene.start(3)
    scene.go(2)
    scene.world.configured = ["b", "a"]
    scene.start(3)
    scene.world.executors[0].die()
    scene.world.executors[0].machine.lose()
    scene.go(3)


def _of_the_first_bucket(name: str) -> bool:
    """All that waits, but the snapshots of other buckets."""
    return not name.startswith("snapshot") or "-0 " in name


def _but_snapshots(name: str) -> bool:
    return not name.startswith("snapshot")


def finished_with_what_was_retained(scene: RescaleScene) -> None:
    """All buckets have snapshots at once, and batches from before are retained for a while."""
    scene.go(1)
    scene.start(3)
    scene.go(2, keys=_NONE)
    for value in range(3, 22):
        scene.finish(value)


def finished_by_the_first_bucket(scene: RescaleScene) -> None:
    """The snapshots of the others wait for long."""
    scene.go(1)
    scene.start(3)
    for value in range(2, 20):
        scene.go(value, keys=[0] if value > 2 else ())
        scene.work(_of_the_first_bucket)


def finished_by_one_lineage(scene: RescaleScene) -> None:
    """Two executors run each batch, and each goes on from what it has in memory; snapshots of one wait for long."""
    scene.go(1)
    scene.start(3)
    for value in range(2, 38):
        made = []
        for executor in (2, 0):
            made.append(scene.run(scene.attempt(executor, value, keys=() if value == 3 else _NONE)))
            if executor:
                scene.work(which=executor)
            else:
                scene.work(_but_snapshots, executor)
        scene.commit(*made)


def finished_but_gone_back(scene: RescaleScene) -> None:
    """The query goes back to where buckets needed parents, and their snapshots wait for long."""
    scene.go(1)
    scene.start(3)
    scene.go(2, keys=_NONE)
    before = scene.world.batch
    scene.go(3)
    scene.work()
    for value in (4, 5):
        scene.go(value, keys=_NONE)
    scene.world.spark.go_back(before)
    scene.world.executors[0].die()
    scene.start(3)
    for value in range(6, 42):
        scene.go(value, keys=_NONE)
        scene.work(_but_snapshots)


def finished_by_the_attempt_that_counts(scene: RescaleScene) -> None:
    """A batch runs twice: one attempt goes on from a pointer that needs none, and counts; the other one is the last."""
    scene.go(1)
    scene.start(3)
    scene.go(2, keys=_NONE)
    for value in range(3, 8):
        made = []
        for executor in (0, 2):
            made.append(scene.run(scene.attempt(executor, value, keys=_NONE)))
            if executor == 0:
                scene.work(which=executor)
            else:
                scene.work(_but_snapshots, executor)
        scene.commit(*made[::-1])
    for value in range(8, 16):
        scene.go(value, keys=_NONE)
        scene.work()


def saved_meanwhile(scene: RescaleScene) -> None:
    """Somebody reads pointers that need parents, and copies when the query needs them no more."""
    scene.go(1)
    scene.start(3)
    scene.go(2, keys=_NONE)
    saving = Saving(scene.world, 1, NATIVE)
    for value in range(3, 28):
        scene.finish(value)
    saving.copy()


def refused_and_gone_on(scene: RescaleScene) -> None:
    """A request comes between plan and batch, when a part of the calls have begun in the new folder; readers and askers
    come straight after. Then the query goes on as it was, and is rescaled later, with a request on the way."""
    onlookers = scene.world.onlookers
    scene.go(1)
    scene.start(3)
    onlookers.ask(_QUIET)
    made = scene.world._run(scene.attempt(0, 2), None, _QUIET)
    if not isinstance(made, MovedResult) or made.groups != {1}:
        raise WrongStateError("the query is rescaled while a request waits")
    for _ in range(2):
        onlookers.read()
        onlookers.ask(_QUIET)
        scene.start(3)
        scene.go(3)
    # What waits is done within two batches.
    for _ in range(2):
        scene.go(4)
    scene.start(3)
    made = scene.run(scene.attempt(0, 4))
    onlookers.ask(_QUIET)
    scene.commit(made)
    onlookers.read()
    for value in range(5, 9):
        scene.go(value)
        onlookers.read()
        scene.work()


def refused_for_good(scene: RescaleScene) -> None:
    """A rescaling that is refused in its first batch is not tried again."""
    scene.go(1)
    scene.start(3)
    scene.world.onlookers.ask(_QUIET)
    scene.world._run(scene.attempt(0, 2), None, _QUIET)
    scene.start(2)
    scene.go(3)


RESCALE_SCENES = (
    refused_and_gone_on,
    refused_for_good,
    overwritten_since_the_plan,
    without_data_first,
    begun_twice,
    rescaled_before_a_snapshot,
    only_one_bucket_has_a_snapshot,
    gone_back_to_before,
    backends_in_another_order,
    finished_with_what_was_retained,
    finished_by_the_first_bucket,
    finished_by_one_lineage,
    finished_but_gone_back,
    finished_by_the_attempt_that_counts,
    saved_meanwhile,
)
# How many batches Spark retains, where it matters: few, so that little need be waited for; or so many that parents may
# go before four deltas have come, as then a snapshot is made at once.
_RETAINED: dict[Callable[[RescaleScene], None], int] = {
    finished_by_the_first_bucket: 1,
    finished_by_one_lineage: 6,
    finished_but_gone_back: 6,
}


def play_rescale_scene(script: Callable[[RescaleScene], None], variant: Variant) -> RescaleWorld:
    """Play a scene to its end; raises `WrongStateError` when anything is wrong."""
    scene = RescaleScene(variant, _RETAINED.get(script, 3))
    world = scene.world
    try:
        with patch_for_rescaling(variant), scale_down(False, replace(variant, patches=())):
            script(scene)
            world.check()
            world.calm()
    finally:
        world.close()
    return world
