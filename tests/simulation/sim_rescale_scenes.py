"""Histories of rescaling that random search seldom finds; each provokes a certain mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sim_parts import Call, Numbers, Variant, WrongStateError
from sim_rescale_parts import ALL_KEYS, MovedResult, PlannedAttempt, RescaleConfig, list_keys, restrict_to
from sim_rescale_savepoints import SavepointTaker
from sim_rescales import RescaleWorld, patch_for_rescaling
from sim_spark import TaskResult
from sim_world import scale_down

from arrow_schemas import BucketMap
from arrow_schemas.savepoint import NATIVE

__all__ = ["RESCALE_SCENES", "RescaleScene", "play_rescale_scene"]

_NUMBERS = Numbers(b"scene")
_QUIET = Numbers(bytes([11] * 100_000))
# A key that does not exist, so that no key changes.
_NONE = (-1,)


class RescaleScene:
    """A query of two buckets, each in its own partition, under Spark's checkpoint format 1.

    Parameters
    ----------
    variant
        What is under test.
    retained
        Number of batches that Spark retains.
    """

    def __init__(self, variant: Variant, retained: int = 3) -> None:
        config = RescaleConfig(False, True, retained, False, buckets=2, partitions=2, timeouts=True, journal=True)
        self.world = RescaleWorld(config, variant)

    def make_attempt(
        self, executor: int, value: int, *, heartbeat: bool = True, keys: Sequence[int] = ()
    ) -> PlannedAttempt:
        """Make an attempt at the next batch that gives keys a value."""
        world, batch = self.world, self.world.batch + 1
        heartbeat, now_ms = world._plan(batch, heartbeat, Numbers(b"\x01\x05"))
        planned = world._attempt(executor, batch, heartbeat, now_ms, _NUMBERS, quiet=True, cleans=False)
        count = world.job.options.buckets if heartbeat else world.count
        changes = {
            bucket: {key: value for key in list_keys(BucketMap(count), bucket) if key in (keys or ALL_KEYS)}
            for bucket in range(count)
        }
        # The last bucket has the earliest timeout.
        calls = {
            bucket: Call(dict(changes[bucket]), now_ms + 4 - bucket)
            for bucket in range(count)
            if bucket in planned.calls
        }
        return replace(planned, calls=calls, run=world.stage())

    def run_attempt(self, attempt: PlannedAttempt) -> TaskResult:
        """Run an attempt, which must succeed."""
        result = self.world._run(attempt, None, _QUIET)
        if result is None:
            raise WrongStateError(f"an attempt at batch {attempt.batch} fails without faults")
        return result

    def run_batch(self, value: int, executor: int = 0, **task: Any) -> None:
        """Run a batch of one attempt; if it fails, start the query again and repeat it once."""
        attempt = self.make_attempt(executor, value, **task)
        result = self.world._run(attempt, None, _QUIET)
        if result is None:
            self.start_query(self.world.job.options.buckets)
            result = self.run_attempt(self.make_attempt(executor, value, **task))
        self.commit(result)

    def commit(self, *results: TaskResult) -> None:
        """Commit a batch, and check all states."""
        self.world._commit(self.world.batch + 1, results, _NUMBERS)
        self.world.check()

    def start_query(self, count: int) -> None:
        """Start the query again with a number of buckets; its processes live on."""
        self.world.start()
        for executor in self.world.executors:
            executor.loaded.clear()
        self.world._start_query(count)

    def do_waiting_work(
        self, should_do: Callable[[str], bool] = lambda name: True, executor_index: int | None = None
    ) -> None:
        """Let all executors, or one, do waiting work, selected by its name."""
        for executor in self.world.executors if executor_index is None else [self.world.executors[executor_index]]:
            while any(should_do(name) for name, _ in executor.waiting):
                at = next(at for at, (name, _) in enumerate(executor.waiting) if should_do(name))
                self.world._work_off(executor, at)

    def run_batch_twice(self, value: int) -> None:
        """Run a batch of two attempts in one process, so that the first bucket may remove parents twice."""
        results = []
        for _ in range(2):
            results.append(self.run_attempt(self.make_attempt(0, value)))
            self.do_waiting_work()
        self.commit(*results)


def overwritten_since_the_plan(scene: RescaleScene) -> None:
    """A late attempt's file replaces the file whose pointers the plan has, in the second partition only."""
    scene.run_batch(1)
    late = scene.make_attempt(2, 3)
    scene.run_batch(2)
    scene.start_query(1)
    result = scene.world._run(late, None, _QUIET, zombie=True)
    assert result is not None, "nothing fails"
    scene.world.spark.overwrite(scene.world.batch, restrict_to(result, {1}))
    scene.run_batch(4, keys=[0])
    scene.do_waiting_work()
    scene.run_batch(5, keys=[0])


