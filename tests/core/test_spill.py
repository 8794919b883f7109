"""Sorting and buffering with bounded memory: spilled rows are read back unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from core_support import small_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_state_ext.errors import StorageError, StoreFullError
from spark_state_ext.worker.spill import HashSorter, SpillBuffer
from tests.helpers.waiting import WAIT_S

_HASHES = st.one_of(
    st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(2**53, 2**53 + 3)
)
_BATCHES = st.lists(st.lists(_HASHES, max_size=30), max_size=8)
# The store has unsigned hashes, and Spark has signed ones.
_TYPES = st.sampled_from([pa.uint64(), pa.int64()])


def make_batches(hashes: list[list[int]], data_type: pa.DataType) -> list[pa.RecordBatch]:
    batches, count = [], 0
    for part in hashes:
        column = pa.array(np.array(part, dtype=np.uint64).view(data_type.to_pandas_dtype()), data_type)
        rows = pa.array([f"row {count + i}" for i in range(len(part))])
        count += len(part)
        batches.append(pa.record_batch({"hash": column, "row": rows}))
    return batches


@given(hashes=_BATCHES, data_type=_TYPES, memory=st.sampled_from([1, 200, 1_000, 1 << 20]))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_hash_sorter_returns_all_rows_sorted_by_ranges_of_hashes(
    hashes: list[list[int]], data_type: pa.DataType, memory: int, tmp_path: Path
) -> None:
    sorter = HashSorter(tmp_path, "hash", memory)
    batches = make_batches(hashes, data_type)
    for batch in batches:
        sorter.add(batch)
    seen: list[tuple[int, str]] = []
    lower = -1
    uppers = []
    for upper, table in sorter.ranges():
        uppers.append(upper)
        if table is not None:
            rows = list(zip(table["hash"].to_numpy().view(np.uint64).tolist(), table["row"].to_pylist(), strict=True))
            assert rows
            assert all(lower < h <= upper for h, _ in rows)
            seen += rows
        assert upper > lower
        lower = upper
    assert uppers[-1] == 2**64 - 1, "the ranges must cover every hash"
    flat = [h for part in hashes for h in part]
    assert sorted(seen) == sorted((h, f"row {i}") for i, h in enumerate(flat))
    assert sorter.rows == len(flat)
    assert list(tmp_path.iterdir()) == [], "spill files must have no name"


def test_ranges_of_the_hash_sorter_fit_its_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    memory = 1 << 20
    sorter = HashSorter(tmp_path, "hash", memory)
    for _ in range(40):
        hashes = rng.integers(-(2**63), 2**63, 5_000)
        sorter.add(pa.record_batch({"hash": hashes, "row": [f"{h:040d}" for h in hashes.tolist()]}))
    assert sorter.spilled
    ranges = list(sorter.ranges())
    assert len(ranges) > 10
    sizes = [table.nbytes for _, table in ranges if table is not None]
    assert max(sizes) <= memory
    assert sum(table.num_rows for _, table in ranges if table is not None) == 200_000


def test_rows_of_one_hash_stay_in_one_range(tmp_path: Path) -> None:
    sorter = HashSorter(tmp_path, "hash", 1_000)
    for i in range(20):
        sorter.add(pa.record_batch({"hash": pa.array([7] * 100, pa.uint64()), "row": [str(i)] * 100}))
    tables = [table for _, table in sorter.ranges() if table is not None]
    assert [table.num_rows for table in tables] == [2_000]


@given(hashes=_BATCHES, memory=st.sampled_from([0, 100, 1_000, 1 << 20]))
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_spill_buffer_returns_its_batches_in_order_every_time(
    hashes: list[list[int]], memory: int, tmp_path: Path
) -> None:
    batches = [batch for batch in make_batches(hashes, pa.uint64()) if batch.num_rows]
    buffer = SpillBuffer(tmp_path, memory)
    for batch in batches:
        buffer.append(batch)
    for _ in range(2):
        assert list(buffer) == batches, "the buffer must return the same batches each time"
    assert buffer.rows == sum(batch.num_rows for batch in batches)
    if memory < 100:
        assert (buffer.spilled_bytes > 0) == bool(batches)
    assert list(tmp_path.iterdir()) == []


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """200 MB pass through a sorter and a buffer of 8 MiB each; Arrow holds at most about twice the size of one of them."""
    script = """
import sys
from pathlib import Path
import numpy as np, pyarrow as pa
from spark_state_ext.worker.spill import HashSorter, SpillBuffer
rng = np.random.default_rng(0)
sorter, buffer = HashSorter(Path(sys.argv[1]), "hash", 8 << 20), SpillBuffer(Path(sys.argv[1]), 8 << 20)
for _ in range(100):
    sorter.add(pa.record_batch({"hash": rng.integers(-2**63, 2**63, 10_000), "row": [b"x" * 190] * 10_000}))
rows = 0
for upper, table in sorter.ranges():
    rows += table.num_rows
    buffer.append(table.combine_chunks().to_batches()[0])
assert rows == sum(batch.num_rows for batch in buffer) == 1_000_000
print(pa.default_memory_pool().max_memory() >> 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 4 < int(done.stdout) < 20, f"{done.stdout.strip()} MiB at most"


def test_a_full_disk_is_a_store_full_error(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        buffer = SpillBuffer(disk, 100)
        batch = pa.record_batch({"row": [b"x" * 1000] * 5_000})
        with pytest.raises(StoreFullError, match="full"):
            for _ in range(3):
                buffer.append(batch)
        assert list(disk.iterdir()) == []


def test_a_missing_spill_folder_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent"):
        SpillBuffer(tmp_path / "absent", 0).append(pa.record_batch({"row": [1]}))
