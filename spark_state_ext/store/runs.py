"""Runs: sorted, immutable sets of rows, divided into chunks.

A chunk is the bytes of one Arrow IPC record-batch message; the store has the schema. A lookup searches the hash column
of a chunk, and then compares the keys of rows with equal hashes.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.damage import describe_damage
from arrow_schemas.equality import HashArray, IndexArray, group_by_key, rows_equal
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.row import DELETED, KEY_HASH, TIMEOUT_MS, RowSchema
from spark_state_ext.errors import CorruptStoreError, StorageError
from spark_state_ext.store.chunk_checksums import block_crcs

__all__ = [
    "CHUNK_ROWS",
    "Chunk",
    "Run",
    "align",
    "split_batches",
    "describe",
    "encode_chunk",
    "find_rows",
    "get_hashes",
    "join_batches",
    "merge_newest",
    "sort_by_hash",
]

# Opening a chunk costs a fixed time, so chunks are large and a run has few of them.
CHUNK_ROWS = 524_288
# Bounds the memory that reading and merging chunks takes; rows of up to 60 bytes still reach `CHUNK_ROWS`.
_CHUNK_BYTES_MAX = 32 << 20
_TOO_LARGE = (
    "state rows that are processed together have more than 2 GiB in one column; use more buckets, or a smaller "
    "memory_bytes_max so that a call processes its keys in smaller portions"
)
_NO_TIMEOUT = 2**63 - 1
# Arrow needs its buffers aligned to 8 bytes; LMDB aligns only values that are large enough for separate pages.
_ALIGNMENT = 8
# With fewer rows per wanted hash, a plain binary search is used: it reads most of the memory anyway.
_SPARSE_ROWS_A_HASH = 64
# Rows searched around an estimate, a power of two. Of 500,000 random hashes estimates are up to 30 rows off.
_WINDOW = 64


@dataclass(frozen=True)
class Chunk:
    """Statistics of a chunk in the manifest, so that most chunks need not be opened.

    `timeout_min` and `timeout_max`, in milliseconds, are over the rows that have a timeout; `offset` is the start of
    the chunk in the run's file, if the run has one.
    """

    rows: int
    size_bytes: int
    crc: int
    hash_min: int
    hash_max: int
    timeout_min: int
    timeout_max: int
    tombstones: int
    offset: int = 0


@dataclass(frozen=True)
class Run:
    """One run in the manifest.

    Parameters
    ----------
    key
        Random id that the keys of its chunks begin with: 16 bytes as hexadecimal digits.
    newest, oldest
        The range of checkpoints it covers; equal for a delta.
    parent
        The checkpoint below `oldest`; None if the run is a base, below which there is no other run.
    base
        True if the run holds the whole state up to `newest`.
    file_bytes, blocks
        If the chunks lie in a separate file (`base_file`): the length of its content, and the CRC-32 of each of its
        blocks. Otherwise 0 and empty.
    """

    key: str
    newest: CheckpointRef
    oldest: CheckpointRef
    parent: CheckpointRef | None
    base: bool
    rows: int
    tombstones: int
    chunks: tuple[Chunk, ...]
    file_bytes: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.size_bytes for chunk in self.chunks)

    def encode(self) -> bytes:
        """Encode the run as a manifest entry."""
        return json.dumps(
            {
                "key": self.key,
                "newest": [self.newest.version, self.newest.id],
                "oldest": [self.oldest.version, self.oldest.id],
                "parent": None if self.parent is None else [self.parent.version, self.parent.id],
                "base": self.base,
                "rows": self.rows,
                "tombstones": self.tombstones,
                "chunks": [list(asdict(chunk).values()) for chunk in self.chunks],
                "file_bytes": self.file_bytes,
                "blocks": self.blocks,
            }
        ).encode()

    @staticmethod
    @functools.lru_cache(maxsize=4_096)
    def decode(data: bytes) -> Run:
        """Decode a manifest entry; cached, because every call of a bucket reads all entries."""
        try:
            fields = json.loads(data)
            return Run(
                key=fields["key"],
                newest=CheckpointRef(*fields["newest"]),
                oldest=CheckpointRef(*fields["oldest"]),
                parent=None if fields["parent"] is None else CheckpointRef(*fields["parent"]),
                base=fields["base"],
                rows=fields["rows"],
                tombstones=fields["tombstones"],
                chunks=tuple(Chunk(*values) for values in fields["chunks"]),
                file_bytes=fields["file_bytes"],
                blocks=tuple(fields["blocks"]),
            )
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"an entry of the run manifest cannot be read: {describe_damage(error)}") from error


def sort_by_hash(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows of a batch, sorted by hash. Keys must be distinct."""
    hashes = get_hashes(batch)
    if len(hashes) < 2 or bool((hashes[1:] >= hashes[:-1]).all()):
        return batch
    return batch.take(pa.array(np.argsort(hashes, kind="stable")))


