"""A folder of checkpoint files on any fsspec file system.

A file appears whole or not at all: file systems that can rename write it under a temporary name first; on object
stores, a PUT is atomic. A file's name holds its identity, so writing it again writes the same bytes.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import importlib
import json
import os
import posixpath
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from spark_state_ext.errors import MissingCheckpointError, StateError, StorageError, StoreFullError, UsageError
from spark_state_ext.files import duplication, publication
from spark_state_ext.files.advice import advice_on, extra_for
from spark_state_ext.files.listing import Entry, entry_of, list_tree
from spark_state_ext.files.readable import Duplicable, Listed, Readable
from spark_state_ext.worker import removal
from spark_state_ext.worker.descriptors import is_limit_reached, make_too_many_error

__all__ = ["Duplicable", "Entry", "Folder", "Listed", "Readable", "is_temporary", "refuse_relative", "make_taken_error"]

# Object stores: a PUT becomes visible whole or not at all, and a rename would be a copy.
_ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory", "r2"})
_TEMPORARY = ".tmp-"
_PIECE_BYTES = 8 << 20
# A local path without a leading slash, which fsspec would look for in the process's working folder.
_RELATIVE_URL = re.compile(r"(?:.*::)?(?:file|local)://(?!/)")


class Folder:
    """A folder on a file system."""

    def __init__(self, root: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.root = root
        # A digest, as the options may hold secrets.
        options_json = json.dumps(dict(storage_options or {}), sort_keys=True, default=repr)
        self._options_digest = hashlib.blake2b(options_json.encode(), digest_size=16).hexdigest()
        # Some file systems, such as s3fs, cache listings for the life of the process, and then do not see files that
        # other processes wrote since.
        self._options = dict(storage_options or {})
        if "implementation" not in self._options:
            self._options.setdefault("use_listings_cache", False)
        try:
            self._fs, self._path = _open_file_system(root, self._options)
        except (ValueError, ImportError, TypeError) as error:
            hint = extra_for(root) if isinstance(error, ImportError) else ""
            raise UsageError(f"the root {root!r} cannot be opened: {error}{hint}") from error
        protocols = self._fs.protocol if isinstance(self._fs.protocol, (tuple, list)) else (self._fs.protocol,)
        self._atomic_put = not _ATOMIC_PUT.isdisjoint(protocols)
        self._local = isinstance(self._fs, LocalFileSystem)
        # Folders whose names survive a power failure, from this one downwards; shared with the folders below it.
        self._top = self._path
        self._durable: set[str] = set()
        # Above this folder, a symbolic link is the user's choice; below it, files behind a link are never removed.
        self._named = self._path

    @property
    def is_local(self) -> bool:
        """True if the folder is on a file system of this machine."""
        return self._local

    @property
    def identity(self) -> str:
        """The folder's root, with a digest of its storage options."""
        return f"{self.root} {self._options_digest}"

    @property
    def name(self) -> str:
        """The last part of the folder's path."""
        return posixpath.basename(self._path.rstrip("/"))

    @property
    def replaces(self) -> bool:
        """True if writing a file replaces an older one in one step, so that the name exists at every moment.

        This is only sure on local disks and object stores.
        """
        return self._local or self._atomic_put

    @property
    def creates_exclusively(self) -> bool:
        """True if exactly one of several concurrent callers of `create` is sure to get True.

        This holds on local disks, on S3 (s3fs with botocore 1.35.20 or newer, and a server that honours
        ``If-None-Match``), on Azure (adlfs), on Google Cloud Storage (gcsfs), on WebHDFS, HDFS and SMB, and in memory.
        """
        return publication.creates_exclusively(self._fs)

    def child(self, *names: str) -> Folder:
        """Return a folder below this one."""
        folder = object.__new__(Folder)
        folder.__dict__.update(self.__dict__)
        folder.root = posixpath.join(self.root, *names)
        folder._path = posixpath.join(self._path, *names)
        return folder

    def above(self) -> list[Folder]:
        """Return the folders that contain this one, nearest first; local folders without links and on one disk only."""
        path, scheme = os.path.realpath(self._path) if self._local else self._path.rstrip("/"), ""
        if not self._local and "://" in self.root:
            scheme = f"{self.root.partition('://')[0]}://"
        folders: list[Folder] = []
        while posixpath.dirname(path) not in ("", "/", path):
            path = posixpath.dirname(path)
            if self._local and folders and _device(path) != _device(folders[-1]._path) is not None:
                break
            folder = self.child()
            folder.root, folder._path = f"{scheme}{path}", path
            folders.append(folder)
        return folders

    def as_named(self) -> Folder:
        """Return this folder as if the user had named it, to remove what the query itself wrote by the same path."""
        folder = copy.copy(self)
        folder._named = folder._path
        return folder

    def where(self, name: str) -> str:
        """Return a file's name for messages."""
        return posixpath.join(self.root, name)

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Publish a small file; it replaces an existing one.

        If not `replaces`, the name may be missing for a moment. Use `create` or `put_file` for files that must exist at
        every moment.
        """
        with self._translate_errors(f"writing {self.where(name)}", writes=True):
            target = posixpath.join(self._path, name)
            if self._atomic_put:
                self._fs.pipe_file(target, bytes(data))
                return
            self._make_folder(posixpath.dirname(target))
            temporary = self._temporary(target)
            with self._remove_on_failure(temporary):
                with self._fs.open(temporary, "wb") as file:
                    file.write(data)
                    self._sync(file)
                if not self._rename(temporary, target):
                    self._fs.rm_file(target)
                    self._fs.mv(temporary, target)

    def put_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """Publish a local file, of any size, under a name.

        It replaces an existing file if the store `replaces`. Otherwise an existing file stays and is never absent; it
        is an error if it has other bytes.
        """
        with self._translate_errors(f"writing {self.where(name)}", writes=True):
            target = posixpath.join(self._path, name)
            if self._atomic_put:
                self._fs.put_file(os.fspath(local_path), target)
                return
            self._make_folder(posixpath.dirname(target))
            temporary = self._temporary(target)
            with self._remove_on_failure(temporary):
                self._fs.put_file(os.fspath(local_path), temporary)
                if self._local:
                    with open(temporary, "rb") as file:
                        os.fsync(file.fileno())
                if self._rename(temporary, target):
                    return
                # Another process sent the file too; both have the same bytes.
                if not self._has_bytes_of(local_path, target):
                    raise make_taken_error(self.where(name)) from FileExistsError(
                        errno.EEXIST, "another file exists", target
                    )
                self._fs.rm_file(temporary)

    def duplicate(self, name: str, source: Folder) -> bool:
        """Duplicate another folder's file here, under its name, without reading it. Call `sync` after the last one."""
        with self._translate_errors(f"duplicating {source.where(name)} to {self.root}", writes=True):
            paths = posixpath.join(source._path, name), posixpath.join(self._path, name)
            try:
                return duplication.duplicate_file(source._fs, paths[0], self._fs, paths[1], self._make_folder)
            except FileNotFoundError as error:
                if source.exists(name):
                    raise
                raise MissingCheckpointError(f"{source.where(name)} does not exist") from error

    def duplicate_to(self, target: Folder, name: str) -> bool:
        """Duplicate a file of this folder to a target folder, see `duplicate`."""
        return target.duplicate(name, self)

    def sync(self) -> None:
        """Make the names of duplicates in this folder survive a power failure."""
        if self._local and os.path.isdir(self._path):
            with self._translate_errors(f"syncing {self.root}", writes=True):
                publication.sync_folder(self._path)

    def create(self, name: str, data: bytes) -> bool:
        """Publish a small file unless its name exists; return False if it exists with other bytes."""
        with self._translate_errors(f"writing {self.where(name)}", writes=True):
            target = posixpath.join(self._path, name)
            if self._local:
                self._make_folder(posixpath.dirname(target))
            return publication.create(self._fs, target, data, self._temporary(target))

    def get(self, name: str) -> bytes:
        """Read a whole file."""
        with self._translate_errors(f"reading {self.where(name)}"):
            data: bytes = self._fs.cat_file(posixpath.join(self._path, name))
            return data

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Read bytes `start` to `end` of a file; fewer if the file ends before."""
        with self._translate_errors(f"reading {self.where(name)}"):
            data: bytes = self._fs.cat_file(posixpath.join(self._path, name), start=start, end=end)
            return data

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """Copy a file to a local path; a failure of the local disk is an `OSError`."""
        size = self.size(name)
        with open(local_path, "wb") as copy:
            for at in range(0, size, _PIECE_BYTES):
                copy.write(self.get_range(name, at, min(at + _PIECE_BYTES, size)))

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        with self._translate_errors(f"reading {self.where(name)}"):
            size: int = self._fs.info(posixpath.join(self._path, name))["size"]
            return size

    def open_local(self, name: str) -> pa.NativeFile | None:
        """Open a file in place on a local file system; None on any other one."""
        if not self._local:
            return None
        with self._translate_errors(f"reading {self.where(name)}"):
            return pa.OSFile(posixpath.join(self._path, name), "r")
        raise AssertionError("unreachable: _translate_errors raises what it catches")

    def mapped(self, name: str) -> pa.Buffer:
        """Map a file of a local file system into memory, without a copy; the mapping outlives the file's deletion."""
        with (
            self._translate_errors(f"mapping {self.where(name)}"),
            pa.memory_map(posixpath.join(self._path, name)) as file,
        ):
            return file.read_buffer()
        raise AssertionError("unreachable: _translate_errors raises what it catches")

    def exists(self, name: str) -> bool:
        """True if the file exists."""
        with self._translate_errors(f"looking for {self.where(name)}"):
            self._fs.invalidate_cache(self._path)
            return self._is_there(posixpath.join(self._path, name))

    def names(self) -> list[str]:
        """Return the names of files and folders here, sorted; empty if the folder does not exist."""
        with self._translate_errors(f"listing {self.root}"):
            self._fs.invalidate_cache(self._path)
            try:
                paths = self._fs.ls(self._path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            names = (posixpath.basename(path.rstrip("/")) for path in paths)
            return sorted(name for name in names if not name.startswith(_TEMPORARY))

    def entries(self) -> list[Entry]:
        """List files and folders here, including temporary ones, with what the file system knows about them."""
        with self._translate_errors(f"listing {self.root}"):
            self._fs.invalidate_cache(self._path)
            try:
                infos = self._fs.ls(self._path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(entry_of(info) for info in infos)

    def changed_ns(self) -> int | None:
        """Return when a file was last added or removed here, by a local file system's clock.

        None if the folder does not exist or is not local.
        """
        if not self._local:
            return None
        with self._translate_errors(f"looking at {self.root}"), contextlib.suppress(FileNotFoundError):
            return os.stat(self._path).st_mtime_ns
        return None

    def tree(self) -> list[Entry]:
        """List all files here and in the folders below, by their path from here; an unreadable folder is an error."""
        with self._translate_errors(f"listing {self.root}"):
            self._fs.invalidate_cache(self._path)
            infos = list_tree(self._fs, self._path, self._atomic_put)
            files = ((posixpath.relpath(path, self._path), entry_of(info)) for path, info in infos.items())
            return sorted(replace(entry, name=path) for path, entry in files if not entry.folder)

    def move(self, name: str, target: str) -> None:
        """Move a file within this folder, unless it was moved already. An object store copies it."""
        with self._translate_errors(f"moving {self.where(name)}"), contextlib.suppress(FileNotFoundError):
            path = posixpath.join(self._path, target)
            if not self._atomic_put:
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            self._fs.mv(posixpath.join(self._path, name), path)

    def remove(self, name: str) -> None:
        """Remove a file if it exists. Links on the path are refused, see `refuse_links`."""
        with self._translate_errors(f"removing {self.where(name)}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._removable(name))

    def remove_tree(self, name: str) -> None:
        """Remove a folder and its content if it exists. Links on the path are refused, see `refuse_links`."""
        with self._translate_errors(f"removing {self.where(name)}"), contextlib.suppress(FileNotFoundError):
            path = self._removable(name)
            removal.remove_tree(path) if self._local else self._fs.rm(path, recursive=True)

    def remove_if_empty(self, *names: str) -> None:
        """Remove a folder if it is empty. Object stores have no folders."""
        if not self._atomic_put:
            with contextlib.suppress(OSError):
                self._fs.rmdir(self._removable(*names))

    def refuse_links(self, folder: str = "") -> None:
        """Raise an UnsafeFolderError if a folder in this one, or one between it and the user's, is a symbolic link."""
        if self._local:
            removal.refuse_links(posixpath.join(self._path, folder), self._named)

    def _removable(self, *names: str) -> str:
        self.refuse_links(posixpath.dirname(posixpath.join("", *names)))
        return posixpath.join(self._path, *names)

    def _is_there(self, path: str) -> bool:
        return publication.is_there(self._fs, path)

    def _rename(self, temporary: str, target: str) -> bool:
        """Rename a temporary file to its name; False if another file has that name and keeps it."""
        if self._local:
            os.replace(temporary, target)
            # Without this, a power failure may undo the rename after Spark made the pointer durable.
            publication.sync_folder(posixpath.dirname(target))
            return True
        return publication.rename(self._fs, temporary, target)

    def _make_folder(self, path: str) -> None:
        if not self._local:
            self._fs.makedirs(path, exist_ok=True)
        elif path not in self._durable or not os.path.isdir(path):
            publication.make_folder(path, self._top)
            self._durable.add(path)

    def _has_bytes_of(self, local_path: str | os.PathLike[str], target: str) -> bool:
        with open(local_path, "rb") as local:
            size = os.fstat(local.fileno()).st_size
            return self._fs.info(target)["size"] == size and all(
                self._fs.cat_file(target, start=at, end=min(at + _PIECE_BYTES, size)) == local.read(_PIECE_BYTES)
                for at in range(0, size, _PIECE_BYTES)
            )

    def _sync(self, file: Any) -> None:
        file.flush()
        if self._local:
            os.fsync(file.fileno())

    @staticmethod
    def _temporary(target: str) -> str:
        folder, name = posixpath.split(target)
        return posixpath.join(folder, f"{_TEMPORARY}{uuid.uuid4().hex}-{name}")

    @contextlib.contextmanager
    def _remove_on_failure(self, temporary: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # The first error is what matters; a leftover temporary file does no harm.
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    @contextlib.contextmanager
    def _translate_errors(self, doing: str, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except StateError:  # some are also an OSError
            raise
        except FileNotFoundError as error:
            if writes:  # the folder or the local source was removed, or the folder cannot be created
                raise StorageError(f"{doing}: {error}. {advice_on(error, self._local)}") from error
            raise MissingCheckpointError(f"{doing}: it does not exist") from error
        except OSError as error:
            if is_limit_reached(error):
                raise make_too_many_error(doing) from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFullError(f"{doing}: {error}. Make room where the root lies.") from error
            raise StorageError(f"{doing}: {error}. {advice_on(error, self._local)}") from error
        except Exception as error:
            # Clients of object stores have their own errors, which are not an OSError.
            text = f"{type(error).__name__}: {error}"
            raise StorageError(f"{doing}: {text}. {advice_on(error, self._local)}") from error


def _device(path: str) -> int | None:
    """Return the disk that a local folder is on; None if the folder does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_dev
    return None


def _open_file_system(root: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Open the file system of a root; return it with the root's path in it."""
    try:
        root.encode()
    except UnicodeEncodeError as error:
        # Neither LMDB nor PyArrow opens such a path.
        raise ValueError("its name is not UTF-8") from error
    options = dict(options)
    implementation = options.pop("implementation", None)
    if implementation is None:
        file_system_and_path: tuple[Any, str] = fsspec.core.url_to_fs(root, **options)
        return file_system_and_path
    module, _, name = str(implementation).rpartition(".")
    try:
        file_system_class = getattr(importlib.import_module(module), name)
    except (AttributeError, ValueError) as error:
        raise ImportError(f"there is no class {implementation!r}: {error}") from error
    # Such a class may serve several protocols, and so does not know which prefix to strip from a root.
    return file_system_class(**options), root.partition("://")[2] or root


def refuse_relative(root: str, what: str) -> None:
    """Raise a UsageError for a relative root, which each process would look for in its own working folder."""
    if "://" not in root and not root.startswith("/"):
        raise UsageError(f"{what} must be a URL or an absolute path, as executors have other working folders: {root!r}")
    if _RELATIVE_URL.match(root):
        raise UsageError(
            f"{what} must be an absolute path, in a URL too, as executors have other working folders: {root!r} is "
            "missing the third slash of file:///…"
        )


def make_taken_error(where: str) -> StorageError:
    """Return the error for a file that exists with wrong bytes and cannot be replaced."""
    return StorageError(
        f"{where} exists with other bytes than it must have, so it is probably damaged, and this file system cannot "
        "replace a file in one step. The file is of no use: delete it, and start again."
    )


def is_temporary(name: str) -> bool:
    """True if a name belongs to a temporary file, which is being written or whose writer died."""
    return name.startswith(_TEMPORARY)
