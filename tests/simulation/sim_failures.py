"""Which runs had failed uploads, and which attempts reported a failure.

A failure counts for the run that saw it, in every attempt at the task. A failure of a run that has ended must not make an
attempt of the next run fail.
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
    """Failures that the simulation caused, and the attempts that reported them."""

    def __init__(self) -> None:
        self._failed_runs: list[Run] = []
        # Files that did not exist when an attempt at a task reported that they could not be sent.
        self._missing_files: dict[tuple[object, ...], list[_Where]] = {}

    def note_failure(self, run: Run) -> None:
        """Note that an upload of a run fails."""
        self._failed_runs.append(run)

    @staticmethod
    def read_failed_stage(machine: Machine, run: Run) -> int | None:
        """Return the last stage of a run that reported a failure, as a machine knows it."""
        return FailedStage(machine.folder / "any bucket").read(run)

    def check_failure(self, run: Run, failed_stage: int | None, error: Exception) -> None:
        """Check an attempt that failed without a fault of its own; raises if no earlier failure counts for it.

        Parameters
        ----------
        run
            The attempt's run and stage.
        failed_stage
            What `read_failed_stage` returned when the attempt began.
        error
            The error that the attempt raised.
        """
        if not any(
            failed_run == run or still_counts(failed_run, run, failed_stage) for failed_run in self._failed_runs
        ):
            raise WrongStateError(f"a failure of an ended run fails the next one, {run}: {error}") from error

    def note_report(self, machine: Machine, attempt: Attempt, folders: Iterable[tuple[int, str, Folder]]) -> None:
        """Note that an attempt reported that its input's deltas could not be sent."""
        self._missing_files[_make_key(machine, attempt)] = [
            (folder, delta.name)
            for bucket, backend, folder in folders
            for name, delta in _list_pending(attempt, bucket)
            if name == backend and not folder.exists(delta.name)
        ]

    def must_fail(self, machine: Machine, attempt: Attempt) -> bool:
        """Whether an attempt must fail: another attempt at its task reported a failure, and no file was sent since."""
        missing = self._missing_files.get(_make_key(machine, attempt), [])
        return bool(missing) and not any(folder.exists(name) for folder, name in missing)


def _make_key(machine: Machine, attempt: Attempt) -> tuple[object, ...]:
    pointers = tuple(attempt.partition[number].pointer.ref for number in attempt.calls)
    return machine.disk, attempt.run, pointers


def _list_pending(attempt: Attempt, bucket: int) -> list[tuple[str, InlineDelta]]:
    pointer: Pointer = attempt.partition[bucket].pointer
    return list_pending(pointer) if bucket in attempt.calls else []
