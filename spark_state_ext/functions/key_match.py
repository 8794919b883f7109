"""Find keys among other keys by value, without their hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.equality import BoolArray, HashArray, IndexArray, group_by_key

__all__ = ["hold_floats", "find_keys", "nan_is_null", "positions_without_nan"]


def find_keys(own: Sequence[pa.Array], searched: Sequence[pa.Array]) -> IndexArray:
    """Return the position of each searched key among the own keys, -1 if it is not there."""
    count = len(own[0])
    together = [pa.concat_arrays([a, b]) for a, b in zip(own, searched, strict=True)]
    codes = _codes(together)
    # Keys with equal codes are then compared by value. An own key comes first in its group.
    order, starts = group_by_key(codes, together)
    sizes = np.diff(np.append(starts, len(order)))
    first = order[starts]
    own_positions = np.repeat(np.where(first < count, first, -1), sizes)
    positions = np.empty(len(order), dtype=np.int64)
    positions[order] = own_positions
    return positions[count:]


def hold_floats(columns: Sequence[pa.Array]) -> bool:
    """Return whether any key column has floats, at any depth."""
    return any(_holds_floats(column.type) for column in columns)


def positions_without_nan(own: Sequence[pa.Array], searched: Sequence[pa.Array]) -> tuple[IndexArray, BoolArray]:
    """Return the position of each searched key if NaN equals NULL, and whether several own keys match.

    pandas does not distinguish NaN and NULL.
    """
    mine, theirs = [_without_nan(column) for column in own], [_without_nan(column) for column in searched]
    positions, firsts = find_keys(mine, theirs), find_keys(mine, mine)
    is_shared = np.bincount(firsts, minlength=len(firsts)) > 1
    is_ambiguous: BoolArray = np.zeros(len(positions), dtype=np.bool_)
    has_match = positions >= 0
    is_ambiguous[has_match] = is_shared[positions[has_match]]
    return positions, is_ambiguous


def nan_is_null(table: Any) -> bool:
    """Return whether a table or a column comes from pandas and does not distinguish NaN and NULL."""
    columns = table.values() if isinstance(table, Mapping) else [table]
    return any(_is_pandas(column) for column in columns)


def _is_pandas(value: Any) -> bool:
    """True for a pandas frame or series with NumPy types. (Other types distinguish NaN and NULL.)"""
    if not hasattr(type(value), "iloc"):
        return False
    kinds = value.dtypes if hasattr(type(value), "columns") else [value.dtype]
    return any(isinstance(kind, np.dtype) and kind.kind in "fO" for kind in kinds)


def _holds_floats(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_floats(field.type) for field in kind)
    return _holds_floats(kind.value_type) if pa.types.is_list(kind) else bool(pa.types.is_floating(kind))


def _without_nan(column: pa.Array) -> pa.Array:
    """Replace NaN by NULL, at any depth."""
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
    """Return one number for each row, the same for equal keys."""
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
        # A first guess; the later comparison by value looks at the elements.
        lengths: HashArray = (
            pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False).astype(np.uint64)
        )
        return lengths
    if types.is_floating(column.type):
        # Arrow's dictionaries compare bits, and NaN has many. NULL gets the code of NaN; the later comparison by value
        # separates them.
        values = column.to_numpy(zero_copy_only=False).astype(np.float64)
        bits: HashArray = np.where(np.isnan(values), np.nan, values + 0.0).view(np.uint64)
        return bits
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    indices: HashArray = encoded.indices.to_numpy(zero_copy_only=False).astype(np.uint64)
    return indices
