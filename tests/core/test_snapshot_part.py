"""A rescaled bucket reads only the rows of its hashes from its parent's snapshot, and checks each byte that it reads."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from core_support import WRITER
from reading_support import operator_file

from arrow_schemas import BucketMap, CheckpointRef, LineageEntry, LineageHeader, Pointer, RowSchema
from arrow_schemas.blocks import BLOCK_BYTES, PIECE_BYTES
from arrow_schemas.lineage import SNAPSHOT, file_name
from arrow_schemas.savepoint import SavedBucket
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError
from spark_state_ext.files import sealed_body
from spark_state_ext.files.checkpoint import read_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_file import seal
from spark_state_ext.rescale.origin import Origin, read_rows_of_parent
from spark_state_ext.rescale.parents import Parent, compute_origin, note_parent, parent_files
from spark_state_ext.restore.lazy import LazySnapshot, read_ends
from spark_state_ext.restore.part import read_part
from spark_state_ext.savepoints.file_copy import put_whole
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.runs import CHUNK_ROWS

_ITEM = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.string())])
SCHEMA = RowSchema(
    (pa.field("name", pa.string()), pa.field("x", pa.float64())),
    (
        pa.field("n", pa.int64()),
        pa.field("flag", pa.bool_()),
        pa.field("price", pa.decimal128(20, 2)),
        pa.field("note", pa.large_binary()),
        pa.field("none", pa.string()),
        pa.field("list", pa.list_(pa.int16())),
        pa.field("item", _ITEM),
    ),
)
REF = CheckpointRef(7, "7" * 32)
NAME = file_name(REF, SNAPSHOT)
POINTER = Pointer("counts", 0, 1, 0, 6, None, lineage=(LineageEntry(REF, 0),), query_folder="old")
HEADER = LineageHeader(SNAPSHOT, "counts", 0, REF, None, (), 0, WRITER, "0.1.0")
ROWS, END = 40_000, 1 << 64


@cache
def rows_of(count: int) -> pa.RecordBatch:
    """Return rows with evenly spread hashes, some of them equal, and with NULLs in every kind of column."""
    numbers = np.arange(count)
    hashes = np.sort(np.random.default_rng(3).integers(0, END - 1, count, dtype=np.uint64, endpoint=True))
    hashes[1::50] = hashes[::50][: len(hashes[1::50])]
    some = numbers % 3 == 0
    columns = [
        pa.array(hashes),
        pa.array([f"name {n}" for n in numbers]),
        pa.array(numbers / 2),
        pa.array(numbers, mask=some),
        pa.array(numbers % 7 == 0),
        pa.array([None if n % 5 == 0 else Decimal(int(n)) / 4 for n in numbers], pa.decimal128(20, 2)),
        pa.array([None if n % 4 == 0 else bytes([n % 251]) * (n % 90) for n in numbers], pa.large_binary()),
        pa.nulls(count, pa.string()),
        pa.array([None if n % 6 == 0 else [n % 100] * (n % 4) for n in numbers], pa.list_(pa.int16())),
        pa.array([None if n % 8 == 0 else {"a": n, "b": str(n)} for n in numbers], _ITEM),
        pa.array(numbers, mask=~some),
        pa.array(np.full(count, True)),
        pa.array(np.full(count, False)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)


class Metered:
    """A folder that counts the bytes that are read from its files."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.where, self.size, self.open_local = folder.where, folder.size, folder.open_local
        self.get, self.get_file = folder.get, folder.get_file
        self.read_bytes = 0

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Read a range and count its bytes."""
        data = self._folder.get_range(name, start, end)
        self.read_bytes += len(data)
        return data


def query_of(folder: Path, rows: pa.RecordBatch) -> tuple[Folder, Parent]:
    """Return a query folder, and its parent with one bucket whose state is one snapshot."""
    query_folder = Folder(str(folder / "root")).child("counts", "new")
    saved = put_whole(parent_files(query_folder, 0), seal(HEADER, SCHEMA, iter([rows]), folder))
    # The columns of this operator file are not used.
    old = operator_file("counts", "old", 1)
    return query_folder, note_parent(query_folder, Parent(old, SavedBucket("counts", 0, POINTER, (saved,))))


@pytest.fixture(params=[ROWS, CHUNK_ROWS + 9_000], ids=["one chunk", "two chunks"])
def rows(request: pytest.FixtureRequest) -> pa.RecordBatch:
    count: int = request.param
    return rows_of(count)


@pytest.fixture
def files(tmp_path: Path) -> Folder:
    """Return a parent's folder with one snapshot of one large chunk."""
    files = parent_files(query_of(tmp_path, rows_of(ROWS))[0], 0)
    assert read_ends_of(files).index.chunks[0].size_bytes > BLOCK_BYTES
    return files


def read_ends_of(files: Folder) -> LazySnapshot:
    ends = read_ends(files, REF, files.size(NAME))
    assert ends is not None
    return ends


