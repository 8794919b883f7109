"""Histories of savepoints that random search seldom finds, as scripts."""

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


class _PauseEverywhere(Numbers):
    """Numbers that let activities pause wherever they can, without faults."""

    def __init__(self) -> None:
        super().__init__(b"")

    def below(self, n: int) -> int:
        return n - 1


_NUMBERS, _PAUSE_EVERYWHERE = Numbers(b"no chance"), _PauseEverywhere()


class SavepointScene:
    """A query with three buckets; Spark retains one batch.

    Parameters
    ----------
    variant
        As for `World`.
    """

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self.world = SavepointWorld(Config(True, False, 1, False, ends_calmly=True, buckets=3), variant)

    def begin(self, **config: Any) -> None:
        """Begin a new world with another configuration."""
        self.world.close()
        self.world = SavepointWorld(replace(self.world.config, **config), self._variant)

    def run_batches(self, count: int, query: Query | None = None, except_for: PausableWork | None = None) -> None:
        """Run batches of a query with clean-ups and all waiting work, except for one paused activity."""
        query = query or self.world
        for _ in range(count):
            batch = query.batch + 1
            heartbeat, now_ms = query._plan(batch, True, _NUMBERS)
            attempt = query._attempt(0, batch, heartbeat, now_ms, _NUMBERS, cleans=True)
            query._commit(batch, [query._run_until_success(attempt, _PAUSE_EVERYWHERE)], _NUMBERS)
            self.do_waiting_work(query, except_for)

    def do_waiting_work(self, query: Query, except_for: PausableWork | None = None) -> None:
        """Do all waiting work of a query's processes, except for one paused activity."""
        for executor in query.executors:
            while executor.waiting:
                query._work_off(executor, 0)
        for activity in [activity for activity in self.world.shared.activities if activity is not except_for]:
            activity.end()
        self.world.shared.activities = [activity for activity in self.world.shared.activities if not activity.is_over]
        self.world.check_now()

    def run_attempt(self, query: Query) -> None:
        """Run an attempt at the next batch that is not committed."""
        batch = query.batch + 1
        heartbeat, now_ms = query._plan(batch, True, _NUMBERS)
        query._run(query._attempt(0, batch, heartbeat, now_ms, _NUMBERS, cleans=False), None, _PAUSE_EVERYWHERE)
        self.world.check_now()

    def run_attempt_or_end(self, query: StartedQuery) -> bool:
        """Run an attempt; returns False if the query may not start, and ends it."""
        try:
            self.run_attempt(query)
        except RefusedError:
            self.world._end_query(query)
            return False
        return True

    def begin_savepoint(self) -> PausableWork:
        """Begin to take a savepoint; the process pauses wherever it can."""
        return self.world.take(_PAUSE_EVERYWHERE)

    def take_savepoint(self) -> SimSavepoint:
        """Take a savepoint."""
        self.begin_savepoint().end()
        return self.world.saved[-1]

    def start(self, savepoint: SimSavepoint, mode: str) -> StartedQuery:
        """Start a query from a savepoint."""
        return self.world.start_from(savepoint, mode, clean_up=True)

    def begin_detaching(self, query: StartedQuery, stops_at: int) -> PausableWork:
        """Begin the work that detaches a query from its savepoint; it pauses before one of its changes to files."""
        executor = query.executors[0]
        at = next(at for at, (name, _) in enumerate(executor.waiting) if name.startswith("detaching"))
        _, work = executor.waiting.pop(at)

        def work_with_trap() -> None:
            with set_trap(Trap(stops_at, "waits")):
                work()

        return self.world.shared.begin(work_with_trap)

    def run_batch_alone(self, query: Query) -> None:
        """Run a batch of a query without any waiting work."""
        batch = query.batch + 1
        heartbeat, now_ms = query._plan(batch, True, _NUMBERS)
        attempt = query._attempt(0, batch, heartbeat, now_ms, _NUMBERS, cleans=False)
        query._commit(batch, [query._run_until_success(attempt, _PAUSE_EVERYWHERE)], _NUMBERS)
        self.world.check_now()


def copied_while_batches_go_on(scene: SavepointScene) -> None:
    """A process that holds the query folder finds all files that it read about, whatever the query deletes."""
    scene.run_batches(14)
    activity = scene.begin_savepoint()
    taker = scene.world.shared.takers[0]
    while not activity.is_over:
        activity.advance()
        if taker.copies or taker.hold is None:
            # Otherwise Spark would have dropped the batch before its pointers were read.
            scene.world.shared.pass_time(0.9 * HOLD_S)
            scene.run_batches(14, except_for=activity)
    assert scene.world.saved, "it was taken"


