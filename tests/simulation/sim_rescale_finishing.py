"""How a simulated query removes what it was rescaled from: in which calls, with interruptions, and what remains."""

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

__all__ = ["Removals", "check_nothing_is_left", "list_removal_patches", "list_remaining"]

_REMOVE_TREE = Folder.remove_tree


def _remove_in_pieces(folder: Folder, name: str) -> None:
    """Replaces `Folder.remove_tree`: removes one file after the other, so that the process may stop between any two."""
    tree = folder.child(name)
    for entry in tree.tree():
        if entry.name != ".":
            tree.remove(entry.name)
    folder.remove(name)
    _REMOVE_TREE(folder, name)


class Removals:
    """The background to which a call of a query's first bucket submits removals; they run at once, or later.

    Parameters
    ----------
    world
        Where the query lives.
    executor
        The executor of the call's process; if it dies, waiting work is lost.
    numbers
        Decide when a removal runs, and whether it is interrupted.
    at_once
        Whether removals may run within the call.
    """

    def __init__(self, world: RescaleWorld, executor: Executor, numbers: Numbers, at_once: bool) -> None:
        self._world = world
        self._executor = executor
        self._numbers = numbers
        self._at_once = at_once

    def submit(self, name: str, work: Callable[[], object]) -> bool:
        """Submit work as to `Background`, which ignores work that already waits."""
        if self._executor.busy(name):
            return False
        action = ("dies", "fails", *[""] * 4)[self._numbers.below(6)] if self._at_once else ""
        trap = Trap(self._numbers.below(12), action) if action else None

        def remove_and_check() -> None:
            world, before = self._world, list_remaining(self._world.job)
            try:
                with set_trap(trap) if trap else nullcontext():
                    work()
            finally:
                removed_paths = before - list_remaining(world.job)
                world.removed |= removed_paths
                world.counted["removals"] += bool(removed_paths)
                if removed_paths:
                    world.check()

        if not self._at_once or self._numbers.below(3):
            return self._executor.submit(name, remove_and_check)
        try:
            remove_and_check()
        except StateError:
            return True  # the product logs it
        return True


def list_remaining(job: Job) -> set[str]:
    """Return the query's folders under all names that it has had, and their parents."""
    paths = set()
    for operator_root in operator_folders(job):
        for name in operator_root.names():
            if first_folder(name) == "q0":
                paths.add(operator_root.where(name))
                paths.update(
                    operator_root.child(name, PARENTS_FOLDER).where(parent)
                    for parent in _list_parents(operator_root, name)
                )
    return paths


def check_nothing_is_left(world: RescaleWorld) -> None:
    """Check that the query's earlier folders and all parents are removed.

    Two kinds of files may remain: files that a process of an earlier run wrote after their folder was removed, such as a
    waiting snapshot; and all earlier files if the parents are in a backend that the query no longer has, because then the
    query cannot know when they are no longer needed.
    """
    (current,) = {state.pointer.query_folder for state in world.spark.at(world.batch).values()}
    operator_roots = operator_folders(world.job)
    roots = [world.shared.root(name).child(world.job.operator) for name in ("a", "b")]
    known = {operator_root.root for operator_root in operator_roots}
    if any(_list_parents(root, current) for root in roots if root.root not in known):
        world.counted["rescalings whose parents' backend has gone"] += 1
        return
    for operator_root in operator_roots:
        parents = _list_parents(operator_root, current)
        if parents:
            raise WrongStateError(f"{operator_root.child(current).root} still has the parents {parents}")
        for name in operator_root.names():
            if first_folder(name) != "q0" or name == current:
                continue
            if operator_root.where(name) in world.removed:
                world.counted["removed folders that late processes wrote in"] += 1
            else:
                raise WrongStateError(f"{operator_root.where(name)} is left, although the query continues in {current}")
    world.counted["queries that finished calmly"] += current != "q0"


def _list_parents(operator_root: Folder, name: str) -> list[str]:
    return operator_root.child(name, PARENTS_FOLDER).names()


def list_removal_patches() -> list[tuple[Any, str, Any]]:
    """Replacements of a folder's methods while a history runs."""
    return [(Folder, "remove_tree", _remove_in_pieces)]
