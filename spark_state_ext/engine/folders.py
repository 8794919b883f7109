"""The folders of a job's state: in the root, in other backends, and a bucket's local store."""

from __future__ import annotations

from pathlib import Path

from spark_state_ext.backends.registry import FSSPEC
from spark_state_ext.engine.job import Job
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.local_folders import store_folder, stores_folder

__all__ = ["local_folder", "operator_folder", "operator_folders"]


def operator_folder(job: Job) -> Folder:
    """Return the folder ``<root>/<operator>``, which contains the query folders."""
    return Folder(job.options.root, job.options.storage_options).child(job.operator)


def operator_folders(job: Job) -> list[Folder]:
    """Return the operator's folder in the root and in every other backend that is a file system."""
    root = operator_folder(job)
    others = [
        Folder(backend.root, backend.storage_options).child(job.operator)
        for backend in job.options.backends
        if backend.kind == FSSPEC
    ]
    return list({folder.identity: folder for folder in (root, *others)}.values())


def local_folder(job: Job, query_folder: str, schema_id: int, bucket: int) -> Path:
    """Return the folder of a bucket's local store."""
    stores = stores_folder(job.options.local_dir)
    return store_folder(stores, job.options.root, job.operator, query_folder, schema_id, bucket)
