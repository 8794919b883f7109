"""Spark's ``xxhash64(key columns …)`` of one key, in Python, so that a key's bucket can be found without Spark.

This is for one key or a few; Spark or `spark_hashes` hash many keys. The code is a second implementation, because the
first lookup of a process must be fast, and PyArrow's conversions in `spark_hashes` import pandas. A test compares both
with Spark and with each other.

NULLs do not change the hash, so keys that differ only in NULLs may have the same hash. Lookups therefore compare the
keys too (`arrow_schemas.equality`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from decimal import Context

import pyarrow as pa

from arrow_schemas.errors import UnsupportedTypeError

__all__ = ["hash_key", "xxhash64"]

_MASK = 0xFFFFFFFFFFFFFFFF
_SEED = 42
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_DIGITS_OF_A_LONG = 18


def hash_key(columns: Sequence[pa.Array]) -> int:
    """Return the unsigned hash of a key, as in the column ``key_hash`` of checkpoint files."""
    seed = _SEED
    for column in columns:
        seed = _hash(column[0], seed)
    return seed


def xxhash64(data: bytes, seed: int) -> int:
    """Return the XXH64 of some bytes."""
    length, at = len(data), 0
    if length >= 32:
        lanes = [(seed + _P1 + _P2) & _MASK, (seed + _P2) & _MASK, seed, (seed - _P1) & _MASK]
        while at + 32 <= length:
            words = struct.unpack_from("<4Q", data, at)
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += 32
        rotated = zip(lanes, (1, 7, 12, 18), strict=True)
        digest = sum(_rotate(lane, bits) for lane, bits in rotated) & _MASK
        for lane in lanes:
            digest = ((digest ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        digest = (seed + _P5) & _MASK
    digest = (digest + length) & _MASK
    while at + 8 <= length:
        (word,) = struct.unpack_from("<Q", data, at)
        digest = (_rotate(digest ^ _round(0, word), 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= length:
        (half,) = struct.unpack_from("<I", data, at)
        digest = (_rotate(digest ^ (half * _P1 & _MASK), 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        digest = _rotate(digest ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    return _mix(digest)


def _hash(value: pa.Scalar, seed: int) -> int:
    """Hash one value by Spark's rules; the seed is the hash of the values before it."""
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
    # Types that Spark holds in 32 bits are hashed as a word of 4 bytes, all other numbers as a word of 8 bytes.
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
    raise UnsupportedTypeError(f"a key of type {data_type} cannot be hashed: key columns cannot have this type")


def _float_bytes(number: float, layout: str) -> bytes:
    # -0.0 is hashed as 0.0, and every NaN as Java's canonical NaN.
    return struct.pack(layout, float("nan") if number != number else number + 0.0)


def _decimal_bytes(value: pa.Scalar, data_type: pa.DataType) -> bytes:
    unscaled = int(value.as_py().scaleb(data_type.scale, Context(prec=data_type.precision)))
    if data_type.precision <= _DIGITS_OF_A_LONG:
        return struct.pack("<q", unscaled)
    # As Java's BigInteger: the fewest bytes that hold the number and its sign, the highest byte first.
    magnitude = unscaled if unscaled >= 0 else ~unscaled
    return unscaled.to_bytes(magnitude.bit_length() // 8 + 1, "big", signed=True)


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def _mix(digest: int) -> int:
    digest = (digest ^ digest >> 33) * _P2 & _MASK
    digest = (digest ^ digest >> 29) * _P3 & _MASK
    return digest ^ digest >> 32
