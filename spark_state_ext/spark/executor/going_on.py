"""How a bucket goes on in a call, as one of four ways: by what Spark hands out, and by what the batch brought."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import UsageError
from spark_state_ext.rescale.dividing import Division
from spark_state_ext.savepoints.starting import Beginning, Starts
from spark_state_ext.spark.executor.call_info import CallInfo
from spark_state_ext.spark.executor.rescaling import Move, Rescales

__all__ = ["Begin", "End", "Outlook", "Rescale", "Resume", "decide", "look"]

Tried = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Outlook:
    """What a call knows of its bucket before it has read the batch.

    Parameters
    ----------
    info
        What the call was told.
    beginning
        What a bucket without a pointer begins with; None: with nothing.
    move
        Where the query is to be rescaled.
    """

    info: CallInfo
    beginning: Beginning | None = None
    move: Move | None = None

    @property
    def before(self) -> Pointer | None:
        """The pointer that tells of the batch before."""
        if self.info.stored is None and self.beginning is not None:
            return self.beginning.pointer
        return self.info.stored


@dataclass(frozen=True)
class Resume:
    """From the pointer that Spark hands out.

    Parameters
    ----------
    info
        What the call was told.
    waiting
        A rescaling that waits for a batch with data, and wants to know the new pointer.
    """

    info: CallInfo
    waiting: Move | None = None


@dataclass(frozen=True)
class Begin:
    """Without a pointer: with nothing, or with `beginning`."""

    info: CallInfo
    beginning: Beginning | None


@dataclass(frozen=True)
class Rescale:
    """With parts of the query's old buckets, in another folder."""

    info: CallInfo
    move: Move
    beginning: Division


@dataclass(frozen=True)
class End:
    """The query was rescaled and no longer has this bucket: its state goes to the new ones."""


def look(info: CallInfo, starts: Starts, rescales: Rescales, tried: Tried) -> Outlook:
    """What is known before the batch is read."""
    move: Move | None = tried(lambda: rescales.of(info.job, info.bucket, info.stored))
    if move is not None:
        if move.stored is not None:
            return Outlook(info, None, move)
        # Called for the first time, so with a heartbeat.
        division: Division = tried(move.beginning)
        return Outlook(info.not_before(division.pointer), division, move)
    if info.stored is not None:
        return Outlook(info)
    beginning = starts.of(info.job, info.bucket)
    _refuse_without_import(info, beginning)
    return Outlook(info if beginning is None else info.not_before(beginning.pointer), beginning)


def decide(
    outlook: Outlook, has_heartbeat: bool, give: Callable[[Move], None], tried: Tried
) -> Resume | Begin | Rescale | End:
    """How the bucket goes on, once the batch was read.

    Parameters
    ----------
    outlook
        What was known before.
    has_heartbeat
        The batch has data, so that every bucket is called in it.
    give
        Has the state of an old bucket among the parents of the new ones.
    tried
        Does what asks a store again for a while.
    """
    info, move = outlook.info, outlook.move
    if move is None:
        return Begin(info, outlook.beginning) if info.stored is None else Resume(info)
    if move.stored is None:
        assert isinstance(outlook.beginning, Division), "a bucket that is called for the first time"
        return Rescale(info, move, outlook.beginning)
    if not has_heartbeat:
        # Not every bucket is called: they all go on as they were.
        return Resume(replace(info, job=move.as_before()), waiting=move)
    tried(lambda: give(move))
    if move.ends:
        return End()
    division: Division = tried(move.beginning)
    return Rescale(replace(info, stored=None).not_before(division.pointer), move, division)


def _refuse_without_import(call: CallInfo, beginning: Beginning | None) -> None:
    """Refuse to begin an imported bucket with anything but the savepoint that its state was imported into."""
    mark, start = call.imported, call.job.options.start_from
    if mark is None or (beginning is not None and beginning.record.source_id == mark.savepoint_id):
        return
    if beginning is None and start is not None and start.allow_non_restored:
        return
    raise UsageError(
        f"the state of operator {call.job.operator!r} was imported into the savepoint {mark.savepoint_id}, and the job "
        f"starts from {start if start is not None else 'nothing'}: give the ArrowState "
        f"start_from=Savepoint({mark.savepoint!r}), or where that savepoint lies now"
    )
