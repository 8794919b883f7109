"""The index of snapshot files of format 3: it describes the body exactly, and each part of a file is checked with it."""

from __future__ import annotations

import hashlib
import io
import random
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from core_support import WRITER
from hypothesis import given, settings
from hypothesis import strategies as st
from test_base_file import SCHEMA, rows_of

from arrow_schemas import CheckpointRef, LineageHeader
from arrow_schemas.blocks import BLOCK_BYTES, PIECE_BYTES, BlockDigest, PieceDigest, combine_pieces
from arrow_schemas.lineage import DELTA, SNAPSHOT, BodyRecord, file_name
from arrow_schemas.snapshot_index import IndexedChunk, IndexRecord, SnapshotIndex
from spark_state_ext.errors import CorruptFileError
from spark_state_ext.files.checkpoint import read_checkpoint, verify_checkpoint, write_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_body import read_announced_index
from spark_state_ext.store import LocalStore
from spark_state_ext.store.base_file import chunks_of, read_chunks
from spark_state_ext.store.runs import Run

REF = CheckpointRef(7, "7" * 32)
HEADER = LineageHeader(SNAPSHOT, "counts", 3, REF, None, (), 0, WRITER, "0.1.0")
NAME = file_name(REF, SNAPSHOT)


def write_snapshot(batches: list[pa.RecordBatch], header: LineageHeader = HEADER) -> bytes:
    file = io.BytesIO()
    write_checkpoint(file, header, SCHEMA, batches)
    return file.getvalue()


def make_large_snapshot() -> bytes:
    """Return a snapshot with two chunks and several blocks."""
    keys = np.arange(600_000)
    return write_snapshot([rows_of(keys, keys * 2)])


def index_of(data: bytes) -> tuple[BodyRecord, SnapshotIndex]:
    record, index = read_announced_index(lambda start, end: data[start:end], len(data), "file")
    assert index is not None
    return record, index


