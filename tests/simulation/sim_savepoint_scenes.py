"""Histories of savepoints that numbers find rarely, as scripts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sim_aside import PausableWork, Trap, set_trap
from sim_parts import Config, Numbers, Variant, WrongStateError
from sim_savepoints import SavepointWorld, patch_for_savepoints
from sim_starts import RefusedError, StartedQuery
from sim_taking import HOLD_S
from sim_world import scale_down
from sim_yard import Query, SimSavepoint

from spark_state_ext.engine.start_from import CLAIM, NO_CLAIM

__all__ = ["SAVEPOINT_SCENES", "SavepointScene", "play_savepoint_scene"]


class _Last(Numbers):
    """Whoever goes by these stops wherever that is possible, and nothing happens to him."""

    def __init__(self) -> None:
        super().__init__(b"")

    def below(self, n: int) -> int:
        return n - 1


_NUMBERS, _LAST = Numbers(b"no chance"), _Last()


class SavepointScene:
    """A query with three buckets, of which Spark retains one batch.

    Parameters
    ----------
    variant
        As for `World`.
    """

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self.world = SavepointWorld(Config(True, False, 1, False, ends_calmly=True, buckets=3), variant)

    def begin(self, **config: Any) -> None:
        """Begin with another configuration."""
        self.world.close()
        self.world = SavepointWorld(replace(self.world.config, **config), self._variant)

    def batches(self, count: int, query: Query | None = None, but: PausableWork | None = None) -> None:
        """So many batches of a query, with their clean-ups and all else that waits, but for somebody who stands still."""
        query = query or self.world
        for _ in range(count):
            batch = query.batch + 1
            heartbeat, now_ms = query._plan(batch, True, _NUMBERS)
            attempt = query._attempt(0, batch, heartbeat, now_ms, _NUMBERS, cleans=True)
            query._commit(batch, [query._run_until_success(attempt, _LAST)], _NUMBERS)
            self.work(query, but)

    def work(self, query: Query, but: PausableWork | None = None) -> None:
        """All that waits in a query's processes is done."""
        for executor in query.executors:
            while executor.waiting:
                query._work_off(executor, 0)
        for activity in [it for it in self.world.shared.activities if it is not but]:
            activity.end()
        self.world.shared.activities = [it for it in self.world.shared.activities if not it.is_over]
        self.world.check_now()

    def call(self, query: Query) -> None:
        """An attempt at the next batch that comes to nothing."""
        batch = query.batch + 1
        heartbeat, now_ms = query._plan(batch, True, _NUMBERS)
        query._run(query._attempt(0, batch, heartbeat, now_ms, _NUMBERS, cleans=False), None, _LAST)
        self.world.check_now()

    def call_or_end(self, query: StartedQuery) -> bool:
        """As `call`; a query that may not start ends."""
        try:
            self.call(query)
        except RefusedError:
            self.world._end_query(query)
            return False
        return True

    def taker(self) -> PausableWork:
        """Somebody who takes a savepoint, and stops wherever that is possible."""
        return self.world.take(_LAST)

    def savepoint(self) -> SimSavepoint:
        """A savepoint."""
        self.taker().end()
        return self.world.saved[-1]

    def start(self, savepoint: SimSavepoint, mode: str) -> StartedQuery:
        """A query that starts from it."""
        return self.world.start_from(savepoint, mode, clean_up=True)

    def detaching(self, query: StartedQuery, stops_at: int) -> PausableWork:
        """What lets go of a savepoint, stopped before one of its changes to files."""
        executor = query.executors[0]
        at = next(at for at, (name, _) in enumerate(executor.waiting) if name.startswith("detaching"))
        _, work = executor.waiting.pop(at)

        def stopped() -> None:
            with set_trap(Trap(stops_at, "waits")):
                work()

        return self.world.shared.begin(stopped)

    def batch_alone(self, query: Query) -> None:
        """A batch of a query; nothing that waits is done."""
        batch = query.batch + 1
        heartbeat, now_ms = query._plan(batch, True, _NUMBERS)
        attempt = query._attempt(0, batch, heartbeat, now_ms, _NUMBERS, cleans=False)
        query._commit(batch, [query._run_until_success(attempt, _LAST)], _NUMBERS)
        self.world.check_now()


def copied_while_batches_go_on(scene: SavepointScene) -> None:
    """Whatever the query deletes, who holds it finds all that he read of."""
    scene.batches(14)
    taker = scene.taker()
    who = scene.world.shared.takers[0]
    while not taker.is_over:
        taker.advance()
        if who.copies or who.hold is None:
            # Else Spark would have dropped the batch before its pointers were read.
            scene.world.shared.pass_time(0.9 * HOLD_S)
            scene.batches(14, but=taker)
    assert scene.world.saved, "it was taken"


