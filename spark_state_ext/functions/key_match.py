"""Finding keys by value among others, without their hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.equality import BoolArray, HashArray, IndexArray, group_by_key

__all__ = ["hold_floats", "key_positions", "nan_is_null", "positions_without_nan"]


def key_positions(own: Sequence[pa.Array], wanted: Sequence[pa.Array]) -> IndexArray:
    """Where each wanted key is."""
    count = len(own[0])
    together = [pa.concat_arrays([a, b]) for a, b in zip(own, wanted, strict=True)]
    codes = _codes(together)
    # Equal codes are compared on the keys themselves. Of a group's rows the own one, if there is one, comes first.
    order, starts = group_by_key(codes, together)
    sizes = np.diff(np.append(starts, len(order)))
    first = order[starts]
    found = np.repeat(np.where(first < count, first, -1), sizes)
    positions = np.empty(len(order), dtype=np.int64)
    positions[order] = found
    return positions[count:]


def hold_floats(columns: Sequence[pa.Array]) -> bool:
    """Whether some key column has floats, at any depth."""
    return any(_holds_floats(column.type) for column in columns)


def positions_without_nan(own: Sequence[pa.Array], wanted: Sequence[pa.Array]) -> tuple[IndexArray, BoolArray]:
    """Where each wanted key is, if NaN and NULL are the same: pandas knows one of them only."""
    mine, other = [_without_nan(column) for column in own], [_without_nan(column) for column in wanted]
    positions, firsts = key_positions(mine, other), key_positions(mine, mine)
    shared = np.bincount(firsts, minlength=len(firsts)) > 1
    several: BoolArray = np.zeros(len(positions), dtype=np.bool_)
    found = positions >= 0
    several[found] = shared[positions[found]]
    return positions, several


def nan_is_null(given: Any) -> bool:
    """Whether a table, or a column of it, comes from pandas such that NaN and NULL are one."""
    columns = given.values() if isinstance(given, Mapping) else [given]
    return any(_is_pandas(column) for column in columns)


def _is_pandas(given: Any) -> bool:
    """Whether something is a frame or series of pandas, with types of NumPy in it. (Others tell NaN and NULL apart.)"""
    if not hasattr(type(given), "iloc"):
        return False
    kinds = given.dtypes if hasattr(type(given), "columns") else [given.dtype]
    return any(isinstance(kind, np.dtype) and kind.kind in "fO" for kind in kinds)


def _holds_floats(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_floats(field.type) for field in kind)
    return _holds_floats(kind.value_type) if pa.types.is_list(kind) else bool(pa.types.is_floating(kind))


def _without_nan(column: pa.Array) -> pa.Array:
    """The same with NULL for NaN, at any depth."""
    kind = column.type
    if not _holds_floats(kind):
        return column
    if pa.types.is_struct(kind):
        children = [_without_nan(child) for child in column.flatten()]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=column.is_null())
    if pa.types.is_list(kind):
        values = _without_nan(column.values)
        return pa.Array.from_buffers(
            kind, len(column), column.buffers()[:2], column.null_count, column.offset, [values]
        )
    return pc.if_else(pc.fill_null(pc.is_nan(column), False), pa.scalar(None, kind), column)


def _codes(columns: Sequence[pa.Array]) -> HashArray:
    """A number a row, the same for equal keys."""
    codes: HashArray = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        codes = codes * np.uint64(0x9E3779B97F4A7C15) + _column_codes(column)
    return codes


def _column_codes(column: pa.Array) -> HashArray:
    types = pa.types
    if types.is_struct(column.type):
        codes: HashArray = column.is_valid().to_numpy(zero_copy_only=False).astype(np.uint64)
        for child in column.flatten():
            codes = codes * np.uint64(0x9E3779B97F4A7C15) + _column_codes(child)
        return codes
    if types.is_list(column.type):
        # Only a first guess; the comparison after it looks at the elements.
        lengths: HashArray = (
            pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False).astype(np.uint64)
        )
        return lengths
    if types.is_floating(column.type):
        # Arrow's dictionaries go by the bits, and a NaN may have many. That NULL counts as one here is put right after.
        values = column.to_numpy(zero_copy_only=False).astype(np.float64)
        bits: HashArray = np.where(np.isnan(values), np.nan, values + 0.0).view(np.uint64)
        return bits
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    indices: HashArray = encoded.indices.to_numpy(zero_copy_only=False).astype(np.uint64)
    return indices
