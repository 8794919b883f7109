"""Finds rows that hold the same key, by Spark's grouping semantics, over Arrow columns.

NULL equals NULL, NaN equals NaN, and ``-0.0`` equals ``0.0``, at every depth. All of it is vectorised, even if 64-bit
hashes collide. Collisions are common: Spark's hash skips NULLs, so ``(x, NULL)`` and ``(NULL, x)`` have the same hash.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["BoolArray", "HashArray", "IndexArray", "group_by_key", "rows_equal"]

HashArray = npt.NDArray[np.uint64]
IndexArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_CodeArray = npt.NDArray[np.int32]


def rows_equal(left: Sequence[pa.Array], right: Sequence[pa.Array]) -> BoolArray:
    """Compare two equally long sets of key columns row by row; True if the rows hold the same key."""
    equal: BoolArray = np.ones(len(left[0]), dtype=np.bool_)
    for a, b in zip(left, right, strict=True):
        equal &= _compare_columns(a, b)
    return equal


def _to_numpy(mask: pa.Array) -> BoolArray:
    result: BoolArray = mask.to_numpy(zero_copy_only=False)
    return result


def _compare_columns(a: pa.Array, b: pa.Array) -> BoolArray:
    if a.null_count == 0 and b.null_count == 0:
        return _compare_values(a, b)
    a_null, b_null = _to_numpy(a.is_null()), _to_numpy(b.is_null())
    both_valid = ~a_null & ~b_null
    equal: BoolArray = a_null & b_null
    if both_valid.all():
        return _compare_values(a, b)
    mask = pa.array(both_valid)
    equal[both_valid] = _compare_values(a.filter(mask), b.filter(mask))
    return equal


def _compare_values(a: pa.Array, b: pa.Array) -> BoolArray:
    """Compare two columns that have no NULLs at the top level."""
    types = pa.types
    if types.is_floating(a.type):
        x, y = a.to_numpy(zero_copy_only=False), b.to_numpy(zero_copy_only=False)
        result: BoolArray = (x == y) | (np.isnan(x) & np.isnan(y))
        return result
    if types.is_struct(a.type):
        if a.type.num_fields == 0:
            return np.ones(len(a), dtype=np.bool_)
        return rows_equal(a.flatten(), b.flatten())
    if types.is_list(a.type):
        return _compare_lists(a, b)
    return _to_numpy(pc.equal(a, b))


def _compare_lists(a: pa.Array, b: pa.Array) -> BoolArray:
    lengths = pc.list_value_length(a).to_numpy(zero_copy_only=False).astype(np.int64)
    equal: BoolArray = lengths == pc.list_value_length(b).to_numpy(zero_copy_only=False)
    compared = equal & (lengths > 0)
    if compared.any():
        mask = pa.array(compared)
        elements = _compare_columns(a.filter(mask).flatten(), b.filter(mask).flatten())
        starts = np.concatenate(([0], np.cumsum(lengths[compared])[:-1]))
        equal[compared] = np.logical_and.reduceat(elements, starts)
    return equal


def group_by_key(hashes: HashArray, keys: Sequence[pa.Array]) -> tuple[IndexArray, IndexArray]:
    """Order rows so that rows of the same key are adjacent.

    Parameters
    ----------
    hashes
        Hash of each row's key, shape (n,).
    keys
        Key columns, n rows each.

    Returns
    -------
    order
        Permutation of the rows, int64 (n,): ascending by hash, rows of the same key adjacent and in their input order.
    starts
        Index in `order` of each key's first row, int64 (number of keys,), ascending.
    """
    order = np.argsort(hashes, kind="stable").astype(np.int64, copy=False)
    n = len(order)
    if n == 0:
        return order, np.empty(0, dtype=np.int64)
    ordered = hashes[order]
    same_hash = ordered[1:] == ordered[:-1]
    pairs = np.flatnonzero(same_hash)
    boundary = np.ones(n, dtype=np.bool_)
    boundary[1:] = ~same_hash
    if len(pairs):
        first, second = pa.array(order[pairs]), pa.array(order[pairs + 1])
        equal = rows_equal([k.take(first) for k in keys], [k.take(second) for k in keys])
        if not equal.all():
            hash_ids = np.cumsum(boundary) - 1
            shared = np.zeros(int(hash_ids[-1]) + 1, dtype=np.bool_)
            shared[hash_ids[pairs[~equal]]] = True
            _split_collisions(order, boundary, hash_ids, np.flatnonzero(shared[hash_ids]), keys)
    return order, np.flatnonzero(boundary).astype(np.int64, copy=False)


def _split_collisions(
    order: IndexArray, boundary: BoolArray, hash_ids: IndexArray, places: IndexArray, keys: Sequence[pa.Array]
) -> None:
    """Order rows by key within each hash that several keys share, and mark the first row of each key."""
    rows = order[places]
    row_indices = pa.array(rows)
    codes = _join_codes([_encode(column.take(row_indices)) for column in keys])
    # The sort is stable, so rows of the same key keep their order.
    by_key = np.lexsort((codes, hash_ids[places]))
    order[places] = rows[by_key]
    ids, codes = hash_ids[places], codes[by_key]
    boundary[places] = np.append(True, (ids[1:] != ids[:-1]) | (codes[1:] != codes[:-1]))


def _encode(column: pa.Array) -> _CodeArray:
    """Return a number for each row; two rows have the same number exactly if `rows_equal` calls them equal.

    Values are never converted to Python objects: text may not be UTF-8, and times may lie outside the years 1 to 9999.
    """
    types = pa.types
    if types.is_struct(column.type):
        return _join_codes([_encode_validity(column), *(_encode(child) for child in column.flatten())])
    if types.is_list(column.type):
        return _join_codes([_encode_validity(column), _encode_lists(column)])
    if types.is_floating(column.type):
        return _encode_floats(column)
    return _encode_flat(column)


def _encode_validity(column: pa.Array) -> _CodeArray:
    return _to_numpy(column.is_valid()).astype(np.int32)


def _encode_flat(column: pa.Array) -> _CodeArray:
    codes: _CodeArray = pc.fill_null(column.dictionary_encode().indices, -1).to_numpy(zero_copy_only=False)
    return codes


def _encode_floats(column: pa.Array) -> _CodeArray:
    # Arrow's dictionaries treat 0.0 and -0.0 as different, and compare NaNs by their bits.
    with np.errstate(invalid="ignore"):  # some NaNs signal
        values = column.to_numpy(zero_copy_only=False).astype(np.float64)
        bits = np.where(np.isnan(values), np.nan, values + 0.0).view(np.int64)
    return _encode_flat(pa.array(bits, mask=_to_numpy(column.is_null())))


def _encode_lists(column: pa.Array) -> _CodeArray:
    """Return a code for each list, from its elements; NULL has the code of an empty list."""
    elements = _encode(column.flatten())
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths, dtype=np.int64) * elements.itemsize
    buffers = [None, pa.py_buffer(np.append(np.int64(0), ends)), pa.py_buffer(elements)]
    return _encode_flat(pa.Array.from_buffers(pa.large_binary(), len(column), buffers))


def _join_codes(parts: Sequence[_CodeArray]) -> _CodeArray:
    """Combine several codes of each row into one code."""
    if len(parts) == 1:
        return parts[0]
    stacked = np.stack(parts, axis=1)
    kind = pa.binary(len(parts) * stacked.itemsize)
    return _encode_flat(pa.Array.from_buffers(kind, len(stacked), [None, pa.py_buffer(stacked)]))
