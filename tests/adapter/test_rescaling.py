"""What a call of a query that is rescaled in place is to do, without Spark."""

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


def planned(folder: Path, buckets: int, *, goes_on: bool = False) -> tuple[Job, dict[int, Pointer]]:
    """A job of a query of three buckets that is to have others, and where these are.

    That is what the plan has read, unless the query goes on afterwards.
    """
    old = OldJob(folder, folder / "local", buckets=3)
    old.batch({key: Row(1) for key in KEYS})
    pointers = {it.bucket: replace(it, query_folder=old.query_id) for it in old.pointers[-1]}
    captured = pointers
    if goes_on:
        old.batch({key: Row(2) for key in KEYS})
        pointers = {it.bucket: replace(it, query_folder=old.query_id) for it in old.pointers[-1]}
    old.close()
    name = make_captured_name(1, PLAN)
    hold = Hold.place(old.folder, "the plan")
    notes = Folder(str(folder)).child("counts", STARTING_FOLDER)
    notes.put(name, Captured("counts", 0, (), hold.id, 0, captured).encode())
    made = job_from(folder, old, BucketMap(buckets), None, plan_id=PLAN, rescaled_from=name, rescaled_buckets=3)
    return made, pointers


@pytest.mark.parametrize("buckets", [2, 5])
def test_a_query_at_another_location_does_not_take_the_state(tmp_path: Path, buckets: int) -> None:
    job, pointers = planned(tmp_path, buckets)
    starts = Starts()
    for bucket in range(3):
        assert starts.rescaling(job, bucket, pointers[bucket]) is not None
    with pytest.raises(LineageError, match="bucket 0 of operator 'counts' has no state at this checkpointLocation"):
        starts.rescaling(job, 0, None)
    # Buckets that are new have none rightly.
    assert buckets == 2 or starts.rescaling(job, 4, None) is not None
    gone_on = replace(pointers[0], query_folder=f"{pointers[0].query_folder}.r{PLAN[:12]}", buckets=buckets)
    assert starts.rescaling(job, 0, gone_on) is None


@pytest.mark.parametrize("buckets", [3, 4])
def test_what_is_not_rescaled_is_not_held(tmp_path: Path, buckets: int) -> None:
    job, pointers = planned(tmp_path, buckets)
    told = {
        "options": job.options.to_plain(),
        "package_version": job.package_version,
        "operator": job.operator,
        "query_folder": pointers[0].query_folder,
        "holder": "the plan",
        "rescales": True,
        "wanted": job.operator_file(pointers[0].query_folder).encode().decode(),
        "case": False,
    }
    held = Folder(str(tmp_path)).child("counts", pointers[0].query_folder, HOLDS_FOLDER)
    before = held.names()
    answered = pa.Table.from_batches(savepoint_tasks.begin(told, ()))["answer"].to_pylist()
    assert (answered == ['{"stays": true}']) == (buckets == 3)
    assert (held.names() == before) == (buckets == 3)


@pytest.mark.parametrize("buckets", [2, 5])
def test_a_worker_that_comes_late_needs_nothing_of_what_the_query_was(tmp_path: Path, buckets: int) -> None:
    """What it was rescaled from goes while the plan is still in force, and then a worker dies and another one comes."""
    job, pointers = planned(tmp_path, buckets)
    operator = Folder(str(tmp_path)).child("counts")
    operator.remove_tree(pointers[0].query_folder)
    operator.remove_tree(STARTING_FOLDER)
    gone_on = replace(pointers[0], query_folder=f"{pointers[0].query_folder}.r{PLAN[:12]}", buckets=buckets)
    assert Starts().rescaling(job, 0, gone_on) is None
    # Under that plan Spark calls labels of old buckets for ever.
    assert [is_dropped_bucket(job, it, None) for it in range(3)] == [it >= buckets for it in range(3)]
    assert not is_dropped_bucket(job, 2, pointers[2])


@pytest.mark.parametrize("gone", ["query", "plan"])
def test_a_late_call_finds_nothing_to_begin_with(tmp_path: Path, gone: str) -> None:
    """Of a batch that is over, or of a program that was planned long before the query went on."""
    job, pointers = planned(tmp_path, 2)
    operator = Folder(str(tmp_path)).child("counts")
    operator.remove_tree(pointers[0].query_folder if gone == "query" else STARTING_FOLDER)
    with pytest.raises(LineageError, match=r"'counts' is not rescaled, as its query has gone on .* Start the program"):
        Starts().rescaling(job, 0, pointers[0])


@pytest.mark.parametrize("at_once", [False, True])
def test_a_query_that_has_gone_on_is_told_to_be_planned_anew(
    tmp_path: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call brings the parent first: that of the old bucket, or of one that begins with a part of it."""
    job, pointers = planned(tmp_path, 2, goes_on=True)
    replicas, scratch = Replicas(Background(), WorkerUploads()), tmp_path / "local"
    first, second = (Starts().rescaling(job, bucket, pointers[bucket]) for bucket in (0, 1))
    assert first is not None
    assert second is not None
    state = first.initial_state()
    begin_bucket(state, job, operator_folder(job), state.pointer.query_folder, replicas, scratch)
    if at_once:
        # Both looked before either had written.
        monkeypatch.setattr(first_call, "read_parent", lambda folder, bucket: None)
    with pytest.raises(
        LineageError, match=r"'counts' is not rescaled, as its query has gone on .* plan the query again"
    ):
        second.give(replicas, scratch)
