"""Histories of erase requests that chance seldom finds, each for what might go wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sim_erasure_parts import ErasureConfig
from sim_erasures import EXECUTORS, KEYS, ErasureWorld, Patch
from sim_parts import Numbers, WrongStateError
from sim_search import replaced

from spark_state_ext.files.horizon import recent_heartbeats

__all__ = ["ERASURE_SCENES", "ErasureScene", "played_erasures"]

RETAINED = 3
OVERTAKES = 3
# Those of the second bucket.
ODD = tuple(range(1, KEYS, 2))


class ErasureScene:
    """A query of two buckets, each of which is a task of its own."""

    def __init__(self) -> None:
        self.world = ErasureWorld(ErasureConfig(True, False, RETAINED, False, buckets=2, partitions=2, switches=True))
        self._numbers = Numbers(b"scene")

    @property
    def batch(self) -> int:
        """The newest batch that is committed."""
        return self.world.batch

    def go(self, batches: int = 1, first_on: int = 0) -> None:
        """Batches in which both buckets are called, the second one in a process of its own."""
        for _ in range(batches):
            self._batch(first_on, ())

    def asked_behind(self, *requests: Sequence[int]) -> int:
        """A batch in which somebody asks between the calls: only the first bucket's process sees that. Gives the batch."""
        self._batch(0, requests)
        return self.batch

    def first_only(self) -> None:
        """A batch without data, in which a timeout calls the first bucket."""
        self.world.planned[self.batch + 1] = (0,)
        self._batch(0, ())

    def dies(self) -> None:
        """The first bucket is called, and the query dies in the batch."""
        self.world.plan(self.batch + 1, self._numbers, True)
        task = self.world.begin(0, self._numbers)
        task.process = self.world.processes[0]
        while self.world.go_on_with(task):
            pass

    def ask(self, *keys: int) -> None:
        """Somebody asks."""
        self.world.asking.ask(*keys)

    def restart(self, batch: int | None = None, *, looks: bool = True) -> None:
        """The query starts again, and its processes go on."""
        self.world.restart(self.batch if batch is None else batch, looks, [False] * EXECUTORS)
        self.world.check()

    def _batch(self, first_on: int, asked: Iterable[Sequence[int]]) -> None:
        world, numbers = self.world, self._numbers
        world.plan(self.batch + 1, numbers, True)
        tasks = {p: world.begin(p, numbers) for p in (1, 0)}
        for task in tasks.values():
            task.cleans = True
        tasks[1].process, tasks[0].process = world.processes[2], world.processes[first_on]
        world.go_on_with(tasks[1])
        for keys in asked:
            world.asking.ask(*keys)
        for task in tasks.values():
            while world.go_on_with(task):
                pass
            if not task.over:
                raise WrongStateError(f"a call of batch {task.batch} fails")
        world.commit({p: [task] for p, task in tasks.items()}, numbers)
        world.check()


def seen_by_one_bucket(scene: ErasureScene) -> None:
    """The second bucket carries it out a batch later."""
    scene.asked_behind(ODD)
    scene.go(3)


def back_to_where_one_bucket_had_seen_it(scene: ErasureScene) -> None:
    """The second one has the keys again, and the first one's mark says that it has carried the request out."""
    batch = scene.asked_behind(ODD)
    scene.go(2)
    scene.restart(batch)
    scene.go(4)


def nobody_looked_between(scene: ErasureScene) -> None:
    """A heartbeat has passed, in which the second bucket was called and did not look."""
    scene.asked_behind(ODD)
    scene.restart(looks=False)
    scene.go()
    scene.restart()
    scene.go(4)


def listed_behind_a_writer(scene: ErasureScene) -> None:
    """A listing has the second of two requests and lacks the first."""
    scene.world.asking.arm(0, OVERTAKES, 1)
    scene.go(4)


def two_in_one_heartbeat(scene: ErasureScene) -> None:
    """Timeouts call the first bucket again, and it carries out another one before the second bucket is called."""
    scene.asked_behind(ODD)
    scene.ask(0)
    scene.first_only()
    scene.go(4)


def done_again_much_later(scene: ErasureScene) -> None:
    """A process remembers when a request was done, before the query went back and did not look for long."""
    scene.go()
    before = scene.batch
    scene.ask(*ODD)
    scene.go(3)
    scene.dies()
    scene.restart(before, looks=False)
    scene.go(recent_heartbeats(RETAINED) + 2)
    scene.restart()
    scene.go(3, first_on=1)
    scene.go(3)


def asked_for_when_all_are_gone(scene: ErasureScene) -> None:
    """Of the requests before there are records only."""
    scene.ask(*ODD)
    scene.go(recent_heartbeats(RETAINED) + 5)
    scene.ask(*ODD)
    scene.go(3)


def damaged_before_all_have_read_it(scene: ErasureScene) -> None:
    """The first bucket has carried two out, and the second one cannot read the first of them."""
    scene.asked_behind(ODD[:2], ODD[2:])
    scene.world.asking.spoil(1)
    scene.go(3)


def asked_in_another_folder(scene: ErasureScene) -> None:
    """A mark is of requests that are not there any more, and others have their numbers."""
    scene.ask(0)
    scene.go(3)
    scene.restart()
    scene.world.asking.lose()
    scene.ask(*ODD)
    scene.go(4)


ERASURE_SCENES = (
    seen_by_one_bucket,
    back_to_where_one_bucket_had_seen_it,
    nobody_looked_between,
    listed_behind_a_writer,
    two_in_one_heartbeat,
    done_again_much_later,
    asked_for_when_all_are_gone,
    damaged_before_all_have_read_it,
    asked_in_another_folder,
)


def played_erasures(script: Callable[[ErasureScene], None], patches: Iterable[Patch] = ()) -> ErasureWorld:
    """Play a scene to its end; raises `WrongStateError` when anything is wrong."""
    scene = ErasureScene()
    world = scene.world
    try:
        with replaced([*world.asking.patches(), *patches]):
            # So that every key has state.
            scene.go(8)
            script(scene)
            world.calm()
    finally:
        world.close()
    return world
