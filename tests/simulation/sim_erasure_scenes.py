"""Histories of erase requests that random search seldom finds; each provokes a certain mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sim_erasure_parts import ErasureConfig
from sim_erasures import EXECUTORS, KEYS, ErasureWorld, Patch
from sim_parts import Numbers, WrongStateError
from sim_search import replace_attributes

from spark_state_ext.files.horizon import recent_heartbeats

__all__ = ["ERASURE_SCENES", "ErasureScene", "play_erasure_scene"]

RETAINED = 3
OVERTAKES = 3
# Keys of the second bucket.
ODD = tuple(range(1, KEYS, 2))


class ErasureScene:
    """A query of two buckets; each bucket is a task of its own."""

    def __init__(self) -> None:
        self.world = ErasureWorld(ErasureConfig(True, False, RETAINED, False, buckets=2, partitions=2, switches=True))
        self._numbers = Numbers(b"scene")

    @property
    def batch(self) -> int:
        """The newest batch that is committed."""
        return self.world.batch

    def run_batches(self, batches: int = 1, first_executor: int = 0) -> None:
        """Run batches in which both buckets are called, each in its own process."""
        for _ in range(batches):
            self._batch(first_executor, ())

    def run_batch_with_requests(self, *requests: Sequence[int]) -> int:
        """Run a batch with requests between its calls, which only the first bucket's process sees; returns the batch."""
        self._batch(0, requests)
        return self.batch

    def call_first_bucket(self) -> None:
        """Run a batch without data in which a timeout calls the first bucket."""
        self.world.planned[self.batch + 1] = (0,)
        self._batch(0, ())

    def die_in_batch(self) -> None:
        """Call the first bucket in a batch in which the query then dies."""
        self.world.plan(self.batch + 1, self._numbers, True)
        task = self.world.begin(0, self._numbers)
        task.process = self.world.processes[0]
        while self.world.advance_task(task):
            pass

    def ask(self, *keys: int) -> None:
        """Make a request."""
        self.world.users.ask(*keys)

    def restart(self, batch: int | None = None, *, looks: bool = True) -> None:
        """Start the query again; its processes live on."""
        self.world.restart(self.batch if batch is None else batch, looks, [False] * EXECUTORS)
        self.world.check()

    def _batch(self, first_executor: int, requests: Iterable[Sequence[int]]) -> None:
        world, numbers = self.world, self._numbers
        world.plan(self.batch + 1, numbers, True)
        tasks = {p: world.begin(p, numbers) for p in (1, 0)}
        for task in tasks.values():
            task.cleans = True
        tasks[1].process, tasks[0].process = world.processes[2], world.processes[first_executor]
        world.advance_task(tasks[1])
        for keys in requests:
            world.users.ask(*keys)
        for task in tasks.values():
            while world.advance_task(task):
                pass
            if not task.has_ended:
                raise WrongStateError(f"a call of batch {task.batch} fails")
        world.commit({p: [task] for p, task in tasks.items()}, numbers)
        world.check()


def seen_by_one_bucket(scene: ErasureScene) -> None:
    """The second bucket carries the request out one batch later than the first."""
    scene.run_batch_with_requests(ODD)
    scene.run_batches(3)


def back_to_where_one_bucket_saw_it(scene: ErasureScene) -> None:
    """The second bucket has the keys again, and the first bucket's mark says that it has carried the request out."""
    batch = scene.run_batch_with_requests(ODD)
    scene.run_batches(2)
    scene.restart(batch)
    scene.run_batches(4)


def no_look_in_between(scene: ErasureScene) -> None:
    """In one heartbeat, the second bucket is called and does not look for requests."""
    scene.run_batch_with_requests(ODD)
    scene.restart(looks=False)
    scene.run_batches()
    scene.restart()
    scene.run_batches(4)


def listed_while_others_write(scene: ErasureScene) -> None:
    """A listing contains the second of two requests, but not the first."""
    scene.world.users.set_fault(0, OVERTAKES, 1)
    scene.run_batches(4)


def two_requests_in_one_heartbeat(scene: ErasureScene) -> None:
    """A timeout calls the first bucket again; it carries out another request before the second bucket is called."""
    scene.run_batch_with_requests(ODD)
    scene.ask(0)
    scene.call_first_bucket()
    scene.run_batches(4)


def done_again_much_later(scene: ErasureScene) -> None:
    """A process remembers when a request was done; then the query goes back and does not look for a long time."""
    scene.run_batches()
    before = scene.batch
    scene.ask(*ODD)
    scene.run_batches(3)
    scene.die_in_batch()
    scene.restart(before, looks=False)
    scene.run_batches(recent_heartbeats(RETAINED) + 2)
    scene.restart()
    scene.run_batches(3, first_executor=1)
    scene.run_batches(3)


def asked_after_all_requests_were_removed(scene: ErasureScene) -> None:
    """The earlier requests were removed; only their records exist."""
    scene.ask(*ODD)
    scene.run_batches(recent_heartbeats(RETAINED) + 5)
    scene.ask(*ODD)
    scene.run_batches(3)


def damaged_before_all_buckets_read_it(scene: ErasureScene) -> None:
    """The first bucket has carried out two requests; the second bucket cannot read the first of them."""
    scene.run_batch_with_requests(ODD[:2], ODD[2:])
    scene.world.users.spoil(1)
    scene.run_batches(3)


def asked_in_another_folder(scene: ErasureScene) -> None:
    """A mark refers to requests that no longer exist, and other requests have their numbers."""
    scene.ask(0)
    scene.run_batches(3)
    scene.restart()
    scene.world.users.lose()
    scene.ask(*ODD)
    scene.run_batches(4)


ERASURE_SCENES = (
    seen_by_one_bucket,
    back_to_where_one_bucket_saw_it,
    no_look_in_between,
    listed_while_others_write,
    two_requests_in_one_heartbeat,
    done_again_much_later,
    asked_after_all_requests_were_removed,
    damaged_before_all_buckets_read_it,
    asked_in_another_folder,
)


def play_erasure_scene(script: Callable[[ErasureScene], None], patches: Iterable[Patch] = ()) -> ErasureWorld:
    """Play a scene to its end; raises `WrongStateError` if an invariant is violated."""
    scene = ErasureScene()
    world = scene.world
    try:
        with replace_attributes([*world.users.patches(), *patches]):
            # After these, every key has state.
            scene.run_batches(8)
            script(scene)
            world.calm()
    finally:
        world.close()
    return world
