"""Bounded memory: rows beyond a budget are written to files on the local disk and read back memory-mapped.

`SpillBuffer` keeps batches in order. `HashSorter` takes rows in any order and returns them by ascending hash, in ranges
that fit the budget; the rows of a single key are never divided, even if they exceed it.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from arrow_schemas.equality import HashArray
from spark_state_ext.errors import StateError, StorageError, StoreFullError
from spark_state_ext.worker.descriptors import is_limit_reached, make_too_many_error

__all__ = ["HashSorter", "SpillBuffer", "translate_local_errors"]

_PIECE_ROWS = 16_384


class SpillBuffer:
    """Record batches of one schema, kept in order; re-iterable."""

    def __init__(self, folder: Path, memory_bytes_max: int) -> None:
        self._folder = folder
        self._memory_bytes_max = memory_bytes_max
        self._spilled: list[list[pa.RecordBatch]] = []
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self.rows = 0
        self.size_bytes = 0
        self.spilled_bytes = 0

    def append(self, batch: pa.RecordBatch) -> None:
        """Add a batch."""
        size = batch.get_total_buffer_size()
        self._held.append(batch)
        self._held_bytes += size
        self.rows += batch.num_rows
        self.size_bytes += size
        if self._held_bytes > self._memory_bytes_max:
            self._spilled.append(_write_mapped(self._folder, self._held))
            self.spilled_bytes += self._held_bytes
            self._held, self._held_bytes = [], 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for piece in self._spilled:
            yield from piece
        yield from self._held


class HashSorter:
    """Sorts rows by a column of 64-bit hashes, taken as unsigned, within a memory budget."""

    def __init__(self, folder: Path, hash_column: str, memory_bytes_max: int) -> None:
        self._folder = folder
        self._column = hash_column
        self._memory_bytes_max = memory_bytes_max
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._pieces: list[list[pa.RecordBatch]] = []
        self.rows = 0
        self.size_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        if not batch.num_rows:
            return
        size = batch.get_total_buffer_size()
        self._held.append(batch)
        self._held_bytes += size
        self.rows += batch.num_rows
        self.size_bytes += size
        # Half the budget, because sorting makes a copy of the rows in memory.
        if self._held_bytes > self._memory_bytes_max // 2:
            self._spill()

    @property
    def spilled(self) -> bool:
        """True if rows were written to disk."""
        return bool(self._pieces)

    def ranges(self) -> Iterator[tuple[int, pa.Table | None]]:
        """Yield all rows as (upper bound, rows) of ascending hash ranges that cover all hashes; consumes the rows."""
        if not self._pieces:
            held, self._held = self._held, []
            yield 2**64 - 1, pa.Table.from_batches(held) if held else None
            return
        if self._held:
            self._spill()
        batches = [batch for piece in self._pieces for batch in piece]
        self._pieces = []
        spans = [(int(hashes[0]), int(hashes[-1])) for hashes in map(self._hashes, batches)]
        lower = -1
        for upper in self._borders(batches):
            parts = []
            for batch, (first, last) in zip(batches, spans, strict=True):
                if last <= lower or first > upper:
                    continue
                hashes = self._hashes(batch)
                lo = 0 if lower < 0 else int(np.searchsorted(hashes, np.uint64(lower), side="right"))
                hi = int(np.searchsorted(hashes, np.uint64(upper), side="right"))
                if lo < hi:
                    parts.append(batch.slice(lo, hi - lo))
            yield upper, pa.Table.from_batches(parts) if parts else None
            lower = upper

    def _borders(self, batches: list[pa.RecordBatch]) -> list[int]:
        """Return the upper bounds of the ranges: quantiles of the hashes, so many that each range fits the budget."""
        count = max(1, -(-4 * self.size_bytes // self._memory_bytes_max))
        step = max(1, self.rows // 100_000)
        sample = np.sort(np.concatenate([self._hashes(batch)[::step] for batch in batches]))
        at = (np.arange(1, count) * len(sample)) // count
        borders: list[int] = np.unique(np.append(sample[at], np.uint64(2**64 - 1))).tolist()
        return borders

    def _spill(self) -> None:
        # One chunk per column, because `take` from several chunks would join them for every piece.
        table = pa.Table.from_batches(self._held).combine_chunks()
        self._held, self._held_bytes = [], 0
        order = pa.array(np.argsort(_unsigned(table[self._column]), kind="stable"))
        pieces = (table.take(order.slice(i, _PIECE_ROWS)) for i in range(0, len(order), _PIECE_ROWS))
        flat = (batch for piece in pieces for batch in piece.combine_chunks().to_batches())
        self._pieces.append(_write_mapped(self._folder, flat))

    def _hashes(self, batch: pa.RecordBatch) -> HashArray:
        return _unsigned(batch.column(self._column))


def _unsigned(column: pa.Array | pa.ChunkedArray) -> HashArray:
    """Return a column of 64-bit hashes as unsigned numbers: Spark's are signed, buckets and runs use the bits."""
    hashes: HashArray = column.to_numpy().view(np.uint64)
    return hashes


def _write_mapped(folder: Path, batches: Iterator[pa.RecordBatch] | list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Write batches to a local file that is removed at once, and return them as views of its mapped pages."""
    with translate_local_errors(folder), tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "spill.arrow"
        with contextlib.ExitStack() as stack:
            sink = stack.enter_context(pa.OSFile(str(path), "wb"))
            writer: pa.RecordBatchFileWriter | None = None
            for batch in batches:
                if writer is None:
                    writer = pa.ipc.new_file(sink, batch.schema)
                writer.write_batch(batch)
            if writer is None:
                return []
            writer.close()
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    raise AssertionError("unreachable: local_errors raises what it catches")


@contextlib.contextmanager
def translate_local_errors(folder: Path) -> Iterator[None]:
    """Translate errors of temporary files in a local folder into this package's errors."""
    try:
        yield
    except StateError:
        raise
    except OSError as error:
        if is_limit_reached(error):
            raise make_too_many_error(f"temporary files in the local folder {folder} failed") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise StoreFullError(f"the disk of the local folder {folder} is full: {error}. Make room there.") from error
        raise StorageError(f"temporary files in the local folder {folder} failed: {error}") from error
