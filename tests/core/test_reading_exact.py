"""`open_exact` reads the state at given committed pointers. Files alone prove only the batch before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from reading_support import Job, state_of
from small_root import savepoint_of
from test_reading import EVERYWHERE, lived

from spark_state_ext import OpenState, open_state
from spark_state_ext.errors import ChangedJobError, CorruptFileError, MissingCheckpointError, StorageError, UsageError
from spark_state_ext.reading.exact_batch import ExactBatch, QueryOfOperator, open_exact
from spark_state_ext.testing.model import Row

QUERY = QueryOfOperator("counts", "query", "/checkpoints/counts")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    new_job = Job(tmp_path / "root", tmp_path)
    yield new_job
    new_job.close()


def make_exact_batch(job: Job, batch: int) -> ExactBatch:
    """Return what Spark knows of a batch. Spark retains batches from 3 on."""
    pointers = {pointer.bucket: replace(pointer, query_folder="query") for pointer in job.pointers[batch + 1]}
    return ExactBatch(batch, 3, len(job.models) - 1, pointers)


def open_at(job: Job, batch: int, path: Path | None = None) -> OpenState:
    return open_exact(path or Path(job.root), QUERY, lambda: make_exact_batch(job, batch))


def test_open_exact_reads_the_last_batch_without_proof_by_files(job: Job) -> None:
    lived(job, 14)
    job.retained = 100
    for at in range(3):
        job.batch({EVERYWHERE[0]: Row(at, "only one bucket")})
    with open_state(job.root) as state:
        assert state.batch == 12
    job.attempt({key: Row(-1, "never") for key in EVERYWHERE})
    with open_at(job, 16) as state:
        assert state_of(state) == job.models[16]
        assert (state.batch, state.oldest_batch, state.newest_batch, state.begun_batch) == (16, 3, 16, 16)
        assert (state.unit, state.proven, state.held) == ("batch", True, True)
        assert state.get(EVERYWHERE[0])["note"].to_pylist() == ["only one bucket"]
    assert job.folder.child("holds").names() == []


def test_open_exact_reads_older_batches(job: Job) -> None:
    lived(job, 14)
    for batch in (3, 8, 12):
        with open_at(job, batch, Path(job.folder.root)) as state:
            assert (state.batch, state.newest_batch) == (batch, 13)
            assert state_of(state) == job.models[batch]


def test_pointers_are_read_under_a_hold_that_is_removed_after_an_error(job: Job) -> None:
    lived(job, 4)
    holds: list[int] = []

    def read() -> ExactBatch:
        holds.append(len(job.folder.child("holds").names()))
        raise StorageError("Spark cannot read its state")

    for hold in (True, False):
        with pytest.raises(StorageError, match="Spark cannot read"):
            open_exact(Path(job.root), QUERY, read, hold=hold)
    assert holds == [1, 0]
    assert job.folder.child("holds").names() == []


def test_pointers_of_another_query_folder_are_refused(job: Job, tmp_path: Path) -> None:
    lived(job, 4)
    other = lived(Job(tmp_path / "root", tmp_path, query_id="second"), 4)
    with pytest.raises(UsageError, match=r"to the query with the folder query, not to .*second: give the root"):
        open_at(job, 3, Path(other.folder.root))
    savepoint = savepoint_of(job, tmp_path / "savepoint")
    with pytest.raises(UsageError, match="is a savepoint, which is always exact"):
        open_at(job, 3, Path(savepoint.root))
    with pytest.raises(UsageError, match="no operator 'sums'"):
        open_exact(Path(job.root), replace(QUERY, operator="sums"), lambda: make_exact_batch(job, 3))
    other.close()


def test_pointers_without_a_whole_state_are_refused(job: Job) -> None:
    lived(job, 4)
    whole = make_exact_batch(job, 3)
    fewer = {bucket: pointer for bucket, pointer in whole.pointers.items() if bucket != 2}
    mixed = {**fewer, 2: replace(whole.pointers[2], query_folder="another")}
    with pytest.raises(MissingCheckpointError, match=r"has no state of operator 'counts' yet.*Choose a later batch"):
        open_exact(Path(job.root), QUERY, lambda: replace(whole, pointers={}))
    with pytest.raises(CorruptFileError, match="pointers of 3 buckets, but operator 'counts' has 4"):
        open_exact(Path(job.root), QUERY, lambda: replace(whole, pointers=fewer))
    with pytest.raises(CorruptFileError, match="pointers to another and to query"):
        open_exact(Path(job.root), QUERY, lambda: replace(whole, pointers=mixed))
    newer = {**whole.pointers, 2: replace(whole.pointers[2], schema_id=7)}
    with pytest.raises(ChangedJobError, match="a newer schema than the operator file"):
        open_exact(Path(job.root), QUERY, lambda: replace(whole, pointers=newer))
    assert job.folder.child("holds").names() == []
