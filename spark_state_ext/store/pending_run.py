"""A run that is being written in several transactions."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from spark_state_ext.store import manifest
from spark_state_ext.store.runs import Chunk
from spark_state_ext.store.transaction import Writer

__all__ = ["PendingRun", "chunk_key", "crcs_key"]


@dataclass
class PendingRun:
    """A run being written: all its chunks so far, and the chunks that wait for the next write transaction."""

    key: str

    def __post_init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.waiting: list[tuple[int, pa.Buffer, bytes]] = []
        self.waiting_bytes = 0
        self.any_flushed = False

    def add(self, chunk: Chunk, data: pa.Buffer, crcs: bytes) -> None:
        """Add the next chunk, with the checksums of its blocks."""
        self.chunks.append(chunk)
        self.waiting.append((len(self.chunks) - 1, data, crcs))
        self.waiting_bytes += data.size

    def put_waiting(self, txn: Writer) -> None:
        """Write the waiting chunks."""
        manifest.mark_begun(txn, self.key)
        for index, data, crcs in self.waiting:
            txn.put(b"chunks", chunk_key(self.key, index), memoryview(data))
            txn.put(b"chunks", crcs_key(self.key, index), crcs)

    def mark_flushed(self) -> None:
        """Forget the waiting chunks, which were written; they are not visible until the manifest names the run."""
        self.waiting = []
        self.waiting_bytes = 0
        self.any_flushed = True


def chunk_key(run_key: str, index: int) -> bytes:
    """Return the key of a chunk in the database."""
    return bytes.fromhex(run_key) + index.to_bytes(4, "big")


def crcs_key(run_key: str, index: int) -> bytes:
    """Return the key of a chunk's block checksums in the database."""
    return chunk_key(run_key, index) + b"/crc"