def get_hashes(batch: pa.RecordBatch) -> HashArray:
    """Return the hash column as a NumPy view."""
    view: HashArray = batch.column(KEY_HASH).to_numpy(zero_copy_only=True)
    return view


def encode_chunk(batch: pa.RecordBatch) -> tuple[Chunk, pa.Buffer, bytes]:
    """Return the manifest's statistics of a chunk, its bytes, and the checksums of its blocks."""
    data = batch.serialize()
    crcs = block_crcs(data)
    return describe(batch, data.size, zlib.crc32(crcs)), data, crcs


def describe(batch: pa.RecordBatch, size_bytes: int, crc: int, offset: int = 0) -> Chunk:
    """Return the manifest's statistics of a chunk."""
    hashes = get_hashes(batch)
    timeouts = batch.column(TIMEOUT_MS)
    has_timeout = timeouts.null_count < len(timeouts)
    values = timeouts.drop_null().to_numpy() if has_timeout else None
    return Chunk(
        rows=batch.num_rows,
        size_bytes=size_bytes,
        crc=crc,
        hash_min=int(hashes[0]),
        hash_max=int(hashes[-1]),
        timeout_min=int(values.min()) if values is not None else _NO_TIMEOUT,
        timeout_max=int(values.max()) if values is not None else -1,
        tombstones=batch.column(DELETED).true_count,
        offset=offset,
    )


def align(data: memoryview, chunk: Chunk) -> pa.Buffer:
    """Return a chunk's bytes as an Arrow buffer, copied if they are not aligned."""
    if len(data) != chunk.size_bytes:
        raise CorruptStoreError("the size of a chunk of the local store differs from the manifest")
    buffer = pa.py_buffer(data)
    return pa.py_buffer(bytes(data)) if buffer.address % _ALIGNMENT else buffer


def split_batches(batches: Iterable[pa.RecordBatch], rows_max: int) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of `rows_max` rows; the last has fewer, and so do batches of large rows."""
    held: list[pa.RecordBatch] = []
    count = 0
    held_bytes = 0.0
    for batch in batches:
        row_bytes = batch.nbytes / max(1, batch.num_rows)
        while batch.num_rows:
            room = int((_CHUNK_BYTES_MAX - held_bytes) // row_bytes) if row_bytes else rows_max
            if held and room < 1:
                yield _join_and_clear(held)
                count, held_bytes = 0, 0.0
                continue
            piece = batch.slice(0, min(rows_max - count, max(1, room)))
            batch = batch.slice(piece.num_rows)
            held.append(piece)
            count += piece.num_rows
            held_bytes += piece.num_rows * row_bytes
            if count == rows_max:
                yield _join_and_clear(held)
                count, held_bytes = 0, 0.0
    if held:
        yield _join_and_clear(held)


def _join_and_clear(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Join a list of batches and empty the list, so that it does not hold memory while the caller uses the result."""
    batch = join_batches(held)
    held.clear()
    return batch


