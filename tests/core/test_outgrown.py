"""If state exceeds the size of a compaction, its snapshots become runs, and the store stays small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from core_support import WRITER, first_pointer
from hypothesis import given
from hypothesis import strategies as st

from arrow_schemas import CheckpointRef, Pointer, RowSchema
from arrow_schemas.lineage import SNAPSHOT, parse_file_name
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import StoreFullError
from spark_state_ext.files import checkpoint as checkpoint_module
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore
from spark_state_ext.store.compaction import choose_compaction
from spark_state_ext.store.runs import sort_by_hash
from spark_state_ext.worker.background import Background, Inline, Runner
from spark_state_ext.worker.spill import SpillBuffer
from tests.helpers.waiting import WAIT_S

SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))
KEYS, CHANGED, ROW_BYTES = 20_000, 500, 26
COMPACTION_BYTES_MAX = 512 << 10
STATE_BYTES = KEYS * ROW_BYTES


def rows_of(keys: np.ndarray, value: int, live: bool = True) -> pa.RecordBatch:
    n = len(keys)
    hashes = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = np.full(n, value) if live else pa.nulls(n, pa.int64())
    columns = [hashes, keys, values, pa.nulls(n, pa.int64()), np.full(n, live), np.full(n, not live)]
    return sort_by_hash(pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=SCHEMA.arrow))


def buffer_with(rows: pa.RecordBatch, folder: Path) -> SpillBuffer:
    buffer = SpillBuffer(folder, 1 << 30)
    buffer.append(rows)
    return buffer


class Job:
    """A bucket whose keys change at random, with the values expected after each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore.at(folder / "store", SCHEMA, compaction_bytes_max=COMPACTION_BYTES_MAX)
        self.replicas = sole_replica(Folder(str(folder / "root")).child("3"), folder)
        self.pointer: Pointer = replace(first_pointer(), operator="counts")
        self.values = np.full(KEYS, -1)
        self.rng = np.random.default_rng(1)
        self.background: Runner = Inline()

    def bucket(self) -> Bucket:
        return Bucket(
            self.store,
            self.replicas,
            self.pointer,
            WRITER,
            CommitContext(self.folder, batches_retained=2, runner=self.background),
        )

    def batch(self, keys: np.ndarray) -> None:
        value = self.pointer.version + 1
        self.pointer = self.bucket().commit(buffer_with(rows_of(keys, value), self.folder)).pointer
        self.values[keys] = value

    def history(self, batches: int, each: Callable[[], None] = lambda: None) -> None:
        self.batch(np.arange(KEYS))
        for _ in range(batches):
            self.batch(self.rng.choice(KEYS, CHANGED, replace=False))
            each()

    def snapshots(self) -> set[CheckpointRef]:
        names = [parse_file_name(path.name) for path in (self.folder / "root" / "3").iterdir()]
        return {name[0] for name in names if name is not None and name[1] == SNAPSHOT}

    def check(self) -> None:
        table = pa.Table.from_batches(self.bucket().scan()).sort_by("key.k")
        assert table["key.k"].to_pylist() == list(range(KEYS))
        assert np.array_equal(table["state.n"].to_numpy(), self.values)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(checkpoint_module, "_INGESTED_BYTES_MIN", 64 << 10)
    return Job(tmp_path)


def test_the_size_of_the_store_stays_proportional_to_the_state(job: Job) -> None:
    sizes: list[int] = []
    runs: list[int] = []
    on_disk: list[int] = []

    def record() -> None:
        view = job.store.view(job.pointer.ref)
        sizes.append(view.size_bytes)
        runs.append(len(view.runs))
        on_disk.append(sum(path.stat().st_size for path in job.store._environment.folder.glob("base-*")))

    job.history(400, record)
    assert max(sizes) < 4 * STATE_BYTES
    assert max(sizes[200:]) <= 1.2 * max(sizes[:200]), "the store does not grow with the batches"
    assert max(runs) < 25
    assert max(on_disk) < 4 * STATE_BYTES
    job.check()


def test_compaction_alone_lets_the_store_grow(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above relies on this."""
    monkeypatch.setattr(LocalStore, "outgrown", lambda store, view: False)
    job.history(300)
    assert job.store.view(job.pointer.ref).size_bytes > 6 * STATE_BYTES
    job.check()


def test_snapshots_become_runs_even_if_they_are_written_late(job: Job) -> None:
    """They are written in the background, while batches continue and runs are compacted."""
    job.background = background = Background()
    ends: set[CheckpointRef] = set()

    def record() -> None:
        if job.pointer.version % 10 == 0:
            # Snapshots are late by at most ten batches, so that `record` sees the run of each.
            assert background.wait(WAIT_S)
        ends.update(run.newest for run in job.store.view(job.pointer.ref).runs if run.file_bytes)

    job.history(250, record)
    assert background.wait(WAIT_S)
    job.batch(np.arange(9))
    record()
    assert len(ends) > 1, "compaction does not merge across a snapshot"
    assert ends == job.snapshots()
    job.check()


@pytest.mark.parametrize(
    ("where", "name", "error", "reason"),
    [
        (LocalStore, "ingest", StoreFullError("no room"), "no room"),
        # PyArrow's error under a limit such as spark.executor.pyspark.memory.
        (pa, "memory_map", OSError("Memory mapping file failed: Cannot allocate memory"), "no address space"),
    ],
    ids=["a full disk", "no address space"],
)
def test_a_snapshot_that_does_not_fit_into_the_store_is_still_uploaded(
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: object,
    name: str,
    error: Exception,
    reason: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(where, name, fail)
    job.history(120)
    assert f"keeps its old runs: {reason}" in caplog.text
    assert job.snapshots()
    assert not list(job.store._environment.folder.glob("incoming-*"))
    job.check()


def test_the_store_shrinks_with_the_state(job: Job) -> None:
    """Rows of removed keys must not stay until as many other keys have been added."""
    job.history(1)
    removed = buffer_with(rows_of(np.arange(3, KEYS), 1, live=False), job.folder)
    job.pointer = job.bucket().commit(removed).pointer
    for _ in range(120):
        job.batch(np.arange(3))
    view = job.store.view(job.pointer.ref)
    assert view.size_bytes < 600 * ROW_BYTES
    assert sum(batch.num_rows for batch in job.bucket().scan()) == 3


@given(st.lists(st.integers(1, 1_000), max_size=30), st.integers(1, 5_000), st.integers(0, 30))
def test_no_compaction_crosses_the_border(sizes: list[int], bytes_max: int, border: int) -> None:
    border = min(border, len(sizes))
    chosen = choose_compaction(sizes, bytes_max, border)
    if chosen is not None:
        start, stop = chosen
        assert stop <= border or start >= border