def batches_without_data_first(scene: RescaleScene) -> None:
    """Batches without data come before the first batch with data."""
    scene.run_batch(1)
    scene.start_query(3)
    for value in (2, 3):
        scene.run_batch(value, heartbeat=False)
    scene.run_batch(4, keys=[2])
    scene.do_waiting_work()
    scene.run_batch(5, keys=[2])


def begun_twice(scene: RescaleScene) -> None:
    """The driver dies in the first batch; the query continues with the old number, and is rescaled again later."""
    scene.run_batch(1)
    scene.start_query(3)
    scene.run_attempt(scene.make_attempt(0, 2))
    scene.start_query(2)
    scene.run_batch(3)
    scene.start_query(3)
    scene.run_batch(4, keys=[0])
    scene.do_waiting_work()
    scene.run_batch(5, keys=[0])


def rescaled_before_a_snapshot(scene: RescaleScene) -> None:
    """Rescale several times before any bucket has its own snapshot; finally back to the first number."""
    scene.run_batch(1)
    for value, count in enumerate((3, 4, 1, 2), 2):
        scene.start_query(count)
        scene.run_batch(value, keys=[value])
        scene.world.executors[0].die()
        scene.world.executors[0].machine.lose()
        scene.world.check()
    scene.do_waiting_work()
    scene.run_batch(9)


def only_one_bucket_has_a_snapshot(scene: RescaleScene) -> None:
    """The first bucket has its own snapshot; the others need their parents, because no file of them was written."""
    scene.run_batch(1)
    scene.start_query(3)
    scene.run_batch(2, keys=[])
    waiting = scene.world.executors[0].waiting
    first = [at for at, (name, _) in enumerate(waiting) if name.startswith("snapshot") and "-0 " in name]
    others = [at for at, (name, _) in enumerate(waiting) if name.startswith("snapshot") and "-0 " not in name]
    assert first, waiting
    assert others, waiting
    for at in reversed(others):
        del waiting[at]
    scene.do_waiting_work()
    for value in (3, 4, 5, 6):
        scene.run_batch(value, keys=[0])
        scene.do_waiting_work(_is_no_other_buckets_snapshot)


def gone_back_to_before_the_rescaling(scene: RescaleScene) -> None:
    """The query goes back to a batch with the old number of buckets, and continues with that."""
    scene.run_batch(1)
    before = scene.world.batch
    scene.start_query(4)
    for value in (2, 3):
        scene.run_batch(value)
        scene.do_waiting_work()
    scene.world.spark.go_back(before)
    scene.start_query(2)
    scene.run_batch(4)


def backends_in_another_order(scene: RescaleScene) -> None:
    """A second backend joins and becomes the first one while buckets need their parents."""
    scene.run_batch(1)
    scene.start_query(3)
    scene.run_batch(2)
    scene.world.configured = ["b", "a"]
    scene.start_query(3)
    scene.world.executors[0].die()
    scene.world.executors[0].machine.lose()
    scene.run_batch(3)


def _is_no_other_buckets_snapshot(name: str) -> bool:
    """Select all work except snapshots of buckets other than the first one."""
    return not name.startswith("snapshot") or "-0 " in name


def _is_no_snapshot(name: str) -> bool:
    return not name.startswith("snapshot")


