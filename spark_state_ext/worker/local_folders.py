"""Local folders of this machine: stores and temporary files. All lie in one folder of this user."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from spark_state_ext.errors import StorageError
from spark_state_ext.worker.private_folder import make_private
from spark_state_ext.worker.process import namespace

__all__ = ["root_id", "scratch_folder", "store_folder", "stores_folder", "stores_path"]


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