def silent_for_too_long(scene: SavepointScene) -> None:
    """Who sleeps for longer than his hold lasts is told when he wakes up; who dies holds up nobody for ever."""
    scene.batches(14)
    taker = scene.taker()
    while not scene.world.shared.takers[0].hold:
        taker.advance()
    scene.batches(2, but=taker)
    scene.world.shared.pass_time(2 * HOLD_S)
    scene.batches(14, but=taker)
    taker.end()
    if scene.world.saved:
        raise WrongStateError("who was silent for longer than his hold lasts was not told")
    dead = scene.taker()
    while not scene.world.shared.takers[0].hold:
        dead.advance()
    scene.world.calm()


def uploads_under_way(scene: SavepointScene) -> None:
    """No backend has what was committed last, and an attempt at the next batch is done."""
    scene.begin(journal=True, buckets=1, retained=3)
    scene.batches(6)
    for _ in range(4):
        scene.batch_alone(scene.world)
        # The savepoint is of what was committed, and nothing else.
        scene.call(scene.world)
        scene.savepoint()


def begun_twice(scene: SavepointScene) -> None:
    """The first batch comes to nothing, and is run again."""
    scene.batches(9)
    savepoint = scene.savepoint()
    for mode in (NO_CLAIM, CLAIM):
        query = scene.start(savepoint, mode)
        scene.call(query)
        scene.call(query)
        scene.batches(3, query)
        if mode == NO_CLAIM:
            scene.world._delete(_NUMBERS)
            assert savepoint.deleted, "it said that it needs nothing"
            savepoint = scene.savepoint()
    scene.world.calm()
    assert len(savepoint.list_missing_files()) == len(savepoint.files), "its owner has deleted it"


def claimed_twice(scene: SavepointScene) -> None:
    """The second query to claim it is refused."""
    scene.batches(9)
    savepoint = scene.savepoint()
    first, second = scene.start(savepoint, CLAIM), scene.start(savepoint, CLAIM)
    scene.call(first)
    assert not scene.call_or_end(second), "two queries own one savepoint"
    scene.batches(3, first)


def released_and_claimed_anew(scene: SavepointScene) -> None:
    """Who was taken to be gone comes back, when the savepoint is another query's."""
    scene.batches(9)
    savepoint = scene.savepoint()
    first = scene.start(savepoint, CLAIM)
    scene.batch_alone(first)
    scene.world.release(savepoint)
    second = scene.start(savepoint, CLAIM)
    scene.call(second)
    scene.batches(3, first)
    scene.batches(3, second)


def released_while_it_is_deleted(scene: SavepointScene) -> None:
    """Its owner and who takes it to be dead stand still anywhere: nobody gets a savepoint that is being deleted."""
    scene.batches(9)
    for stops_at, released_at in itertools.product(range(3), range(-1, 2)):
        savepoint = scene.savepoint()
        first = scene.start(savepoint, CLAIM)
        scene.batch_alone(first)
        scene.batch_alone(first)
        release = scene.world.release(savepoint, Trap(released_at, "waits"))
        detaching = scene.detaching(first, stops_at)
        if released_at == 0:
            release.end()
        second = None if first.savepoint.owner is not None else scene.start(savepoint, CLAIM)
        if second is not None:
            scene.call_or_end(second)
        detaching.end()
        release.end()
        scene.world.check_now()
        if second in scene.world.started_queries:
            scene.batches(2, second)
        for query in list(scene.world.started_queries):
            scene.world._end_query(query)


def died_while_it_deleted(scene: SavepointScene) -> None:
    """Stopped anywhere, the next call goes on."""
    scene.batches(9)
    for stops_at in range(9):
        savepoint = scene.savepoint()
        query = scene.start(savepoint, CLAIM)
        scene.batch_alone(query)
        scene.batch_alone(query)
        scene.detaching(query, stops_at).kill()
        for executor in query.executors:
            executor.die()
        scene.batches(2, query)
        scene.world._check_detached(query)
        scene.world._end_query(query)


SAVEPOINT_SCENES: tuple[Callable[[SavepointScene], None], ...] = (
    copied_while_batches_go_on,
    silent_for_too_long,
    uploads_under_way,
    begun_twice,
    claimed_twice,
    released_and_claimed_anew,
    released_while_it_is_deleted,
    died_while_it_deleted,
)


def play_savepoint_scene(script: Callable[[SavepointScene], None], variant: Variant) -> None:
    """Play a script with what is built, or with a variant of it."""
    scene = SavepointScene(variant)
    try:
        with patch_for_savepoints(variant.patches), scale_down(False, Variant()):
            script(scene)
            scene.world.check()
    finally:
        scene.world.close()