def join_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Join the rows of some batches into one batch."""
    if len(batches) == 1:
        return batches[0]
    try:
        combined = pa.Table.from_batches(batches).combine_chunks().to_batches()
    except pa.ArrowInvalid as error:  # Arrow does not divide nested strings
        raise StorageError(_TOO_LARGE) from error
    if len(combined) > 1:
        raise StorageError(_TOO_LARGE)
    return combined[0] if combined else batches[0]


def find_rows(
    chunk: pa.RecordBatch,
    schema: RowSchema,
    hashes: HashArray,
    keys: Sequence[pa.Array],
    at: IndexArray | None = None,
) -> tuple[IndexArray, pa.RecordBatch]:
    """Look up many keys in one chunk; return the positions of the keys found, and their rows.

    `at`, if given, has for each key the row of the first hash that is not smaller.
    """
    chunk_hashes = get_hashes(chunk)
    if at is None:
        at = first_at_least(chunk_hashes, hashes)
    positions: IndexArray = np.arange(len(hashes), dtype=np.int64)
    positions_found: list[IndexArray] = []
    rows_found: list[pa.RecordBatch] = []
    while True:
        at_row = np.minimum(at, len(chunk_hashes) - 1)
        hit = (chunk_hashes[at_row] == hashes[positions]) & (at == at_row)
        if not hit.all():
            at, positions = at[hit], positions[hit]
        if not len(at):
            break
        # Copying first and comparing the copy costs one pass less than comparing in place.
        rows = chunk.take(pa.array(at))
        keys_left = keys if len(positions) == len(hashes) else [k.take(pa.array(positions)) for k in keys]
        same = rows_equal(schema.key_columns(rows), keys_left)
        if same.all():
            positions_found.append(positions)
            rows_found.append(rows)
            break
        positions_found.append(positions[same])
        rows_found.append(rows.filter(pa.array(same)))
        # The row has another key with the same hash; the next row may have the wanted key.
        at, positions = at[~same] + 1, positions[~same]
    if not positions_found:
        return np.empty(0, dtype=np.int64), schema.empty()
    if len(positions_found) == 1:
        return positions_found[0], rows_found[0]
    return np.concatenate(positions_found), join_batches(rows_found)


def first_at_least(ascending: HashArray, hashes: HashArray) -> IndexArray:
    """Return ``np.searchsorted(ascending, hashes)``, but faster for few hashes among very many evenly spread rows.

    A binary search over more rows than fit in the processor's cache waits for memory at every other step. With evenly
    spread hashes, the value of a hash gives its position to within a few rows, and these rows are searched for all
    hashes at once. Hashes that are not among these rows (with a bad hash function) are searched for by NumPy.
    """
    count = len(ascending)
    if count < _SPARSE_ROWS_A_HASH * len(hashes) or count <= _WINDOW or not len(hashes):
        return np.searchsorted(ascending, hashes, side="left")
    first, last = float(ascending[0]), float(ascending[-1])
    rows_per_hash = (count - 1) / max(1.0, last - first)
    target = np.clip(hashes.astype(np.float64), first, last)
    estimate = (target - first) * rows_per_hash
    for _ in range(2):
        at = np.clip(estimate, 0, count - 1).astype(np.int64)
        estimate = at + (target - ascending[at]) * rows_per_hash
    # A binary search in the rows around the estimate.
    at = np.clip(estimate - _WINDOW // 2, 0, count - _WINDOW).astype(np.int64)
    step = _WINDOW // 2
    while step:
        at += step * (ascending[at + (step - 1)] < hashes)
        step //= 2
    at += ascending[at] < hashes
    wrong = (ascending[np.minimum(at, count - 1)] < hashes) & (at < count)
    wrong |= (ascending[np.maximum(at - 1, 0)] >= hashes) & (at > 0)
    if wrong.any():
        at[wrong] = np.searchsorted(ascending, hashes[wrong], side="left")
    return at


def merge_newest(batches: Sequence[pa.RecordBatch], schema: RowSchema, drop_tombstones: bool) -> pa.RecordBatch:
    """Merge sorted batches, given newest first: return the newest row of each key, sorted by hash."""
    if len(batches) == 1:
        merged = batches[0]
    else:
        rows = join_batches(batches)
        # Rows of one key keep their order, so the first of each group is the newest.
        order, starts = group_by_key(get_hashes(rows), schema.key_columns(rows))
        merged = rows.take(pa.array(order[starts]))
    if drop_tombstones and merged.num_rows:
        deleted = merged.column(DELETED)
        if deleted.true_count:
            merged = merged.filter(pc.invert(deleted))
    return merged
