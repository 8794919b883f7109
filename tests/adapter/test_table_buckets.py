"""Rows of a table become snapshots of buckets without Spark: each row in its bucket, within the task's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from arrow_schemas.labels import find_buckets
from arrow_schemas.operator import OperatorFile
from spark_state_ext.errors import StateValueError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.bucket_copy import BucketCopy
from spark_state_ext.savepoints.saved_rows import read_visible_rows
from spark_state_ext.savepoints.task_rows import parse_copies
from spark_state_ext.spark.executor import table_tasks
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN
from spark_state_ext.version import __version__
from spark_state_ext.worker.spill import HashSorter

BUCKETS, ROWS = 40, 20_000
_KEY = '{"type":"struct","fields":[{"name":"key","type":"long","nullable":true,"metadata":{}}]}'
_STATE = '{"type":"struct","fields":[{"name":"text","type":"string","nullable":true,"metadata":{}}]}'
OPERATOR = OperatorFile("made", "", BUCKETS, _KEY, _STATE)


class WatchedSorter(HashSorter):
    """A sorter that records the maximum of the bytes that all such sorters held at a time."""

    sorters: list[WatchedSorter] = []  # noqa: RUF012 # emptied by each test
    most_held_bytes = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        WatchedSorter.sorters.append(self)

    def add(self, batch: pa.RecordBatch) -> None:
        super().add(batch)
        held = sum(sorter._held_bytes for sorter in WatchedSorter.sorters)
        WatchedSorter.most_held_bytes = max(WatchedSorter.most_held_bytes, held)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(table_tasks, "HashSorter", WatchedSorter)
    WatchedSorter.sorters, WatchedSorter.most_held_bytes = [], 0
    return {
        "package_version": __version__,
        "operator_file": OPERATOR.encode().decode(),
        "savepoint": str(tmp_path / "savepoint"),
        "savepoint_options": {},
        "id": "an id",
        "has_timeout": True,
        "watermark_ms": None,
        "memory_bytes_max": 64 << 20,
    }


def make_table_rows(hashes: Any, keys: Any) -> Iterator[pa.RecordBatch]:
    columns = [
        pa.array(keys, pa.int64()),
        pa.array([f"of {key}" for key in keys.tolist()]),
        pa.array(np.where(keys % 3 == 0, keys, -1), pa.int64(), mask=keys % 3 != 0),
        pa.array(hashes.view(np.int64)),
    ]
    whole = pa.RecordBatch.from_arrays(columns, names=["c0", "c1", "c2", HASH_COLUMN])
    return (whole.slice(at, 1_000) for at in range(0, whole.num_rows, 1_000))


def write_savepoint(arguments: dict[str, Any], hashes: Any, keys: Any) -> list[BucketCopy]:
    packed = table_tasks.pack_rows(arguments, make_table_rows(hashes, keys))
    rows = pa.Table.from_batches(table_tasks.write_buckets(arguments, packed)).to_pylist()
    return parse_copies((row["saved"], row["pointer"]) for row in rows)


@pytest.mark.parametrize("memory_bytes", [64 << 10, 64 << 20])
def test_each_row_is_in_its_bucket(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    """The rows need not fit into memory."""
    monkeypatch.setattr(table_tasks, "_HELD_BYTES_MAX", 100_000)
    arguments["memory_bytes_max"] = memory_bytes
    rng = np.random.default_rng(1)
    keys = rng.permutation(ROWS)
    # Every thousandth key shares its hash with another one.
    hashes = (np.where(keys % 1_000 == 0, keys // 2_000, keys)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    copies = write_savepoint(arguments, hashes, keys)
    assert [copy.saved.bucket for copy in copies] == list(range(BUCKETS))
    bucket_of = dict(zip(keys.tolist(), find_buckets(hashes, BUCKETS).tolist(), strict=True))
    seen: dict[int, str] = {}
    for copy in copies:
        pointer = copy.saved.pointer
        rows = [
            row
            for batch in read_visible_rows(Folder(arguments["savepoint"]), copy.saved, OPERATOR.row_schema(), tmp_path)
            for row in batch.to_pylist()
        ]
        assert {bucket_of[row["key"]] for row in rows} == {copy.saved.bucket}
        assert pointer.rows == len(rows)
        timeouts = [row["timeout_ms"] for row in rows if row["timeout_ms"] is not None]
        assert timeouts == [row["key"] for row in rows if row["key"] % 3 == 0]
        assert pointer.earliest_timeout_ms == min(timeouts)
        seen.update((row["key"], row["text"]) for row in rows)
    assert seen == {key: f"of {key}" for key in range(ROWS)}


def test_the_memory_limit_is_for_a_task_and_not_for_each_bucket(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_tasks, "_HELD_BYTES_MAX", 10_000)
    arguments["memory_bytes_max"] = 256 << 10
    keys = np.arange(ROWS)
    write_savepoint(arguments, keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), keys)
    # The table has about a million bytes.
    assert sum(sorter.size_bytes for sorter in WatchedSorter.sorters) > 500_000
    assert WatchedSorter.most_held_bytes < arguments["memory_bytes_max"]


@pytest.mark.parametrize("memory_bytes", [64 << 10, 64 << 20])
def test_a_key_that_occurs_twice_is_refused(arguments: dict[str, Any], memory_bytes: int) -> None:
    arguments["memory_bytes_max"] = memory_bytes
    keys = np.append(np.arange(ROWS), 777)
    with pytest.raises(StateValueError, match=r"the key \{'key': 777\} more than once"):
        write_savepoint(arguments, keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), keys)
