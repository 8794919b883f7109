"""A stream of small tables for a vectorised function, with the state in a dict.

It needs neither Spark nor the code below a `StateBatch`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from spark_state_ext.functions.outcome import NO_TIMEOUT
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.functions.tables import conform_table
from spark_state_ext.testing.model import canonicalise

__all__ = ["Driver", "Stored", "made", "outcome_of"]

Key = tuple[Any, ...]
Values = tuple[Any, ...]


@dataclass(frozen=True)
class Stored:
    """The state and the timeout of a key."""

    values: Values | None = None
    timeout_ms: int | None = None


def made(
    keys: pa.Schema,
    state: pa.Schema,
    rows: pa.Table,
    with_rows: Sequence[Key],
    sizes: Sequence[int],
    due: Sequence[Key] = (),
    known: dict[Key, Values] | None = None,
    **options: Any,
) -> StateBatch:
    """Return a batch of rows that are already ordered by key."""
    all_keys = [*with_rows, *due]
    known = known or {}
    states = [known.get(canonicalise(key)) for key in all_keys]
    no_values = (None,) * len(state)
    options = {"watermark_ms": None, "processing_time_ms": 1_000, **options}
    return StateBatch(
        rows=rows,
        keys=pa.table(
            [pa.array([key[i] for key in all_keys], field_.type) for i, field_ in enumerate(keys)], schema=keys
        ),
        state=pa.table(
            [pa.array([(row or no_values)[i] for row in states], field_.type) for i, field_ in enumerate(state)],
            schema=state,
        ),
        exists=pa.array([row is not None for row in states], pa.bool_()),
        starts=np.cumsum([0, *sizes])[:-1].astype(np.int64),
        **options,
    )


def outcome_of(batch: StateBatch, known: dict[Key, Stored]) -> dict[Key, Stored]:
    """Return the states and timeouts after a call, given those before it."""
    after = dict(known)
    outcome = batch.outcome
    updates = [tuple(row.values()) for table in outcome.updates for row in table.to_pylist()]
    for at, row in enumerate(batch.keys.to_pylist()):
        key = canonicalise(tuple(row.values()))
        if not outcome.touched[at]:
            assert outcome.source[at] == -2
            assert outcome.timeouts_ms[at] == NO_TIMEOUT
            continue
        source, timeout_ms = int(outcome.source[at]), int(outcome.timeouts_ms[at])
        values = known.get(key, Stored()).values if source == -2 else None if source == -1 else updates[source]
        after[key] = Stored(values, None if timeout_ms == NO_TIMEOUT else timeout_ms)
        if after[key] == Stored():
            del after[key]
    return after


@dataclass
class Driver:
    """A stream of one bucket.

    Parameters
    ----------
    function
        The vectorised function.
    keys
        Names of the key columns.
    rows, state, output
        Schemas.
    """

    function: Callable[[StateBatch], Any]
    keys: Sequence[str]
    rows: pa.Schema
    state: pa.Schema
    output: pa.Schema
    timeout_conf: str = "NoTimeout"
    stored: dict[Key, Stored] = field(default_factory=dict)
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def batch(self, rows: Any, *, watermark_ms: int | None = None, now_ms: int = 0) -> list[dict[str, Any]]:
        """Run a batch and return the function's output."""
        rows = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=self.rows)
        groups: dict[Key, list[int]] = {}
        for at, row in enumerate(rows.select(list(self.keys)).to_pylist()):
            groups.setdefault(canonicalise(tuple(row.values())), []).append(at)
        threshold_ms = watermark_ms if self.timeout_conf == "EventTimeTimeout" else now_ms
        due = [
            key
            for key, entry in self.stored.items()
            if entry.timeout_ms is not None and entry.timeout_ms < (threshold_ms or 0) and key not in groups
        ]
        # Shuffle the keys: in production they are ordered by hash, and a function may not rely on their order.
        order = list(groups)
        self.random.shuffle(order)
        self.random.shuffle(due)
        if not order and not due:
            return []
        batch = made(
            pa.schema([self.rows.field(name) for name in self.keys]),
            self.state,
            rows.take(pa.array([at for key in order for at in groups[key]], pa.int64())),
            order,
            [len(groups[key]) for key in order],
            due,
            {key: entry.values for key, entry in self.stored.items() if entry.values is not None},
            watermark_ms=watermark_ms,
            processing_time_ms=now_ms,
            timeout_conf=self.timeout_conf,
        )
        tables = [
            conform_table(table, list(self.output), "the function gave")
            for table in iterate_tables(self.function(batch))
        ]
        self.stored = outcome_of(batch, self.stored)
        return [row for table in tables for row in table.to_pylist()]


def iterate_tables(output: Any) -> Iterator[Any]:
    if output is None:
        return
    if isinstance(output, (pa.Table, dict)) or hasattr(output, "__arrow_c_stream__"):
        yield output
    else:
        yield from output
