"""Checksums of a chunk, one per block, so that a reader of one row need not check the whole chunk.

A chunk has megabytes, and each batch writes new ones. A process that asks a running job for a key (`View.row`) checks
only the blocks that it reads, each once, as RocksDB does. A reader of a whole chunk checks all blocks at once.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from arrow_schemas.equality import HashArray
from arrow_schemas.row import KEY_HASH
from spark_state_ext.errors import CorruptStoreError

__all__ = [
    "BINARY",
    "CHECK_BYTES",
    "FIXED",
    "NOTHING",
    "WHOLE",
    "Cells",
    "BlockChecks",
    "PartlyChecked",
    "block_crcs",
    "find_cells",
    "check_all",
    "check_crcs",
]

CHECK_BYTES = 16 << 10
_PREFIX_BYTES = 8
# Rows searched on each side of an estimate. With 500,000 random hashes, estimates are up to 30 rows off in the middle,
# and a few hundred if a chunk is only a part of a run.
_REACH = 256
NOTHING, FIXED, BINARY, WHOLE = range(4)
# Made from bytes, because PyArrow imports pandas when it first makes an array from Python values.
_FIRST = pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(bytes(8))])


def block_crcs(data: pa.Buffer | memoryview) -> bytes:
    """Return the CRC-32 of each block, u32, little-endian."""
    view = memoryview(data)
    crcs = [zlib.crc32(view[at : at + CHECK_BYTES]) for at in range(0, len(view), CHECK_BYTES)]
    return struct.pack(f"<{len(crcs)}I", *crcs)


def check_crcs(stored: memoryview | None, size_bytes: int, crc: int) -> bytes:
    """Return a chunk's stored block checksums after checking them against the manifest."""
    crcs = b"" if stored is None else bytes(stored)
    if len(crcs) != 4 * -(-size_bytes // CHECK_BYTES) or zlib.crc32(crcs) != crc:
        raise CorruptStoreError("the block checksums of a chunk of the local store do not match the manifest")
    return crcs


def check_all(data: pa.Buffer | memoryview, crcs: bytes) -> None:
    """Check all blocks of a chunk."""
    if block_crcs(data) != crcs:
        raise _checksum_error()


@dataclass(frozen=True)
class Cells:
    """Positions of a column's values in the bytes of a chunk.

    Parameters
    ----------
    kind
        `NOTHING`: all values are NULL, so their bytes are never read; `FIXED`: all values have one width; `BINARY`:
        bytes or text; `WHOLE`: any other type, of which the whole chunk is checked.
    validity, values, data
        Start of the validity bitmap (-1 if there is none), of the values or their offsets, and of the bytes that the
        offsets point into.
    bits
        Width of a value, or of an offset.
    """

    kind: int
    validity: int = -1
    values: int = -1
    bits: int = 0
    data: int = -1


@dataclass
class BlockChecks:
    """Which blocks of a chunk have been checked; kept from one use of the chunk to the next.

    Parameters
    ----------
    crcs
        Checksums of the blocks.
    done
        A byte for each block, not 0 once it was checked.
    cells
        Positions of the chunk's columns; None until they are determined.
    """

    crcs: bytes
    done: bytearray
    cells: tuple[Cells, ...] | None = None

    @staticmethod
    def none_checked(crcs: bytes) -> BlockChecks:
        """Return the state of a chunk of which no block was checked."""
        return BlockChecks(crcs, bytearray(len(crcs) // 4))

    @staticmethod
    def all_checked(size_bytes: int) -> BlockChecks:
        """Return the state of a chunk of which all blocks were checked."""
        return BlockChecks(b"", bytearray(b"\1") * -(-size_bytes // CHECK_BYTES))


class PartlyChecked:
    """A chunk that checks only the blocks it reads; valid as long as the chunk's memory."""

    def __init__(self, data: pa.Buffer, checks: BlockChecks, schema: pa.Schema, hash_min: int, hash_max: int) -> None:
        self._data = memoryview(data)
        self._address = data.address
        self._checks = checks
        self._hash_min, self._hash_max = hash_min, hash_max
        self._check(0, _PREFIX_BYTES)
        _, header_bytes = struct.unpack_from("<Ii", self._data)
        self._check(0, _PREFIX_BYTES + header_bytes)
        self._rows = pa.ipc.read_record_batch(data, schema)
        if checks.cells is None:
            checks.cells = tuple(find_cells(column, self._address) for column in self._rows.columns)
        self._hashes_at = checks.cells[schema.get_field_index(KEY_HASH)].values
        self._hashes: HashArray = np.frombuffer(self._data, np.uint64, self._rows.num_rows, self._hashes_at)

    def first_at_least(self, key_hash: int) -> int:
        """Return the first row whose hash is at least `key_hash`, or the number of rows if there is none."""
        last = len(self._hashes) - 1
        hashes, least = self._hashes, np.uint64(key_hash)
        span = max(1, self._hash_max - self._hash_min)
        guess = min(max(0, (key_hash - self._hash_min) * last // span), last)
        reach = _REACH
        while True:
            low, high = max(0, guess - reach), min(last, guess + reach)
            self._check(self._hashes_at + 8 * low, 8 * (high - low + 1))
            if (low == 0 or hashes[low] < least) and (high == last or hashes[high] >= least):
                return low + int(hashes[low : high + 1].searchsorted(least))
            reach *= 4

    def hash_at(self, row: int) -> int | None:
        """Return the hash of a row; None beyond the last row."""
        if row >= len(self._hashes):
            return None
        self._check(self._hashes_at + 8 * row, 8)
        return int(self._hashes[row])

    def row(self, row: int) -> pa.RecordBatch:
        """Return a copy of one row."""
        if 0 in self._checks.done:
            assert self._checks.cells is not None
            for cells in self._checks.cells:
                self._check_cell(cells, row)
        # Slice first: `take` allocates by the last offset of all rows, which may be unchecked.
        return self._rows.slice(row, 1).take(_FIRST)

    def _check_cell(self, cells: Cells, row: int) -> None:
        """Check the blocks that hold one row's value of a column."""
        if cells.kind == WHOLE:
            self._check(0, len(self._data))
            return
        if cells.validity >= 0:
            self._check(cells.validity + row // 8, 1)
        if cells.kind == FIXED:
            start = row * cells.bits // 8
            self._check(cells.values + start, -(-(row + 1) * cells.bits // 8) - start)
        elif cells.kind == BINARY:
            width = cells.bits // 8
            self._check(cells.values + width * row, 2 * width)
            start, end = struct.unpack_from("<2q" if width == 8 else "<2i", self._data, cells.values + width * row)
            if start < end:
                self._check(cells.data + start, end - start)

    def _check(self, start: int, size_bytes: int) -> None:
        end = start + size_bytes
        if not 0 <= start <= end <= len(self._data):
            raise _checksum_error()
        for block in range(start // CHECK_BYTES, -(-end // CHECK_BYTES)):
            if not self._checks.done[block]:
                block_bytes = self._data[block * CHECK_BYTES : (block + 1) * CHECK_BYTES]
                if zlib.crc32(block_bytes).to_bytes(4, "little") != self._checks.crcs[4 * block : 4 * block + 4]:
                    raise _checksum_error()
                self._checks.done[block] = 1


def find_cells(column: pa.Array, address: int) -> Cells:
    """Return the positions of a column's values, relative to `address`."""
    data_type, types = column.type, pa.types
    if types.is_null(data_type):
        return Cells(NOTHING)
    is_long = types.is_large_string(data_type) or types.is_large_binary(data_type)
    is_binary = is_long or types.is_string(data_type) or types.is_binary(data_type)
    if not (is_binary or types.is_primitive(data_type) or types.is_decimal(data_type)):
        # Structs, lists and maps nest in too many ways to follow.
        return Cells(WHOLE)
    validity, values, *data = (-1 if buffer is None else buffer.address - address for buffer in column.buffers())
    if is_binary:
        return Cells(BINARY, validity, values, 64 if is_long else 32, data[0])
    if 0 < column.null_count == len(column):
        # Typical for timeouts. The column still has bytes for its values, which are never read.
        return Cells(NOTHING, validity)
    return Cells(FIXED, validity, values, data_type.bit_width)


def _checksum_error() -> CorruptStoreError:
    return CorruptStoreError("a chunk of the local store differs from its checksum")