def finished_with_what_was_retained(scene: RescaleScene) -> None:
    """All buckets have snapshots at once, but Spark retains earlier batches for a while."""
    scene.run_batch(1)
    scene.start_query(3)
    scene.run_batch(2, keys=_NONE)
    for value in range(3, 22):
        scene.run_batch_twice(value)


def finished_by_the_first_bucket(scene: RescaleScene) -> None:
    """The snapshots of all buckets but the first are delayed."""
    scene.run_batch(1)
    scene.start_query(3)
    for value in range(2, 20):
        scene.run_batch(value, keys=[0] if value > 2 else ())
        scene.do_waiting_work(_is_no_other_buckets_snapshot)


def finished_by_one_lineage(scene: RescaleScene) -> None:
    """Two executors run each batch, and each continues from memory; the snapshots of one executor are delayed."""
    scene.run_batch(1)
    scene.start_query(3)
    for value in range(2, 38):
        results = []
        for executor in (2, 0):
            results.append(scene.run_attempt(scene.make_attempt(executor, value, keys=() if value == 3 else _NONE)))
            if executor:
                scene.do_waiting_work(executor_index=executor)
            else:
                scene.do_waiting_work(_is_no_snapshot, executor)
        scene.commit(*results)


def finished_then_gone_back(scene: RescaleScene) -> None:
    """The query goes back to a batch in which buckets needed parents, and their snapshots are delayed."""
    scene.run_batch(1)
    scene.start_query(3)
    scene.run_batch(2, keys=_NONE)
    before = scene.world.batch
    scene.run_batch(3)
    scene.do_waiting_work()
    for value in (4, 5):
        scene.run_batch(value, keys=_NONE)
    scene.world.spark.go_back(before)
    scene.world.executors[0].die()
    scene.start_query(3)
    for value in range(6, 42):
        scene.run_batch(value, keys=_NONE)
        scene.do_waiting_work(_is_no_snapshot)


def finished_by_the_attempt_that_counts(scene: RescaleScene) -> None:
    """A batch runs twice: the attempt that counts needs no parents; the last attempt does."""
    scene.run_batch(1)
    scene.start_query(3)
    scene.run_batch(2, keys=_NONE)
    for value in range(3, 8):
        results = []
        for executor in (0, 2):
            results.append(scene.run_attempt(scene.make_attempt(executor, value, keys=_NONE)))
            if executor == 0:
                scene.do_waiting_work(executor_index=executor)
            else:
                scene.do_waiting_work(_is_no_snapshot, executor)
        scene.commit(*results[::-1])
    for value in range(8, 16):
        scene.run_batch(value, keys=_NONE)
        scene.do_waiting_work()


def saved_meanwhile(scene: RescaleScene) -> None:
    """A process reads pointers that need parents, and copies when the query no longer needs them."""
    scene.run_batch(1)
    scene.start_query(3)
    scene.run_batch(2, keys=_NONE)
    taker = SavepointTaker(scene.world, 1, NATIVE)
    for value in range(3, 28):
        scene.run_batch_twice(value)
    taker.copy()


def refused_and_continued(scene: RescaleScene) -> None:
    """A request is made between plan and batch, after some calls have begun in the new folder; reads and requests follow.
    Then the query continues with the old number, and is rescaled later, while another request is made."""
    onlookers = scene.world.onlookers
    scene.run_batch(1)
    scene.start_query(3)
    onlookers.ask(_QUIET)
    result = scene.world._run(scene.make_attempt(0, 2), None, _QUIET)
    if not isinstance(result, MovedResult) or result.groups != {1}:
        raise WrongStateError("the query is rescaled while a request waits")
    for _ in range(2):
        onlookers.read()
        onlookers.ask(_QUIET)
        scene.start_query(3)
        scene.run_batch(3)
    # The requests are done within two batches.
    for _ in range(2):
        scene.run_batch(4)
    scene.start_query(3)
    result = scene.run_attempt(scene.make_attempt(0, 4))
    onlookers.ask(_QUIET)
    scene.commit(result)
    onlookers.read()
    for value in range(5, 9):
        scene.run_batch(value)
        onlookers.read()
        scene.do_waiting_work()


