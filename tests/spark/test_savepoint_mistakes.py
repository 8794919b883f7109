"""Mistakes of users with savepoints, and the errors and warnings that they see before anything is lost."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, Job, count, keyed, reads_state
from pyspark.errors import PySparkException, StreamingQueryException
from test_savepoints import FIRST, NEXT, Query, counted, take

from spark_state_ext import ArrowState, RetainedCheckpoint, stop_with_savepoint
from spark_state_ext.errors import MissingCheckpointError, StorageError, UsageError

pytestmark = [pytest.mark.spark, reads_state]


def test_stop_with_savepoint_refuses_wrong_arguments_before_it_stops_the_query(spark: Any, tmp_path: Path) -> None:
    job = Job(spark, "arrow", tmp_path, count, output=COUNTS)
    job.feed(keyed("a"), keyed("a"))
    state = Query(spark, tmp_path).state
    other = ArrowState(str(tmp_path / "root"), "other", buckets=3)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "savepoint.arrow").write_bytes(b"another one")
    with job.running() as query:
        query.processAllAvailable()

        def stop(path: str, state: Any, **options: Any) -> None:
            stop_with_savepoint(query, path, job.checkpoint, state, **options)

        with pytest.raises(UsageError, match="must be a URL or an absolute path"):
            stop("relative", state)
        with pytest.raises(UsageError, match="has the operators tested, but state names other"):
            stop(str(tmp_path / "savepoint"), other)
        with pytest.raises(PySparkException, match="UsageError"):
            stop(str(tmp_path / "there"), state)
        with pytest.raises(PySparkException, match=r"UsageError: a savepoint cannot be at .*/root/savepoint"):
            stop(f"file://{tmp_path}/root/savepoint/", state)
        with pytest.raises(UsageError, match="form must be"):
            stop(str(tmp_path / "savepoint"), state, form="new")
        # This is how the checkpoint looks while the first batch runs.
        shutil.copytree(job.checkpoint, tmp_path / "first", ignore=shutil.ignore_patterns("commits"))
        (tmp_path / "first" / "commits").mkdir()
        with pytest.raises(
            MissingCheckpointError, match=r"has not committed a batch yet, .* try again after its first batch"
        ):
            stop_with_savepoint(query, str(tmp_path / "savepoint"), tmp_path / "first", state)
        assert query.isActive
        assert stop_with_savepoint(query, str(tmp_path / "savepoint"), job.checkpoint, state).batch == 1


def test_a_savepoint_warns_that_it_has_no_state_of_sparks_own_operators(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(spark, tmp_path / "query")
    query.job.before = lambda df: df.dropDuplicates(["key"])
    query.run(FIRST)
    with caplog.at_level(logging.WARNING):
        take(query, tmp_path / "savepoint")
    (warning,) = [record.getMessage() for record in caplog.records if "stateful operators" in record.getMessage()]
    assert "are Spark's own: dedupe" in warning


def test_a_checkpoint_that_sparks_reader_cannot_find_is_reported_and_can_be_copied(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, plain_location = Query(spark, tmp_path / "my 100% counts").run(FIRST), tmp_path / "checkpoint"
    with pytest.raises(StorageError, match=r"does not find .*/my 100% counts/checkpoint: .* in which ' %' is quoted"):
        take(query, tmp_path / "savepoint")
    # The message advises this.
    shutil.copytree(query.job.checkpoint, plain_location)
    monkeypatch.setattr(Job, "checkpoint", plain_location)
    query.run(NEXT)
    assert query.table == counted(FIRST, NEXT)
    assert take(query, tmp_path / "savepoint").batch == len([*FIRST, *NEXT]) - 1


def test_a_claimed_query_folder_cannot_get_another_number_of_buckets(spark: Any, tmp_path: Path) -> None:
    old = Query(spark, tmp_path / "old").run(FIRST)
    root = str(tmp_path / "old" / "root")
    start = RetainedCheckpoint(root, str(old.job.checkpoint), mode="claim")
    with pytest.raises(StreamingQueryException, match="a claimed query folder is used as it is"):
        Query(spark, tmp_path / "new", root=root, start_from=start, buckets=7).run(NEXT)


def test_a_missing_retained_checkpoint_is_reported_when_the_query_is_planned(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = RetainedCheckpoint(str(tmp_path / "root"), str(tmp_path / "mistyped"))
    (tmp_path / "new").mkdir()
    job = Job(spark, "arrow", tmp_path / "new", count, output=COUNTS, options={"start_from": start})
    job.feed(keyed("a"))
    with caplog.at_level(logging.WARNING):
        job.planned()
    (warning,) = [record.getMessage() for record in caplog.records if "cannot start from" in record.getMessage()]
    assert "mistyped" in warning
