"""Where a job's state lies: its folder in the root, and local folders of this machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from spark_state_ext.backends.registry import FSSPEC
from spark_state_ext.engine.job import Job
from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.private_folder import make_private
from spark_state_ext.worker.process import namespace

__all__ = [
    "local_folder",
    "operator_folder",
    "operator_folders",
    "root_id",
    "scratch_folder",
    "store_folder",
    "stores_folder",
    "stores_path",
]


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


def store_folder(stores: Path, root: str, operator: str, query_folder: str, schema_id: int, bucket: int) -> Path:
    """Folder of a bucket's local store: each root, operator, query folder, schema and bucket has its own."""
    return stores / f"{root_id(root)}-{operator}" / query_folder / f"s{schema_id}" / str(bucket)


def root_id(root: str) -> str:
    """What tells the local stores of one root from those of another: 16 hexadecimal digits."""
    # And those of each container of a machine, as LMDB tells processes apart by their numbers.
    return hashlib.blake2b(f"{root}\0{namespace()}".encode(), digest_size=8).hexdigest()


def scratch_folder(local_dir: str | None) -> Path:
    """A folder for temporary files, on a local disk."""
    return _private(stores_folder(local_dir) / "scratch")


def stores_folder(local_dir: str | None) -> Path:
    """Where the local stores lie: our folder, mode 0700, in `local_dir` or else in Spark's first folder for scratch."""
    return _private(stores_path(local_dir))


def stores_path(local_dir: str | None) -> Path:
    """The same, whether or not it is there."""
    base = local_dir or os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    return Path(base) / f"spark_state_ext-{os.getuid()}"


def _private(folder: Path) -> Path:
    """Make or check a folder of this user alone, and return it."""
    try:
        make_private(folder)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"the local folder {folder} cannot be used: {error}. Set local_dir to a writable local disk."
        ) from error
    return folder
