"""Which rows of a bucket are those of some keys, and what takes their place: tombstones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.equality import BoolArray, HashArray, IndexArray
from arrow_schemas.row import DELETED, RowSchema
from spark_state_ext.functions.key_match import key_positions
from spark_state_ext.store.runs import find, hashes_of, joined, sorted_run

__all__ = ["ErasedRows", "matching", "places_of"]


def matching(own: Sequence[pa.Array], wanted: Sequence[pa.Array]) -> BoolArray:
    """Which of some keys are among others, by value."""
    found: BoolArray = np.zeros(len(own[0]), dtype=np.bool_)
    at = places_of(wanted, own)
    found[at[at >= 0]] = True
    return found


def places_of(wanted: Sequence[pa.Array], own: Sequence[pa.Array]) -> IndexArray:
    """Where each of some keys is among others, or -1; int64 (number of wanted keys,). Columns as for `matching`."""
    # Most keys differ in the first column already, which Arrow sees without an index of all of them.
    maybe = np.ones(len(own[0]), dtype=np.bool_)
    for mine, other in zip(own, wanted, strict=True):
        if _is_flat(mine.type):
            maybe &= pc.is_in(mine, value_set=other).to_numpy(zero_copy_only=False)
    candidates = np.flatnonzero(maybe)
    if not len(candidates):
        return np.full(len(wanted[0]), -1, dtype=np.int64)
    taken = pa.array(candidates)
    positions = key_positions([column.take(taken) for column in own], wanted)
    return np.where(positions < 0, -1, candidates[positions])


def _is_flat(kind: pa.DataType) -> bool:
    """Whether equal values are equal bytes, and have no others within."""
    types = pa.types
    return not (types.is_nested(kind) or types.is_floating(kind))


class ErasedRows:
    """The rows of a bucket that a call takes away before the function runs: their tombstones, in run order."""

    def __init__(self, schema: RowSchema, rows: pa.RecordBatch | None = None) -> None:
        self._schema = schema
        self.rows = schema.empty() if rows is None else rows

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @staticmethod
    def found(live: Iterable[pa.RecordBatch], keys: Sequence[pa.Array], schema: RowSchema) -> ErasedRows:
        """Those of some keys."""
        pieces = []
        for batch in live:
            found = matching(schema.key_columns(batch), keys)
            if found.any():
                pieces.append(_tombstones(batch.filter(pa.array(found)), schema))
        return ErasedRows(schema, joined(pieces) if pieces else None)

    def with_those(self, others: ErasedRows) -> ErasedRows:
        """These and others, each key once."""
        fresh = self.without(others.rows)
        if not len(self) or not fresh.num_rows:
            return self if len(self) else others
        return ErasedRows(self._schema, sorted_run(joined([self.rows, fresh])))

    def among(self, hashes: HashArray, keys: Sequence[pa.Array]) -> BoolArray:
        """Which of some keys are taken away; their hashes ascend."""
        gone: BoolArray = np.zeros(len(hashes), dtype=np.bool_)
        if len(self) and len(hashes):
            wanted, _ = find(self.rows, self._schema, hashes, keys)
            gone[wanted] = True
        return gone

    def without(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of rows in run order, without those that are taken away."""
        if not len(self) or not batch.num_rows:
            return batch
        gone = self.among(hashes_of(batch), self._schema.key_columns(batch))
        return batch.filter(pa.array(~gone)) if gone.any() else batch

    def between(self, after: int, upto: int) -> pa.RecordBatch:
        """The tombstones with a hash in (after, upto]."""
        if not len(self):
            return self.rows
        hashes = hashes_of(self.rows)
        low = 0 if after < 0 else int(np.searchsorted(hashes, np.uint64(after), side="right"))
        return self.rows.slice(low, int(np.searchsorted(hashes, np.uint64(upto), side="right")) - low)


def _tombstones(rows: pa.RecordBatch, schema: RowSchema) -> pa.RecordBatch:
    count, keep = rows.num_rows, schema.key_slice.stop
    arrays = [*rows.columns[:keep], *(pa.nulls(count, field.type) for field in list(schema.arrow)[keep:-2])]
    no, yes = np.zeros(count, dtype=np.bool_), np.ones(count, dtype=np.bool_)
    assert schema.arrow.names[-1] == DELETED, "the last column"
    return pa.RecordBatch.from_arrays([*arrays, pa.array(no), pa.array(yes)], schema=schema.arrow)
