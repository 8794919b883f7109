"""Chunks of which only the blocks that a lookup reads are compared with their checksums."""

from __future__ import annotations

import datetime
import decimal
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_search import SHAPES

from arrow_schemas import CheckpointRef, RowSchema
from arrow_schemas.lineage import new_checkpoint_id
from arrow_schemas.row import DEFINED, DELETED, KEY_HASH
from spark_state_ext.errors import CorruptStoreError
from spark_state_ext.store import LocalStore, chunk_checksums
from spark_state_ext.store.chunk_checksums import CHECK_BYTES, BlockChecks, PartlyChecked, block_crcs, check_all
from spark_state_ext.store.runs import encode_chunk

SCHEMA = RowSchema(
    (pa.field("name", pa.string()),),
    (
        pa.field("n", pa.int64()),
        pa.field("flag", pa.bool_()),
        pa.field("raw", pa.binary()),
        pa.field("price", pa.decimal128(20, 2)),
        pa.field("day", pa.date32()),
        pa.field("nothing", pa.null()),
        pa.field("small", pa.int8()),
        pa.field("tags", pa.list_(pa.string())),
    ),
)


def make_chunk(rows: int, seed: int, hashes: Any = None) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    if hashes is None:
        hashes = np.sort(rng.integers(0, 2**64, rows, dtype=np.uint64))
    numbers = range(rows)
    state = [
        pa.array([None if at % 7 == 0 else at for at in numbers], pa.int64()),
        pa.array([None if at % 5 == 0 else at % 2 == 0 for at in numbers], pa.bool_()),
        pa.array([bytes([at % 256]) * (at % 9) for at in numbers], pa.binary()),
        pa.array([decimal.Decimal(at) / 4 for at in numbers], pa.decimal128(20, 2)),
        pa.array([datetime.date(2024, 1, 1) + datetime.timedelta(at) for at in numbers]),
        pa.nulls(rows),
        pa.array([at % 100 for at in numbers], pa.int8()),
        pa.array([[str(at)] * (at % 3) for at in numbers], pa.list_(pa.string())),
    ]
    names = pa.array([f"name {at}" for at in numbers], pa.string())
    rest = [pa.nulls(rows, pa.int64()), pa.array([True] * rows), pa.array([at % 11 == 3 for at in numbers])]
    assert SCHEMA.arrow.names[-2:] == [DEFINED, DELETED]
    return pa.RecordBatch.from_arrays([pa.array(hashes), names, *state, *rest], schema=SCHEMA.arrow)


@pytest.fixture(params=[64, CHECK_BYTES])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the size of a block; one block of the real size is as large as a whole chunk of a test."""
    size: int = request.param
    monkeypatch.setattr(chunk_checksums, "CHECK_BYTES", size)
    return size


def open_chunk(data: pa.Buffer, batch: pa.RecordBatch, crcs: bytes) -> PartlyChecked:
    hashes = batch.column(KEY_HASH).to_numpy()
    return PartlyChecked(data, BlockChecks.none_checked(crcs), SCHEMA.arrow, int(hashes[0]), int(hashes[-1]))


def test_a_partly_checked_chunk_has_the_rows_of_the_chunk(blocks: int) -> None:
    batch = make_chunk(50, 1)
    _, data, crcs = encode_chunk(batch)
    check_all(data, crcs)
    chunk = open_chunk(data, batch, crcs)
    for at, key_hash in enumerate(batch.column(KEY_HASH).to_pylist()):
        assert chunk.first_at_least(key_hash) == at
        assert chunk.hash_at(at) == key_hash
        assert chunk.row(at).equals(batch.slice(at, 1))
    assert chunk.hash_at(50) is None


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10)
@given(rows=st.integers(1, 3_000), seed=st.integers(0, 2**32 - 1), wanted=st.integers(0, 2**64 - 1))
def test_a_search_is_right_for_any_distribution_of_hashes(shape: str, rows: int, seed: int, wanted: int) -> None:
    schema = RowSchema((), ())
    hashes = np.sort(SHAPES[shape](np.random.default_rng(seed).integers(0, 2**64, rows, dtype=np.uint64)))
    n = len(hashes)
    flags = pa.array(np.ones(n, dtype=np.bool_))
    batch = pa.RecordBatch.from_arrays([pa.array(hashes), pa.nulls(n, pa.int64()), flags, flags], schema=schema.arrow)
    _, data, crcs = encode_chunk(batch)
    chunk = PartlyChecked(data, BlockChecks.none_checked(crcs), schema.arrow, int(hashes[0]), int(hashes[-1]))
    for key_hash in {wanted, 0, 2**64 - 1, int(hashes[0]), int(hashes[-1]), int(hashes[n // 2])}:
        assert chunk.first_at_least(key_hash) == int(np.searchsorted(hashes, np.uint64(key_hash)))


def test_a_damaged_byte_never_changes_what_a_lookup_finds() -> None:
    """After damage to any byte, a lookup gives the right row or an error."""
    batch = make_chunk(40, 2)
    refused = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunk_checksums, "CHECK_BYTES", 64)
        _, data, crcs = encode_chunk(batch)
        intact = data.to_pybytes()
        for damaged_at in range(len(intact)):
            damaged = bytearray(intact)
            damaged[damaged_at] ^= 0xFF
            with pytest.raises(CorruptStoreError):
                check_all(pa.py_buffer(damaged), crcs)
            at = damaged_at % 40
            key_hash = batch.column(KEY_HASH)[at].as_py()
            try:
                chunk = open_chunk(pa.py_buffer(bytes(damaged)), batch, crcs)
                position = chunk.first_at_least(key_hash)
                assert (position, chunk.hash_at(position)) == (at, key_hash)
                assert chunk.row(position).equals(batch.slice(at, 1))
            except CorruptStoreError:
                refused += 1
    assert refused > 0


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary()])
def test_a_damaged_offset_of_another_row_does_not_affect_a_row(
    kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When Arrow takes one row, it allocates as many bytes as the last offset says."""
    monkeypatch.setattr(chunk_checksums, "CHECK_BYTES", 64)
    schema = RowSchema((), (pa.field("s", kind),))
    rows = 1_000
    hashes, flags = pa.array(np.arange(rows), pa.uint64()), pa.array(np.ones(rows, dtype=np.bool_))
    texts = pa.array([f"text {at}" for at in range(rows)]).cast(kind)
    batch = pa.RecordBatch.from_arrays([hashes, texts, pa.nulls(rows, pa.int64()), flags, flags], schema=schema.arrow)
    _, data, crcs = encode_chunk(batch)
    damaged = bytearray(data.to_pybytes())
    width = 8 if "large" in str(kind) else 4
    offsets = pa.ipc.read_record_batch(data, schema.arrow).column(1).buffers()[1].address - data.address
    damaged[offsets + width * rows : offsets + width * (rows + 1)] = b"\x77" * width
    chunk = PartlyChecked(pa.py_buffer(bytes(damaged)), BlockChecks.none_checked(crcs), schema.arrow, 0, rows - 1)
    assert chunk.row(700).column(1).cast(pa.binary() if "binary" in str(kind) else pa.string())[0].as_py() in (
        "text 700",
        b"text 700",
    )


