"""A bucket in memory that runs vectorised functions without Spark, with state, timeouts, late rows and a watermark."""

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

__all__ = ["MemoryBucket", "to_comparable", "us"]

us = pa.timestamp("us", "UTC")


def to_comparable(value: Any) -> Any:
    """Return a value that is equal for equal keys."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple((name, to_comparable(part)) for name, part in value.items())
    return value


class MemoryBucket:
    """One bucket of an operator.

    Parameters
    ----------
    function
        The vectorised function; it is pickled before each call, as it is for an executor.
    keys, state
        Fields of keys and state; keys are columns of the input.
    event_time
        Column with the event time, by which late rows are dropped, a window by its end; None for no timeouts.
    combine
        The operator's combiner before the shuffle and the number of its tasks; None for no combiner.
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
        """Run a batch and return its output rows; the previous batch's watermark decides which rows are late."""
        late_ms, self.watermark_ms = self.watermark_ms, watermark_ms
        if self.combine is not None:
            rows = self._combine(rows, *self.combine)
        if self.event_time is not None:
            rows = self._drop_late_rows(rows, late_ms)
        groups, first_keys = self._group_rows(rows)
        due = [
            key
            for key, (_, _, timeout) in self.stored.items()
            if self.event_time is not None and timeout != NO_TIMEOUT and timeout < watermark_ms and key not in groups
        ]
        if not groups and not due:
            return []
        keys = [*groups, *due]
        sizes = [len(places) for places in groups.values()]
        order = np.array([at for places in groups.values() for at in places], dtype=np.int64)
        key_rows = {**first_keys, **{key: self.stored[key][0] for key in due}}
        states = [self.stored.get(key, (None, None, NO_TIMEOUT))[1] for key in keys]
        batch = StateBatch(
            rows=rows.take(pa.array(order)) if len(order) else rows.slice(0, 0),
            keys=pa.Table.from_pylist([key_rows[key] for key in keys], schema=self.keys),
            state=pa.Table.from_pylist([row or dict.fromkeys(self.state.names) for row in states], schema=self.state),
            exists=pa.array([row is not None for row in states]),
            starts=np.cumsum([0, *sizes])[:-1].astype(np.int64) if sizes else np.empty(0, dtype=np.int64),
            watermark_ms=watermark_ms,
            processing_time_ms=0,
            timeout_conf="NoTimeout" if self.event_time is None else "EventTimeTimeout",
        )
        output = pickle.loads(pickle.dumps(self.function))(batch)
        self._apply_changes(batch, keys, key_rows, states)
        return [] if output is None else output.to_pylist()

    # -- inside ------------------------------------------------------------------------------------

    def _group_rows(self, rows: Any) -> tuple[dict[Any, list[int]], dict[Any, dict[str, Any]]]:
        """Return the positions of each key's rows, and the key's columns in its first row."""
        groups: dict[Any, list[int]] = {}
        first_keys: dict[Any, dict[str, Any]] = {}
        names = self.keys.names
        for at, row in enumerate(rows.select(names).to_pylist()):
            key = tuple(to_comparable(row[name]) for name in names)
            groups.setdefault(key, []).append(at)
            first_keys.setdefault(key, row)
        return groups, first_keys

    def _combine(self, rows: Any, combine: Combine, tasks: int) -> Any:
        """Give each task a piece of the rows; every second task does not group its rows by key."""
        step, pieces = max(1, -(-rows.num_rows // tasks)), []
        for task, start in enumerate(range(0, max(1, rows.num_rows), step)):
            piece = rows.slice(start, step)
            places = list(self._group_rows(piece)[0].values()) if task % 2 == 0 else [[at] for at in range(len(piece))]
            order = np.array([at for key_places in places for at in key_places], dtype=np.int64)
            starts = np.cumsum([0, *map(len, places)])[:-1].astype(np.int64)
            combined, positions = pickle.loads(pickle.dumps(combine))(KeyedRows(piece, order, starts))
            keys = [tuple(to_comparable(row[name]) for name in self.keys.names) for row in combined.to_pylist()]
            row_keys = [tuple(to_comparable(row[name]) for name in self.keys.names) for row in piece.to_pylist()]
            assert keys == [row_keys[places[at][0]] for at in positions.tolist()], (
                "each position must be of a row with the key"
            )
            pieces.append(combined)
        return pa.concat_tables(pieces)

    def _drop_late_rows(self, rows: Any, late_ms: int) -> Any:
        times = rows.column(self.event_time).to_pylist()
        ends = [value["end"] if isinstance(value, dict) else value for value in times]
        keep = [end is None or end.timestamp() * 1000 > late_ms for end in ends]
        return rows.filter(pa.array(keep, pa.bool_()))

    def _apply_changes(self, batch: StateBatch, keys: list[Any], key_rows: dict[Any, Any], states: list[Any]) -> None:
        outcome = batch.outcome
        updates = [row for table in outcome.updates for row in table.to_pylist()]
        for at, key in enumerate(keys):
            if not outcome.touched[at]:
                continue
            source = int(outcome.source[at])
            state = updates[source] if source >= 0 else states[at] if source == -2 else None
            timeout = int(outcome.timeouts_ms[at])
            if state is None and timeout == NO_TIMEOUT:
                self.stored.pop(key, None)
            else:
                self.stored[key] = key_rows[key], state, timeout
