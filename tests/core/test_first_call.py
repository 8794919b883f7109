"""The first call of a query that starts from a snapshot: what it refuses, and what it says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from savepoint_folders import ID, SCHEMA, savepoint_at

from spark_state_ext.beginning.detachment import detach
from spark_state_ext.beginning.first_call import claim_source
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.start_from import RetainedCheckpoint, Savepoint, StartFrom
from spark_state_ext.errors import ExistingStateError, LineageError, OperatorChangedError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.start_records import StartRecord, is_detached, note_start
from tests.helpers.jobs import job_of

BATCH_MS = 1_000


@pytest.fixture
def savepoint(tmp_path: Path) -> Folder:
    return savepoint_at(tmp_path / "savepoint")


def _job(root: Path, start: StartFrom | None, *, strict: bool = False, operator: str = "counts") -> Job:
    options = StateOptions(root=str(root), operator=operator, buckets=2, start_from=start, strict=strict)
    return job_of(options, key_schema=SCHEMA, state_schema=SCHEMA, columns=("n",))


def _begun(root: Path, name: str, record: StartRecord) -> Folder:
    query_folder = Folder(str(root)).child("counts", name)
    note_start(query_folder, record)
    query_folder.put("operator_0.json", b"there is state")
    return query_folder


def test_strict_refuses_to_begin_again_from_the_same_savepoint(savepoint: Folder, tmp_path: Path) -> None:
    """As a checkpoint that was lost, or a mistyped checkpointLocation, would have it."""
    root = tmp_path / "root"
    record = StartRecord("savepoint", "/before/it/was/moved", ID, 7, "no_claim", "counts")
    _begun(root, "first", record)

    def claimed(strict: bool, query_folder: str) -> None:
        job = _job(root, Savepoint(savepoint.root), strict=strict)
        state = Starts().of(job, 0)
        assert state is not None
        claim_source(state, job, Folder(str(root)).child("counts"), query_folder, BATCH_MS)

    with pytest.raises(ExistingStateError, match="but the query first there already began from it"):
        claimed(True, "second")
    claimed(False, "second")
    # Its own retries.
    claimed(True, "first")
    _begun(tmp_path / "other", "first", StartRecord("savepoint", savepoint.root, "34" * 16, 7, "no_claim", "counts"))
    root = tmp_path / "other"
    claimed(True, "second")


def test_a_start_that_is_not_used_is_said(savepoint: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def said(query_folder: Folder, start: StartFrom) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            detach(_job(tmp_path / "root", start), query_folder, lambda: None)
        return [record.getMessage() for record in caplog.records]

    begun = _begun(tmp_path / "root", "first", StartRecord("savepoint", savepoint.root, ID, 7, "no_claim", "counts"))
    assert said(begun, Savepoint(savepoint.root)) == []
    assert is_detached(begun)
    (other,) = said(begun, Savepoint("/savepoints/last-night"))
    assert other.startswith("start_from=/savepoints/last-night is not used")
    assert "with a new checkpointLocation" in other
    Path(savepoint.root).rename(tmp_path / "moved")
    assert said(begun, Savepoint(str(tmp_path / "moved"))) == []
    without = Folder(str(tmp_path / "root")).child("counts", "second")
    (never,) = said(without, Savepoint(savepoint.root))
    assert "which began empty" in never
    (never,) = said(without, RetainedCheckpoint("/root", "/checkpoint"))
    assert "which began empty" in never
    # The folder is the other query's, and so is what it says of its start.
    assert said(without, RetainedCheckpoint(str(tmp_path / "root"), "/checkpoint", mode="claim")) == []


def test_a_second_attempt_from_another_batch_is_refused(tmp_path: Path) -> None:
    """Spark has fixed where its input begins, which belongs to the batch of the first attempt."""
    query_folder = Folder(str(tmp_path)).child("counts", "mine")
    record = StartRecord("retained_checkpoint", "/root/counts/old", "", 41, "no_claim", "counts")
    note_start(query_folder, record)
    note_start(query_folder, record)
    with pytest.raises(LineageError, match=r"started from batch 41 .*, and this one starts from batch 45"):
        note_start(query_folder, StartRecord("retained_checkpoint", "/root/counts/old", "", 45, "no_claim", "counts"))


def test_an_operator_that_begins_without_state_is_said_once(
    savepoint: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts, start = Starts(), Savepoint(savepoint.root)
    with pytest.raises(OperatorChangedError, match="has no operator 'sums'; it has counts"):
        starts.of(_job(tmp_path, start, operator="sums"), 0)
    allowed = _job(tmp_path, Savepoint(savepoint.root, allow_non_restored=True), operator="sums")
    with caplog.at_level(logging.WARNING):
        assert [starts.of(allowed, bucket) for bucket in range(2)] == [None, None]
    (said,) = caplog.records
    assert "operator 'sums' begins without state" in said.getMessage()
    assert "has no operator 'sums'; it has counts" in said.getMessage()
