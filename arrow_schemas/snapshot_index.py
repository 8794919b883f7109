"""The index of a snapshot file of format 3: where each chunk lies, and the CRC-32 of each piece of the body.

It lies between the body and Arrow's footer, where Arrow readers do not look; a fixed-width record in the footer gives
its position. A reader that has both ends of a file can fetch and check any part of it without the rest.
`docs/format.md` gives every byte.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from arrow_schemas.blocks import PIECE_BYTES, CrcArray, combine_pieces, digest_crcs
from arrow_schemas.errors import CorruptFileError

__all__ = ["INDEX_KEY", "INDEX_PLACEHOLDER", "IndexRecord", "IndexedChunk", "SnapshotIndex"]

INDEX_KEY = b"spark_state_ext.index"
_RECORD = re.compile(rb"index=([0-9a-f]{16}) bytes=([0-9a-f]{16}) blake2b=([0-9a-f]{32})")
_MAGIC = b"SSEX"
# The magic number, then the numbers of: bytes in a piece, bytes in the body, rows, tombstones, chunks, pieces.
_HEAD = struct.Struct("<4sIQQQII")
_CHUNK = np.dtype(
    [
        ("offset", "<u8"),
        ("size_bytes", "<u8"),
        ("rows", "<u8"),
        ("tombstones", "<u8"),
        ("hash_min", "<u8"),
        ("hash_max", "<u8"),
        ("timeout_min", "<i8"),
        ("timeout_max", "<i8"),
    ]
)


@dataclass(frozen=True)
class IndexRecord:
    """The record of a snapshot's index, which is in the snapshot's footer.

    Parameters
    ----------
    offset, size_bytes
        Position of the index in the file, and its size.
    digest
        BLAKE2b of the index's bytes, 32 hexadecimal digits.
    """

    offset: int
    size_bytes: int
    digest: str

    def encode(self) -> bytes:
        """Return the record as fixed-width text, which can replace `INDEX_PLACEHOLDER` in place."""
        return f"index={self.offset:016x} bytes={self.size_bytes:016x} blake2b={self.digest}".encode()

    @staticmethod
    def of(index: bytes, offset: int) -> IndexRecord:
        """Return the record for an encoded index at `offset`."""
        return IndexRecord(offset, len(index), _digest(index))

    @staticmethod
    def find(footer: bytes) -> IndexRecord | None:
        """Find the record in the bytes of a footer that Arrow has not parsed yet; return None if it has no record."""
        match = _RECORD.search(footer)
        return None if match is None else IndexRecord(int(match[1], 16), int(match[2], 16), match[3].decode())


INDEX_PLACEHOLDER = IndexRecord(0, 0, "0" * 32).encode()


@dataclass(frozen=True)
class IndexedChunk:
    """A chunk of a snapshot: one record batch, which has rows.

    Parameters
    ----------
    offset, size_bytes
        Position of the chunk's message in the file, and the size of the message.
    rows, tombstones
        Number of the chunk's rows, and how many of them are tombstones.
    hash_min, hash_max
        The chunk's first and last key hash.
    timeout_min, timeout_max
        The smallest and largest timeout of the rows, milliseconds; the largest int64 and -1 if no row has a timeout.
    """

    offset: int
    size_bytes: int
    rows: int
    tombstones: int
    hash_min: int
    hash_max: int
    timeout_min: int
    timeout_max: int


@dataclass(frozen=True, eq=False)
class SnapshotIndex:
    """The index of a snapshot.

    Parameters
    ----------
    body_bytes, rows, tombstones
        The same numbers as in the body record.
    chunks
        The chunks, in the order of the file.
    pieces
        CRC-32 of each piece of the body.
    """

    body_bytes: int
    rows: int
    tombstones: int
    chunks: tuple[IndexedChunk, ...]
    pieces: CrcArray

    def encode(self) -> bytes:
        """Return the bytes of the index section, padded to a multiple of 8 bytes."""
        head = _HEAD.pack(
            _MAGIC, PIECE_BYTES, self.body_bytes, self.rows, self.tombstones, len(self.chunks), len(self.pieces)
        )
        names = _CHUNK.names or ()
        table = np.array([tuple(getattr(chunk, name) for name in names) for chunk in self.chunks], dtype=_CHUNK)
        data = head + table.tobytes() + self.pieces.astype("<u4").tobytes()
        return data + bytes(-len(data) % 8)

    def blocks(self) -> list[int]:
        """Return the CRC-32 of each block of the body."""
        return combine_pieces(self.pieces, self.body_bytes)

    def check(self, first: int, data: bytes | memoryview, where: str) -> None:
        """Compare bytes of the body, which begin at piece number `first`, with their checksums."""
        view = memoryview(data)
        count = -(-len(view) // PIECE_BYTES)
        if min((first + count) * PIECE_BYTES, self.body_bytes) - first * PIECE_BYTES != len(view):
            raise CorruptFileError(f"{where} is shorter than it announces: it is damaged")
        for piece in range(count):
            if zlib.crc32(view[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]) != self.pieces[first + piece]:
                raise CorruptFileError(f"{where} fails its checksum from byte {(first + piece) * PIECE_BYTES} on")

    @staticmethod
    def decode(data: bytes, record: IndexRecord, body_digest: str, where: str) -> SnapshotIndex:
        """Decode an index section."""
        if len(data) != record.size_bytes or _digest(data) != record.digest:
            raise CorruptFileError(f"the index of {where} fails its checksum")
        try:
            index = _parse(data)
        except (struct.error, ValueError) as error:
            raise CorruptFileError(f"the index of {where} cannot be read: {error}") from error
        if digest_crcs(index.blocks()) != body_digest:
            raise CorruptFileError(f"the index of {where} belongs to another body than the file announces")
        return index


def _parse(data: bytes) -> SnapshotIndex:
    magic, piece_bytes, body_bytes, rows, tombstones, chunk_count, piece_count = _HEAD.unpack_from(data)
    if magic != _MAGIC or piece_bytes != PIECE_BYTES:
        raise ValueError(f"it begins with {magic!r} and has pieces of {piece_bytes} bytes")
    if piece_count != -(-body_bytes // PIECE_BYTES):
        raise ValueError(f"it has {piece_count} pieces for a body of {body_bytes} bytes")
    pieces_at = _HEAD.size + chunk_count * _CHUNK.itemsize
    end = pieces_at + 4 * piece_count
    if len(data) != end + -end % 8:
        raise ValueError(f"it has {len(data)} bytes, but {chunk_count} chunks and {piece_count} pieces need {end}")
    table = np.frombuffer(data, _CHUNK, chunk_count, _HEAD.size)
    chunks = tuple(IndexedChunk(*row) for row in table.tolist())
    _check(table, body_bytes, rows, tombstones)
    pieces = np.frombuffer(data, "<u4", piece_count, pieces_at)
    return SnapshotIndex(body_bytes, rows, tombstones, chunks, pieces)


def _check(table: npt.NDArray[Any], body_bytes: int, rows: int, tombstones: int) -> None:
    """Raise `ValueError` unless the chunks ascend in the body without overlap and have all its rows."""
    ends = table["offset"] + table["size_bytes"]
    wrong = (
        (table["rows"] == 0)
        | (table["offset"] > body_bytes)
        | (table["size_bytes"] == 0)
        | (table["size_bytes"] > body_bytes)
        | (ends > body_bytes)
        | (table["tombstones"] > table["rows"])
        | (table["hash_min"] > table["hash_max"])
    )
    disordered = (table["offset"][1:] < ends[:-1]) | (table["hash_min"][1:] < table["hash_max"][:-1])
    if wrong.any() or disordered.any():
        raise ValueError("its chunks are not in order")
    counts = (int(table["rows"].sum()), int(table["tombstones"].sum()))
    if counts != (rows, tombstones):
        raise ValueError(f"its chunks have {counts} rows and tombstones, but it announces {(rows, tombstones)}")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
