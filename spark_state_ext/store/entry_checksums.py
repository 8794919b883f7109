"""Checksums of the local store's small entries: one wrong bit there could hide rows unnoticed.

LMDB keeps no checksums. The manifest has the checksums of chunks; the entries of the manifest, pins and records get
theirs here.
"""

from __future__ import annotations

import zlib

from spark_state_ext.errors import CorruptStoreError

__all__ = ["CRC_BYTES", "add_checksum", "remove_checksum"]

CRC_BYTES = 4


def add_checksum(key: bytes, value: bytes) -> bytes:
    """Prefix an entry's value with a CRC-32 of key and value."""
    return zlib.crc32(value, zlib.crc32(key)).to_bytes(CRC_BYTES, "little") + value


def remove_checksum(key: bytes, value: bytes | memoryview) -> bytes:
    """Check an entry's CRC-32 and return the value without it; the inverse of `add_checksum`."""
    data = bytes(value)
    if add_checksum(key, data[CRC_BYTES:]) != data:
        raise CorruptStoreError(f"the entry {key!r} of the local store differs from its checksum")
    return data[CRC_BYTES:]
