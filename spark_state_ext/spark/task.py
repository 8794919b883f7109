"""What a Spark task on an executor knows of itself, and where it may put things."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyspark import TaskContext

from spark_state_ext.backend import Backend
from spark_state_ext.errors import StorageError, UnsupportedPlanError
from spark_state_ext.spark.job import Job

__all__ = ["TaskInfo", "local_folder", "operator_files", "scratch_folder"]


@dataclass(frozen=True)
class TaskInfo:
    """Query, run and batch of a streaming task."""

    query_id: str
    run_id: str
    batch: int

    @staticmethod
    def current() -> TaskInfo:
        """Of the task that runs in this process.

        Raises
        ------
        UnsupportedPlanError
            Outside a micro-batch of a streaming query.
        """
        context = TaskContext.get()
        query_id = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
        if context is None or not query_id or batch is None:
            raise UnsupportedPlanError("stateful processing runs only in micro-batches of a streaming query")
        return TaskInfo(query_id, context.getLocalProperty("spark.jobGroup.id") or "", int(batch))


def operator_files(job: Job, query_id: str) -> Backend:
    """The folder ``<root>/<operator>/<query id>``."""
    return Backend(job.root, job.storage_options).child(job.operator, query_id)


def local_folder(job: Job, query_id: str, schema_id: int, bucket: int) -> Path:
    """Folder of a bucket's local store: the root, operator, query, schema and bucket each have one of their own."""
    root = hashlib.blake2b(job.root.encode(), digest_size=8).hexdigest()
    return _private(job.local_dir) / f"{root}-{job.operator}" / query_id / f"s{schema_id}" / str(bucket)


def scratch_folder(local_dir: str | None) -> Path:
    """A folder for temporary files, on a local disk."""
    return _private(local_dir)


def _private(local_dir: str | None) -> Path:
    """Our folder with mode 0700 in `local_dir`, or else in the first folder Spark gives executors for scratch."""
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
