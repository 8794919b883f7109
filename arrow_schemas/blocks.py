"""Checksums of a snapshot's body: CRC-32 of each piece and of each block, and BLAKE2b of those of the blocks.

A digest over everything at once can only be computed from front to back, on one core. Blocks can be checked side by
side, and one at a time when a part of the file is used. Pieces are for who fetches little of a file from elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_BYTES", "PIECE_BYTES", "BlockDigest", "CrcArray", "PieceDigest", "blocks_of_pieces", "digest_of"]

BLOCK_BYTES = 4 << 20
PIECE_BYTES = 16 << 10
_PIECES_A_BLOCK = BLOCK_BYTES // PIECE_BYTES

CrcArray: TypeAlias = npt.NDArray[np.uint32]


def digest_of(crcs: Sequence[int]) -> str:
    """BLAKE2b, 16 bytes, of the blocks' CRC-32s, each as u32, as hexadecimal digits."""
    return hashlib.blake2b(struct.pack(f"<{len(crcs)}I", *crcs), digest_size=16).hexdigest()


class _Crcs:
    """The CRC-32 of each part of bytes that arrive piecemeal; to be used as the digests of `hashlib` are."""

    _part_bytes: int

    def __init__(self) -> None:
        self._crcs: list[int] = []
        self._crc = 0
        self._filled = 0
        self._taken = 0

    def update(self, data: bytes | memoryview) -> None:
        """Take more bytes."""
        view = memoryview(data).cast("B")
        self._taken += len(view)
        while len(view):
            whole = 0 if self._filled else len(view) // self._part_bytes * self._part_bytes
            if whole:
                self._crcs += [zlib.crc32(view[at : at + self._part_bytes]) for at in range(0, whole, self._part_bytes)]
                view = view[whole:]
                continue
            piece = view[: self._part_bytes - self._filled]
            self._crc = zlib.crc32(piece, self._crc)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == self._part_bytes:
                self._crcs.append(self._crc)
                self._crc = self._filled = 0

    def _all(self) -> list[int]:
        return [*self._crcs, self._crc] if self._filled else self._crcs


class BlockDigest(_Crcs):
    """The digest of what arrives."""

    _part_bytes = BLOCK_BYTES

    def hexdigest(self) -> str:
        """The digest of what has been taken so far."""
        return digest_of(self._all())


class PieceDigest(_Crcs):
    """The same digest, and the CRC-32 of each piece; no byte is looked at twice."""

    _part_bytes = PIECE_BYTES

    def pieces(self) -> CrcArray:
        """CRC-32 of each piece of what has been taken so far; the last one may be shorter."""
        return np.array(self._all(), dtype="<u4")

    def hexdigest(self) -> str:
        """The digest of what has been taken so far."""
        return digest_of(blocks_of_pieces(self.pieces(), self._taken))


def blocks_of_pieces(pieces: CrcArray, length: int) -> list[int]:
    """CRC-32 of each block, by arithmetic from those of its pieces (zlib's `crc32_combine`, for all blocks at once)."""
    if not len(pieces):
        return []
    # In rows of a block each. What lacks at the last one's front counts for nothing: no bytes have the CRC-32 0.
    whole, last_bytes = pieces[:-1], length - (len(pieces) - 1) * PIECE_BYTES
    full, rest = divmod(len(whole), _PIECES_A_BLOCK)
    crcs = np.zeros((full + 1, _PIECES_A_BLOCK), dtype=np.uint32)
    crcs[:full] = whole[: full * _PIECES_A_BLOCK].reshape(full, _PIECES_A_BLOCK)
    if rest:
        crcs[full, -rest:] = whole[-rest:]
    doublings = 0
    while crcs.shape[1] > 1:
        crcs = _shifted(_pieces_after(doublings), crcs[:, ::2]) ^ crcs[:, 1::2]
        doublings += 1
    # The file's last piece, which may be shorter.
    crcs[-1] = _shifted(_zeros_after(last_bytes), crcs[-1]) ^ pieces[-1]
    found: list[int] = crcs[:, 0].tolist()
    return found


def _shifted(tables: CrcArray, crcs: CrcArray) -> CrcArray:
    """What CRCs become where as many zeros as the tables are for follow; CRC-32 is linear."""
    shifted: CrcArray = tables[0][crcs & 0xFF]
    for byte in range(1, 4):
        shifted = shifted ^ tables[byte][(crcs >> np.uint32(8 * byte)) & np.uint32(0xFF)]
    return shifted


@functools.cache
def _pieces_after(doublings: int) -> CrcArray:
    """As `_zeros_after`, for a piece, or for two, four and so on."""
    if not doublings:
        return _zeros_after(PIECE_BYTES)
    half = _pieces_after(doublings - 1)
    return _tables(_shifted(half, _shifted(half, np.uint32(1) << np.arange(32, dtype=np.uint32))))


@functools.lru_cache(maxsize=8)
def _zeros_after(count: int) -> CrcArray:
    """For each byte of a CRC and each of its values, what becomes of it after so many zeros; u32 (4, 256)."""
    zeros = bytes(count)
    none = zlib.crc32(zeros)
    return _tables(np.array([zlib.crc32(zeros, 1 << bit) ^ none for bit in range(32)], dtype=np.uint32))


def _tables(bits: CrcArray) -> CrcArray:
    """From what becomes of each bit."""
    tables = np.zeros((4, 256), dtype=np.uint32)
    values = np.arange(256)
    for bit, effect in enumerate(bits):
        tables[bit // 8] ^= np.where(values >> (bit % 8) & 1, effect, np.uint32(0))
    return tables
