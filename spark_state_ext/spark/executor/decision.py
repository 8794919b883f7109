"""Decide how a bucket continues in a call: it resumes, begins or ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arrow_schemas.pointer import Pointer
from spark_state_ext.beginning.initial_state import InitialState
from spark_state_ext.beginning.rescaling import Rescaling
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.spark.executor.call_info import CallInfo

__all__ = ["Begin", "End", "Outlook", "Resume", "Retry", "decide", "look"]

Retry = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Outlook:
    """What a call knows of its bucket before it reads the batch.

    Parameters
    ----------
    info
        The call's input.
    state
        The initial state of a bucket without a pointer; None: an empty bucket.
    rescaling
        The rescaling that the query is to undergo, if any.
    """

    info: CallInfo
    state: InitialState | None = None
    rescaling: Rescaling | None = None

    @property
    def before(self) -> Pointer | None:
        """The pointer after the previous batch."""
        return self.info.stored if self.state is None else self.state.pointer


@dataclass(frozen=True)
class Resume:
    """The bucket continues from the pointer that Spark hands out.

    Parameters
    ----------
    info
        The call's input.
    waiting
        A rescaling that waits for a batch with data, and must be given the new pointer.
    """

    info: CallInfo
    waiting: Rescaling | None = None


@dataclass(frozen=True)
class Begin:
    """The bucket has no pointer: it begins empty, or with `state`."""

    info: CallInfo
    state: InitialState | None


@dataclass(frozen=True)
class End:
    """The query was rescaled and no longer has this bucket: its state goes to the new buckets."""


def look(info: CallInfo, starts: Starts, retry: Retry) -> Outlook:
    """Return what the call knows of its bucket before it reads the batch."""
    rescaling: Rescaling | None = retry(lambda: starts.rescaling(info.job, info.bucket, info.stored))
    if info.stored is not None:
        return Outlook(info, None, rescaling)
    if rescaling is None:
        state = starts.of(info.job, info.bucket, info.imported)
    else:
        # A first call always has a heartbeat.
        state = retry(rescaling.initial_state)
    return Outlook(info if state is None else info.with_later_watermark(state.pointer), state, rescaling)


def decide(
    outlook: Outlook, has_heartbeat: bool, replicas: Replicas, scratch: Path, retry: Retry
) -> Resume | Begin | End:
    """Return how the bucket continues. With a heartbeat, every bucket is called in this batch."""
    info, rescaling = outlook.info, outlook.rescaling
    if info.stored is None:
        return Begin(info, outlook.state)
    if rescaling is None:
        return Resume(info)
    if not has_heartbeat:
        # Not every bucket is called, so all buckets continue without rescaling.
        return Resume(replace(info, job=rescaling.as_before()), waiting=rescaling)
    retry(lambda: rescaling.give(replicas, scratch))
    if rescaling.ends:
        return End()
    state: InitialState = retry(rescaling.initial_state)
    return Begin(replace(info, stored=None).with_later_watermark(state.pointer), state)
