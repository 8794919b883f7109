"""What users get wrong with savepoints, and what they are told before anything is lost by it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, Job, count, keyed, reads_state
from pyspark.errors import PySparkException, StreamingQueryException
from test_savepoints import FIRST, NEXT, Query, counted, taken

from spark_state_ext import ArrowState, RetainedCheckpoint, stop_with_savepoint
from spark_state_ext.errors import MissingCheckpointError, StorageError, UsageError

pytestmark = [pytest.mark.spark, reads_state]


def test_what_is_wrong_is_refused_before_the_query_is_stopped(spark: Any, tmp_path: Path) -> None:
    job = Job(spark, "arrow", tmp_path, count, output=COUNTS)
    job.feed(keyed("a"), keyed("a"))
    state = Query(spark, tmp_path).state
    other = ArrowState(str(tmp_path / "root"), "other", buckets=3)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "savepoint.arrow").write_bytes(b"another one")
    with job.running() as query:
        query.processAllAvailable()

        def stopped(path: str, its: Any, **also: Any) -> None:
            stop_with_savepoint(query, path, job.checkpoint, its, **also)

        with pytest.raises(UsageError, match="must be a URL or an absolute path"):
            stopped("relative", state)
        with pytest.raises(UsageError, match="has the operators tested, but state names other"):
            stopped(str(tmp_path / "savepoint"), other)
        with pytest.raises(PySparkException, match="UsageError"):
            stopped(str(tmp_path / "there"), state)
        with pytest.raises(PySparkException, match=r"UsageError: a savepoint cannot be at .*/root/savepoint"):
            stopped(f"file://{tmp_path}/root/savepoint/", state)
        with pytest.raises(UsageError, match="form must be"):
            stopped(str(tmp_path / "savepoint"), state, form="new")
        # As it is while the first batch runs.
        shutil.copytree(job.checkpoint, tmp_path / "first", ignore=shutil.ignore_patterns("commits"))
        (tmp_path / "first" / "commits").mkdir()
        with pytest.raises(
            MissingCheckpointError, match=r"has not committed a batch yet, .* try again after its first batch"
        ):
            stop_with_savepoint(query, str(tmp_path / "savepoint"), tmp_path / "first", state)
        assert query.isActive
        assert stop_with_savepoint(query, str(tmp_path / "savepoint"), job.checkpoint, state).batch == 1


def test_the_state_of_sparks_own_operators_is_not_in_it_and_that_is_said(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(spark, tmp_path / "query")
    query.job.before = lambda df: df.dropDuplicates(["key"])
    query.run(FIRST)
    with caplog.at_level(logging.WARNING):
        taken(query, tmp_path / "savepoint")
    (said,) = [it.getMessage() for it in caplog.records if "stateful operators" in it.getMessage()]
    assert "are Spark's own: dedupe" in said


def test_a_location_that_sparks_reader_does_not_find_is_told_and_may_be_moved(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, plain = Query(spark, tmp_path / "my 100% counts").run(FIRST), tmp_path / "checkpoint"
    with pytest.raises(StorageError, match=r"does not find .*/my 100% counts/checkpoint: .* in which ' %' is quoted"):
        taken(query, tmp_path / "savepoint")
    # What the message advises.
    shutil.copytree(query.job.checkpoint, plain)
    monkeypatch.setattr(Job, "checkpoint", plain)
    query.run(NEXT)
    assert query.table == counted(FIRST, NEXT)
    assert taken(query, tmp_path / "savepoint").batch == len([*FIRST, *NEXT]) - 1


def test_what_is_claimed_keeps_its_number_of_buckets(spark: Any, tmp_path: Path) -> None:
    old = Query(spark, tmp_path / "old").run(FIRST)
    root = str(tmp_path / "old" / "root")
    start = RetainedCheckpoint(root, str(old.job.checkpoint), mode="claim")
    with pytest.raises(StreamingQueryException, match="a claimed query folder is used as it is"):
        Query(spark, tmp_path / "new", root=root, start_from=start, buckets=7).run(NEXT)


def test_what_cannot_be_captured_is_said_when_the_query_is_planned(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = RetainedCheckpoint(str(tmp_path / "root"), str(tmp_path / "mistyped"))
    (tmp_path / "new").mkdir()
    job = Job(spark, "arrow", tmp_path / "new", count, output=COUNTS, options={"start_from": start})
    job.feed(keyed("a"))
    with caplog.at_level(logging.WARNING):
        job.planned()
    (said,) = [it.getMessage() for it in caplog.records if "cannot start from" in it.getMessage()]
    assert "mistyped" in said