def hold_not_renewed_in_time(scene: SavepointScene) -> None:
    """A process that does not renew its hold in time gets an error; the hold of a dead process ends."""
    scene.run_batches(14)
    activity = scene.begin_savepoint()
    while not scene.world.shared.takers[0].hold:
        activity.advance()
    scene.run_batches(2, except_for=activity)
    scene.world.shared.pass_time(2 * HOLD_S)
    scene.run_batches(14, except_for=activity)
    activity.end()
    if scene.world.saved:
        raise WrongStateError("a process that did not renew its hold in time got no error")
    dead_activity = scene.begin_savepoint()
    while not scene.world.shared.takers[0].hold:
        dead_activity.advance()
    scene.world.calm()


def uploads_under_way(scene: SavepointScene) -> None:
    """No backend has the last committed state, and an attempt at the next batch has ended."""
    scene.begin(journal=True, buckets=1, retained=3)
    scene.run_batches(6)
    for _ in range(4):
        scene.run_batch_alone(scene.world)
        # The savepoint must not contain this uncommitted attempt.
        scene.run_attempt(scene.world)
        scene.take_savepoint()


def begun_twice(scene: SavepointScene) -> None:
    """The first batch fails and runs again."""
    scene.run_batches(9)
    savepoint = scene.take_savepoint()
    for mode in (NO_CLAIM, CLAIM):
        query = scene.start(savepoint, mode)
        scene.run_attempt(query)
        scene.run_attempt(query)
        scene.run_batches(3, query)
        if mode == NO_CLAIM:
            scene.world._delete(_NUMBERS)
            assert savepoint.deleted, "the query is recorded as detached"
            savepoint = scene.take_savepoint()
    scene.world.calm()
    assert len(savepoint.list_missing_files()) == len(savepoint.files), "its owner has deleted it"


def claimed_twice(scene: SavepointScene) -> None:
    """The second query to claim it is refused."""
    scene.run_batches(9)
    savepoint = scene.take_savepoint()
    first, second = scene.start(savepoint, CLAIM), scene.start(savepoint, CLAIM)
    scene.run_attempt(first)
    assert not scene.run_attempt_or_end(second), "two queries own one savepoint"
    scene.run_batches(3, first)


def released_and_claimed_again(scene: SavepointScene) -> None:
    """A query whose claim was released continues after another query has claimed the savepoint."""
    scene.run_batches(9)
    savepoint = scene.take_savepoint()
    first = scene.start(savepoint, CLAIM)
    scene.run_batch_alone(first)
    scene.world.release(savepoint)
    second = scene.start(savepoint, CLAIM)
    scene.run_attempt(second)
    scene.run_batches(3, first)
    scene.run_batches(3, second)


def released_during_deletion(scene: SavepointScene) -> None:
    """The owner and a release pause at any step: no query gets a savepoint that is being deleted."""
    scene.run_batches(9)
    for stops_at, released_at in itertools.product(range(3), range(-1, 2)):
        savepoint = scene.take_savepoint()
        first = scene.start(savepoint, CLAIM)
        scene.run_batch_alone(first)
        scene.run_batch_alone(first)
        release = scene.world.release(savepoint, Trap(released_at, "waits"))
        detaching = scene.begin_detaching(first, stops_at)
        if released_at == 0:
            release.end()
        second = None if first.savepoint.owner is not None else scene.start(savepoint, CLAIM)
        if second is not None:
            scene.run_attempt_or_end(second)
        detaching.end()
        release.end()
        scene.world.check_now()
        if second in scene.world.started_queries:
            scene.run_batches(2, second)
        for query in list(scene.world.started_queries):
            scene.world._end_query(query)


def owner_dies_while_it_deletes(scene: SavepointScene) -> None:
    """If the deletion stops at any step, the next call continues it."""
    scene.run_batches(9)
    for stops_at in range(9):
        savepoint = scene.take_savepoint()
        query = scene.start(savepoint, CLAIM)
        scene.run_batch_alone(query)
        scene.run_batch_alone(query)
        scene.begin_detaching(query, stops_at).kill()
        for executor in query.executors:
            executor.die()
        scene.run_batches(2, query)
        scene.world._check_detached(query)
        scene.world._end_query(query)


SAVEPOINT_SCENES: tuple[Callable[[SavepointScene], None], ...] = (
    copied_while_batches_go_on,
    hold_not_renewed_in_time,
    uploads_under_way,
    begun_twice,
    claimed_twice,
    released_and_claimed_again,
    released_during_deletion,
    owner_dies_while_it_deletes,
)


def play_savepoint_scene(script: Callable[[SavepointScene], None], variant: Variant) -> None:
    """Play a scene with the product or a variant of it."""
    scene = SavepointScene(variant)
    try:
        with patch_for_savepoints(variant.patches), scale_down(False, Variant()):
            script(scene)
            scene.world.check()
    finally:
        scene.world.close()
