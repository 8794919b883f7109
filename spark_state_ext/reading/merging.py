"""Deltas laid over a snapshot, vectorised, without a local store: a bucket as a stream, or the row of one key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from arrow_schemas.row import RowSchema
from spark_state_ext.reading.bodies import Body, hashes_in
from spark_state_ext.reading.lookup import WantedKey
from spark_state_ext.store.runs import joined, newest_wins

__all__ = ["live_rows", "row_of_key"]


def live_rows(bodies: Sequence[Body], schema: RowSchema) -> Iterator[pa.RecordBatch]:
    """All live rows, ascending by hash. The oldest file streams; the others, which are smaller, merge in memory."""
    if not bodies:
        return
    changes = _newest_of(bodies[1:], schema)
    at = 0
    for batch, ends in _hash_groups(bodies[0].batches()):
        # No row of a later batch has a hash of this one.
        to = at
        if changes is not None:
            last = np.uint64(hashes_in(batch)[-1])
            hashes = hashes_in(changes)
            to = len(hashes) if ends else int(np.searchsorted(hashes, last, side="right"))
        if changes is None or to == at:
            found = _without_deleted(batch, schema)
        else:
            found = newest_wins([changes.slice(at, to - at), batch], schema, drop_tombstones=True)
        at = to
        if found.num_rows:
            yield found
    if changes is not None and at < changes.num_rows:
        # The oldest file has no rows at all.
        found = _without_deleted(changes.slice(at), schema)
        if found.num_rows:
            yield found


def row_of_key(bodies: Sequence[Body], wanted: WantedKey, schema: RowSchema) -> pa.RecordBatch:
    """The live row of one key, or none: the newest file that has the key decides."""
    for body in reversed(bodies):
        for rows in body.with_hash(wanted.hash):
            # Mostly one; keys that differ in NULLs only have one hash.
            for row in (rows.slice(at, 1) for at in range(rows.num_rows)):
                if wanted.is_in(row, schema):
                    return _without_deleted(row, schema)
    return schema.empty()


def _newest_of(deltas: Sequence[Body], schema: RowSchema) -> pa.RecordBatch | None:
    """What changed above the oldest file, tombstones included; None where nothing did."""
    newest_first = [batch for body in reversed(deltas) for batch in body.batches()]
    return newest_wins(newest_first, schema, drop_tombstones=False) if newest_first else None


def _without_deleted(batch: pa.RecordBatch, schema: RowSchema) -> pa.RecordBatch:
    # The same batch where nothing is deleted.
    return newest_wins([batch], schema, drop_tombstones=True)


def _hash_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """Batches such that all rows of one hash are in the same one, and whether it is the last."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if held and hashes_in(held[-1])[-1] != hashes_in(batch)[0]:
            yield joined(held), False
            held = []
        held.append(batch)
    if held:
        yield joined(held), True