@given(
    length=st.sampled_from([0, PIECE_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES + PIECE_BYTES]),
    more=st.integers(-2, 2),
    step=st.integers(1_000, 3 << 20),
)
@settings(max_examples=40)
def test_the_checksums_of_blocks_can_be_computed_from_those_of_pieces(length: int, more: int, step: int) -> None:
    data = np.random.default_rng(length).bytes(max(0, length + more))
    pieces, blocks = PieceDigest(), BlockDigest()
    for at in range(0, len(data), step):
        pieces.update(data[at : at + step])
        blocks.update(memoryview(data)[at : at + step])
    expected = [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    assert combine_pieces(pieces.pieces(), len(data)) == expected
    assert pieces.hexdigest() == blocks.hexdigest()


def test_the_index_matches_what_reading_all_rows_gives() -> None:
    data = make_large_snapshot()
    record, index = index_of(data)
    run = Run("0" * 32, REF, REF, None, True, record.rows, 0, (), record.length)
    chunks = read_chunks(pa.py_buffer(data), run, SCHEMA.arrow, "file")
    assert chunks_of(index) == chunks
    assert len(chunks) == 2
    assert chunks[0].timeout_max > chunks[0].timeout_min == 0
    body = data[: record.length]
    assert index.blocks() == [zlib.crc32(body[at : at + BLOCK_BYTES]) for at in range(0, len(body), BLOCK_BYTES)]
    for first in range(0, len(index.pieces), 100):
        start, end = first * PIECE_BYTES, min((first + 3) * PIECE_BYTES, record.length)
        index.check(first, data[start:end], "file")


def test_any_arrow_reader_can_read_an_indexed_snapshot_as_a_file_or_a_stream() -> None:
    data = make_large_snapshot()
    _, index = index_of(data)
    with pa.ipc.open_file(pa.py_buffer(data)) as reader:
        table = reader.read_all()
        assert [reader.get_batch(at).num_rows for at in range(reader.num_record_batches)] == [
            chunk.rows for chunk in index.chunks
        ]
    assert table.num_rows == 600_000
    assert pa.ipc.open_stream(data[8:]).read_all() == table
    # A single chunk can be read at the offset that the index gives.
    last = index.chunks[-1]
    part = pa.ipc.read_record_batch(pa.py_buffer(data[last.offset : last.offset + last.size_bytes]), SCHEMA.arrow)
    assert pa.Table.from_batches([part]) == table.slice(600_000 - last.rows)


def test_a_snapshot_without_rows_has_an_index_without_chunks() -> None:
    record, index = index_of(write_snapshot([]))
    assert (index.rows, index.chunks, len(index.pieces)) == (0, (), 1)
    assert index.body_bytes == record.length


def test_a_small_index_and_the_footer_are_fetched_in_one_read() -> None:
    data, reads = make_large_snapshot(), []

    def read(start: int, end: int) -> bytes:
        reads.append((start, end))
        return data[start:end]

    read_announced_index(read, len(data), "file")
    assert reads == [(len(data) - (64 << 10), len(data))]
    assert len(data) - index_of(data)[0].length < len(data) / 1_000, "the index must be small"


@pytest.mark.parametrize("form", ["delta", "format 1", "format 2"])
def test_deltas_and_files_of_older_formats_have_no_index(form: str, tmp_path: Path) -> None:
    header = replace(HEADER, kind=DELTA, format=1) if form == "delta" else replace(HEADER, format=int(form[-1]))
    data = write_snapshot([rows_of(np.arange(10), np.arange(10))], header)
    assert read_announced_index(lambda start, end: data[start:end], len(data), "file")[1] is None
    files = Folder(str(tmp_path / "root"))
    files.put(file_name(REF, header.kind), data)
    assert read_checkpoint(files, REF, header.kind, SCHEMA, tmp_path).header == header


def replace_index(data: bytes, index: bytes) -> bytes:
    """Return a file with another index and a correct record of it."""
    record, old = index_of(data)
    begin = record.length + 8
    rest = data[begin + len(old.encode()) :]
    return (
        data[:begin]
        + index
        + rest.replace(IndexRecord.of(old.encode(), begin).encode(), IndexRecord.of(index, begin).encode())
    )


def read_damaged(data: bytes, tmp_path: Path) -> list[pa.RecordBatch]:
    files = Folder(str(tmp_path / "root"))
    files.put(NAME, data)
    with pytest.raises(CorruptFileError) as verified:
        verify_checkpoint(files, REF, SNAPSHOT, tmp_path)
    with pytest.raises(CorruptFileError) as read:
        list(read_checkpoint(files, REF, SNAPSHOT, SCHEMA, tmp_path).batches)
    assert str(read.value) == str(verified.value)
    raise read.value


def test_an_index_that_contradicts_itself_or_the_body_is_refused(tmp_path: Path) -> None:
    data = write_snapshot([rows_of(np.arange(100), np.arange(100))])
    _, index = index_of(data)
    (chunk,) = index.chunks
    assert replace_index(data, index.encode()) == data
    wrong: list[tuple[SnapshotIndex, str]] = [
        (replace(index, pieces=index.pieces ^ np.uint32(1)), "another body"),
        (replace(index, rows=99, chunks=(replace(chunk, rows=99),)), "another body"),
        (replace(index, rows=99), "rows and tombstones"),
        (replace(index, body_bytes=index.body_bytes - 8), "another body|not in order"),
        (replace(index, body_bytes=PIECE_BYTES * 5), "pieces"),
    ]
    changes: list[dict[str, int]] = [
        {"offset": 2**64 - 8},
        {"offset": index.body_bytes},
        {"size_bytes": 2**63},
        {"size_bytes": 0},
        {"hash_min": chunk.hash_max, "hash_max": chunk.hash_min},
        {"tombstones": 101},
    ]
    wrong += [(replace(index, chunks=(replace(chunk, **change),)), "not in order") for change in changes]
    twice = replace(index, rows=200, chunks=(chunk, chunk))
    for changed, why in [*wrong, (twice, "not in order")]:
        with pytest.raises(CorruptFileError, match=why):
            read_damaged(replace_index(data, changed.encode()), tmp_path)


def test_an_unreadable_index_is_refused(tmp_path: Path) -> None:
    data = write_snapshot([rows_of(np.arange(100), np.arange(100))])
    good = index_of(data)[1].encode()
    for content in (
        b"",
        b"SSEX",
        good[:-8],
        good + bytes(8),
        b"XXXX" + good[4:],
        random.Random(7).randbytes(len(good)),
    ):
        with pytest.raises(CorruptFileError, match=r"^the index of .* cannot be read"):
            read_damaged(replace_index(data, content), tmp_path)
    many = good[:36] + struct.pack("<II", 2**32 - 1, 2**32 - 1) + good[44:]
    with pytest.raises(CorruptFileError, match="cannot be read"):
        read_damaged(replace_index(data, many), tmp_path)


def test_a_file_with_a_missing_or_wrong_index_record_is_refused(tmp_path: Path) -> None:
    data = write_snapshot([rows_of(np.arange(100), np.arange(100))])
    at = data.rindex(b"index=")
    with pytest.raises(CorruptFileError, match="has format 3, but its footer has another one"):
        read_damaged(data[:at] + b"Index=" + data[at + 6 :], tmp_path)
    record, index = index_of(data)
    moved = IndexRecord(record.length, len(index.encode()), "0" * 32).encode()
    with pytest.raises(CorruptFileError, match="that is not between body and footer"):
        read_damaged(data[:at] + moved + data[at + len(moved) :], tmp_path)


def test_a_damaged_or_truncated_part_of_the_body_is_detected() -> None:
    data = make_large_snapshot()
    _, index = index_of(data)
    part = bytearray(data[5 * PIECE_BYTES : 8 * PIECE_BYTES])
    index.check(5, bytes(part), "file")
    with pytest.raises(CorruptFileError, match="shorter"):
        index.check(5, bytes(part[:-1]), "file")
    part[PIECE_BYTES] ^= 1
    with pytest.raises(CorruptFileError, match=f"from byte {6 * PIECE_BYTES} on"):
        index.check(5, bytes(part), "file")
    with pytest.raises(CorruptFileError, match="shorter"):
        index.check(len(index.pieces), bytes(PIECE_BYTES), "file")


def test_a_restored_file_takes_its_chunks_from_the_index(tmp_path: Path) -> None:
    """The run is the same as after reading all rows, and only the heads of messages are read a second time."""
    runs = []
    for form in (2, 3):
        keys = np.arange(600_000)
        data = write_snapshot([rows_of(keys, keys * 2)], replace(HEADER, format=form))
        files = Folder(str(tmp_path / str(form)))
        files.put(NAME, data)
        store = LocalStore.at(tmp_path / f"store-{form}", SCHEMA)
        keep = store.incoming()
        copy = read_checkpoint(files, REF, SNAPSHOT, SCHEMA, tmp_path, keep).copy
        assert copy is not None
        assert (copy.index is not None) == (form == 3)
        runs.append(store.ingest(keep, copy.body_bytes, copy.blocks, copy.rows, REF, copy.index))
        store.end_incoming(keep)
        assert store.view(REF).expired(1_000).num_rows == 100
        store.close()
    comparable = [replace(run, key="", file_bytes=0, blocks=(), chunks=()) for run in runs]
    assert comparable[0] == comparable[1]
    # The header of format 3 is longer, because it names the index.
    shift = runs[1].chunks[0].offset - runs[0].chunks[0].offset
    assert shift > 0
    assert runs[1].chunks == tuple(replace(chunk, offset=chunk.offset + shift) for chunk in runs[0].chunks)


def test_a_store_refuses_an_index_with_wrong_offsets_or_row_counts(tmp_path: Path) -> None:
    keys = np.arange(600_000)
    data = write_snapshot([rows_of(keys, keys * 2)])
    record, index = index_of(data)
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    first, last = index.chunks
    for wrong in (
        (replace(first, offset=first.offset + 8), last),
        (replace(first, rows=first.rows + 1), replace(last, rows=last.rows - 1)),
    ):
        keep = store.incoming()
        keep.write_bytes(data)
        with pytest.raises(CorruptFileError, match="its index describes"):
            store.ingest(keep, record.length, index.blocks(), record.rows, REF, replace(index, chunks=wrong))
        store.end_incoming(keep)
        assert store.runs() == []
    store.close()


def test_an_index_is_encoded_as_the_format_page_describes() -> None:
    """The expected bytes are built by hand from `docs/format.md`."""
    chunk = IndexedChunk(800, 160, 2, 1, 5, 2**64 - 1, -3, 9)
    index = SnapshotIndex(960, 2, 1, (chunk,), np.array([zlib.crc32(bytes(960))], dtype=np.uint32))
    head = struct.pack("<4sIQQQII", b"SSEX", 16_384, 960, 2, 1, 1, 1)
    expected = (
        head + struct.pack("<6Q2q", 800, 160, 2, 1, 5, 2**64 - 1, -3, 9) + struct.pack("<I4x", zlib.crc32(bytes(960)))
    )
    assert index.encode() == expected
    digest = hashlib.blake2b(struct.pack("<I", zlib.crc32(bytes(960))), digest_size=16).hexdigest()
    record = IndexRecord(968, len(expected), hashlib.blake2b(expected, digest_size=16).hexdigest())
    decoded = SnapshotIndex.decode(expected, record, digest, "file")
    assert (decoded.chunks, decoded.encode()) == ((chunk,), expected)
