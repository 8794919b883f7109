"""What a Spark task on an executor knows of itself, and where it may put things."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyspark import TaskContext

from spark_state_ext.bucket import BATCHES_RETAINED
from spark_state_ext.errors import StorageError
from spark_state_ext.folder import Folder
from spark_state_ext.process import namespace
from spark_state_ext.spark.job import Job

__all__ = ["TaskInfo", "local_folder", "operator_folder", "scratch_folder", "settle", "stores_folder"]


_RETAINED = "spark.sql.streaming.minBatchesToRetain"
# Since Spark 4.1 the first one, where it is set, is that of stateful operators.
_PARTITIONS = ("spark.sql.streaming.internal.stateStore.partitions", "spark.sql.shuffle.partitions")
_STATE_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
# Containers allocated, and not freed yet, at which a young collection begins; Python's own default is 700.
_YOUNG_OBJECTS_MAX = 5_000


@dataclass(frozen=True)
class TaskInfo:
    """Query and batch of a streaming task, as far as Spark tells.

    An action in a thread that the user's code made is told nothing, and every action inside `foreachBatch` over Spark
    Connect is one. So nothing that state depends on may need to be told.

    Parameters
    ----------
    query_id
        Spark's id of the query; empty where tasks are not told it.
    run_id
        For people only: Spark's id of the run, or what `foreachBatch` set as the job group; empty where not told.
    batch
        Number of the micro-batch; None where tasks are not told it.
    batches_retained
        How many batches Spark retains, or more.
    partition
        The task's partition.
    partitions
        Over how many partitions Spark's stateful operator spreads its keys, as far as settings tell; None where not.
    attempt
        Spark's number of the attempt, which no other attempt at any task has.
    state_has_ids
        Spark's own state has checkpoint format 2 or above: what an attempt writes of a partition has an id, and the
        next batch goes on from the one that was committed.
    stage
        Spark's number of the stage: all attempts at a task have the same, later ones in the application larger ones.
    """

    query_id: str
    run_id: str
    batch: int | None
    batches_retained: int = BATCHES_RETAINED
    partition: int = 0
    partitions: int | None = None
    attempt: int | None = None
    state_has_ids: bool = False
    stage: int = 0

    @staticmethod
    def current(job: Job) -> TaskInfo:
        """Of the task that runs in this process."""
        context = TaskContext.get()
        query_id = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
        # As it was when the query started, which may be another value than when it was planned. Spark tells settings
        # that are not its defaults. Where it tells none, the larger of its default and what was planned is safe.
        told = context.getLocalProperty(_RETAINED) if context is not None else None
        retained = int(told) if told else max(BATCHES_RETAINED, job.batches_retained)
        if context is None:
            return TaskInfo("", "", None, retained)
        stage = context.stageId()
        if not query_id or batch is None:
            attempt = context.taskAttemptId()
            return TaskInfo("", "", None, retained, context.partitionId(), attempt=attempt, stage=stage)
        counts = [context.getLocalProperty(name) for name in _PARTITIONS]
        return TaskInfo(
            query_id,
            context.getLocalProperty("spark.jobGroup.id") or "",
            int(batch),
            retained,
            context.partitionId(),
            next((int(count) for count in counts if count), None),
            context.taskAttemptId(),
            # Not told: Spark's default, which is 1 in all releases so far, or a Spark before 4.0.
            int(context.getLocalProperty(_STATE_FORMAT) or 1) >= 2,
            stage,
        )


@functools.cache
def settle() -> None:
    """Once in the life of a worker process: let the garbage collector run less often, and over less.

    What is alive now, modules mostly, stays for good, but each full collection would go through all of it again. And
    the frames that functions make for thousands of keys allocate so much that young collections follow each other.
    """
    gc.collect()
    gc.freeze()
    young, *old = gc.get_threshold()
    if young:  # zero: somebody switched collections off
        gc.set_threshold(max(young, _YOUNG_OBJECTS_MAX), *old)


def operator_folder(job: Job) -> Folder:
    """The folder ``<root>/<operator>``; a query's state is in a folder below it, its home."""
    return Folder(job.root, job.storage_options).child(job.operator)


def local_folder(job: Job, home: str, schema_id: int, bucket: int) -> Path:
    """Folder of a bucket's local store: the root, operator, home, schema and bucket each have one of their own."""
    # And so does each container of a machine, as LMDB tells processes apart by their numbers.
    root = hashlib.blake2b(f"{job.root}\0{namespace()}".encode(), digest_size=8).hexdigest()
    return stores_folder(job.local_dir) / f"{root}-{job.operator}" / home / f"s{schema_id}" / str(bucket)


def scratch_folder(local_dir: str | None) -> Path:
    """A folder for temporary files, on a local disk."""
    folder = stores_folder(local_dir) / "scratch"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the local folder {folder} cannot be made: {error}. Set local_dir elsewhere.") from error
    return folder


def stores_folder(local_dir: str | None) -> Path:
    """Where the local stores lie: our folder, mode 0700, in `local_dir` or else in Spark's first folder for scratch."""
    base = local_dir or os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    folder = Path(base) / f"spark_state_ext-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise StorageError(
                f"the local folder {folder} belongs to another user; set local_dir to a folder of your own"
            )
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"the local folder {folder} cannot be used: {error}. Set local_dir to a writable local disk."
        ) from error
    return folder
