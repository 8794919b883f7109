"""Runs a vectorised function over small tables, a batch each, and keeps its state in a dict: what a stream does, without
Spark and without any of the machinery below a `StateBatch`.
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
    """What is kept of a key."""

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
    """A batch of rows that are by key already."""
    every = [*with_rows, *due]
    known = known or {}
    found = [known.get(canonicalise(key)) for key in every]
    nothing = (None,) * len(state)
    options = {"watermark_ms": None, "processing_time_ms": 1_000, **options}
    return StateBatch(
        rows=rows,
        keys=pa.table([pa.array([key[i] for key in every], it.type) for i, it in enumerate(keys)], schema=keys),
        state=pa.table(
            [pa.array([(row or nothing)[i] for row in found], it.type) for i, it in enumerate(state)], schema=state
        ),
        exists=pa.array([row is not None for row in found], pa.bool_()),
        starts=np.cumsum([0, *sizes])[:-1].astype(np.int64),
        **options,
    )


def outcome_of(batch: StateBatch, known: dict[Key, Stored]) -> dict[Key, Stored]:
    """What is kept after a call, of what was kept before."""
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
        """Run a batch and return what the function gave."""
        rows = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=self.rows)
        groups: dict[Key, list[int]] = {}
        for at, row in enumerate(rows.select(list(self.keys)).to_pylist()):
            groups.setdefault(canonicalise(tuple(row.values())), []).append(at)
        threshold_ms = watermark_ms if self.timeout_conf == "EventTimeTimeout" else now_ms
        due = [
            key
            for key, it in self.stored.items()
            if it.timeout_ms is not None and it.timeout_ms < (threshold_ms or 0) and key not in groups
        ]
        # By hash, in life: in no order that a function may rely on.
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
            {key: it.values for key, it in self.stored.items() if it.values is not None},
            watermark_ms=watermark_ms,
            processing_time_ms=now_ms,
            timeout_conf=self.timeout_conf,
        )
        tables = [
            conform_table(given, list(self.output), "the function gave") for given in _tables(self.function(batch))
        ]
        self.stored = outcome_of(batch, self.stored)
        return [row for table in tables for row in table.to_pylist()]


def _tables(given: Any) -> Iterator[Any]:
    if given is None:
        return
    if isinstance(given, (pa.Table, dict)) or hasattr(given, "__arrow_c_stream__"):
        yield given
    else:
        yield from given