def read_between(files: Folder, ends: LazySnapshot, low: int, high: int) -> list[pa.RecordBatch]:
    return list(read_part(files, ends, SCHEMA, low, high))


def combine(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
    table = pa.Table.from_batches(batches, SCHEMA.arrow)
    table.validate(full=True)
    return table


def damage(files: Folder, at: int) -> bytes:
    """Change one byte of the snapshot, and return the previous content."""
    path, before = Path(files.root) / NAME, files.get(NAME)
    path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
    return before


def test_the_parts_of_all_buckets_have_exactly_the_rows_of_the_parent(tmp_path: Path, rows: pa.RecordBatch) -> None:
    query_folder, parent = query_of(tmp_path, rows)
    files = parent_files(query_folder, 0)
    for buckets in (1, 2, 3, 64):
        parts: list[pa.RecordBatch] = []
        for bucket in range(buckets):
            low, high = BucketMap(buckets).range_of(bucket)
            part = list(read_rows_of_parent(files, parent, low, high, SCHEMA, tmp_path))
            hashes = np.concatenate([[], *(batch.column(0).to_numpy() >> np.uint64(32) for batch in part)])
            assert ((hashes >= low) & (hashes < high)).all()
            parts += part
        assert combine(iter(parts)).equals(pa.Table.from_batches([rows]))


def test_reading_half_of_the_hashes_reads_little_more_than_half_of_the_file(files: Folder) -> None:
    metered, size = Metered(files), files.size(NAME)
    for low, high in ((0, END // 2), (END // 2, END)):
        metered.read_bytes = 0
        ends = read_ends(metered, REF, size)
        assert ends is not None
        assert sum(batch.num_rows for batch in read_part(metered, ends, SCHEMA, low, high)) < 0.51 * ROWS
        assert metered.read_bytes < 0.75 * size
    unused_hash = int(rows_of(ROWS).column(0)[ROWS // 2].as_py()) + 1
    assert read_between(files, read_ends_of(files), unused_hash, unused_hash + 1)[0].num_rows == 0


def test_damage_is_detected_by_each_part_that_reads_the_damaged_byte(files: Folder) -> None:
    ends, size = read_ends_of(files), files.size(NAME)
    (chunk,) = ends.index.chunks
    halves = (0, END // 2), (END // 2, END)
    right = [read_between(files, ends, *half) for half in halves]
    detected = np.zeros(2, dtype=int)
    places = range(PIECE_BYTES, chunk.offset + chunk.size_bytes, 5 * PIECE_BYTES)
    for at in places:
        before = damage(files, at)
        for number, half in enumerate(halves):
            try:
                assert read_between(files, ends, *half) == right[number]
            except CorruptFileError:
                detected[number] += 1
        (Path(files.root) / NAME).write_bytes(before)
    # One half or both halves read each place.
    assert len(places) <= detected.sum() < 1.6 * len(places)
    assert (detected > len(places) / 4).all()
    for at in (chunk.offset + 4, size - 3, ends.index.body_bytes + 20, 20):
        before = damage(files, at)
        with pytest.raises(CorruptFileError):
            read_between(files, read_ends_of(files), *halves[1])
        (Path(files.root) / NAME).write_bytes(before)


def test_a_truncated_or_missing_file_is_an_error(files: Folder) -> None:
    ends, data, path = read_ends_of(files), files.get(NAME), Path(files.root) / NAME
    for length in (len(data) - 1, len(data) // 2, PIECE_BYTES, 0):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError):
            read_ends_of(files)
    for length in (ends.index.body_bytes // 2 // PIECE_BYTES * PIECE_BYTES, PIECE_BYTES + 5):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError, match="it was cut short"):
            read_between(files, ends, END // 2, END)
    path.unlink()
    with pytest.raises(MissingCheckpointError):
        read_between(files, ends, END // 2, END)


@pytest.mark.parametrize("count", [2_000, 2 * ROWS])
def test_the_rows_for_a_local_store_equal_those_of_a_snapshot_file(tmp_path: Path, count: int) -> None:
    query_folder, parent = query_of(tmp_path, rows_of(count))
    ref = compute_origin([parent], BucketMap(2), 1)
    assert ref is not None
    pointer = replace(POINTER, bucket=1, buckets=2, query_folder="new", lineage=(LineageEntry(ref, 0),), parents=ref)
    with closing(Origin(query_folder, pointer, BucketMap(2), SCHEMA, tmp_path)) as origin:
        name = file_name(ref, SNAPSHOT)
        part = origin.make(name, tmp_path / "kept")
        assert part is not None
        as_file = read_checkpoint(origin, ref, SNAPSHOT, SCHEMA, tmp_path, tmp_path / "read")
        assert part.header == as_file.header
        large = count > ROWS
        assert (part.copy is not None, as_file.copy is not None) == (large, large)
        if part.copy is not None and as_file.copy is not None:
            assert (tmp_path / "kept").read_bytes() == origin.get(name)
            index, other_index = part.copy.index, as_file.copy.index
            assert index is not None
            assert other_index is not None
            assert index.encode() == other_index.encode()
            assert (part.copy.blocks, part.copy.rows) == (as_file.copy.blocks, as_file.copy.rows)
            assert part.copy.body_bytes == as_file.copy.body_bytes
        else:
            assert combine(part.batches).equals(combine(as_file.batches))
        with pytest.raises(MissingCheckpointError):
            origin.make(file_name(REF, SNAPSHOT), tmp_path / "kept")


def test_a_damaged_parent_leaves_the_local_store_unchanged(tmp_path: Path) -> None:
    rows = rows_of(ROWS)
    query_folder, parent = query_of(tmp_path, rows)
    files = parent_files(query_folder, 0)
    ref = compute_origin([parent], BucketMap(2), 1)
    assert ref is not None
    pointer = replace(POINTER, bucket=1, buckets=2, query_folder="new", lineage=(LineageEntry(ref, 0),), parents=ref)
    store = LocalStore.at(tmp_path / "local", SCHEMA)

    def restore() -> pa.Table:
        origin = Origin(query_folder, pointer, BucketMap(2), SCHEMA, tmp_path)
        bucket = Bucket(store, (), pointer, WRITER, CommitContext(tmp_path), sources=(origin,))
        try:
            return bucket.read(scan_rows)
        finally:
            bucket.close()
            origin.close()

    def scan_rows(view: View) -> pa.Table:
        return pa.Table.from_batches(
            [pa.RecordBatch.from_arrays(batch.columns, schema=SCHEMA.arrow) for batch in view.scan()]
        )

    chunk, path = read_ends_of(files).index.chunks[0], Path(files.root) / NAME
    before = damage(files, chunk.offset + chunk.size_bytes - PIECE_BYTES)
    with pytest.raises(CorruptFileError, match="fails its checksum from byte"):
        restore()
    assert store.runs() == []
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(CorruptFileError):
        restore()
    path.unlink()
    with pytest.raises((CorruptFileError, MissingCheckpointError)):
        restore()
    assert store.runs() == []
    assert not [path for path in (tmp_path / "local").rglob("incoming-*") if path.name != "incoming.lock"]
    path.write_bytes(before)
    hashes = rows.column(0).to_numpy() >> np.uint64(32)
    assert restore().equals(pa.Table.from_batches([rows.slice(int(np.searchsorted(hashes, 1 << 31)))]))
    store.close()


@pytest.mark.parametrize("node_values", [(ROWS, -1), (ROWS, ROWS), (10**12, -1)], ids=["unknown", "all", "too long"])
def test_a_column_with_a_wrong_null_count_is_refused(
    node_values: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checksums are correct: another program may have written the file."""
    rows = rows_of(ROWS)
    node = struct.pack("<qq", ROWS, rows.column(3).null_count)
    write, patched = sealed_body._HashingSink.write, []

    def write_other(self: sealed_body._HashingSink, data: bytes) -> int:
        raw = bytes(memoryview(data).cast("B"))
        # Change the metadata of a message, but no rows.
        if node in raw and len(raw) < 5_000:
            patched.append(raw)
            raw = raw.replace(node, struct.pack("<qq", *node_values))
        return write(self, raw)

    files = Folder(str(tmp_path)).child("files")
    with monkeypatch.context() as patch:
        patch.setattr(sealed_body._HashingSink, "write", write_other)
        put_whole(files, seal(HEADER, SCHEMA, iter([rows]), tmp_path))
    assert patched
    ends = read_ends(files, REF, files.size(NAME))
    assert ends is not None
    with pytest.raises(CorruptFileError, match=NAME):
        list(read_part(files, ends, SCHEMA, END // 2, END // 2 + END // 8))


def test_an_index_with_wrong_hashes_rows_or_chunks_is_refused(tmp_path: Path) -> None:
    """Chunks are skipped by their hashes, so that a wrong index would lose rows."""
    files = Folder(str(tmp_path)).child("files")
    put_whole(files, seal(HEADER, SCHEMA, iter([rows_of(CHUNK_ROWS + 9_000)]), tmp_path))
    ends = read_ends(files, REF, files.size(NAME))
    assert ends is not None
    first, *rest = ends.index.chunks
    other = replace(ends, index=replace(ends.index, chunks=(replace(first, hash_min=first.hash_min + 1), *rest)))
    with pytest.raises(CorruptFileError, match="other hashes"):
        list(read_part(files, other, SCHEMA, 0, END))
    other = replace(ends, index=replace(ends.index, chunks=(replace(first, rows=first.rows - 1), *rest)))
    with pytest.raises(CorruptFileError, match="rows, but announces"):
        list(read_part(files, other, SCHEMA, 0, END))
    fewer = replace(ends, index=replace(ends.index, chunks=(first,), rows=first.rows))
    with pytest.raises(CorruptFileError, match="bytes between"):
        list(read_part(files, fewer, SCHEMA, 0, END))
