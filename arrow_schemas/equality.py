"""Which rows hold the same key: Spark's grouping semantics over Arrow columns.

NULL equals NULL, NaN equals NaN, and ``-0.0`` equals ``0.0``, at every depth. All of it is vectorised; only
rows whose 64-bit hashes collide are told apart one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["BoolArray", "HashArray", "IndexArray", "group_by_key", "rows_equal"]

HashArray = npt.NDArray[np.uint64]
IndexArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


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
            collided = np.unique(ordered[pairs[~equal]])
            _split_collisions(order, ordered, boundary, collided, keys)
    return order, np.flatnonzero(boundary).astype(np.int64, copy=False)


def _split_collisions(
    order: IndexArray, ordered: HashArray, boundary: BoolArray, collided: HashArray, keys: Sequence[pa.Array]
) -> None:
    """Within each hash that different keys share, order rows by key (first seen first) and mark the borders."""
    starts = np.searchsorted(ordered, collided, side="left")
    ends = np.searchsorted(ordered, collided, side="right")
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        rows = order[start:end]
        taken = [column.take(pa.array(rows)).to_pylist() for column in keys]
        members: dict[Any, list[int]] = {}
        for position, row in enumerate(zip(*taken, strict=True)):
            members.setdefault(_canonical(row), []).append(position)
        order[start:end] = rows[np.concatenate([np.asarray(m) for m in members.values()])]
        boundary[start:end] = False
        sizes = np.cumsum([0, *(len(m) for m in members.values())][:-1])
        boundary[start + sizes] = True


def _canonical(value: Any) -> Any:
    """A hashable stand-in for a key value under which equal keys are equal."""
    if isinstance(value, float):
        return ("nan",) if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return ("struct", *(_canonical(v) for v in value.values()))
    if isinstance(value, (list, tuple)):
        return ("list", *(_canonical(v) for v in value))
    return value
