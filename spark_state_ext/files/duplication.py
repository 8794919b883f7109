"""Duplicate a file without reading it: by a hard link on a local disk, or by a copy within the store.

(FLIP-193 calls it duplicating.) Stores with an unknown client are not trusted to do this: `savepoints.file_copy` copies
their files through the process.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from spark_state_ext.files.publication import client_of, is_there
from spark_state_ext.worker.removal import is_link, remove_file

__all__ = ["duplicate_file", "duplicates"]

# Clients whose `cp_file` lets the store copy, whole or not at all, including files larger than one request.
_COPY_IN_THE_STORE = frozenset({"memory", "s3fs", "adlfs", "gcsfs"})
# Another disk, a file system without links, or a file that already has as many links as are allowed.
_NO_LINK = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
)


def duplicates(source: Any, target: Any) -> bool:
    """True if files of one file system may be duplicated to another one; on local disks, only trying it is certain."""
    if isinstance(source, LocalFileSystem) and isinstance(target, LocalFileSystem):
        return True
    # fsspec has one object per process for equal options, so this is the same endpoint and the same account.
    return source is target and client_of(source) in _COPY_IN_THE_STORE


def duplicate_file(source: Any, path: str, target: Any, target_path: str, make_folder: Callable[[str], None]) -> bool:
    """Duplicate a file; return False if that is not possible here."""
    if not duplicates(source, target):
        return False
    if isinstance(target, LocalFileSystem):
        make_folder(posixpath.dirname(target_path))
        return _link(path, target_path)
    if not is_there(target, target_path):
        target.cp_file(path, target_path)
    size, copied = source.info(path)["size"], target.info(target_path)["size"]
    if size != copied:
        raise OSError(errno.EIO, f"the copy made by the store has {copied} bytes instead of {size}", target_path)
    return True


def _link(path: str, target_path: str) -> bool:
    # Link to the file itself, never to a symbolic link, whose target may disappear.
    path = os.path.realpath(path, strict=True)
    if is_link(target_path):
        remove_file(target_path)
    try:
        os.link(path, target_path)
    except FileExistsError:
        return True
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True
