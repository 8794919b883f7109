"""Publish a file under its name on a file system, so that it appears whole or not at all.

If several callers create a file of one name, some file systems let exactly one of them win and others do not. fsspec
has no portable way to ask for it, so this module knows what each client package can do, and trusts no other client.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import inspect
import os
import posixpath
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from spark_state_ext.worker.retry import find_http_status

__all__ = ["client_of", "create", "creates_exclusively", "is_there", "make_folder", "rename", "sync_folder"]

# Protocols whose rename never replaces a file, as decided by one server. (fsspec's rename over SFTP does replace.)
_RENAME_KEEPS = frozenset({"webhdfs", "webHDFS", "hdfs", "smb"})
# HTTP status: the file exists, or another request for it is under way.
_TAKEN_STATUS = frozenset({409, 412})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_ATTEMPTS = 6
_WAIT_S = 0.05
_MEMORY_LOCK = threading.Lock()

Make = Callable[[Any, str, bytes, str], None]


def creates_exclusively(fs: Any) -> bool:
    """True if exactly one of several callers of `create` for one name is sure to make the file."""
    return _find_method(fs)[1]


def create(fs: Any, target: str, data: bytes, temporary: str) -> bool:
    """Make a file unless its name exists; return False if it exists with other bytes."""
    make, _ = _find_method(fs)
    attempt = 0
    while True:
        try:
            make(fs, target, data, temporary)
            return True
        except Exception as error:
            if not isinstance(error, FileExistsError) and find_http_status(error) not in _TAKEN_STATUS:
                raise
            try:
                return bool(fs.cat_file(target) == data)
            except FileNotFoundError:
                # The file was deleted since, or the store refused both of two concurrent requests.
                attempt += 1
                if attempt == _ATTEMPTS:
                    raise error from None
        time.sleep(random.uniform(0, _WAIT_S * 2**attempt))


def make_folder(path: str, root: str) -> None:
    """Make a local folder, so that its name and the names of the folders that contain it survive a power failure."""
    missing, at = [], path
    while not os.path.isdir(at):
        missing.append(at)
        at = posixpath.dirname(at)
    os.makedirs(path, exist_ok=True)
    at = path
    while at in missing or at == root or at.startswith(f"{root}/"):
        parent = posixpath.dirname(at)
        if parent == at:
            return
        # A folder may be passable but not readable, and such a folder cannot be synced.
        with contextlib.suppress(PermissionError):
            sync_folder(parent)
        at = parent


def sync_folder(path: str) -> None:
    """Make the names in a local folder survive a power failure."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _find_method(fs: Any) -> tuple[Make, bool]:
    if isinstance(fs, LocalFileSystem):
        return _make_on_disk, True
    client = client_of(fs)
    if client == "memory":
        return _make_in_memory, True
    if client == "s3fs" and _has_conditional_put():
        # As a parameter of the request: s3fs passed these on long before it had its own mode for this.
        return _put_with(IfNoneMatch="*"), True
    if client == "adlfs":
        return _put_with(overwrite=False), True
    if client == "gcsfs" and _has_create_mode(fs):
        return _put_with(mode="create"), True
    protocols = fs.protocol if isinstance(fs.protocol, (tuple, list)) else (fs.protocol,)
    return _make_by_rename, not _RENAME_KEEPS.isdisjoint(protocols)


def client_of(fs: Any) -> str:
    """Return the package that talks to the store. The protocol is not enough: obstore accepts a mode and ignores it."""
    for base in type(fs).__mro__:
        package = base.__module__.partition(".")[0]
        if package in ("s3fs", "adlfs", "gcsfs"):
            return package
        if base.__module__ == "fsspec.implementations.memory":
            return "memory"
    return ""


def _has_conditional_put() -> bool:
    """True if botocore supports a conditional PUT of a new object, as it does from 1.35.20."""
    return tuple(int(part) for part in importlib.metadata.version("botocore").split(".")[:3]) >= (1, 35, 20)


def _has_create_mode(fs: Any) -> bool:
    return "mode" in inspect.signature(type(fs)._pipe_file).parameters


def _put_with(**options: Any) -> Make:
    def make(fs: Any, target: str, data: bytes, _: str) -> None:
        fs.pipe_file(target, data, **options)

    return make


def _make_in_memory(fs: Any, target: str, data: bytes, _: str) -> None:
    with _MEMORY_LOCK:
        if fs.exists(target):
            raise FileExistsError(errno.EEXIST, "the file exists", target)
        fs.pipe_file(target, data)


def _make_on_disk(fs: Any, target: str, data: bytes, temporary: str) -> None:
    folder = posixpath.dirname(target)
    try:
        _write_new(temporary, data)
        try:
            os.link(temporary, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Some mounts have no links. There, a reader may see a partly written file.
            _write_new(target, data)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_folder(folder)


def _write_new(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        os.unlink(path)
        raise


def _make_by_rename(fs: Any, target: str, data: bytes, temporary: str) -> None:
    fs.invalidate_cache(posixpath.dirname(target))
    if is_there(fs, target):
        raise FileExistsError(errno.EEXIST, "the file exists", target)
    fs.makedirs(posixpath.dirname(target), exist_ok=True)
    try:
        with fs.open(temporary, "wb") as file:
            file.write(data)
        # If the rename does replace, another caller's file may be there now.
        if not rename(fs, temporary, target) or fs.cat_file(target) != data:
            raise FileExistsError(errno.EEXIST, "the file exists", target)
    except BaseException:
        # The first error is what matters; a leftover temporary file does no harm.
        with contextlib.suppress(Exception):
            fs.rm_file(temporary)
        raise


def rename(fs: Any, temporary: str, target: str) -> bool:
    """Rename a temporary file on a remote file system; False if another file has that name and keeps it."""
    try:
        fs.mv(temporary, target)
    except OSError:
        # Clients raise their own errors if a name is taken, or an error that does not say so.
        if not is_there(fs, target):
            raise
    # WebHDFS raises no error if it did not rename.
    return not is_there(fs, temporary)


def is_there(fs: Any, path: str) -> bool:
    """True if the file exists; unlike fsspec's `exists`, an error does not mean that it is absent."""
    try:
        fs.info(path)
    except FileNotFoundError:
        return False
    return True
