"""A rescaled bucket reads a part of its parent's snapshot: the rows of its hashes, each byte checked that it looks at."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
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


def rows_of(count: int) -> pa.RecordBatch:
    """Rows whose hashes are spread evenly, some of them the same, with every kind of column and NULLs."""
    numbers = np.arange(count)
    hashes = np.sort(np.random.default_rng(3).integers(0, END - 1, count, dtype=np.uint64, endpoint=True))
    hashes[1::50] = hashes[::50][: len(hashes[1::50])]
    some = numbers % 3 == 0
    columns = [
        pa.array(hashes),
        pa.array([f"name {it}" for it in numbers]),
        pa.array(numbers / 2),
        pa.array(numbers, mask=some),
        pa.array(numbers % 7 == 0),
        pa.array([None if it % 5 == 0 else Decimal(int(it)) / 4 for it in numbers], pa.decimal128(20, 2)),
        pa.array([None if it % 4 == 0 else bytes([it % 251]) * (it % 90) for it in numbers], pa.large_binary()),
        pa.nulls(count, pa.string()),
        pa.array([None if it % 6 == 0 else [it % 100] * (it % 4) for it in numbers], pa.list_(pa.int16())),
        pa.array([None if it % 8 == 0 else {"a": it, "b": str(it)} for it in numbers], _ITEM),
        pa.array(numbers, mask=~some),
        pa.array(np.full(count, True)),
        pa.array(np.full(count, False)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)


class Metered:
    """A folder that counts the bytes that are read of its files."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.where, self.size, self.open_local = folder.where, folder.size, folder.open_local
        self.get, self.get_file = folder.get, folder.get_file
        self.read_bytes = 0

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Read and count."""
        data = self._folder.get_range(name, start, end)
        self.read_bytes += len(data)
        return data


def query_of(folder: Path, rows: pa.RecordBatch) -> tuple[Folder, Parent]:
    """A query folder with one parent, of one bucket, whose state is one snapshot."""
    query_folder = Folder(str(folder / "root")).child("counts", "new")
    saved = put_whole(parent_files(query_folder, 0), seal(HEADER, SCHEMA, iter([rows]), folder))
    # Nobody asks it for the columns.
    old = operator_file("counts", "old", 1)
    return query_folder, note_parent(query_folder, Parent(old, SavedBucket("counts", 0, POINTER, (saved,))))


@pytest.fixture(params=[ROWS, CHUNK_ROWS + 9_000], ids=["one chunk", "two chunks"])
def rows(request: pytest.FixtureRequest) -> pa.RecordBatch:
    count: int = request.param
    return rows_of(count)


@pytest.fixture
def files(tmp_path: Path) -> Folder:
    """A parent's folder with one snapshot of one large chunk."""
    files = parent_files(query_of(tmp_path, rows_of(ROWS))[0], 0)
    assert ends_of(files).index.chunks[0].size_bytes > BLOCK_BYTES
    return files


def ends_of(files: Folder) -> LazySnapshot:
    found = read_ends(files, REF, files.size(NAME))
    assert found is not None
    return found


def between(files: Folder, ends: LazySnapshot, low: int, high: int) -> list[pa.RecordBatch]:
    return list(read_part(files, ends, SCHEMA, low, high))


