"""Merges deltas with a snapshot without a local store: streams a bucket, or finds the row of one key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from arrow_schemas.row import RowSchema
from spark_state_ext.reading.bodies import Body, read_hashes
from spark_state_ext.reading.lookup import LookupKey
from spark_state_ext.store.runs import join_batches, merge_newest

__all__ = ["merge_live_rows", "find_row"]


def merge_live_rows(bodies: Sequence[Body], schema: RowSchema) -> Iterator[pa.RecordBatch]:
    """Yield all live rows by ascending hash; the oldest file is streamed, the smaller others are merged in memory."""
    if not bodies:
        return
    changes = _merge_deltas(bodies[1:], schema)
    start = 0
    for batch, is_last in _group_by_hash(bodies[0].batches()):
        # Later batches have only greater hashes.
        end = start
        if changes is not None:
            last = np.uint64(read_hashes(batch)[-1])
            hashes = read_hashes(changes)
            end = len(hashes) if is_last else int(np.searchsorted(hashes, last, side="right"))
        if changes is None or end == start:
            rows = _drop_tombstones(batch, schema)
        else:
            rows = merge_newest([changes.slice(start, end - start), batch], schema, drop_tombstones=True)
        start = end
        if rows.num_rows:
            yield rows
    if changes is not None and start < changes.num_rows:
        # The oldest file has no rows.
        rows = _drop_tombstones(changes.slice(start), schema)
        if rows.num_rows:
            yield rows


def find_row(bodies: Sequence[Body], lookup_key: LookupKey, schema: RowSchema) -> pa.RecordBatch:
    """Return the live row of one key, or an empty batch; the newest file that has the key decides."""
    for body in reversed(bodies):
        for rows in body.find_rows(lookup_key.hash):
            # Usually one row; keys that differ only in NULLs have the same hash.
            for row in (rows.slice(at, 1) for at in range(rows.num_rows)):
                if lookup_key.is_in(row, schema):
                    return _drop_tombstones(row, schema)
    return schema.empty()


def _merge_deltas(deltas: Sequence[Body], schema: RowSchema) -> pa.RecordBatch | None:
    """Return the newest row of each key in the deltas, tombstones included; None if the deltas are empty."""
    newest_first = [batch for body in reversed(deltas) for batch in body.batches()]
    return merge_newest(newest_first, schema, drop_tombstones=False) if newest_first else None


def _drop_tombstones(batch: pa.RecordBatch, schema: RowSchema) -> pa.RecordBatch:
    # The same batch if it has no tombstones.
    return merge_newest([batch], schema, drop_tombstones=True)


def _group_by_hash(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """Regroup batches so that all rows of a hash are in the same batch; yield each, and True for the last one."""
    group: list[pa.RecordBatch] = []
    for batch in batches:
        if group and read_hashes(group[-1])[-1] != read_hashes(batch)[0]:
            yield join_batches(group), False
            group = []
        group.append(batch)
    if group:
        yield join_batches(group), True
