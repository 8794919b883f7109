"""A second file with the bytes of another one, without reading it: a hard link on a local disk, a copy by the store.

(FLIP-193 calls it duplicating.) Nothing is believed of stores whose client is not known: files of these go through the
process, in `savepoints.copying`.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from spark_state_ext.files.publishing import client_of, is_there
from spark_state_ext.worker.removal import is_link, remove_file

__all__ = ["duplicated", "duplicates"]

# Their `cp_file` has the store copy, whole or not at all, and files larger than one request too.
_COPY_IN_THE_STORE = frozenset({"memory", "s3fs", "adlfs", "gcsfs"})
# Another disk, a file system without links, or one that has as many names for the file as it allows.
_NO_LINK = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
)


def duplicates(source: Any, target: Any) -> bool:
    """Whether files of one file system may be duplicated to another one; on local disks trying it tells."""
    if isinstance(source, LocalFileSystem) and isinstance(target, LocalFileSystem):
        return True
    # One object a process for equal options: the same endpoint and the same account.
    return source is target and client_of(source) in _COPY_IN_THE_STORE


def duplicated(source: Any, path: str, target: Any, target_path: str, make_folder: Callable[[str], None]) -> bool:
    """Duplicate a file."""
    if not duplicates(source, target):
        return False
    if isinstance(target, LocalFileSystem):
        make_folder(posixpath.dirname(target_path))
        return _linked(path, target_path)
    if not is_there(target, target_path):
        target.cp_file(path, target_path)
    size, copied = source.info(path)["size"], target.info(target_path)["size"]
    if size != copied:
        raise OSError(errno.EIO, f"{copied} bytes of {size} are there after the store has copied it", target_path)
    return True


def _linked(path: str, target_path: str) -> bool:
    # A link to the bytes, and never to a symbolic link, whose target may go.
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