def whole(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
    table = pa.Table.from_batches(batches, SCHEMA.arrow)
    table.validate(full=True)
    return table


def damage(files: Folder, at: int) -> bytes:
    """Change one byte of the snapshot; return the file as it was."""
    path, before = Path(files.root) / NAME, files.get(NAME)
    path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
    return before


def test_children_together_have_exactly_the_rows_of_their_parent(tmp_path: Path, rows: pa.RecordBatch) -> None:
    query_folder, parent = query_of(tmp_path, rows)
    files = parent_files(query_folder, 0)
    for buckets in (1, 2, 3, 64):
        parts: list[pa.RecordBatch] = []
        for bucket in range(buckets):
            low, high = BucketMap(buckets).range_of(bucket)
            part = list(read_rows_of_parent(files, parent, low, high, SCHEMA, tmp_path))
            hashes = np.concatenate([[], *(it.column(0).to_numpy() >> np.uint64(32) for it in part)])
            assert ((hashes >= low) & (hashes < high)).all()
            parts += part
        assert whole(iter(parts)).equals(pa.Table.from_batches([rows]))


def test_a_half_is_read_without_the_other_half(files: Folder) -> None:
    metered, size = Metered(files), files.size(NAME)
    for low, high in ((0, END // 2), (END // 2, END)):
        metered.read_bytes = 0
        found = read_ends(metered, REF, size)
        assert found is not None
        assert sum(it.num_rows for it in read_part(metered, found, SCHEMA, low, high)) < 0.51 * ROWS
        assert metered.read_bytes < 0.75 * size
    beside = int(rows_of(ROWS).column(0)[ROWS // 2].as_py()) + 1
    assert between(files, ends_of(files), beside, beside + 1)[0].num_rows == 0


def test_damage_is_seen_where_it_is_looked_at(files: Folder) -> None:
    ends, size = ends_of(files), files.size(NAME)
    (chunk,) = ends.index.chunks
    halves = (0, END // 2), (END // 2, END)
    right = [between(files, ends, *half) for half in halves]
    seen = np.zeros(2, dtype=int)
    places = range(PIECE_BYTES, chunk.offset + chunk.size_bytes, 5 * PIECE_BYTES)
    for at in places:
        before = damage(files, at)
        for number, half in enumerate(halves):
            try:
                assert between(files, ends, *half) == right[number]
            except CorruptFileError:
                seen[number] += 1
        (Path(files.root) / NAME).write_bytes(before)
    # Each place is in one half or the other, or in both.
    assert len(places) <= seen.sum() < 1.6 * len(places)
    assert (seen > len(places) / 4).all()
    for at in (chunk.offset + 4, size - 3, ends.index.body_bytes + 20, 20):
        before = damage(files, at)
        with pytest.raises(CorruptFileError):
            between(files, ends_of(files), *halves[1])
        (Path(files.root) / NAME).write_bytes(before)


def test_a_file_that_is_cut_short_or_gone_is_an_error(files: Folder) -> None:
    ends, data, path = ends_of(files), files.get(NAME), Path(files.root) / NAME
    for length in (len(data) - 1, len(data) // 2, PIECE_BYTES, 0):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError):
            ends_of(files)
    for length in (ends.index.body_bytes // 2 // PIECE_BYTES * PIECE_BYTES, PIECE_BYTES + 5):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError, match="it was cut short"):
            between(files, ends, END // 2, END)
    path.unlink()
    with pytest.raises(MissingCheckpointError):
        between(files, ends, END // 2, END)


@pytest.mark.parametrize("count", [2_000, 2 * ROWS])
def test_a_local_store_takes_the_rows_as_it_would_take_a_file_of_them(tmp_path: Path, count: int) -> None:
    query_folder, parent = query_of(tmp_path, rows_of(count))
    ref = compute_origin([parent], BucketMap(2), 1)
    assert ref is not None
    pointer = replace(POINTER, bucket=1, buckets=2, query_folder="new", lineage=(LineageEntry(ref, 0),), parents=ref)
    with closing(Origin(query_folder, pointer, BucketMap(2), SCHEMA, tmp_path)) as origin:
        name = file_name(ref, SNAPSHOT)
        made = origin.make(name, tmp_path / "kept")
        assert made is not None
        as_file = read_checkpoint(origin, ref, SNAPSHOT, SCHEMA, tmp_path, tmp_path / "read")
        assert made.header == as_file.header
        large = count > ROWS
        assert (made.copy is not None, as_file.copy is not None) == (large, large)
        if made.copy is not None and as_file.copy is not None:
            assert (tmp_path / "kept").read_bytes() == origin.get(name)
            index, there = made.copy.index, as_file.copy.index
            assert index is not None
            assert there is not None
            assert index.encode() == there.encode()
            assert (made.copy.blocks, made.copy.rows) == (as_file.copy.blocks, as_file.copy.rows)
            assert made.copy.body_bytes == as_file.copy.body_bytes
        else:
            assert whole(made.batches).equals(whole(as_file.batches))
        with pytest.raises(MissingCheckpointError):
            origin.make(file_name(REF, SNAPSHOT), tmp_path / "kept")


def test_a_damaged_parent_leaves_the_local_store_as_it_was(tmp_path: Path) -> None:
    rows = rows_of(ROWS)
    query_folder, parent = query_of(tmp_path, rows)
    files = parent_files(query_folder, 0)
    ref = compute_origin([parent], BucketMap(2), 1)
    assert ref is not None
    pointer = replace(POINTER, bucket=1, buckets=2, query_folder="new", lineage=(LineageEntry(ref, 0),), parents=ref)
    store = LocalStore.at(tmp_path / "local", SCHEMA)

    def restored() -> pa.Table:
        origin = Origin(query_folder, pointer, BucketMap(2), SCHEMA, tmp_path)
        bucket = Bucket(store, (), pointer, WRITER, CommitContext(tmp_path), sources=(origin,))
        try:
            return bucket.read(scanned)
        finally:
            bucket.close()
            origin.close()

    def scanned(view: View) -> pa.Table:
        return pa.Table.from_batches(
            [pa.RecordBatch.from_arrays(it.columns, schema=SCHEMA.arrow) for it in view.scan()]
        )

    chunk, path = ends_of(files).index.chunks[0], Path(files.root) / NAME
    before = damage(files, chunk.offset + chunk.size_bytes - PIECE_BYTES)
    with pytest.raises(CorruptFileError, match="fails its checksum from byte"):
        restored()
    assert store.runs() == []
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(CorruptFileError):
        restored()
    path.unlink()
    with pytest.raises((CorruptFileError, MissingCheckpointError)):
        restored()
    assert store.runs() == []
    assert not [it for it in (tmp_path / "local").rglob("incoming-*") if it.name != "incoming.lock"]
    path.write_bytes(before)
    hashes = rows.column(0).to_numpy() >> np.uint64(32)
    assert restored().equals(pa.Table.from_batches([rows.slice(int(np.searchsorted(hashes, 1 << 31)))]))
    store.close()


@pytest.mark.parametrize("told", [(ROWS, -1), (ROWS, ROWS), (10**12, -1)], ids=["unknown", "all", "too long"])
def test_a_column_that_is_said_to_have_other_nulls_is_refused(
    told: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All checksums are right, as another program may have written the file."""
    rows = rows_of(ROWS)
    node = struct.pack("<qq", ROWS, rows.column(3).null_count)
    write, patched = sealed_body._HashingSink.write, []

    def write_other(self: sealed_body._HashingSink, data: bytes) -> int:
        raw = bytes(memoryview(data).cast("B"))
        # A message's metadata, and no rows.
        if node in raw and len(raw) < 5_000:
            patched.append(raw)
            raw = raw.replace(node, struct.pack("<qq", *told))
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


def test_an_index_that_tells_other_hashes_or_too_few_chunks_is_refused(tmp_path: Path) -> None:
    """Chunks are left out by their hashes."""
    files = Folder(str(tmp_path)).child("files")
    put_whole(files, seal(HEADER, SCHEMA, iter([rows_of(CHUNK_ROWS + 9_000)]), tmp_path))
    ends = read_ends(files, REF, files.size(NAME))
    assert ends is not None
    first, *rest = ends.index.chunks
    other = replace(ends, index=replace(ends.index, chunks=(replace(first, hash_min=first.hash_min + 1), *rest)))
    with pytest.raises(CorruptFileError, match="other hashes"):
        list(read_part(files, other, SCHEMA, 0, END))
    fewer = replace(ends, index=replace(ends.index, chunks=(first,), rows=first.rows))
    with pytest.raises(CorruptFileError, match="bytes between"):
        list(read_part(files, fewer, SCHEMA, 0, END))
