"""Checksums of a chunk, by block, so that who wants one row need not read all of the chunk to trust it.

A chunk has megabytes, and each batch writes new ones. A process that asks a running job for a key (`View.row`) compares
the blocks that it looks at, each once, as RocksDB does with the blocks of its files. Who reads a chunk whole compares
all of them at once.
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
    "Compared",
    "PartlyChecked",
    "block_crcs",
    "cells_of",
    "check_all",
    "opened_crcs",
]

CHECK_BYTES = 16 << 10
_PREFIX_BYTES = 8
# Hashes around an estimate. Of 500,000 random hashes estimates are up to 30 rows off in the middle of all, and a few
# hundred where a chunk is a part of a run only.
_REACH = 256
NOTHING, FIXED, BINARY, WHOLE = range(4)
# From bytes: PyArrow imports pandas with the first array that it makes of Python's values.
_FIRST = pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(bytes(8))])


def block_crcs(data: pa.Buffer | memoryview) -> bytes:
    """The CRC-32 of each block, u32, little-endian."""
    view = memoryview(data)
    crcs = [zlib.crc32(view[at : at + CHECK_BYTES]) for at in range(0, len(view), CHECK_BYTES)]
    return struct.pack(f"<{len(crcs)}I", *crcs)


def opened_crcs(stored: memoryview | None, size_bytes: int, crc: int) -> bytes:
    """The checksums of a chunk as they are stored, once they are what the manifest says."""
    crcs = b"" if stored is None else bytes(stored)
    if len(crcs) != 4 * -(-size_bytes // CHECK_BYTES) or zlib.crc32(crcs) != crc:
        raise CorruptStoreError("the checksums of a chunk of the local store differ from theirs")
    return crcs


def check_all(data: pa.Buffer | memoryview, crcs: bytes) -> None:
    """Compare all blocks."""
    if block_crcs(data) != crcs:
        raise _differs()


@dataclass(frozen=True)
class Cells:
    """Where the values of a column are in the bytes of a chunk.

    Parameters
    ----------
    kind
        `NOTHING`: NULL only, so that no values are looked at; `FIXED`: of one width each; `BINARY`: bytes or text;
        `WHOLE`: of any other form.
    validity, values, data
        Where the bitmap begins (-1: there is none), the values or their offsets, and what the offsets lead to.
    bits
        Width of a value, or of an offset.
    """

    kind: int
    validity: int = -1
    values: int = -1
    bits: int = 0
    data: int = -1


@dataclass
class Compared:
    """What is known of a chunk's blocks; to be kept from one use to the next.

    Parameters
    ----------
    crcs
        Their checksums.
    done
        A byte for each, not 0 once it was compared.
    cells
        Where its columns are; None: nobody has looked yet.
    """

    crcs: bytes
    done: bytearray
    cells: tuple[Cells, ...] | None = None

    @staticmethod
    def nothing(crcs: bytes) -> Compared:
        """No block was compared."""
        return Compared(crcs, bytearray(len(crcs) // 4))

    @staticmethod
    def everything(size_bytes: int) -> Compared:
        """All were."""
        return Compared(b"", bytearray(b"\1") * -(-size_bytes // CHECK_BYTES))


class PartlyChecked:
    """A chunk of which is compared what is looked at; valid as long as its memory is."""

    def __init__(self, data: pa.Buffer, compared: Compared, schema: pa.Schema, hash_min: int, hash_max: int) -> None:
        self._data = memoryview(data)
        self._address = data.address
        self._compared = compared
        self._hash_min, self._hash_max = hash_min, hash_max
        self._compare(0, _PREFIX_BYTES)
        _, header_bytes = struct.unpack_from("<Ii", self._data)
        self._compare(0, _PREFIX_BYTES + header_bytes)
        self._rows = pa.ipc.read_record_batch(data, schema)
        if compared.cells is None:
            compared.cells = tuple(cells_of(column, self._address) for column in self._rows.columns)
        self._hashes_at = compared.cells[schema.get_field_index(KEY_HASH)].values
        self._hashes: HashArray = np.frombuffer(self._data, np.uint64, self._rows.num_rows, self._hashes_at)

    def first_at_least(self, wanted: int) -> int:
        """The first row whose hash is at least this one; as many as there are rows, where none is."""
        last = len(self._hashes) - 1
        hashes, least = self._hashes, np.uint64(wanted)
        span = max(1, self._hash_max - self._hash_min)
        guess = min(max(0, (wanted - self._hash_min) * last // span), last)
        reach = _REACH
        while True:
            low, high = max(0, guess - reach), min(last, guess + reach)
            self._compare(self._hashes_at + 8 * low, 8 * (high - low + 1))
            if (low == 0 or hashes[low] < least) and (high == last or hashes[high] >= least):
                return low + int(hashes[low : high + 1].searchsorted(least))
            reach *= 4

    def hash_at(self, row: int) -> int | None:
        """The hash of a row; None beyond the last one."""
        if row >= len(self._hashes):
            return None
        self._compare(self._hashes_at + 8 * row, 8)
        return int(self._hashes[row])

    def row(self, row: int) -> pa.RecordBatch:
        """A copy of one row."""
        if 0 in self._compared.done:
            assert self._compared.cells is not None
            for cells in self._compared.cells:
                self._compare_cell(cells, row)
        # Of one row: Arrow makes room for what all rows have, by the last offset, which may not have been compared.
        return self._rows.slice(row, 1).take(_FIRST)

    def _compare_cell(self, cells: Cells, row: int) -> None:
        """All that a value of a row consists of."""
        if cells.kind == WHOLE:
            self._compare(0, len(self._data))
            return
        if cells.validity >= 0:
            self._compare(cells.validity + row // 8, 1)
        if cells.kind == FIXED:
            start = row * cells.bits // 8
            self._compare(cells.values + start, -(-(row + 1) * cells.bits // 8) - start)
        elif cells.kind == BINARY:
            width = cells.bits // 8
            self._compare(cells.values + width * row, 2 * width)
            start, end = struct.unpack_from("<2q" if width == 8 else "<2i", self._data, cells.values + width * row)
            if start < end:
                self._compare(cells.data + start, end - start)

    def _compare(self, start: int, size_bytes: int) -> None:
        end = start + size_bytes
        if not 0 <= start <= end <= len(self._data):
            raise _differs()
        for block in range(start // CHECK_BYTES, -(-end // CHECK_BYTES)):
            if not self._compared.done[block]:
                piece = self._data[block * CHECK_BYTES : (block + 1) * CHECK_BYTES]
                if zlib.crc32(piece).to_bytes(4, "little") != self._compared.crcs[4 * block : 4 * block + 4]:
                    raise _differs()
                self._compared.done[block] = 1


def cells_of(column: pa.Array, address: int) -> Cells:
    """Where a whole column of a chunk is."""
    data_type, types = column.type, pa.types
    if types.is_null(data_type):
        return Cells(NOTHING)
    is_long = types.is_large_string(data_type) or types.is_large_binary(data_type)
    is_binary = is_long or types.is_string(data_type) or types.is_binary(data_type)
    if not (is_binary or types.is_primitive(data_type) or types.is_decimal(data_type)):
        # Structs, lists and maps have too many forms to follow each.
        return Cells(WHOLE)
    validity, values, *data = (-1 if it is None else it.address - address for it in column.buffers())
    if is_binary:
        return Cells(BINARY, validity, values, 64 if is_long else 32, data[0])
    if 0 < column.null_count == len(column):
        # As timeouts mostly are. Its bytes are as many as if it had values, and nobody needs them.
        return Cells(NOTHING, validity)
    return Cells(FIXED, validity, values, data_type.bit_width)


def _differs() -> CorruptStoreError:
    return CorruptStoreError("a chunk of the local store differs from its checksum")
