"""The first call of a query that starts from a snapshot: what it refuses, and what it logs."""

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


def _make_job(root: Path, start: StartFrom | None, *, strict: bool = False, operator: str = "counts") -> Job:
    options = StateOptions(root=str(root), operator=operator, buckets=2, start_from=start, strict=strict)
    return job_of(options, key_schema=SCHEMA, state_schema=SCHEMA, columns=("n",))


def _note_started_query(root: Path, name: str, record: StartRecord) -> Folder:
    query_folder = Folder(str(root)).child("counts", name)
    note_start(query_folder, record)
    query_folder.put("operator_0.json", b"there is state")
    return query_folder


def test_strict_refuses_to_begin_again_from_the_same_savepoint(savepoint: Folder, tmp_path: Path) -> None:
    """A query does this if its checkpoint was lost, or its checkpointLocation was mistyped."""
    root = tmp_path / "root"
    record = StartRecord("savepoint", "/before/it/was/moved", ID, 7, "no_claim", "counts")
    _note_started_query(root, "first", record)

    def claim(strict: bool, query_folder: str) -> None:
        job = _make_job(root, Savepoint(savepoint.root), strict=strict)
        state = Starts().of(job, 0)
        assert state is not None
        claim_source(state, job, Folder(str(root)).child("counts"), query_folder, BATCH_MS)

    with pytest.raises(ExistingStateError, match="but the query first there already began from it"):
        claim(True, "second")
    claim(False, "second")
    # The first query itself may try again.
    claim(True, "first")
    _note_started_query(
        tmp_path / "other", "first", StartRecord("savepoint", savepoint.root, "34" * 16, 7, "no_claim", "counts")
    )
    root = tmp_path / "other"
    claim(True, "second")


def test_a_start_option_that_is_not_used_is_logged(
    savepoint: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def detach_and_list_warnings(query_folder: Folder, start: StartFrom) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            detach(_make_job(tmp_path / "root", start), query_folder, lambda: None)
        return [record.getMessage() for record in caplog.records]

    started = _note_started_query(
        tmp_path / "root", "first", StartRecord("savepoint", savepoint.root, ID, 7, "no_claim", "counts")
    )
    assert detach_and_list_warnings(started, Savepoint(savepoint.root)) == []
    assert is_detached(started)
    (warning,) = detach_and_list_warnings(started, Savepoint("/savepoints/last-night"))
    assert warning.startswith("start_from=/savepoints/last-night is not used")
    assert "with a new checkpointLocation" in warning
    Path(savepoint.root).rename(tmp_path / "moved")
    assert detach_and_list_warnings(started, Savepoint(str(tmp_path / "moved"))) == []
    not_started = Folder(str(tmp_path / "root")).child("counts", "second")
    (warning,) = detach_and_list_warnings(not_started, Savepoint(savepoint.root))
    assert "which began empty" in warning
    (warning,) = detach_and_list_warnings(not_started, RetainedCheckpoint("/root", "/checkpoint"))
    assert "which began empty" in warning
    # The start record in this folder is the other query's.
    assert (
        detach_and_list_warnings(not_started, RetainedCheckpoint(str(tmp_path / "root"), "/checkpoint", mode="claim"))
        == []
    )


def test_a_second_attempt_from_another_batch_is_refused(tmp_path: Path) -> None:
    """Spark has already fixed where the input begins, according to the batch of the first attempt."""
    query_folder = Folder(str(tmp_path)).child("counts", "mine")
    record = StartRecord("retained_checkpoint", "/root/counts/old", "", 41, "no_claim", "counts")
    note_start(query_folder, record)
    note_start(query_folder, record)
    with pytest.raises(LineageError, match=r"started from batch 41 .*, and this one starts from batch 45"):
        note_start(query_folder, StartRecord("retained_checkpoint", "/root/counts/old", "", 45, "no_claim", "counts"))


def test_an_operator_that_begins_without_state_is_logged_once(
    savepoint: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts, start = Starts(), Savepoint(savepoint.root)
    with pytest.raises(OperatorChangedError, match="has no operator 'sums'; it has counts"):
        starts.of(_make_job(tmp_path, start, operator="sums"), 0)
    job = _make_job(tmp_path, Savepoint(savepoint.root, allow_non_restored=True), operator="sums")
    with caplog.at_level(logging.WARNING):
        assert [starts.of(job, bucket) for bucket in range(2)] == [None, None]
    (record,) = caplog.records
    assert "operator 'sums' begins without state" in record.getMessage()
    assert "has no operator 'sums'; it has counts" in record.getMessage()
