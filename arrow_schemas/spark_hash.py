"""Spark's ``xxhash64(key columns …)`` of one key, in Python: which bucket a key is in can be told without Spark.

For one key, or a few: what is hashed by the million is hashed by Spark, or by columns (`spark_hashes`). It is written
a second time as a lookup from nothing must be fast, and the conversions of PyArrow that columns need import pandas. A
test compares both with Spark and with each other.

NULLs leave the hash as it is, so keys that differ in NULLs may have one hash, and whoever looks a key up compares the
key too (`arrow_schemas.equality`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from decimal import Context

import pyarrow as pa

from arrow_schemas.errors import UnsupportedTypeError

__all__ = ["key_hash", "xxhash64"]

_MASK = 0xFFFFFFFFFFFFFFFF
_SEED = 42
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_DIGITS_OF_A_LONG = 18


def key_hash(columns: Sequence[pa.Array]) -> int:
    """Hash of a key, as the column ``key_hash`` of checkpoint files has it: unsigned."""
    seed = _SEED
    for column in columns:
        seed = _hash(column[0], seed)
    return seed


def xxhash64(data: bytes, seed: int) -> int:
    """XXH64 of some bytes."""
    length, at = len(data), 0
    if length >= 32:
        lanes = [(seed + _P1 + _P2) & _MASK, (seed + _P2) & _MASK, seed, (seed - _P1) & _MASK]
        while at + 32 <= length:
            words = struct.unpack_from("<4Q", data, at)
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += 32
        rotated = zip(lanes, (1, 7, 12, 18), strict=True)
        found = sum(_rotate(lane, bits) for lane, bits in rotated) & _MASK
        for lane in lanes:
            found = ((found ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        found = (seed + _P5) & _MASK
    found = (found + length) & _MASK
    while at + 8 <= length:
        (word,) = struct.unpack_from("<Q", data, at)
        found = (_rotate(found ^ _round(0, word), 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= length:
        (half,) = struct.unpack_from("<I", data, at)
        found = (_rotate(found ^ (half * _P1 & _MASK), 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        found = _rotate(found ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    return _mixed(found)


def _hash(value: pa.Scalar, seed: int) -> int:
    """Spark's rule for a value; the hash so far is the seed."""
    if not value.is_valid:
        return seed
    types, data_type = pa.types, value.type
    if types.is_struct(data_type):
        for at in range(data_type.num_fields):
            seed = _hash(value[at], seed)
        return seed
    if types.is_list(data_type):
        for element in value.values:
            seed = _hash(element, seed)
        return seed
    # What Spark holds in 32 bits is hashed as a word of 4 bytes, all other numbers as one of 8.
    if types.is_boolean(data_type):
        return xxhash64(struct.pack("<i", value.as_py()), seed)
    if types.is_int64(data_type):
        return xxhash64(struct.pack("<q", value.as_py()), seed)
    if types.is_signed_integer(data_type):
        return xxhash64(struct.pack("<i", value.as_py()), seed)
    if types.is_date32(data_type):
        return xxhash64(struct.pack("<i", value.value), seed)
    if types.is_timestamp(data_type):
        return xxhash64(struct.pack("<q", value.value), seed)
    if types.is_floating(data_type):
        return xxhash64(_float_bytes(value.as_py(), "<f" if types.is_float32(data_type) else "<d"), seed)
    if types.is_decimal(data_type):
        return xxhash64(_decimal_bytes(value, data_type), seed)
    if types.is_string(data_type):
        return xxhash64(value.as_buffer().to_pybytes(), seed)
    if types.is_binary(data_type):
        return xxhash64(value.as_py(), seed)
    raise UnsupportedTypeError(f"a key of the type {data_type} cannot be hashed: no key column has it")


def _float_bytes(number: float, layout: str) -> bytes:
    # -0.0 as 0.0, and each NaN as Java's own.
    return struct.pack(layout, float("nan") if number != number else number + 0.0)


def _decimal_bytes(value: pa.Scalar, data_type: pa.DataType) -> bytes:
    unscaled = int(value.as_py().scaleb(data_type.scale, Context(prec=data_type.precision)))
    if data_type.precision <= _DIGITS_OF_A_LONG:
        return struct.pack("<q", unscaled)
    # Java's BigInteger: as few bytes as hold it with its sign, the highest first.
    magnitude = unscaled if unscaled >= 0 else ~unscaled
    return unscaled.to_bytes(magnitude.bit_length() // 8 + 1, "big", signed=True)


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def _mixed(found: int) -> int:
    found = (found ^ found >> 33) * _P2 & _MASK
    found = (found ^ found >> 29) * _P3 & _MASK
    return found ^ found >> 32