def test_a_lookup_compares_few_blocks_of_a_chunk() -> None:
    schema = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))
    rows = 100_000
    hashes = np.sort(np.random.default_rng(3).integers(0, 2**64, rows, dtype=np.uint64))
    numbers, flags = pa.array(np.arange(rows)), pa.array(np.ones(rows, dtype=np.bool_))
    batch = pa.RecordBatch.from_arrays(
        [pa.array(hashes), numbers, numbers, pa.nulls(rows, pa.int64()), flags, flags], schema=schema.arrow
    )
    _, data, crcs = encode_chunk(batch)
    compared = BlockChecks.none_checked(crcs)
    chunk = PartlyChecked(data, compared, schema.arrow, int(hashes[0]), int(hashes[-1]))
    assert chunk.row(chunk.first_at_least(int(hashes[70_000]))).column("state.n").to_pylist() == [70_000]
    # It reads the header, the blocks with the hashes around the row, and one block of each column.
    assert 0 < sum(compared.done) < 12 < len(compared.done) // 3


Rows = dict[str, tuple[int | None, bool]]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    runs=st.lists(
        st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.none() | st.integers(0, 9), st.booleans())),
        min_size=1,
        max_size=4,
    ),
    colliding=st.booleans(),
    chunk_rows=st.integers(1, 4),
)
def test_a_row_by_hash_equals_the_row_of_a_lookup(
    tmp_path_factory: pytest.TempPathFactory, runs: list[Rows], colliding: bool, chunk_rows: int
) -> None:
    """This holds for any number of runs, for removed keys, and for keys with equal hashes in different chunks."""
    schema = RowSchema((pa.field("k", pa.string()),), (pa.field("n", pa.int64()),))
    store = LocalStore.at(tmp_path_factory.mktemp("store"), schema, chunk_rows=chunk_rows)
    hash_of = (lambda key: ord(key) // 4) if colliding else ord
    parent: CheckpointRef | None = None
    for version, changes in enumerate(runs, 1):
        keys = sorted(changes, key=lambda key: (hash_of(key), key))
        ref = CheckpointRef(version, new_checkpoint_id())
        n = len(keys)
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array([hash_of(key) for key in keys], pa.uint64()),
                pa.array(keys, pa.string()),
                pa.array([changes[key][0] for key in keys], pa.int64()),
                pa.nulls(n, pa.int64()),
                pa.array([True] * n, pa.bool_()),
                pa.array([changes[key][1] for key in keys], pa.bool_()),
            ],
            schema=schema.arrow,
        )
        store.apply([batch], ref, parent)
        parent = ref
    # As in a new process, no chunk counts as checked.
    store._chunks.forget_all()
    view = store.view(parent)
    for key in "abcdefghz":
        columns = [pa.array([key])]
        by_lookup = view.lookup(np.array([hash_of(key)], dtype=np.uint64), columns).rows

        def is_wanted(row: pa.RecordBatch, key: str = key) -> bool:
            return bool(row.column("key.k")[0].as_py() == key)

        by_row = view.row(hash_of(key), is_wanted)
        assert by_row.equals(by_lookup), json.dumps([key, runs])
    store.close()


def test_damaged_checksums_are_refused(tmp_path: Path) -> None:
    data = pa.py_buffer(b"x" * 200_000)
    crcs = block_crcs(data)
    assert len(crcs) == 4 * -(-200_000 // CHECK_BYTES)
    with pytest.raises(CorruptStoreError, match="checksums of a chunk"):
        chunk_checksums.check_crcs(memoryview(crcs[:-1] + b"?"), 200_000, zlib.crc32(crcs))
    with pytest.raises(CorruptStoreError, match="checksums of a chunk"):
        chunk_checksums.check_crcs(None, 200_000, zlib.crc32(crcs))
