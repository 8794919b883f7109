"""How a bucket goes on in a call, as one of three ways: by what Spark hands out, and by what the batch brought."""

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

__all__ = ["Begin", "End", "Outlook", "Resume", "Tried", "decide", "look"]

Tried = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Outlook:
    """What a call knows of its bucket before it has read the batch.

    Parameters
    ----------
    info
        What the call was told.
    state
        What a bucket without a pointer begins with; None: with nothing.
    rescaling
        Where the query is to be rescaled.
    """

    info: CallInfo
    state: InitialState | None = None
    rescaling: Rescaling | None = None

    @property
    def before(self) -> Pointer | None:
        """The pointer that tells of the batch before."""
        return self.info.stored if self.state is None else self.state.pointer


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
    waiting: Rescaling | None = None


@dataclass(frozen=True)
class Begin:
    """Without a pointer: with nothing, or with `state`."""

    info: CallInfo
    state: InitialState | None


@dataclass(frozen=True)
class End:
    """The query was rescaled and no longer has this bucket: its state goes to the new ones."""


def look(info: CallInfo, starts: Starts, tried: Tried) -> Outlook:
    """What is known before the batch is read."""
    rescaling: Rescaling | None = tried(lambda: starts.rescaling(info.job, info.bucket, info.stored))
    if info.stored is not None:
        return Outlook(info, None, rescaling)
    if rescaling is None:
        state = starts.of(info.job, info.bucket, info.imported)
    else:
        # Called for the first time, so with a heartbeat.
        state = tried(rescaling.initial_state)
    return Outlook(info if state is None else info.not_before(state.pointer), state, rescaling)


def decide(
    outlook: Outlook, has_heartbeat: bool, replicas: Replicas, scratch: Path, tried: Tried
) -> Resume | Begin | End:
    """How the bucket goes on, once the batch was read: with a heartbeat every bucket is called in it."""
    info, rescaling = outlook.info, outlook.rescaling
    if info.stored is None:
        return Begin(info, outlook.state)
    if rescaling is None:
        return Resume(info)
    if not has_heartbeat:
        # Not every bucket is called: they all go on as they were.
        return Resume(replace(info, job=rescaling.as_before()), waiting=rescaling)
    tried(lambda: rescaling.give(replicas, scratch))
    if rescaling.ends:
        return End()
    state: InitialState = tried(rescaling.initial_state)
    return Begin(replace(info, stored=None).not_before(state.pointer), state)
