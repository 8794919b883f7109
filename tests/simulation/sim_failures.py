"""Which run's uploads were made to fail, and which attempts Spark saw fail for it.

A failure counts for the run that saw it, and there in every attempt at the task. What failed in a run that is over must not fail the
next one.
"""

from __future__ import annotations

from collections.abc import Iterable

from sim_parts import Attempt, Machine, WrongStateError

from arrow_schemas.pointer import InlineDelta, Pointer
from spark_state_ext.commit.decisions import list_pending
from spark_state_ext.commit.failures import FailedStage, Run, still_counts
from spark_state_ext.files.folder import Folder

__all__ = ["Failures"]

_Where = tuple[Folder, str]


class Failures:
    """What was made to fail, and who was told."""

    def __init__(self) -> None:
        self._made: list[Run] = []
        # Files that were not there when an attempt at a task was told that they could not be sent.
        self._told: dict[tuple[object, ...], list[_Where]] = {}

    def make(self, run: Run) -> None:
        """An upload of a run fails."""
        self._made.append(run)

    @staticmethod
    def ended(machine: Machine, run: Run) -> int | None:
        """The last stage of a run that told of a failure, as a machine knows."""
        return FailedStage(machine.folder / "any bucket").read(run)

    def refuse_others(self, run: Run, ended: int | None, error: Exception) -> None:
        """An attempt failed though nothing failed in it; raises where nothing has failed that counts for it.

        Parameters
        ----------
        run
            The attempt's.
        ended
            What `ended` said when it began.
        error
            What it raised.
        """
        if not any(made == run or still_counts(made, run, ended) for made in self._made):
            raise WrongStateError(f"what failed in a run that is over fails the next one, {run}: {error}") from error

    def tell(self, machine: Machine, attempt: Attempt, folders: Iterable[tuple[int, str, Folder]]) -> None:
        """An attempt was told that what it builds on could not be sent."""
        self._told[_key(machine, attempt)] = [
            (folder, delta.name)
            for bucket, backend, folder in folders
            for name, delta in _pending(attempt, bucket)
            if name == backend and not folder.exists(delta.name)
        ]

    def hidden(self, machine: Machine, attempt: Attempt) -> bool:
        """Whether an attempt must not succeed: another one at its task was told, and nobody has sent anything since."""
        lacking = self._told.get(_key(machine, attempt), [])
        return bool(lacking) and not any(folder.exists(name) for folder, name in lacking)


def _key(machine: Machine, attempt: Attempt) -> tuple[object, ...]:
    pointers = tuple(attempt.partition[number].pointer.ref for number in attempt.calls)
    return machine.disk, attempt.run, pointers


def _pending(attempt: Attempt, bucket: int) -> list[tuple[str, InlineDelta]]:
    pointer: Pointer = attempt.partition[bucket].pointer
    return list_pending(pointer) if bucket in attempt.calls else []
