"""What a simulated query does about what it was rescaled from: who removes it, when that stops, and what is left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from sim_aside import Trap, set_trap
from sim_parts import Executor, Numbers, WrongStateError

from spark_state_ext.engine.folders import operator_folders
from spark_state_ext.engine.job import Job
from spark_state_ext.errors import StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.rescale.folders import first_folder

if TYPE_CHECKING:
    from sim_rescales import RescaleWorld

__all__ = ["Removals", "check_nothing_is_left", "in_pieces", "left_of"]

_REMOVE_TREE = Folder.remove_tree


def _removed_in_pieces(folder: Folder, name: str) -> None:
    """As `Folder.remove_tree`, one file after the other: whoever does it may stop between any two."""
    below = folder.child(name)
    for entry in below.tree():
        if entry.name != ".":
            below.remove(entry.name)
    folder.remove(name)
    _REMOVE_TREE(folder, name)


class Removals:
    """The background that a call of a query's first bucket hands its removals to: they are done at once, or later.

    Parameters
    ----------
    world
        Where the query lives.
    executor
        Whose process it is; what waits is gone when it dies.
    numbers
        Say when, and whether a removal stops in its midst.
    at_once
        Whether it may be done within the call.
    """

    def __init__(self, world: RescaleWorld, executor: Executor, numbers: Numbers, at_once: bool) -> None:
        self._world = world
        self._executor = executor
        self._numbers = numbers
        self._at_once = at_once

    def submit(self, name: str, work: Callable[[], object]) -> bool:
        """As of `Background`: what waits already is not taken again."""
        if self._executor.busy(name):
            return False
        happens = ("dies", "fails", *[""] * 4)[self._numbers.below(6)] if self._at_once else ""
        trap = Trap(self._numbers.below(12), happens) if happens else None

        def watched() -> None:
            world, before = self._world, left_of(self._world.job)
            try:
                with set_trap(trap) if trap else nullcontext():
                    work()
            finally:
                gone = before - left_of(world.job)
                world.removed |= gone
                world.counted["removals"] += bool(gone)
                if gone:
                    world.check()

        if not self._at_once or self._numbers.below(3):
            return self._executor.submit(name, watched)
        try:
            watched()
        except StateError:
            return True  # logged, in the real one
        return True


def left_of(job: Job) -> set[str]:
    """What there is below all names that a query has had, and of parents."""
    found = set()
    for place in operator_folders(job):
        for name in place.names():
            if first_folder(name) == "q0":
                found.add(place.where(name))
                found.update(place.child(name, PARENTS_FOLDER).where(it) for it in _parents(place, name))
    return found


def check_nothing_is_left(world: RescaleWorld) -> None:
    """Nothing of the folders before the one that the query goes on in, nor of parents.

    What a process that outlived the rescaling writes once a folder was removed stays, such as a snapshot that waited. So
    does what was there before where the parents lie with a backend that the query has not any more, as nobody knows then
    when they are needed no more.
    """
    (current,) = {held.pointer.query_folder for held in world.spark.at(world.batch).values()}
    places = operator_folders(world.job)
    roots = [world.shared.root(name).child(world.job.operator) for name in ("a", "b")]
    known = {it.root for it in places}
    if any(_parents(it, current) for it in roots if it.root not in known):
        world.counted["rescalings whose parents' backend has gone"] += 1
        return
    for place in places:
        parents = _parents(place, current)
        if parents:
            raise WrongStateError(f"{place.child(current).root} keeps the parents {parents}")
        for name in place.names():
            if first_folder(name) != "q0" or name == current:
                continue
            if place.where(name) in world.removed:
                world.counted["removed folders that late processes wrote in"] += 1
            else:
                raise WrongStateError(f"{place.where(name)} is left, and the query goes on in {current}")
    world.counted["queries that finished calmly"] += current != "q0"


def _parents(place: Folder, name: str) -> list[str]:
    return place.child(name, PARENTS_FOLDER).names()


def in_pieces() -> list[tuple[Any, str, Any]]:
    """What is put in the place of a folder's method while a history runs."""
    return [(Folder, "remove_tree", _removed_in_pieces)]
