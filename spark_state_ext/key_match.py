"""Finding keys by value among others, without their hashes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.equality import HashArray, IndexArray, group_by_key

__all__ = ["key_positions"]


def key_positions(own: Sequence[pa.Array], wanted: Sequence[pa.Array]) -> IndexArray:
    """Where each wanted key is.

    Parameters
    ----------
    own
        Columns of the keys to look in, no key twice.
    wanted
        Columns of the keys to look for, of the same types.

    Returns
    -------
    numpy.ndarray
        For each wanted key its position in `own`, or -1; int64 (number of wanted keys,).
    """
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
