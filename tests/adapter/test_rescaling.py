"""The calls of a query that is rescaled in place, without Spark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from reading_support import Job as OldJob
from rescaled_query import job_from

from arrow_schemas import BucketMap, Pointer
from spark_state_ext.beginning import first_call
from spark_state_ext.beginning.first_call import begin_bucket
from spark_state_ext.beginning.rescaling import is_dropped_bucket
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.engine.folders import operator_folder
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.errors import LineageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import HOLDS_FOLDER, STARTING_FOLDER
from spark_state_ext.ownership.holds import Hold
from spark_state_ext.savepoints.captured_pointers import Captured, make_captured_name
from spark_state_ext.spark.executor import savepoint_tasks
from spark_state_ext.testing.model import KEYS, Row
from spark_state_ext.worker.background import Background

PLAN = "0123456789ab" + 20 * "0"


def plan_rescaling(folder: Path, buckets: int, *, continues: bool = False) -> tuple[Job, dict[int, Pointer]]:
    """Return a job that rescales a query of three buckets, and the query's pointers.

    The plan has read these pointers, unless the query runs another batch afterwards (`continues`).
    """
    old = OldJob(folder, folder / "local", buckets=3)
    old.batch({key: Row(1) for key in KEYS})
    pointers = {pointer.bucket: replace(pointer, query_folder=old.query_id) for pointer in old.pointers[-1]}
    captured = pointers
    if continues:
        old.batch({key: Row(2) for key in KEYS})
        pointers = {pointer.bucket: replace(pointer, query_folder=old.query_id) for pointer in old.pointers[-1]}
    old.close()
    name = make_captured_name(1, PLAN)
    hold = Hold.place(old.folder, "the plan")
    notes = Folder(str(folder)).child("counts", STARTING_FOLDER)
    notes.put(name, Captured("counts", 0, (), hold.id, 0, captured).encode())
    job = job_from(folder, old, BucketMap(buckets), None, plan_id=PLAN, rescaled_from=name, rescaled_buckets=3)
    return job, pointers


@pytest.mark.parametrize("buckets", [2, 5])
def test_a_query_at_another_checkpoint_location_is_refused_the_state(tmp_path: Path, buckets: int) -> None:
    job, pointers = plan_rescaling(tmp_path, buckets)
    starts = Starts()
    for bucket in range(3):
        assert starts.rescaling(job, bucket, pointers[bucket]) is not None
    with pytest.raises(LineageError, match="bucket 0 of operator 'counts' has no state at this checkpointLocation"):
        starts.rescaling(job, 0, None)
    # New buckets rightly have no pointer.
    assert buckets == 2 or starts.rescaling(job, 4, None) is not None
    rescaled_pointer = replace(pointers[0], query_folder=f"{pointers[0].query_folder}.r{PLAN[:12]}", buckets=buckets)
    assert starts.rescaling(job, 0, rescaled_pointer) is None


@pytest.mark.parametrize("buckets", [3, 4])
def test_the_plan_places_a_hold_only_if_the_query_is_rescaled(tmp_path: Path, buckets: int) -> None:
    job, pointers = plan_rescaling(tmp_path, buckets)
    arguments = {
        "options": job.options.to_plain(),
        "package_version": job.package_version,
        "operator": job.operator,
        "query_folder": pointers[0].query_folder,
        "holder": "the plan",
        "rescales": True,
        "wanted": job.operator_file(pointers[0].query_folder).encode().decode(),
        "case": False,
    }
    holds = Folder(str(tmp_path)).child("counts", pointers[0].query_folder, HOLDS_FOLDER)
    before = holds.names()
    answers = pa.Table.from_batches(savepoint_tasks.begin(arguments, ()))["answer"].to_pylist()
    assert (answers == ['{"stays": true}']) == (buckets == 3)
    assert (holds.names() == before) == (buckets == 3)


@pytest.mark.parametrize("buckets", [2, 5])
def test_a_worker_that_starts_later_does_not_need_the_old_query_folder(tmp_path: Path, buckets: int) -> None:
    """The old folder is removed while the plan is still in use, and then a new worker replaces one that died."""
    job, pointers = plan_rescaling(tmp_path, buckets)
    operator = Folder(str(tmp_path)).child("counts")
    operator.remove_tree(pointers[0].query_folder)
    operator.remove_tree(STARTING_FOLDER)
    rescaled_pointer = replace(pointers[0], query_folder=f"{pointers[0].query_folder}.r{PLAN[:12]}", buckets=buckets)
    assert Starts().rescaling(job, 0, rescaled_pointer) is None
    # As long as this plan is in use, Spark calls the labels of old buckets.
    assert [is_dropped_bucket(job, bucket, None) for bucket in range(3)] == [bucket >= buckets for bucket in range(3)]
    assert not is_dropped_bucket(job, 2, pointers[2])


@pytest.mark.parametrize("removed", ["query", "plan"])
def test_a_late_call_is_refused_if_the_old_query_or_the_plan_was_removed(tmp_path: Path, removed: str) -> None:
    """The call may be of a finished batch, or of a program that was planned long before the query continued."""
    job, pointers = plan_rescaling(tmp_path, 2)
    operator = Folder(str(tmp_path)).child("counts")
    operator.remove_tree(pointers[0].query_folder if removed == "query" else STARTING_FOLDER)
    with pytest.raises(LineageError, match=r"'counts' is not rescaled, as its query has gone on .* Start the program"):
        Starts().rescaling(job, 0, pointers[0])


@pytest.mark.parametrize("at_once", [False, True])
def test_a_rescaling_is_refused_if_the_query_has_continued_after_its_plan(
    tmp_path: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call of the old bucket or of a bucket that begins with a part of it may be the first to write the parent."""
    job, pointers = plan_rescaling(tmp_path, 2, continues=True)
    replicas, scratch = Replicas(Background(), WorkerUploads()), tmp_path / "local"
    first, second = (Starts().rescaling(job, bucket, pointers[bucket]) for bucket in (0, 1))
    assert first is not None
    assert second is not None
    state = first.initial_state()
    begin_bucket(state, job, operator_folder(job), state.pointer.query_folder, replicas, scratch)
    if at_once:
        # Both calls looked for the parent before either had written it.
        monkeypatch.setattr(first_call, "read_parent", lambda folder, bucket: None)
    with pytest.raises(
        LineageError, match=r"'counts' is not rescaled, as its query has gone on .* plan the query again"
    ):
        second.give(replicas, scratch)
