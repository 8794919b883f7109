"""Several stateful steps on the same keys inside one operator.

Spark allows one `applyInPandasWithState` a query. `chain` makes one function of several: what a step yields for a key
is the next step's input for that key, each step has its own state and its own timeout, and all of them are committed
together.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.types import LongType, StructField, StructType

from spark_state_ext.errors import StateValueError, UsageError
from spark_state_ext.spark.callers.group_state import NO_TIMEOUT, Clock, KeyState, watermark_of
from spark_state_ext.spark.callers.keys import as_frames
from spark_state_ext.spark.callers.state_values import changeable

__all__ = ["Chain", "Step", "chain"]

StepFunction = Callable[[tuple[Any, ...], Iterable[pd.DataFrame], GroupState], Iterable[Any]]


@dataclass(frozen=True, init=False)
class Step:
    """One stateful function and its schemas, as for `applyInPandasWithState`.

    Parameters
    ----------
    func
        ``func(key, pdfs, state)``, yielding frames, or what else a function may give: tuples, lists of tuples, dicts of
        columns. The next step gets frames.
    outputStructType
        What it yields: the next step's input. A `StructType`, or Spark's DDL, which the active session reads.
    stateStructType
        Its state; likewise.

    Raises
    ------
    UsageError
        When a schema is neither, or is DDL and there is no session.
    """

    func: StepFunction
    outputStructType: StructType
    stateStructType: StructType

    def __init__(
        self, func: StepFunction, outputStructType: StructType | str, stateStructType: StructType | str
    ) -> None:
        object.__setattr__(self, "func", func)
        object.__setattr__(self, "outputStructType", _struct(outputStructType, "outputStructType"))
        object.__setattr__(self, "stateStructType", _struct(stateStructType, "stateStructType"))


@dataclass(frozen=True)
class Chain:
    """Several steps as one function, with the schemas to pass along with it.

    Use it as ``df.groupBy(…).applyInPandasWithState(c.func, c.outputStructType, c.stateStructType, mode, timeout)``.
    """

    steps: tuple[Step, ...]

    @property
    def outputStructType(self) -> StructType:
        """Output of the last step."""
        return self.steps[-1].outputStructType

    @property
    def stateStructType(self) -> StructType:
        """State of all steps: for each a struct, NULL while it has none, and its timeout in milliseconds."""
        fields: list[StructField] = []
        for i, step in enumerate(self.steps):
            fields.append(StructField(f"state{i}", step.stateStructType, True))
            fields.append(StructField(f"timeout{i}", LongType(), True))
        return StructType(fields)

    @property
    def func(self) -> StepFunction:
        """The combined function."""
        steps = self.steps

        def call_steps(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
            run = _Run(steps, key, state)
            yield from run.all_steps(pdfs)
            run.write_back(state)

        return call_steps


def chain(*steps: Step) -> Chain:
    """Combine steps, the first one nearest the input.

    Parameters
    ----------
    *steps
        Two or more; each gets what the one before it yields.

    Returns
    -------
    Chain
        The function `func` of all steps, with `outputStructType` and `stateStructType` to pass along with it.

    Raises
    ------
    UsageError
        With fewer than two steps.
    """
    if len(steps) < 2:
        raise UsageError(f"chain() needs at least two steps, not {len(steps)}")
    return Chain(tuple(steps))


class _Run:
    """One call: the key's composite state taken apart, the steps run in turn, the state put together again."""

    def __init__(self, steps: tuple[Step, ...], key: tuple[Any, ...], state: GroupState) -> None:
        self._steps = steps
        self._key = key
        self._timed_out = state.hasTimedOut
        stored = state.getOption or (None, None) * len(steps)
        self._before = [(stored[2 * i], stored[2 * i + 1]) for i in range(len(steps))]
        self._after: list[tuple[Any, int | None]] = list(self._before)
        # Not told by comparing: a step may have changed the very list that it was given.
        self._touched = False
        self._outer = state

    def all_steps(self, pdfs: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        frames: Iterable[pd.DataFrame] = () if self._timed_out else pdfs
        empty = next(iter(pdfs)) if self._timed_out else None
        for at, step in enumerate(self._steps):
            frames = self._step(at, step, frames, empty if at == 0 else None)
        yield from frames

    def _step(
        self, at: int, step: Step, frames: Iterable[pd.DataFrame], empty: pd.DataFrame | None
    ) -> Iterator[pd.DataFrame]:
        source = iter(frames)
        first = next(source, None)
        if first is not None:
            yield from _named(self._call(at, step, _chained(first, source), timed_out=False), at, step)
            if at:
                # What this step left unread, the step before has still to make: its state is known only after that.
                for _ in source:
                    pass
        elif self._due(at):
            if empty is None:
                empty = pd.DataFrame(columns=self._steps[at - 1].outputStructType.names)
            yield from _named(self._call(at, step, [empty], timed_out=True), at, step)

    def _due(self, at: int) -> bool:
        """Whether a step without rows has a timeout that is over, in a call for the key's timeout."""
        timeout_ms = self._before[at][1]
        return self._timed_out and timeout_ms is not None and timeout_ms < self._threshold_ms()

    def _threshold_ms(self) -> int:
        state = self._outer
        conf = _timeout_conf(state)
        if conf == GroupStateTimeout.EventTimeTimeout:
            return state.getCurrentWatermarkMs()
        return state.getCurrentProcessingTimeMs()

    def _call(self, at: int, step: Step, frames: Iterable[pd.DataFrame], timed_out: bool) -> Iterator[pd.DataFrame]:
        value, timeout_ms = self._before[at]
        outer = self._outer
        watermark_ms, present = watermark_of(outer)
        # A step may change a list that it was given, which counts only when it is given back by `update`.
        own = copy.deepcopy(value) if changeable(step.stateStructType) else value
        inner = KeyState(
            None if own is None else tuple(own),
            Clock(
                outer.getCurrentProcessingTimeMs(),
                watermark_ms,
                _timeout_conf(outer),
                timed_out,
                present,
                step.stateStructType,
            ),
        )
        yield from as_frames(step.func(self._key, frames, inner), step.outputStructType)
        if inner.touched or inner.timeout_ms != NO_TIMEOUT:
            self._touched = True
            # As Spark does: a call that changes something and sets no timeout has none.
            timeout_ms = None if inner.timeout_ms == NO_TIMEOUT else inner.timeout_ms
        self._after[at] = (inner.getOption if inner.touched else value, timeout_ms)

    def write_back(self, state: GroupState) -> None:
        if not self._timed_out and not self._touched:
            return  # as without a chain: a timeout that is due fires in this batch, where rows changed nothing
        if all(value is None and timeout is None for value, timeout in self._after):
            if state.exists:
                state.remove()
            return
        state.update(tuple(part for pair in self._after for part in pair))
        timeouts = [timeout for _, timeout in self._after if timeout is not None]
        if timeouts:
            if _timeout_conf(state) == GroupStateTimeout.EventTimeTimeout:
                # A timeout that is over already fires at the watermark's next advance.
                watermark_ms, _ = watermark_of(state)
                state.setTimeoutTimestamp(max(min(timeouts), watermark_ms, 1))
            else:
                state.setTimeoutDuration(max(min(timeouts) - state.getCurrentProcessingTimeMs(), 1))


def _struct(given: StructType | str, name: str) -> StructType:
    if isinstance(given, StructType):
        return given
    if not isinstance(given, str):
        raise UsageError(f"{name} of a Step must be a StructType or a string of DDL, not {given!r}")
    spark = _active_session()
    if spark is None:
        raise UsageError(
            f"{name} of a Step is given in DDL, {given!r}, which is read by a Spark session, and none is active here: "
            "make the session first, or give a StructType"
        )
    from spark_state_ext.spark.client.columns import struct_of  # workers do without what it imports

    return struct_of(given, spark, f"{name} of a Step")


def _active_session() -> Any:
    found = SparkSession.getActiveSession()
    # A Connect session may have been made by its own class, where Spark's environment knows of none.
    connect = sys.modules.get("pyspark.sql.connect.session")
    return connect.SparkSession.getActiveSession() if found is None and connect is not None else found


def _timeout_conf(state: GroupState) -> str:
    conf: str = json.loads(state.json())["timeoutConf"]
    return conf


def _chained(first: pd.DataFrame, rest: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    yield first
    yield from rest


def _named(frames: Iterator[pd.DataFrame], at: int, step: Step) -> Iterator[pd.DataFrame]:
    """A step's frames as the next step's input: columns by name if they have names, else by position, none of them
    empty."""
    names = step.outputStructType.names
    for frame in frames:
        if not len(frame):
            continue
        by_name = any(isinstance(label, str) for label in frame.columns)
        if not set(names) <= set(frame.columns) if by_name else len(names) != len(frame.columns):
            given = ", ".join(map(str, frame.columns)) if by_name else f"{len(frame.columns)} without names"
            raise StateValueError(
                f"step {at} gave a frame with the columns {given}, and its outputStructType has {', '.join(names)}"
            )
        yield (frame[names] if by_name else frame.set_axis(names, axis=1)).reset_index(drop=True)
