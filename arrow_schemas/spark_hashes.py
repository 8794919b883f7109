"""Spark's ``xxhash64`` with the seed 42 of many keys at once, without Spark.

`spark_hash` does the same for one key, with few imports.

The hash of each column is the seed of the next one. NULL does not change the hash. Structs and lists chain the hashes
of their values in the same way. Floats are hashed by Java's bits: ``-0.0`` as ``0.0``, and every NaN as the same NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import combine_chunks
from arrow_schemas.equality import BoolArray, HashArray, IndexArray
from arrow_schemas.errors import UnsupportedTypeError

__all__ = ["hash_keys"]

_SEED = np.uint64(42)
_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_FOUR, _EIGHT = np.uint64(4), np.uint64(8)
# Types that are hashed as signed 32-bit numbers.
_INTS = frozenset({pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.date32()})
# Decimals with more digits are hashed as bytes.
_LONG_DIGITS = 18


def hash_keys(columns: Sequence[pa.Array | pa.ChunkedArray]) -> HashArray:
    """Return the hash of each row of some key columns."""
    hashes: HashArray = np.full(len(columns[0]), _SEED, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            hashes = _hash_column(combine_chunks(column), hashes)
    return hashes


def _hash_column(column: pa.Array, seeds: HashArray) -> HashArray:
    valid: BoolArray = column.is_valid().to_numpy(zero_copy_only=False)
    kind, types = column.type, pa.types
    if types.is_struct(kind):
        hashes = seeds
        # `flatten` makes fields of a NULL struct NULL, so they keep the seed.
        for child in column.flatten():
            hashes = _hash_column(child, hashes)
        return np.where(valid, hashes, seeds)
    if types.is_list(kind):
        return _hash_lists(column, seeds)
    if types.is_string(kind) or types.is_binary(kind):
        return np.where(valid, _hash_bytes(column, seeds), seeds)
    if types.is_decimal(kind):
        hashes = _hash_decimals(column, valid, seeds)
    elif kind in _INTS:
        hashes = _hash_int_column(column.cast(pa.int32()), seeds)
    elif types.is_int64(kind) or types.is_timestamp(kind):
        hashes = _hash_longs(_to_longs(column), seeds)
    elif types.is_floating(kind):
        hashes = _hash_floats(column, seeds)
    else:
        raise UnsupportedTypeError(f"a key column cannot have the type {kind}: Spark does not hash it")
    return np.where(valid, hashes, seeds)


def _to_longs(column: pa.Array) -> HashArray:
    if pa.types.is_timestamp(column.type) and column.type.unit != "us":
        column = column.cast(pa.timestamp("us", tz=column.type.tz))
    values: HashArray = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)
    return values


def _hash_floats(column: pa.Array, seeds: HashArray) -> HashArray:
    values = column.fill_null(0).to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore"):  # some NaNs signal
        plain = np.where(np.isnan(values), np.array(np.nan, values.dtype), values + np.array(0, values.dtype))
    if values.dtype == np.float32:
        return _hash_ints(plain.view(np.uint32).astype(np.uint64), seeds)
    return _hash_longs(plain.view(np.uint64), seeds)


def _hash_int_column(column: pa.Array, seeds: HashArray) -> HashArray:
    return _hash_ints(column.fill_null(0).to_numpy(zero_copy_only=False).view(np.uint32).astype(np.uint64), seeds)


def _hash_ints(values: HashArray, seeds: HashArray) -> HashArray:
    return _finish(_mix_int(seeds + _P5 + _FOUR, values))


def _hash_longs(values: HashArray, seeds: HashArray) -> HashArray:
    return _finish(_mix_long(seeds + _P5 + _EIGHT, values))


def _mix_int(hashes: HashArray, values: HashArray) -> HashArray:
    return _rotate(hashes ^ (values * _P1), 23) * _P2 + _P3


def _mix_long(hashes: HashArray, values: HashArray) -> HashArray:
    return _rotate(hashes ^ (_rotate(values * _P2, 31) * _P1), 27) * _P1 + _P4


def _rotate(values: HashArray, bits: int) -> HashArray:
    rotated: HashArray = (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))
    return rotated


def _finish(hashes: HashArray) -> HashArray:
    hashes = (hashes ^ (hashes >> np.uint64(33))) * _P2
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _P3
    finished: HashArray = hashes ^ (hashes >> np.uint64(32))
    return finished


def _hash_decimals(column: pa.Array, valid: BoolArray, seeds: HashArray) -> HashArray:
    # Each value has 16 bytes, the lower half first.
    halves = np.frombuffer(column.buffers()[1], dtype=np.uint64)[2 * column.offset :][: 2 * len(column)].reshape(-1, 2)
    if column.type.precision <= _LONG_DIGITS:
        return _hash_longs(np.where(valid, halves[:, 0], np.uint64(0)), seeds)
    # Java's bytes: the highest byte first, and only as many as the value and its sign need.
    texts = [
        None if not is_valid else _to_java_bytes(int.from_bytes(pair.tobytes(), "little", signed=True))
        for pair, is_valid in zip(halves, valid.tolist(), strict=True)
    ]
    return _hash_bytes(pa.array(texts, pa.binary()), seeds)


def _to_java_bytes(value: int) -> bytes:
    bits = (value if value >= 0 else ~value).bit_length()
    return value.to_bytes(bits // 8 + 1, "big", signed=True)


# -- bytes ----------------------------------------------------------------------------------------


def _hash_bytes(column: pa.Array, seeds: HashArray) -> HashArray:
    """Hash strings and binaries: blocks of 32 bytes in four lanes, then words of 8 bytes, one of 4, single bytes."""
    data, starts, lengths = _find_extents(column)
    hashes = np.where(lengths >= 32, _hash_lanes(data, starts, lengths, seeds), seeds + _P5)
    hashes = hashes + lengths.astype(np.uint64)
    at, ends = starts + lengths // 32 * 32, starts + lengths
    while len(rows := np.flatnonzero(at + 8 <= ends)):
        hashes[rows] = _mix_long(hashes[rows], _read_words(data, at[rows]))
        at[rows] += 8
    rows = np.flatnonzero(at + 4 <= ends)
    hashes[rows] = _mix_int(hashes[rows], _read_words(data, at[rows]) & np.uint64(0xFFFFFFFF))
    at[rows] += 4
    while len(rows := np.flatnonzero(at < ends)):
        hashes[rows] = _rotate(hashes[rows] ^ (data[at[rows]].astype(np.uint64) * _P5), 11) * _P1
        at[rows] += 1
    return _finish(hashes)


def _hash_lanes(data: np.ndarray, starts: IndexArray, lengths: IndexArray, seeds: HashArray) -> HashArray:
    lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
    for stripe in range(int(lengths.max(initial=0)) // 32):
        rows = np.flatnonzero(lengths >= 32 * (stripe + 1))
        for number, lane in enumerate(lanes):
            words = _read_words(data, starts[rows] + 32 * stripe + 8 * number)
            lane[rows] = _rotate(lane[rows] + words * _P2, 31) * _P1
    hashes = _rotate(lanes[0], 1) + _rotate(lanes[1], 7) + _rotate(lanes[2], 12) + _rotate(lanes[3], 18)
    for lane in lanes:
        hashes = (hashes ^ (_rotate(lane * _P2, 31) * _P1)) * _P1 + _P4
    return hashes


def _find_extents(column: pa.Array) -> tuple[np.ndarray, IndexArray, IndexArray]:
    """Return the bytes of all values, with 8 bytes of padding, and each value's start and length."""
    _, offsets, data = column.buffers()
    if not len(column):
        empty: IndexArray = np.empty(0, dtype=np.int64)
        return np.zeros(8, dtype=np.uint8), empty, empty
    bounds = np.frombuffer(offsets, dtype=np.int32)[column.offset :][: len(column) + 1].astype(np.int64)
    own = np.frombuffer(data, dtype=np.uint8)[bounds[0] : bounds[-1]] if data is not None else np.empty(0, np.uint8)
    bounds -= bounds[0]
    return np.concatenate([own, np.zeros(8, dtype=np.uint8)]), bounds[:-1].copy(), np.diff(bounds)


def _read_words(data: np.ndarray, at: IndexArray) -> HashArray:
    """Return the eight bytes at each position as a little-endian word."""
    words: HashArray = data[at[:, None] + np.arange(8)].view(np.uint64)[:, 0]
    return words


# -- lists ----------------------------------------------------------------------------------------


def _hash_lists(column: pa.Array, seeds: HashArray) -> HashArray:
    """Chain the hashes of each list's elements; NULL and empty lists keep the seed."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    elements = column.flatten()
    starts = np.cumsum(lengths) - lengths
    hashes = seeds.copy()
    for place in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > place)
        hashes[rows] = _hash_column(elements.take(pa.array(starts[rows] + place)), hashes[rows])
    return hashes
