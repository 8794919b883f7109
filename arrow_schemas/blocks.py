"""Checksums of a snapshot's body: a CRC-32 of each piece and each block, and one BLAKE2b of the blocks' CRCs.

A digest over all bytes can only be computed from front to back, on one core. Blocks can be checked in parallel, or one
at a time if only a part of the file is used. Pieces are for readers that fetch small parts of a file from elsewhere.
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

__all__ = ["BLOCK_BYTES", "PIECE_BYTES", "BlockDigest", "CrcArray", "PieceDigest", "combine_pieces", "digest_crcs"]

BLOCK_BYTES = 4 << 20
PIECE_BYTES = 16 << 10
_PIECES_A_BLOCK = BLOCK_BYTES // PIECE_BYTES

CrcArray: TypeAlias = npt.NDArray[np.uint32]


def digest_crcs(crcs: Sequence[int]) -> str:
    """Return the 16-byte BLAKE2b of the blocks' CRC-32s, each packed as u32, in hexadecimal digits."""
    return hashlib.blake2b(struct.pack(f"<{len(crcs)}I", *crcs), digest_size=16).hexdigest()


class _Crcs:
    """Collects the CRC-32 of each part of bytes that arrive bit by bit; has the interface of a `hashlib` digest."""

    _part_bytes: int

    def __init__(self) -> None:
        self._crcs: list[int] = []
        self._crc = 0
        self._filled = 0
        self._length = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        view = memoryview(data).cast("B")
        self._length += len(view)
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

    def _list_crcs(self) -> list[int]:
        return [*self._crcs, self._crc] if self._filled else self._crcs


class BlockDigest(_Crcs):
    """Digest of the added bytes, by blocks."""

    _part_bytes = BLOCK_BYTES

    def hexdigest(self) -> str:
        """Return the digest of all bytes added so far."""
        return digest_crcs(self._list_crcs())


class PieceDigest(_Crcs):
    """The same digest as `BlockDigest`, and the CRC-32 of each piece; each byte is read only once."""

    _part_bytes = PIECE_BYTES

    def pieces(self) -> CrcArray:
        """Return the CRC-32 of each piece of the bytes added so far; the last piece may be shorter."""
        return np.array(self._list_crcs(), dtype="<u4")

    def hexdigest(self) -> str:
        """Return the digest of all bytes added so far."""
        return digest_crcs(combine_pieces(self.pieces(), self._length))


def combine_pieces(pieces: CrcArray, length: int) -> list[int]:
    """Return the CRC-32 of each block, computed from its pieces' CRCs (zlib's `crc32_combine`, vectorised)."""
    if not len(pieces):
        return []
    # One row a block. Zeros pad the last row at its front: they do not change its CRC, as the CRC-32 of no bytes is 0.
    whole, last_bytes = pieces[:-1], length - (len(pieces) - 1) * PIECE_BYTES
    full, rest = divmod(len(whole), _PIECES_A_BLOCK)
    crcs = np.zeros((full + 1, _PIECES_A_BLOCK), dtype=np.uint32)
    crcs[:full] = whole[: full * _PIECES_A_BLOCK].reshape(full, _PIECES_A_BLOCK)
    if rest:
        crcs[full, -rest:] = whole[-rest:]
    doublings = 0
    while crcs.shape[1] > 1:
        crcs = _append_zeros(_make_piece_tables(doublings), crcs[:, ::2]) ^ crcs[:, 1::2]
        doublings += 1
    # Append the file's last piece, which may be shorter.
    crcs[-1] = _append_zeros(_make_zero_tables(last_bytes), crcs[-1]) ^ pieces[-1]
    block_crcs: list[int] = crcs[:, 0].tolist()
    return block_crcs


def _append_zeros(tables: CrcArray, crcs: CrcArray) -> CrcArray:
    """Return the CRCs after appending as many zero bytes as the tables stand for; CRC-32 is linear."""
    shifted: CrcArray = tables[0][crcs & 0xFF]
    for byte in range(1, 4):
        shifted = shifted ^ tables[byte][(crcs >> np.uint32(8 * byte)) & np.uint32(0xFF)]
    return shifted


@functools.cache
def _make_piece_tables(doublings: int) -> CrcArray:
    """Return the tables for appending 2**`doublings` pieces of zeros."""
    if not doublings:
        return _make_zero_tables(PIECE_BYTES)
    half = _make_piece_tables(doublings - 1)
    return _make_tables(_append_zeros(half, _append_zeros(half, np.uint32(1) << np.arange(32, dtype=np.uint32))))


@functools.lru_cache(maxsize=8)
def _make_zero_tables(count: int) -> CrcArray:
    """Return the tables for appending `count` zero bytes: a CRC's change by byte and byte value; u32 (4, 256)."""
    zeros = bytes(count)
    unseeded = zlib.crc32(zeros)
    return _make_tables(np.array([zlib.crc32(zeros, 1 << bit) ^ unseeded for bit in range(32)], dtype=np.uint32))


def _make_tables(bits: CrcArray) -> CrcArray:
    """Return the tables that follow from the change of each single bit."""
    tables = np.zeros((4, 256), dtype=np.uint32)
    values = np.arange(256)
    for bit, effect in enumerate(bits):
        tables[bit // 8] ^= np.where(values >> (bit % 8) & 1, effect, np.uint32(0))
    return tables
