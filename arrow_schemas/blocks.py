"""The digest of a snapshot's body: CRC-32 of each block, and BLAKE2b of those.

A digest over everything at once can only be computed from front to back, on one core. Blocks can be checked side by
side, and one at a time when a part of the file is used.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence

__all__ = ["BLOCK_BYTES", "BlockDigest", "digest_of"]

BLOCK_BYTES = 4 << 20


def digest_of(crcs: Sequence[int]) -> str:
    """BLAKE2b, 16 bytes, of the blocks' CRC-32s, each as u32, as hexadecimal digits."""
    return hashlib.blake2b(struct.pack(f"<{len(crcs)}I", *crcs), digest_size=16).hexdigest()


class BlockDigest:
    """The digest of bytes that arrive piecemeal; to be used as those of `hashlib` are."""

    def __init__(self) -> None:
        self._crcs: list[int] = []
        self._crc = 0
        self._filled = 0

    def update(self, data: bytes | memoryview) -> None:
        """Take more bytes."""
        view = memoryview(data).cast("B")
        while len(view):
            piece = view[: BLOCK_BYTES - self._filled]
            self._crc = zlib.crc32(piece, self._crc)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == BLOCK_BYTES:
                self._crcs.append(self._crc)
                self._crc = self._filled = 0

    def hexdigest(self) -> str:
        """The digest of what has been taken so far."""
        return digest_of([*self._crcs, self._crc] if self._filled else self._crcs)
