"""Which rows hold the same key: Spark's grouping semantics over Arrow columns.

NULL equals NULL, NaN equals NaN, and ``-0.0`` equals ``0.0``, at every depth. All of it is vectorised, also
where 64-bit hashes collide. That is common: Spark's hash passes over NULLs, and so ``(x, NULL)`` and ``(NULL, x)`` have
the same one.
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
    """Row by row, whether two equally long sets of key columns hold the same key."""
    equal: BoolArray = np.ones(len(left[0]), dtype=np.bool_)
    for a, b in zip(left, right, strict=True):
        equal &= _column_equal(a, b)
    return equal


def _numpy(mask: pa.Array) -> BoolArray:
    result: BoolArray = mask.to_numpy(zero_copy_only=False)
    return result


def _column_equal(a: pa.Array, b: pa.Array) -> BoolArray:
    if a.null_count == 0 and b.null_count == 0:
        return _values_equal(a, b)
    a_null, b_null = _numpy(a.is_null()), _numpy(b.is_null())
    both = ~a_null & ~b_null
    equal: BoolArray = a_null & b_null
    if both.all():
        return _values_equal(a, b)
    mask = pa.array(both)
    equal[both] = _values_equal(a.filter(mask), b.filter(mask))
    return equal


def _values_equal(a: pa.Array, b: pa.Array) -> BoolArray:
    """Equality where neither side has a NULL at the top."""
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
        return _lists_equal(a, b)
    return _numpy(pc.equal(a, b))


def _lists_equal(a: pa.Array, b: pa.Array) -> BoolArray:
    lengths = pc.list_value_length(a).to_numpy(zero_copy_only=False).astype(np.int64)
    equal: BoolArray = lengths == pc.list_value_length(b).to_numpy(zero_copy_only=False)
    compared = equal & (lengths > 0)
    if compared.any():
        mask = pa.array(compared)
        elements = _column_equal(a.filter(mask).flatten(), b.filter(mask).flatten())
        starts = np.concatenate(([0], np.cumsum(lengths[compared])[:-1]))
        equal[compared] = np.logical_and.reduceat(elements, starts)
    return equal


def group_by_key(hashes: HashArray, keys: Sequence[pa.Array]) -> tuple[IndexArray, IndexArray]:
    """Bring rows of one key together.

    Parameters
    ----------
    hashes
        Hash of each row's key, shape (n,).
    keys
        Key columns, n rows each.

    Returns
    -------
    order
        Permutation of the rows, int64 (n,): ascending by hash, rows of a key adjacent and in their input order.
    starts
        Where each key begins within `order`, int64 (number of keys,), ascending.
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
    """Order rows by key within each hash that different keys share, and mark where keys begin."""
    rows = order[places]
    taken = pa.array(rows)
    codes = _joint_codes([_codes(column.take(taken)) for column in keys])
    # Stable, and so rows of one key stay in the order they are in.
    by_key = np.lexsort((codes, hash_ids[places]))
    order[places] = rows[by_key]
    ids, codes = hash_ids[places], codes[by_key]
    boundary[places] = np.append(True, (ids[1:] != ids[:-1]) | (codes[1:] != codes[:-1]))


def _codes(column: pa.Array) -> _CodeArray:
    """A number a row, the same for those that `rows_equal` calls equal and for no others.

    Values are never made Python's: text need not be UTF-8, nor times lie in the years 1 to 9999.
    """
    types = pa.types
    if types.is_struct(column.type):
        return _joint_codes([_validity(column), *(_codes(child) for child in column.flatten())])
    if types.is_list(column.type):
        return _joint_codes([_validity(column), _list_codes(column)])
    if types.is_floating(column.type):
        return _float_codes(column)
    return _flat_codes(column)


def _validity(column: pa.Array) -> _CodeArray:
    return _numpy(column.is_valid()).astype(np.int32)


def _flat_codes(column: pa.Array) -> _CodeArray:
    codes: _CodeArray = pc.fill_null(column.dictionary_encode().indices, -1).to_numpy(zero_copy_only=False)
    return codes


def _float_codes(column: pa.Array) -> _CodeArray:
    # Arrow's dictionaries tell 0.0 from -0.0, and NaNs by their bits.
    with np.errstate(invalid="ignore"):  # some of them signal
        values = column.to_numpy(zero_copy_only=False).astype(np.float64)
        bits = np.where(np.isnan(values), np.nan, values + 0.0).view(np.int64)
    return _flat_codes(pa.array(bits, mask=_numpy(column.is_null())))


def _list_codes(column: pa.Array) -> _CodeArray:
    """By the elements; NULL is as a list of none."""
    elements = _codes(column.flatten())
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths, dtype=np.int64) * elements.itemsize
    buffers = [None, pa.py_buffer(np.append(np.int64(0), ends)), pa.py_buffer(elements)]
    return _flat_codes(pa.Array.from_buffers(pa.large_binary(), len(column), buffers))


def _joint_codes(parts: Sequence[_CodeArray]) -> _CodeArray:
    """A number a row for what several numbers say together."""
    if len(parts) == 1:
        return parts[0]
    together = np.stack(parts, axis=1)
    kind = pa.binary(len(parts) * together.itemsize)
    return _flat_codes(pa.Array.from_buffers(kind, len(together), [None, pa.py_buffer(together)]))
