"""Ways in which epochs could have been built wrong. The simulator of timelines has to find each."""

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


def _used_twice(_: TimelineWorld) -> Any:
    """A run takes the number of the run before."""

    def begun(epochs: Epochs, start: Start) -> tuple[Epochs, int]:
        found, number = begin_epoch(epochs, start)
        if len(found.entries) < 2 or found.entries[:-1] != epochs.entries:
            return found, number
        parent = min(found.entries[-1].parents[0], number - 2)
        mine = replace(found.entries[-1], number=number - 1, parents=(parent,))
        return Epochs((*found.entries[:-2], mine)), number - 1

    return begun


def _written_after_the_first_file(_: TimelineWorld) -> Any:
    """The first call of a run has the epoch of the record that was there before."""

    def begun(epochs: Epochs, start: Start) -> tuple[Epochs, int]:
        found, number = begin_epoch(epochs, start)
        if found.entries[:-1] == epochs.entries and epochs.newest is not None:
            return found, epochs.newest.number
        return found, number

    return begun


def _went_on_from_who_never_wrote(_: TimelineWorld) -> Any:
    """Each run is taken to have gone on from the one before, which may never have written."""

    def narrowed(epochs: Epochs, newest: Epoch, made: MadeAt | None) -> Epoch:
        return replace(
            newest, parents=(max((it.number for it in epochs.entries if it.number < newest.number), default=0),)
        )

    return narrowed


def _begun_at_one_batch(_: TimelineWorld) -> Any:
    """What two runs made of one batch counts alike."""

    def beyond(self: Position, other: Position) -> int:
        if self.told and other.told and self.query_id == other.query_id:
            return self.batch - other.batch - 1
        return self.heartbeat - other.heartbeat - 1

    return beyond


def _back_once_alone(_: TimelineWorld) -> Any:
    """Only where the newest run began is looked at, and not where those before it did."""

    def judge(self: Epochs, made: MadeAt) -> Verdict:
        newest = self.newest
        if newest is None or made.epoch == newest.number or made.at.beyond(newest.after) <= 0:
            return Verdict.COUNTS
        return Verdict.GIVEN_UP

    return judge


def _late_tasks_are_of_the_newest_run(_: TimelineWorld) -> Any:
    """Whatever is told another run id begins an epoch, those too that tell of an earlier one."""

    def is_new(known: Any, newest: Epoch, start: Start) -> bool:
        return start.run_id not in ("", newest.run_id)

    return is_new


def _surely_from_the_one_before(_: TimelineWorld) -> Any:
    """A first call whose input is older than the run before does not leave open which run it went on from."""

    def narrowed(epochs: Epochs, newest: Epoch, made: MadeAt | None) -> Epoch:
        found = _NARROWED(epochs, newest, made)
        return replace(found, parents=found.parents[:1])

    return narrowed


_NARROWED = module._narrow_parents


def _never_alive(_: TimelineWorld) -> Any:
    """A run that another one's late first call has followed is never seen to be alive."""
    return 1 << 30


BROKEN_TIMELINES: dict[str, tuple[Patch, ...]] = {
    "an epoch is used twice": ((module, "begin_epoch", _used_twice),),
    "the record is written after the first file": ((module, "begin_epoch", _written_after_the_first_file),),
    "a run that never wrote is gone on from": ((module, "_narrow_parents", _went_on_from_who_never_wrote),),
    "two runs that begin at one batch count alike": ((Position, "beyond", _begun_at_one_batch),),
    "going back twice is taken for once": ((Epochs, "judge", _back_once_alone),),
    "whoever is told another run id is a new run": ((module, "_is_new_run", _late_tasks_are_of_the_newest_run),),
    "a late first call is believed for ever": ((records, "_SEEN_MIN", _never_alive),),
    "an old input tells which run was gone on from": ((module, "_narrow_parents", _surely_from_the_one_before),),
}
