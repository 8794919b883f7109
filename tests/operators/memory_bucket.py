"""A bucket in memory, for vectorised functions without Spark: rows by key, state, timeouts, late rows, the watermark."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from spark_state_ext.functions.outcome import NO_TIMEOUT
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.operators.arrays import KeyedRows
from spark_state_ext.spark.shuffle.combine import Combine

__all__ = ["MemoryBucket", "plain", "us"]

us = pa.timestamp("us", "UTC")


def plain(value: Any) -> Any:
    """A value such that equal keys are equal Python values."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple((name, plain(part)) for name, part in value.items())
    return value


class MemoryBucket:
    """One bucket of an operator.

    Parameters
    ----------
    function
        The vectorised function; it is pickled before each call, as on its way to an executor.
    keys, state
        Fields of keys and state; keys are columns of the input.
    event_time
        Column with the event time: late rows are dropped by it, a window's by its end. None: there are no timeouts.
    combine
        What the operator does before the shuffle, and by how many tasks; None: nothing.
    """

    def __init__(
        self,
        function: Callable[[StateBatch], Any],
        keys: Sequence[Any],
        state: Sequence[Any],
        event_time: str | None = None,
        combine: tuple[Combine, int] | None = None,
    ) -> None:
        self.function = function
        self.keys = pa.schema(list(keys))
        self.state = pa.schema(list(state))
        self.event_time = event_time
        self.combine = combine
        self.watermark_ms = 0
        self.stored: dict[Any, tuple[dict[str, Any], dict[str, Any] | None, int]] = {}

    def step(self, rows: Any, watermark_ms: int = 0) -> list[dict[str, Any]]:
        """A batch; returns the output's rows. The watermark is the batch's own, and that of the one before says what is late."""
        late_ms, self.watermark_ms = self.watermark_ms, watermark_ms
        if self.combine is not None:
            rows = self._combined(rows, *self.combine)
        if self.event_time is not None:
            rows = self._on_time(rows, late_ms)
        groups, found = self._grouped(rows)
        due = [
            key
            for key, (_, _, timeout) in self.stored.items()
            if self.event_time is not None and timeout != NO_TIMEOUT and timeout < watermark_ms and key not in groups
        ]
        if not groups and not due:
            return []
        called = [*groups, *due]
        sizes = [len(places) for places in groups.values()]
        order = np.array([at for places in groups.values() for at in places], dtype=np.int64)
        shown = {**found, **{key: self.stored[key][0] for key in due}}
        before = [self.stored.get(key, (None, None, NO_TIMEOUT))[1] for key in called]
        batch = StateBatch(
            rows=rows.take(pa.array(order)) if len(order) else rows.slice(0, 0),
            keys=pa.Table.from_pylist([shown[key] for key in called], schema=self.keys),
            state=pa.Table.from_pylist([row or dict.fromkeys(self.state.names) for row in before], schema=self.state),
            exists=pa.array([row is not None for row in before]),
            starts=np.cumsum([0, *sizes])[:-1].astype(np.int64) if sizes else np.empty(0, dtype=np.int64),
            watermark_ms=watermark_ms,
            processing_time_ms=0,
            timeout_conf="NoTimeout" if self.event_time is None else "EventTimeTimeout",
        )
        given = pickle.loads(pickle.dumps(self.function))(batch)
        self._take(batch, called, shown, before)
        return [] if given is None else given.to_pylist()

    # -- inside ------------------------------------------------------------------------------------

    def _grouped(self, rows: Any) -> tuple[dict[Any, list[int]], dict[Any, dict[str, Any]]]:
        """Where each key's rows are, and the key as its first row has it."""
        groups: dict[Any, list[int]] = {}
        found: dict[Any, dict[str, Any]] = {}
        names = self.keys.names
        for at, row in enumerate(rows.select(names).to_pylist()):
            key = tuple(plain(row[name]) for name in names)
            groups.setdefault(key, []).append(at)
            found.setdefault(key, row)
        return groups, found

    def _combined(self, rows: Any, combine: Combine, tasks: int) -> Any:
        """Each task has a piece of the rows; every other one finds it not worth the while to look for equal keys."""
        step, pieces = max(1, -(-rows.num_rows // tasks)), []
        for task, start in enumerate(range(0, max(1, rows.num_rows), step)):
            piece = rows.slice(start, step)
            places = list(self._grouped(piece)[0].values()) if task % 2 == 0 else [[at] for at in range(len(piece))]
            order = np.array([at for mine in places for at in mine], dtype=np.int64)
            starts = np.cumsum([0, *map(len, places)])[:-1].astype(np.int64)
            given, positions = pickle.loads(pickle.dumps(combine))(KeyedRows(piece, order, starts))
            keys = [tuple(plain(row[name]) for name in self.keys.names) for row in given.to_pylist()]
            wanted = [tuple(plain(row[name]) for name in self.keys.names) for row in piece.to_pylist()]
            assert keys == [wanted[places[at][0]] for at in positions.tolist()], "positions are those of the rows' keys"
            pieces.append(given)
        return pa.concat_tables(pieces)

    def _on_time(self, rows: Any, late_ms: int) -> Any:
        times = rows.column(self.event_time).to_pylist()
        ends = [value["end"] if isinstance(value, dict) else value for value in times]
        keep = [end is None or end.timestamp() * 1000 > late_ms for end in ends]
        return rows.filter(pa.array(keep, pa.bool_()))

    def _take(self, batch: StateBatch, called: list[Any], shown: dict[Any, Any], before: list[Any]) -> None:
        outcome = batch.outcome
        updates = [row for table in outcome.updates for row in table.to_pylist()]
        for at, key in enumerate(called):
            if not outcome.touched[at]:
                continue
            source = int(outcome.source[at])
            state = updates[source] if source >= 0 else before[at] if source == -2 else None
            timeout = int(outcome.timeouts_ms[at])
            if state is None and timeout == NO_TIMEOUT:
                self.stored.pop(key, None)
            else:
                self.stored[key] = shown[key], state, timeout
