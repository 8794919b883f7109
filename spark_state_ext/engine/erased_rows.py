"""Find the rows of erased keys in a bucket and replace them by tombstones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.equality import BoolArray, HashArray, IndexArray
from arrow_schemas.row import DELETED, RowSchema
from spark_state_ext.functions.key_match import find_keys
from spark_state_ext.store.runs import find_rows, get_hashes, join_batches, sort_by_hash

__all__ = ["ErasedRows", "find_matching", "find_positions"]


def find_matching(own_keys: Sequence[pa.Array], wanted_keys: Sequence[pa.Array]) -> BoolArray:
    """Return a mask of the own keys that are among the wanted keys, compared by value."""
    mask: BoolArray = np.zeros(len(own_keys[0]), dtype=np.bool_)
    positions = find_positions(wanted_keys, own_keys)
    mask[positions[positions >= 0]] = True
    return mask


def find_positions(wanted_keys: Sequence[pa.Array], own_keys: Sequence[pa.Array]) -> IndexArray:
    """Return the position of each wanted key among the own keys, or -1; int64 (number of wanted keys,)."""
    # Most keys differ in the first column already. Arrow finds these without an index of all keys.
    may_match = np.ones(len(own_keys[0]), dtype=np.bool_)
    for own_column, wanted_column in zip(own_keys, wanted_keys, strict=True):
        if _is_flat(own_column.type):
            may_match &= pc.is_in(own_column, value_set=wanted_column).to_numpy(zero_copy_only=False)
    candidates = np.flatnonzero(may_match)
    if not len(candidates):
        return np.full(len(wanted_keys[0]), -1, dtype=np.int64)
    candidate_array = pa.array(candidates)
    positions = find_keys([column.take(candidate_array) for column in own_keys], wanted_keys)
    return np.where(positions < 0, -1, candidates[positions])


def _is_flat(data_type: pa.DataType) -> bool:
    """True if a type is not nested and equal values have equal bytes."""
    types = pa.types
    return not (types.is_nested(data_type) or types.is_floating(data_type))


class ErasedRows:
    """Tombstones, in run order, for the rows of a bucket that a call erases before the function runs."""

    def __init__(self, schema: RowSchema, rows: pa.RecordBatch | None = None) -> None:
        self._schema = schema
        self.rows = schema.empty() if rows is None else rows

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @staticmethod
    def found(live: Iterable[pa.RecordBatch], keys: Sequence[pa.Array], schema: RowSchema) -> ErasedRows:
        """Return the tombstones for those rows of `live` that belong to `keys`."""
        pieces = []
        for batch in live:
            mask = find_matching(schema.key_columns(batch), keys)
            if mask.any():
                pieces.append(_tombstones(batch.filter(pa.array(mask)), schema))
        return ErasedRows(schema, join_batches(pieces) if pieces else None)

    def with_those(self, others: ErasedRows) -> ErasedRows:
        """Return these and other tombstones, each key once."""
        new_rows = self.without(others.rows)
        if not len(self) or not new_rows.num_rows:
            return self if len(self) else others
        return ErasedRows(self._schema, sort_by_hash(join_batches([self.rows, new_rows])))

    def among(self, hashes: HashArray, keys: Sequence[pa.Array]) -> BoolArray:
        """Return a mask of the keys that are erased; their hashes must ascend."""
        erased: BoolArray = np.zeros(len(hashes), dtype=np.bool_)
        if len(self) and len(hashes):
            positions, _ = find_rows(self.rows, self._schema, hashes, keys)
            erased[positions] = True
        return erased

    def without(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch of rows in run order without the erased rows."""
        if not len(self) or not batch.num_rows:
            return batch
        erased = self.among(get_hashes(batch), self._schema.key_columns(batch))
        return batch.filter(pa.array(~erased)) if erased.any() else batch

    def between(self, after: int, upto: int) -> pa.RecordBatch:
        """Return the tombstones with a hash in (after, upto]."""
        if not len(self):
            return self.rows
        hashes = get_hashes(self.rows)
        low = 0 if after < 0 else int(np.searchsorted(hashes, np.uint64(after), side="right"))
        return self.rows.slice(low, int(np.searchsorted(hashes, np.uint64(upto), side="right")) - low)


def _tombstones(rows: pa.RecordBatch, schema: RowSchema) -> pa.RecordBatch:
    count, stop = rows.num_rows, schema.key_slice.stop
    arrays = [*rows.columns[:stop], *(pa.nulls(count, field.type) for field in list(schema.arrow)[stop:-2])]
    no, yes = np.zeros(count, dtype=np.bool_), np.ones(count, dtype=np.bool_)
    assert schema.arrow.names[-1] == DELETED, "the tombstone mark must be the last column"
    return pa.RecordBatch.from_arrays([*arrays, pa.array(no), pa.array(yes)], schema=schema.arrow)
