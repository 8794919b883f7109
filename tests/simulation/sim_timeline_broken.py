"""Broken variants of epochs. The simulator of timelines must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sim_timeline import TimelineWorld

from spark_state_ext.timeline import epochs as module
from spark_state_ext.timeline import records
from spark_state_ext.timeline.epochs import Epoch, Epochs, MadeAt, Position, Start, Verdict, begin_epoch

__all__ = ["BROKEN_TIMELINES"]

Patch = tuple[Any, str, Callable[[TimelineWorld], Any]]


def _use_epoch_twice(_: TimelineWorld) -> Any:
    """A run takes the number of the run before."""

    def begin_epoch_wrongly(epochs: Epochs, start: Start) -> tuple[Epochs, int]:
        epochs_after, number = begin_epoch(epochs, start)
        if len(epochs_after.entries) < 2 or epochs_after.entries[:-1] != epochs.entries:
            return epochs_after, number
        parent = min(epochs_after.entries[-1].parents[0], number - 2)
        mine = replace(epochs_after.entries[-1], number=number - 1, parents=(parent,))
        return Epochs((*epochs_after.entries[:-2], mine)), number - 1

    return begin_epoch_wrongly


def _write_after_first_file(_: TimelineWorld) -> Any:
    """The first call of a run has the epoch of the record that was there before."""

    def begin_epoch_wrongly(epochs: Epochs, start: Start) -> tuple[Epochs, int]:
        epochs_after, number = begin_epoch(epochs, start)
        if epochs_after.entries[:-1] == epochs.entries and epochs.newest is not None:
            return epochs_after, epochs.newest.number
        return epochs_after, number

    return begin_epoch_wrongly


def _continue_from_run_before(_: TimelineWorld) -> Any:
    """Each run counts as the continuation of the run before, even if that run never wrote a file."""

    def narrow_parents(epochs: Epochs, newest: Epoch, made: MadeAt | None) -> Epoch:
        return replace(
            newest,
            parents=(max((epoch.number for epoch in epochs.entries if epoch.number < newest.number), default=0),),
        )

    return narrow_parents


def _count_runs_alike(_: TimelineWorld) -> Any:
    """The results of two runs that begin at the same batch count alike."""

    def count_beyond(self: Position, other: Position) -> int:
        if self.told and other.told and self.query_id == other.query_id:
            return self.batch - other.batch - 1
        return self.heartbeat - other.heartbeat - 1

    return count_beyond


def _judge_newest_run_only(_: TimelineWorld) -> Any:
    """Only the start of the newest run is checked, but not the starts of earlier runs."""

    def judge(self: Epochs, made: MadeAt) -> Verdict:
        newest = self.newest
        if newest is None or made.epoch == newest.number or made.at.beyond(newest.after) <= 0:
            return Verdict.COUNTS
        return Verdict.GIVEN_UP

    return judge


def _take_late_tasks_for_new_runs(_: TimelineWorld) -> Any:
    """Every call with another run id begins an epoch, also calls with the id of an earlier run."""

    def is_new(known: Any, newest: Epoch, start: Start) -> bool:
        return start.run_id not in ("", newest.run_id)

    return is_new


def _keep_first_parent_only(_: TimelineWorld) -> Any:
    """If the input of a first call is older than the run before, its parent run is guessed."""

    def narrow_parents(epochs: Epochs, newest: Epoch, made: MadeAt | None) -> Epoch:
        epoch_after = _NARROW_PARENTS(epochs, newest, made)
        return replace(epoch_after, parents=epoch_after.parents[:1])

    return narrow_parents


_NARROW_PARENTS = module._narrow_parents


def _never_correct_late_call(_: TimelineWorld) -> Any:
    """A run that a late first call has superseded is never recognized as alive."""
    return 1 << 30


BROKEN_TIMELINES: dict[str, tuple[Patch, ...]] = {
    "an epoch is used twice": ((module, "begin_epoch", _use_epoch_twice),),
    "the record is written after the first file": ((module, "begin_epoch", _write_after_first_file),),
    "a run continues from a run that never wrote": ((module, "_narrow_parents", _continue_from_run_before),),
    "runs that begin at the same batch count alike": ((Position, "beyond", _count_runs_alike),),
    "going back twice counts as going back once": ((Epochs, "judge", _judge_newest_run_only),),
    "a task with another run id is taken for a new run": ((module, "_is_new_run", _take_late_tasks_for_new_runs),),
    "a late first call is never corrected": ((records, "_SEEN_MIN", _never_correct_late_call),),
    "an old input decides which run was continued": ((module, "_narrow_parents", _keep_first_parent_only),),
}
