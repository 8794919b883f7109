"""Entries with a checksum: what the local store says of itself, as one wrong bit there may hide rows without a trace.

LMDB keeps no checksums. Chunks have theirs in the manifest; the manifest, pins and records have them here.
"""

from __future__ import annotations

import zlib

from spark_state_ext.errors import CorruptStoreError

__all__ = ["CRC_BYTES", "checked", "opened"]

CRC_BYTES = 4


def checked(key: bytes, value: bytes) -> bytes:
    """An entry's value with a CRC-32 of key and value before it."""
    return zlib.crc32(value, zlib.crc32(key)).to_bytes(CRC_BYTES, "little") + value


def opened(key: bytes, value: bytes | memoryview) -> bytes:
    """Inverse of `checked`."""
    data = bytes(value)
    if checked(key, data[CRC_BYTES:]) != data:
        raise CorruptStoreError(f"the entry {key!r} of the local store differs from its checksum")
    return data[CRC_BYTES:]
