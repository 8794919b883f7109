"""Where a job's state lies: its folder in the root and in other backends, and the local store of a bucket."""

from __future__ import annotations

from pathlib import Path

from spark_state_ext.backends.registry import FSSPEC
from spark_state_ext.engine.job import Job
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.local_folders import store_folder, stores_folder

__all__ = ["local_folder", "operator_folder", "operator_folders"]


def operator_folder(job: Job) -> Folder:
    """The folder ``<root>/<operator>``; a query's state is in a folder below it, the query folder."""
    return Folder(job.options.root, job.options.storage_options).child(job.operator)


def operator_folders(job: Job) -> list[Folder]:
    """That folder, and the same one in every other backend that is a file system."""
    root = operator_folder(job)
    others = [
        Folder(it.root, it.storage_options).child(job.operator) for it in job.options.backends if it.kind == FSSPEC
    ]
    return list({it.identity: it for it in (root, *others)}.values())


def local_folder(job: Job, query_folder: str, schema_id: int, bucket: int) -> Path:
    """Folder of a bucket's local store, for a task of a job."""
    stores = stores_folder(job.options.local_dir)
    return store_folder(stores, job.options.root, job.operator, query_folder, schema_id, bucket)
