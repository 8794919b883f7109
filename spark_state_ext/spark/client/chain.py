"""Several stateful steps on the same keys inside one operator.

Spark allows one `applyInPandasWithState` in a query. `chain` combines several functions into one: the output of a step
for a key is the next step's input for that key, each step has its own state and its own timeout, and all states are
committed together.
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
from spark_state_ext.spark.callers.group_state import NO_TIMEOUT, Clock, KeyState, get_watermark
from spark_state_ext.spark.callers.keys import as_frames
from spark_state_ext.spark.callers.state_values import find_mutable_columns

__all__ = ["Chain", "Step", "chain"]

StepFunction = Callable[[tuple[Any, ...], Iterable[pd.DataFrame], GroupState], Iterable[Any]]


@dataclass(frozen=True, init=False)
class Step:
    """A stateful function and its schemas, as for `applyInPandasWithState`.

    Parameters
    ----------
    func
        ``func(key, pdfs, state)``, which yields frames or other output that functions may return: tuples, lists of
        tuples, dicts of columns. The next step gets frames.
    outputStructType
        The function's output, which is the next step's input. A `StructType`, or DDL, which the active session parses.
    stateStructType
        The function's state, as a `StructType` or DDL.

    Raises
    ------
    UsageError
        When a schema is neither a `StructType` nor DDL, or is DDL and no session is active.
    """

    func: StepFunction
    outputStructType: StructType
    stateStructType: StructType

    def __init__(
        self, func: StepFunction, outputStructType: StructType | str, stateStructType: StructType | str
    ) -> None:
        object.__setattr__(self, "func", func)
        object.__setattr__(self, "outputStructType", _to_struct(outputStructType, "outputStructType"))
        object.__setattr__(self, "stateStructType", _to_struct(stateStructType, "stateStructType"))


@dataclass(frozen=True)
class Chain:
    """Several steps combined into one function, with the schemas to pass with it.

    Use it as ``df.groupBy(…).applyInPandasWithState(c.func, c.outputStructType, c.stateStructType, mode, timeout)``.
    """

    steps: tuple[Step, ...]

    @property
    def outputStructType(self) -> StructType:
        """The output of the last step."""
        return self.steps[-1].outputStructType

    @property
    def stateStructType(self) -> StructType:
        """The state of all steps: for each a struct, NULL without state, and its timeout in milliseconds."""
        fields: list[StructField] = []
        for position, step in enumerate(self.steps):
            fields.append(StructField(f"state{position}", step.stateStructType, True))
            fields.append(StructField(f"timeout{position}", LongType(), True))
        return StructType(fields)

    @property
    def func(self) -> StepFunction:
        """The combined function."""
        steps = self.steps

        def call_steps(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
            run = _Run(steps, key, state)
            yield from run.run_steps(pdfs)
            run.write_state(state)

        return call_steps


def chain(*steps: Step) -> Chain:
    """Combine steps into one function. The first step gets the query's input.

    Parameters
    ----------
    *steps
        Two or more steps; each gets the output of the one before it.

    Returns
    -------
    Chain
        The combined function `func`, with `outputStructType` and `stateStructType` to pass with it.

    Raises
    ------
    UsageError
        When there are fewer than two steps.
    """
    if len(steps) < 2:
        raise UsageError(f"chain() needs at least two steps, not {len(steps)}")
    return Chain(tuple(steps))


class _Run:
    """Runs one call of a chain: splits the key's composite state, runs each step, and combines the state again."""

    def __init__(self, steps: tuple[Step, ...], key: tuple[Any, ...], state: GroupState) -> None:
        self._steps = steps
        self._key = key
        self._timed_out = state.hasTimedOut
        stored = state.getOption or (None, None) * len(steps)
        self._before = [(stored[2 * position], stored[2 * position + 1]) for position in range(len(steps))]
        self._after: list[tuple[Any, int | None]] = list(self._before)
        # Comparing states is not enough: a step may have changed the very list that it was given.
        self._touched = False
        self._outer = state

    def run_steps(self, pdfs: Iterable[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        frames: Iterable[pd.DataFrame] = () if self._timed_out else pdfs
        empty = next(iter(pdfs)) if self._timed_out else None
        for position, step in enumerate(self._steps):
            frames = self._run_step(position, step, frames, empty if position == 0 else None)
        yield from frames

    def _run_step(
        self, position: int, step: Step, frames: Iterable[pd.DataFrame], empty: pd.DataFrame | None
    ) -> Iterator[pd.DataFrame]:
        source = iter(frames)
        first = next(source, None)
        if first is not None:
            yield from _name_columns(
                self._call_step(position, step, _prepend(first, source), timed_out=False), position, step
            )
            if position:
                # Consume what this step left unread: the step before produces it only now, and then knows its state.
                for _ in source:
                    pass
        elif self._is_due(position):
            if empty is None:
                empty = pd.DataFrame(columns=self._steps[position - 1].outputStructType.names)
            yield from _name_columns(self._call_step(position, step, [empty], timed_out=True), position, step)

    def _is_due(self, position: int) -> bool:
        """True if this call is for the key's timeout and the timeout of this step has passed."""
        timeout_ms = self._before[position][1]
        return self._timed_out and timeout_ms is not None and timeout_ms < self._find_threshold_ms()

    def _find_threshold_ms(self) -> int:
        state = self._outer
        conf = _read_timeout_conf(state)
        if conf == GroupStateTimeout.EventTimeTimeout:
            return state.getCurrentWatermarkMs()
        return state.getCurrentProcessingTimeMs()

    def _call_step(
        self, position: int, step: Step, frames: Iterable[pd.DataFrame], timed_out: bool
    ) -> Iterator[pd.DataFrame]:
        value, timeout_ms = self._before[position]
        outer = self._outer
        watermark_ms, present = get_watermark(outer)
        # A step may change a list that it was given. That counts only if the step passes it to `update`.
        argument = copy.deepcopy(value) if find_mutable_columns(step.stateStructType) else value
        inner = KeyState(
            None if argument is None else tuple(argument),
            Clock(
                outer.getCurrentProcessingTimeMs(),
                watermark_ms,
                _read_timeout_conf(outer),
                timed_out,
                present,
                step.stateStructType,
            ),
        )
        yield from as_frames(step.func(self._key, frames, inner), step.outputStructType)
        if inner.touched or inner.timeout_ms != NO_TIMEOUT:
            self._touched = True
            # As in Spark: after a call that changes something and sets no timeout there is no timeout.
            timeout_ms = None if inner.timeout_ms == NO_TIMEOUT else inner.timeout_ms
        self._after[position] = (inner.getOption if inner.touched else value, timeout_ms)

    def write_state(self, state: GroupState) -> None:
        if not self._timed_out and not self._touched:
            return  # as without a chain: if rows left the state unchanged, a timeout that is due fires in this batch
        if all(value is None and timeout is None for value, timeout in self._after):
            if state.exists:
                state.remove()
            return
        state.update(tuple(part for pair in self._after for part in pair))
        timeouts = [timeout for _, timeout in self._after if timeout is not None]
        if timeouts:
            if _read_timeout_conf(state) == GroupStateTimeout.EventTimeTimeout:
                # A timeout in the past fires when the watermark next advances.
                watermark_ms, _ = get_watermark(state)
                state.setTimeoutTimestamp(max(min(timeouts), watermark_ms, 1))
            else:
                state.setTimeoutDuration(max(min(timeouts) - state.getCurrentProcessingTimeMs(), 1))


def _to_struct(schema: StructType | str, name: str) -> StructType:
    if isinstance(schema, StructType):
        return schema
    if not isinstance(schema, str):
        raise UsageError(f"{name} of a Step must be a StructType or a DDL string, not {schema!r}")
    spark = _find_active_session()
    if spark is None:
        raise UsageError(
            f"{name} of a Step is the DDL string {schema!r}, which a Spark session must parse, but no session is "
            "active: create the session first, or give a StructType"
        )
    from spark_state_ext.spark.client.columns import parse_schema  # workers do not need what it imports

    return parse_schema(schema, spark, f"{name} of a Step")


def _find_active_session() -> Any:
    session = SparkSession.getActiveSession()
    # A Connect session may be active only in its own class, and unknown to the classic one.
    connect = sys.modules.get("pyspark.sql.connect.session")
    return connect.SparkSession.getActiveSession() if session is None and connect is not None else session


def _read_timeout_conf(state: GroupState) -> str:
    conf: str = json.loads(state.json())["timeoutConf"]
    return conf


def _prepend(first: pd.DataFrame, rest: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    yield first
    yield from rest


def _name_columns(frames: Iterator[pd.DataFrame], position: int, step: Step) -> Iterator[pd.DataFrame]:
    """Yield a step's frames, without empty ones, as the next step's input: by column name, or by position if columns
    have no names."""
    names = step.outputStructType.names
    for frame in frames:
        if not len(frame):
            continue
        by_name = any(isinstance(label, str) for label in frame.columns)
        if not set(names) <= set(frame.columns) if by_name else len(names) != len(frame.columns):
            columns = ", ".join(map(str, frame.columns)) if by_name else f"{len(frame.columns)} without names"
            raise StateValueError(
                f"step {position} returned a frame with the columns {columns}, but its outputStructType has "
                f"{', '.join(names)}"
            )
        yield (frame[names] if by_name else frame.set_axis(names, axis=1)).reset_index(drop=True)