def refused_for_good(scene: RescaleScene) -> None:
    """A rescaling that is refused in its first batch is not tried again."""
    scene.run_batch(1)
    scene.start_query(3)
    scene.world.onlookers.ask(_QUIET)
    scene.world._run(scene.make_attempt(0, 2), None, _QUIET)
    scene.start_query(2)
    scene.run_batch(3)


def asked_while_rescaled_twice(scene: RescaleScene) -> None:
    """A request is made before any call has put the folder of the first or of the second rescaling in force."""
    for count in (2, 3, 4):
        scene.start_query(count)
        scene.run_batch(count)
    scene.world.onlookers.ask(_QUIET)
    for value in (5, 6, 7):
        scene.run_batch(value)
    scene.world.onlookers.check_done()


def rescaled_again_after_a_request(scene: RescaleScene) -> None:
    """A request was made in the first folder, which still exists, and is done in the second."""
    scene.run_batch(1)
    scene.start_query(3)
    scene.run_batch(2)
    scene.world.onlookers.ask(_QUIET)
    for value in (3, 4, 5):
        scene.run_batch(value)
    scene.world.onlookers.check_done()
    scene.start_query(4)
    for value in (6, 7, 8):
        scene.run_batch(value)


def gone_back_and_rescaled(scene: RescaleScene) -> None:
    """A request is done, and then the query goes back to before it and is rescaled at once."""
    world = scene.world
    scene.run_batch(1)
    world.onlookers.ask(_QUIET)
    scene.run_batch(2)
    before = world.batch
    scene.run_batch(3)
    world.onlookers.check_done()
    world.spark.go_back(before)
    world.onlookers.go_back(before)
    scene.start_query(3)
    for value in (4, 5, 6, 7):
        scene.run_batch(value)
    world.onlookers.check_done()


def gone_back_over_two_rescalings(scene: RescaleScene) -> None:
    """A request is made and done between two rescalings, and then the query goes back to before both."""
    world = scene.world
    scene.run_batch(1)
    before = world.batch
    scene.start_query(3)
    for value in (2, 3):
        scene.run_batch(value)
    world.onlookers.ask(_QUIET)
    for value in (4, 5):
        scene.run_batch(value)
    world.onlookers.check_done()
    scene.start_query(4)
    for value in (6, 7):
        scene.run_batch(value)
    world.spark.go_back(before)
    world.onlookers.go_back(before)
    scene.start_query(2)
    for value in (8, 9, 10):
        scene.run_batch(value)
    world.onlookers.check_done()


RESCALE_SCENES = (
    refused_and_continued,
    refused_for_good,
    asked_while_rescaled_twice,
    rescaled_again_after_a_request,
    gone_back_and_rescaled,
    gone_back_over_two_rescalings,
    overwritten_since_the_plan,
    batches_without_data_first,
    begun_twice,
    rescaled_before_a_snapshot,
    only_one_bucket_has_a_snapshot,
    gone_back_to_before_the_rescaling,
    backends_in_another_order,
    finished_with_what_was_retained,
    finished_by_the_first_bucket,
    finished_by_one_lineage,
    finished_then_gone_back,
    finished_by_the_attempt_that_counts,
    saved_meanwhile,
)
# Number of batches that Spark retains in some scenes: few, so that the scene is short; or so many that parents may be
# removed before there are four deltas, because four deltas cause a snapshot at once.
_RETAINED: dict[Callable[[RescaleScene], None], int] = {
    finished_by_the_first_bucket: 1,
    finished_by_one_lineage: 6,
    finished_then_gone_back: 6,
    gone_back_over_two_rescalings: 9,
}


def play_rescale_scene(script: Callable[[RescaleScene], None], variant: Variant) -> RescaleWorld:
    """Play a scene to its end; raises `WrongStateError` if an invariant is violated."""
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
