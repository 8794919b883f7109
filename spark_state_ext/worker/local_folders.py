"""Paths of local stores and temporary files, all below one private folder per user."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from spark_state_ext.errors import StorageError
from spark_state_ext.worker.private_folder import make_private
from spark_state_ext.worker.process import get_pid_namespace

__all__ = ["root_id", "scratch_folder", "store_folder", "stores_folder", "stores_path"]


def store_folder(stores: Path, root: str, operator: str, query_folder: str, schema_id: int, bucket: int) -> Path:
    """Return the folder of a bucket's local store, unique for the root, operator, query folder, schema and bucket."""
    return stores / f"{root_id(root)}-{operator}" / query_folder / f"s{schema_id}" / str(bucket)


def root_id(root: str) -> str:
    """Return an id of a root for the names of its local stores: 16 hexadecimal digits."""
    # Containers of a machine get different ids, because LMDB identifies processes by their process ids.
    return hashlib.blake2b(f"{root}\0{get_pid_namespace()}".encode(), digest_size=8).hexdigest()


def scratch_folder(local_dir: str | None) -> Path:
    """Return the private folder for temporary files on a local disk; create it if it is missing."""
    return _make_private_folder(stores_folder(local_dir) / "scratch")


def stores_folder(local_dir: str | None) -> Path:
    """Return the folder of the local stores (see `stores_path`), and create it with mode 0700 if it is missing."""
    return _make_private_folder(stores_path(local_dir))


def stores_path(local_dir: str | None) -> Path:
    """Return the path of the folder of the local stores, in `local_dir` or else in Spark's first local folder."""
    base = local_dir or os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    return Path(base) / f"spark_state_ext-{os.getuid()}"


def _make_private_folder(folder: Path) -> Path:
    """Create or check a folder that only this user may access, and return it."""
    try:
        make_private(folder)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"the local folder {folder} cannot be used: {error}. Set local_dir to a writable local disk."
        ) from error
    return folder
