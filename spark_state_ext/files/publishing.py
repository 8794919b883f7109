"""How a file gets its name on a file system, so that it is there whole or not at all.

Some file systems let one of several callers that make a file of one name win, others do not, and fsspec has no portable
way to ask for it. So what each can do is said here, by the package that talks to it; nothing is believed of others.
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

from spark_state_ext.worker.retry import status_of

__all__ = ["client_of", "create", "creates_exclusively", "is_there", "make_folder", "renamed", "sync_folder"]

# Rename never puts a file in another one's place, and one server decides. (fsspec renames over SFTP so that it does.)
_RENAME_KEEPS = frozenset({"webhdfs", "webHDFS", "hdfs", "smb"})
# A file of this name is there, or another request for it is under way.
_TAKEN_STATUS = frozenset({409, 412})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_ATTEMPTS = 6
_WAIT_S = 0.05
_IN_MEMORY = threading.Lock()

Make = Callable[[Any, str, bytes, str], None]


def creates_exclusively(fs: Any) -> bool:
    """Whether of several callers of `create` for one name exactly one makes the file, for certain."""
    return _how(fs)[1]


def create(fs: Any, target: str, data: bytes, temporary: str) -> bool:
    """Make a file where none of its name is."""
    make, _ = _how(fs)
    attempt = 0
    while True:
        try:
            make(fs, target, data, temporary)
            return True
        except Exception as error:
            if not isinstance(error, FileExistsError) and status_of(error) not in _TAKEN_STATUS:
                raise
            try:
                return bool(fs.cat_file(target) == data)
            except FileNotFoundError:
                # It was deleted since, or stores refuse both of two requests at one time.
                attempt += 1
                if attempt == _ATTEMPTS:
                    raise error from None
        time.sleep(random.uniform(0, _WAIT_S * 2**attempt))


def make_folder(path: str, root: str) -> None:
    """Make a local folder, so that its name and those of the folders it is in survive a power failure."""
    made, at = [], path
    while not os.path.isdir(at):
        made.append(at)
        at = posixpath.dirname(at)
    os.makedirs(path, exist_ok=True)
    at = path
    while at in made or at == root or at.startswith(f"{root}/"):
        parent = posixpath.dirname(at)
        if parent == at:
            return
        # One may be allowed to go through a folder and not to look into it; nobody can sync that.
        with contextlib.suppress(PermissionError):
            sync_folder(parent)
        at = parent


def sync_folder(path: str) -> None:
    """See that the names in a local folder survive a power failure."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _how(fs: Any) -> tuple[Make, bool]:
    if isinstance(fs, LocalFileSystem):
        return _on_disk, True
    client = client_of(fs)
    if client == "memory":
        return _in_memory, True
    if client == "s3fs" and _knows_conditions():
        # As a parameter of the request, which s3fs has handed on for longer than it has a mode of its own.
        return _put_with(IfNoneMatch="*"), True
    if client == "adlfs":
        return _put_with(overwrite=False), True
    if client == "gcsfs" and _has_mode(fs):
        return _put_with(mode="create"), True
    protocols = fs.protocol if isinstance(fs.protocol, (tuple, list)) else (fs.protocol,)
    return _by_rename, not _RENAME_KEEPS.isdisjoint(protocols)


def client_of(fs: Any) -> str:
    """The package that talks to the store. The protocol does not tell: obstore's takes a mode and ignores it."""
    for made in type(fs).__mro__:
        package = made.__module__.partition(".")[0]
        if package in ("s3fs", "adlfs", "gcsfs"):
            return package
        if made.__module__ == "fsspec.implementations.memory":
            return "memory"
    return ""


def _knows_conditions() -> bool:
    """Whether botocore lets an object be put only where there is none; it does from 1.35.20."""
    return tuple(int(part) for part in importlib.metadata.version("botocore").split(".")[:3]) >= (1, 35, 20)


def _has_mode(fs: Any) -> bool:
    return "mode" in inspect.signature(type(fs)._pipe_file).parameters


def _put_with(**options: Any) -> Make:
    def make(fs: Any, target: str, data: bytes, _: str) -> None:
        fs.pipe_file(target, data, **options)

    return make


def _in_memory(fs: Any, target: str, data: bytes, _: str) -> None:
    with _IN_MEMORY:
        if fs.exists(target):
            raise FileExistsError(errno.EEXIST, "there is one", target)
        fs.pipe_file(target, data)


def _on_disk(fs: Any, target: str, data: bytes, temporary: str) -> None:
    folder = posixpath.dirname(target)
    try:
        _write_new(temporary, data)
        try:
            os.link(temporary, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Some mounts have no links. There a reader may find it before all of it is written.
            _write_new(target, data)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_folder(folder)


def _write_new(path: str, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(file, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(file)
    except BaseException:
        os.unlink(path)
        raise


def _by_rename(fs: Any, target: str, data: bytes, temporary: str) -> None:
    fs.invalidate_cache(posixpath.dirname(target))
    if is_there(fs, target):
        raise FileExistsError(errno.EEXIST, "there is one", target)
    fs.makedirs(posixpath.dirname(target), exist_ok=True)
    try:
        with fs.open(temporary, "wb") as file:
            file.write(data)
        # Where it does replace, another one's file may have come in its place.
        if not renamed(fs, temporary, target) or fs.cat_file(target) != data:
            raise FileExistsError(errno.EEXIST, "there is one", target)
    except BaseException:
        # What went wrong is what matters; a leftover temporary file harms nobody.
        with contextlib.suppress(Exception):
            fs.rm_file(temporary)
        raise


def renamed(fs: Any, temporary: str, target: str) -> bool:
    """Give a file on a file system elsewhere its name."""
    try:
        fs.mv(temporary, target)
    except OSError:
        # Clients have errors of their own for a name that is taken, or none that tells.
        if not is_there(fs, target):
            raise
    # WebHDFS says nothing where it did nothing.
    return not is_there(fs, temporary)


def is_there(fs: Any, path: str) -> bool:
    """Whether there is a file; unlike `exists` of fsspec, which takes an error of whatever kind for an absent one."""
    try:
        fs.info(path)
    except FileNotFoundError:
        return False
    return True
