"""What a call of a query that is rescaled in place is to do, without Spark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from reading_support import Job as OldJob
from rescaled_query import job_from

from arrow_schemas import BucketMap, Pointer
from spark_state_ext.engine.job import Job
from spark_state_ext.errors import LineageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.operator_catalog import STARTING_FOLDER
from spark_state_ext.ownership.holds import HOLDS_FOLDER, Hold
from spark_state_ext.savepoints.captured import Captured, captured_name
from spark_state_ext.spark.executor.rescaling import Rescales
from spark_state_ext.testing.model import KEYS, Row

PLAN = "0123456789ab" + 20 * "0"


def planned(folder: Path, buckets: int) -> tuple[Job, dict[int, Pointer]]:
    """A job of a query of three buckets that is to have others, and what the plan has read of it."""
    old = OldJob(folder, folder / "local", buckets=3)
    old.batch({key: Row(1) for key in KEYS})
    pointers = {it.bucket: replace(it, query_folder=old.query_id) for it in old.pointers[-1]}
    old.close()
    name = captured_name(1, PLAN)
    hold = Hold.place(old.folder, "the plan")
    notes = Folder(str(folder)).child("counts", STARTING_FOLDER)
    notes.put(name, Captured("counts", 0, (), hold.id, 0, pointers).encode())
    made = job_from(folder, old, BucketMap(buckets), None, plan_id=PLAN, rescaled_from=name, rescaled_buckets=3)
    return made, pointers


@pytest.mark.parametrize("buckets", [2, 5])
def test_a_query_at_another_location_does_not_take_the_state(tmp_path: Path, buckets: int) -> None:
    job, pointers = planned(tmp_path, buckets)
    rescales = Rescales()
    for bucket in range(3):
        assert rescales.of(job, bucket, pointers[bucket]) is not None
    with pytest.raises(LineageError, match="bucket 0 of operator 'counts' has no state at this checkpointLocation"):
        rescales.of(job, 0, None)
    # Buckets that are new, or are no more, have none rightly.
    assert rescales.of(job, 4 if buckets == 5 else 2, None) is not None
    gone_on = replace(pointers[0], query_folder=f"{pointers[0].query_folder}.r{PLAN[:12]}", buckets=buckets)
    assert rescales.of(job, 0, gone_on) is None


@pytest.mark.parametrize("buckets", [3, 4])
def test_what_is_not_rescaled_is_not_held(tmp_path: Path, buckets: int) -> None:
    job, pointers = planned(tmp_path, buckets)
    move = Rescales().of(job, 0, pointers[0])
    held = Folder(str(tmp_path)).child("counts", pointers[0].query_folder, HOLDS_FOLDER).names()
    assert (move is not None) == bool(held) == (buckets != 3)
