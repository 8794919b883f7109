"""A query without Spark that the code of its calls rescales in place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from reading_support import Job as OldJob
from rescaled_query import RescaledQuery, job_from

from arrow_schemas import BucketMap, Pointer
from spark_state_ext.beginning.first_call import begin_bucket
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.files.operator_catalog import OperatorCatalog
from spark_state_ext.rescale.folder_in_force import put_in_force
from spark_state_ext.rescale.folders import make_rescaled_name
from spark_state_ext.savepoints.captured_pointers import Captured, make_captured_name
from spark_state_ext.worker.background import Background

__all__ = ["InPlace", "make_plan_id", "plan_in_place"]


def make_plan_id(number: int) -> str:
    """Return the id of a plan."""
    return f"{number:012x}" + 20 * "0"


class InPlace(RescaledQuery):
    """The query with its new buckets, in a folder next to the old one."""

    old: list[Pointer]

    @property
    def operator(self) -> Folder:
        """The operator folder, which contains both query folders."""
        return Folder(self.job.options.root).child(self.job.operator)

    def begin(self) -> None:
        """Do what the calls of the first batch do before they change the state."""
        replicas, starts = Replicas(Background(), WorkerUploads()), Starts()
        for pointer in self.old:
            rescaling = starts.rescaling(self.job, pointer.bucket, pointer)
            assert rescaling is not None
            rescaling.give(replicas, self.scratch)
        before = max(pointer.batch for pointer in self.old)
        self.pointers = []
        for bucket in range(self.bucket_map.buckets):
            rescaling = starts.rescaling(self.job, bucket, self.old[bucket] if bucket < len(self.old) else None)
            assert rescaling is not None
            state = rescaling.initial_state()
            wanted = state.begins(self.job, self.name)
            OperatorCatalog().admit(self.operator, wanted, False, with_state=True)
            begun, _ = begin_bucket(state, self.job, self.operator, self.name, replicas, self.scratch)
            self.pointers.append(replace(begun, batch=before))

    def put_in_force(self) -> None:
        """Do what the first bucket does after Spark has handed out a pointer of the query."""
        put_in_force([self.operator], self.name, self.job.plan_id, lambda: None)


def plan_in_place(folder: Path, old: OldJob, bucket_map: BucketMap, plan: int = 1) -> InPlace:
    """Plan to rescale an old query to another bucket map, before its first call."""
    root = Path(old.folder.root).parent.parent
    pointers = [replace(pointer, query_folder=old.query_id) for pointer in old.pointers[-1]]
    name = make_captured_name(1, make_plan_id(plan))
    captured = Captured(old.operator, pointers[0].batch, (), "", 0, {pointer.bucket: pointer for pointer in pointers})
    Folder(str(root)).child(old.operator, STARTING_FOLDER).put(name, captured.encode())
    job = job_from(
        root, old, bucket_map, None, plan_id=make_plan_id(plan), rescaled_from=name, rescaled_buckets=old.buckets
    )
    query = InPlace(
        job, folder, old.models[-1], name=make_rescaled_name(old.query_id, make_plan_id(plan)), query_id=old.query_id
    )
    query.old = pointers
    return query
