"""Bucket labels: the integers whose Spark hash is 0, 1, 2, …

Spark places a row by ``murmur3(label, seed 42) mod partitions``. If buckets were labelled 0…N-1, chance would put
several buckets on some partitions and leave others empty. Murmur3 of a 32-bit integer is a bijection, so it can be
inverted: the label of bucket *i* hashes to exactly *i*, and buckets spread evenly over any number of partitions. A
label depends only on the bucket's number.
"""

from __future__ import annotations

import numpy as np

from arrow_schemas.equality import HashArray, IndexArray

__all__ = ["bucket_label", "find_buckets", "label_bucket"]

_MASK = 0xFFFFFFFF
_SEED = 42
_C1, _C2, _M, _N = 0xCC9E2D51, 0x1B873593, 5, 0xE6546B64
_F1, _F2 = 0x85EBCA6B, 0xC2B2AE35


def bucket_label(bucket: int) -> int:
    """Return the signed 32-bit integer whose Spark hash (`hash(label)`) is `bucket`."""
    h = bucket & _MASK
    h ^= h >> 16
    h = h * pow(_F2, -1, 1 << 32) & _MASK
    h ^= (h >> 13) ^ (h >> 26)
    h = h * pow(_F1, -1, 1 << 32) & _MASK
    h ^= h >> 16
    h ^= 4  # length of an int in bytes
    h = (h - _N) * pow(_M, -1, 1 << 32) & _MASK
    k = _rotate(h, 19) ^ _SEED
    k = k * pow(_C2, -1, 1 << 32) & _MASK
    k = _rotate(k, 17) * pow(_C1, -1, 1 << 32) & _MASK
    return k - (1 << 32) if k >= 1 << 31 else k


def label_bucket(label: int) -> int:
    """Return the bucket of a label: Spark's Murmur3 hash of an int, as an unsigned number."""
    k = _rotate((label & _MASK) * _C1 & _MASK, 15) * _C2 & _MASK
    h = (_rotate(_SEED ^ k, 13) * _M + _N) & _MASK
    h ^= 4
    h = (h ^ (h >> 16)) * _F1 & _MASK
    h = (h ^ (h >> 13)) * _F2 & _MASK
    return h ^ (h >> 16)


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & _MASK


def find_buckets(hashes: HashArray, buckets: int) -> IndexArray:
    """Return each hash's bucket: its high 32 bits scaled to the number of buckets, so a bucket is a range of hashes."""
    bucket_numbers: IndexArray = (((hashes >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)).astype(np.int64)
    return bucket_numbers
