"""A run that is being written, over several transactions."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from spark_state_ext.store import manifest
from spark_state_ext.store.runs import Chunk
from spark_state_ext.store.transaction import Writing

__all__ = ["Pending", "chunk_key"]


@dataclass
class Pending:
    """A run being written: chunks done, and chunks that wait for the next write transaction."""

    key: str

    def __post_init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.waiting: list[tuple[int, pa.Buffer]] = []
        self.waiting_bytes = 0
        self.any_flushed = False

    def add(self, chunk: Chunk, data: pa.Buffer) -> None:
        """Add the next chunk."""
        self.chunks.append(chunk)
        self.waiting.append((len(self.chunks) - 1, data))
        self.waiting_bytes += data.size

    def put_waiting(self, txn: Writing) -> None:
        """Write what waits."""
        manifest.begin(txn, self.key)
        for index, data in self.waiting:
            txn.put(b"chunks", chunk_key(self.key, index), memoryview(data))

    def flushed(self) -> None:
        """It is written, and visible to nobody: a run exists only once the manifest names it."""
        self.waiting = []
        self.waiting_bytes = 0
        self.any_flushed = True


def chunk_key(run_key: str, index: int) -> bytes:
    """Where a chunk lies in the database."""
    return bytes.fromhex(run_key) + index.to_bytes(4, "big")
