"""Hashes of keys, as Spark computes them in a plan: ``xxhash64`` with the seed 42, without Spark.

For many keys at once; `spark_hash` is the same for one key, with few imports.

Each column goes on from the hash of the column before it, NULL leaves it as it is, and structs and lists go on from
value to value. Floats are hashed by Java's bits: ``-0.0`` as ``0.0``, every NaN as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import flat
from arrow_schemas.equality import BoolArray, HashArray, IndexArray
from arrow_schemas.errors import UnsupportedTypeError

__all__ = ["key_hashes"]

_SEED = np.uint64(42)
_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_FOUR, _EIGHT = np.uint64(4), np.uint64(8)
# Hashed as 32 bits, with their sign.
_INTS = frozenset({pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.date32()})
# Decimals of more digits are hashed as bytes.
_LONG_DIGITS = 18


def key_hashes(columns: Sequence[pa.Array | pa.ChunkedArray]) -> HashArray:
    """The hash of each row of some key columns."""
    hashes: HashArray = np.full(len(columns[0]), _SEED, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            hashes = _hashed(flat(column), hashes)
    return hashes


def _hashed(column: pa.Array, seeds: HashArray) -> HashArray:
    valid: BoolArray = column.is_valid().to_numpy(zero_copy_only=False)
    kind, types = column.type, pa.types
    if types.is_struct(kind):
        found = seeds
        # With the NULLs of the struct itself, which go on with the seed.
        for child in column.flatten():
            found = _hashed(child, found)
        return np.where(valid, found, seeds)
    if types.is_list(kind):
        return _hashed_lists(column, seeds)
    if types.is_string(kind) or types.is_binary(kind):
        return np.where(valid, _hashed_bytes(column, seeds), seeds)
    if types.is_decimal(kind):
        found = _hashed_decimals(column, valid, seeds)
    elif kind in _INTS:
        found = _of_int(column.cast(pa.int32()), seeds)
    elif types.is_int64(kind) or types.is_timestamp(kind):
        found = _of_long(_longs(column), seeds)
    elif types.is_floating(kind):
        found = _hashed_floats(column, seeds)
    else:
        raise UnsupportedTypeError(f"a key column has the type {kind}, which no key has: it has no hash in Spark")
    return np.where(valid, found, seeds)


def _longs(column: pa.Array) -> HashArray:
    if pa.types.is_timestamp(column.type) and column.type.unit != "us":
        column = column.cast(pa.timestamp("us", tz=column.type.tz))
    values: HashArray = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)
    return values


def _hashed_floats(column: pa.Array, seeds: HashArray) -> HashArray:
    values = column.fill_null(0).to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore"):  # some NaNs signal
        plain = np.where(np.isnan(values), np.array(np.nan, values.dtype), values + np.array(0, values.dtype))
    if values.dtype == np.float32:
        return _int_mixed(plain.view(np.uint32).astype(np.uint64), seeds)
    return _of_long(plain.view(np.uint64), seeds)


def _of_int(column: pa.Array, seeds: HashArray) -> HashArray:
    return _int_mixed(column.fill_null(0).to_numpy(zero_copy_only=False).view(np.uint32).astype(np.uint64), seeds)


def _int_mixed(values: HashArray, seeds: HashArray) -> HashArray:
    return _finished(_with_int(seeds + _P5 + _FOUR, values))


def _of_long(values: HashArray, seeds: HashArray) -> HashArray:
    return _finished(_with_long(seeds + _P5 + _EIGHT, values))


def _with_int(hashes: HashArray, values: HashArray) -> HashArray:
    return _rotated(hashes ^ (values * _P1), 23) * _P2 + _P3


def _with_long(hashes: HashArray, values: HashArray) -> HashArray:
    return _rotated(hashes ^ (_rotated(values * _P2, 31) * _P1), 27) * _P1 + _P4


def _rotated(values: HashArray, bits: int) -> HashArray:
    rotated: HashArray = (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))
    return rotated


def _finished(hashes: HashArray) -> HashArray:
    hashes = (hashes ^ (hashes >> np.uint64(33))) * _P2
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _P3
    finished: HashArray = hashes ^ (hashes >> np.uint64(32))
    return finished


def _hashed_decimals(column: pa.Array, valid: BoolArray, seeds: HashArray) -> HashArray:
    # 16 bytes a value, the lower half first.
    halves = np.frombuffer(column.buffers()[1], dtype=np.uint64)[2 * column.offset :][: 2 * len(column)].reshape(-1, 2)
    if column.type.precision <= _LONG_DIGITS:
        return _of_long(np.where(valid, halves[:, 0], np.uint64(0)), seeds)
    # Java's bytes: the first is the highest, and no more of them than the value and its sign take.
    texts = [
        None if not there else _java_bytes(int.from_bytes(pair.tobytes(), "little", signed=True))
        for pair, there in zip(halves, valid.tolist(), strict=True)
    ]
    return _hashed_bytes(pa.array(texts, pa.binary()), seeds)


def _java_bytes(value: int) -> bytes:
    bits = (value if value >= 0 else ~value).bit_length()
    return value.to_bytes(bits // 8 + 1, "big", signed=True)


# -- bytes ----------------------------------------------------------------------------------------


def _hashed_bytes(column: pa.Array, seeds: HashArray) -> HashArray:
    """Texts and binaries: four lanes for each 32 bytes, then words of 8, then one of 4, then bytes."""
    data, starts, lengths = _extents(column)
    hashes = np.where(lengths >= 32, _in_lanes(data, starts, lengths, seeds), seeds + _P5)
    hashes = hashes + lengths.astype(np.uint64)
    at, ends = starts + lengths // 32 * 32, starts + lengths
    while len(rows := np.flatnonzero(at + 8 <= ends)):
        hashes[rows] = _with_long(hashes[rows], _words(data, at[rows]))
        at[rows] += 8
    rows = np.flatnonzero(at + 4 <= ends)
    hashes[rows] = _with_int(hashes[rows], _words(data, at[rows]) & np.uint64(0xFFFFFFFF))
    at[rows] += 4
    while len(rows := np.flatnonzero(at < ends)):
        hashes[rows] = _rotated(hashes[rows] ^ (data[at[rows]].astype(np.uint64) * _P5), 11) * _P1
        at[rows] += 1
    return _finished(hashes)


def _in_lanes(data: np.ndarray, starts: IndexArray, lengths: IndexArray, seeds: HashArray) -> HashArray:
    lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
    for stripe in range(int(lengths.max(initial=0)) // 32):
        rows = np.flatnonzero(lengths >= 32 * (stripe + 1))
        for number, lane in enumerate(lanes):
            words = _words(data, starts[rows] + 32 * stripe + 8 * number)
            lane[rows] = _rotated(lane[rows] + words * _P2, 31) * _P1
    hashes = _rotated(lanes[0], 1) + _rotated(lanes[1], 7) + _rotated(lanes[2], 12) + _rotated(lanes[3], 18)
    for lane in lanes:
        hashes = (hashes ^ (_rotated(lane * _P2, 31) * _P1)) * _P1 + _P4
    return hashes


def _extents(column: pa.Array) -> tuple[np.ndarray, IndexArray, IndexArray]:
    """The bytes of all values, with some behind them, and for each value where it begins and how long it is."""
    _, offsets, data = column.buffers()
    if not len(column):
        nothing: IndexArray = np.empty(0, dtype=np.int64)
        return np.zeros(8, dtype=np.uint8), nothing, nothing
    bounds = np.frombuffer(offsets, dtype=np.int32)[column.offset :][: len(column) + 1].astype(np.int64)
    own = np.frombuffer(data, dtype=np.uint8)[bounds[0] : bounds[-1]] if data is not None else np.empty(0, np.uint8)
    bounds -= bounds[0]
    return np.concatenate([own, np.zeros(8, dtype=np.uint8)]), bounds[:-1].copy(), np.diff(bounds)


def _words(data: np.ndarray, at: IndexArray) -> HashArray:
    """Eight bytes from each place on, the first the lowest."""
    words: HashArray = data[at[:, None] + np.arange(8)].view(np.uint64)[:, 0]
    return words


# -- lists ----------------------------------------------------------------------------------------


def _hashed_lists(column: pa.Array, seeds: HashArray) -> HashArray:
    """From element to element; NULL and empty lists go on with the seed."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    elements = column.flatten()
    starts = np.cumsum(lengths) - lengths
    hashes = seeds.copy()
    for place in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > place)
        hashes[rows] = _hashed(elements.take(pa.array(starts[rows] + place)), hashes[rows])
    return hashes
