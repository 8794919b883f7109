"""Where checkpoint files live: one folder of any fsspec file system.

A file appears whole or not at all: on file systems that can rename, it is written under a temporary name first;
on object stores, a PUT is atomic. A file's name holds its identity, so writing it again writes the same bytes.
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
from spark_state_ext.files import duplicating, publishing
from spark_state_ext.files.advice import advice_on, extra_for
from spark_state_ext.files.listing import Entry, entry_of, listed_whole
from spark_state_ext.files.readable import Duplicable, Listed, Readable
from spark_state_ext.worker import removal
from spark_state_ext.worker.descriptors import too_many, used_up

__all__ = ["Duplicable", "Entry", "Folder", "Listed", "Readable", "is_temporary", "refuse_relative", "taken"]

# Object stores: a PUT is seen whole or not at all, and "rename" would be a copy.
_ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory", "r2"})
_TEMPORARY = ".tmp-"
_PIECE_BYTES = 8 << 20
# A path of this machine, which fsspec looks for in the process's own folder as it does not begin with a slash.
_RELATIVE_URL = re.compile(r"(?:.*::)?(?:file|local)://(?!/)")


class Folder:
    """A folder on a file system."""

    def __init__(self, root: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.root = root
        # Of the options as given; they may hold secrets.
        given = json.dumps(dict(storage_options or {}), sort_keys=True, default=repr)
        self._options_digest = hashlib.blake2b(given.encode(), digest_size=16).hexdigest()
        # Listings are remembered for the life of a process by some, s3fs among them, and then files that others wrote
        # since "do not exist".
        self._options = dict(storage_options or {})
        if "implementation" not in self._options:
            self._options.setdefault("use_listings_cache", False)
        try:
            self._fs, self._path = _opened(root, self._options)
        except (ValueError, ImportError, TypeError) as error:
            lacks = extra_for(root) if isinstance(error, ImportError) else ""
            raise UsageError(f"the root {root!r} cannot be opened: {error}{lacks}") from error
        protocols = self._fs.protocol if isinstance(self._fs.protocol, (tuple, list)) else (self._fs.protocol,)
        self._atomic_put = not _ATOMIC_PUT.isdisjoint(protocols)
        self._local = isinstance(self._fs, LocalFileSystem)
        # Folders of which the names survive a power failure, from this one on; those below it know them too.
        self._top = self._path
        self._durable: set[str] = set()
        # Above this one a symbolic link is the user's choice; below it nothing is removed behind one.
        self._named = self._path

    @property
    def is_local(self) -> bool:
        """Whether it is on a file system of this machine."""
        return self._local

    @property
    def identity(self) -> str:
        """The folder's root, and what else decides where that is."""
        return f"{self.root} {self._options_digest}"

    @property
    def name(self) -> str:
        """Its last name."""
        return posixpath.basename(self._path.rstrip("/"))

    @property
    def replaces(self) -> bool:
        """Whether a file takes the place of another one in one step, so that there is one at every moment.

        False where nobody vouches for it: on all but local disks and object stores.
        """
        return self._local or self._atomic_put

    @property
    def creates_exclusively(self) -> bool:
        """Whether of several concurrent callers of `create` exactly one gets True, for certain.

        So it is on local disks, on S3 (s3fs with botocore 1.35.20 or newer, and a server that honours
        ``If-None-Match``), on Azure (adlfs), on Google Cloud Storage (gcsfs), on WebHDFS, HDFS and SMB, and in memory.
        """
        return publishing.creates_exclusively(self._fs)

    def child(self, *names: str) -> Folder:
        """A folder below this one."""
        made = object.__new__(Folder)
        made.__dict__.update(self.__dict__)
        made.root = posixpath.join(self.root, *names)
        made._path = posixpath.join(self._path, *names)
        return made

    def above(self) -> list[Folder]:
        """The folders that this one lies in, nearest first; on a local disk without links, and on one disk only."""
        path, scheme = os.path.realpath(self._path) if self._local else self._path.rstrip("/"), ""
        if not self._local and "://" in self.root:
            scheme = f"{self.root.partition('://')[0]}://"
        found: list[Folder] = []
        while posixpath.dirname(path) not in ("", "/", path):
            path = posixpath.dirname(path)
            if self._local and found and _device(path) != _device(found[-1]._path) is not None:
                break
            made = self.child()
            made.root, made._path = f"{scheme}{path}", path
            found.append(made)
        return found

    def as_named(self) -> Folder:
        """Return this folder as if the user had named it: for removing what the query itself wrote by the same path."""
        made = copy.copy(self)
        made._named = made._path
        return made

    def where(self, name: str) -> str:
        """How to call a file in messages."""
        return posixpath.join(self.root, name)

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Publish a small file; it takes the place of one that is there.

        Where not `replaces`, there may be none of that name for a moment. Files that must be there at every moment go
        by `create` or `put_file`.
        """
        with self._translated(f"writing {self.where(name)}", writes=True):
            target = posixpath.join(self._path, name)
            if self._atomic_put:
                self._fs.pipe_file(target, bytes(data))
                return
            self._make_folder(posixpath.dirname(target))
            temporary = self._temporary(target)
            with self._removed_on_failure(temporary):
                with self._fs.open(temporary, "wb") as file:
                    file.write(data)
                    self._sync(file)
                if not self._renamed(temporary, target):
                    self._fs.rm_file(target)
                    self._fs.mv(temporary, target)

    def put_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """Publish a local file, of any size, under a name.

        It takes the place of one that is there where the store `replaces`. Elsewhere that one stays, and is never
        absent; it is an error when it has other bytes.
        """
        with self._translated(f"writing {self.where(name)}", writes=True):
            target = posixpath.join(self._path, name)
            if self._atomic_put:
                self._fs.put_file(os.fspath(local_path), target)
                return
            self._make_folder(posixpath.dirname(target))
            temporary = self._temporary(target)
            with self._removed_on_failure(temporary):
                self._fs.put_file(os.fspath(local_path), temporary)
                if self._local:
                    with open(temporary, "rb") as file:
                        os.fsync(file.fileno())
                if self._renamed(temporary, target):
                    return
                # Sent by another one too; files that are sent twice are the same.
                if not self._has_bytes_of(local_path, target):
                    raise taken(self.where(name)) from FileExistsError(errno.EEXIST, "there is another one", target)
                self._fs.rm_file(temporary)

    def duplicate(self, name: str, source: Folder) -> bool:
        """Have another folder's file here, under its name, without reading it; `sync` follows when all are there."""
        with self._translated(f"duplicating {source.where(name)} to {self.root}", writes=True):
            paths = posixpath.join(source._path, name), posixpath.join(self._path, name)
            try:
                return duplicating.duplicated(source._fs, paths[0], self._fs, paths[1], self._make_folder)
            except FileNotFoundError as error:
                if source.exists(name):
                    raise
                raise MissingCheckpointError(f"{source.where(name)} does not exist") from error

    def duplicate_to(self, target: Folder, name: str) -> bool:
        """As `duplicate` of the target."""
        return target.duplicate(name, self)

    def sync(self) -> None:
        """See that names of duplicates here survive a power failure."""
        if self._local and os.path.isdir(self._path):
            with self._translated(f"syncing {self.root}", writes=True):
                publishing.sync_folder(self._path)

    def create(self, name: str, data: bytes) -> bool:
        """Publish a small file, only where none of its name is."""
        with self._translated(f"writing {self.where(name)}", writes=True):
            target = posixpath.join(self._path, name)
            if self._local:
                self._make_folder(posixpath.dirname(target))
            return publishing.create(self._fs, target, data, self._temporary(target))

    def get(self, name: str) -> bytes:
        """A whole file."""
        with self._translated(f"reading {self.where(name)}"):
            data: bytes = self._fs.cat_file(posixpath.join(self._path, name))
            return data

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of a file; shorter where the file ends."""
        with self._translated(f"reading {self.where(name)}"):
            data: bytes = self._fs.cat_file(posixpath.join(self._path, name), start=start, end=end)
            return data

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """Copy a file to a local path; what fails there is an `OSError`."""
        size = self.size(name)
        with open(local_path, "wb") as copy:
            for at in range(0, size, _PIECE_BYTES):
                copy.write(self.get_range(name, at, min(at + _PIECE_BYTES, size)))

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        with self._translated(f"reading {self.where(name)}"):
            size: int = self._fs.info(posixpath.join(self._path, name))["size"]
            return size

    def open_local(self, name: str) -> pa.NativeFile | None:
        """A file on a local file system, opened where it lies; None elsewhere."""
        if not self._local:
            return None
        with self._translated(f"reading {self.where(name)}"):
            return pa.OSFile(posixpath.join(self._path, name), "r")
        raise AssertionError("unreachable: _translated raises what it catches")

    def mapped(self, name: str) -> pa.Buffer:
        """A file on a local file system as memory, without a copy; deleting the file does not end it."""
        with self._translated(f"mapping {self.where(name)}"), pa.memory_map(posixpath.join(self._path, name)) as file:
            return file.read_buffer()
        raise AssertionError("unreachable: _translated raises what it catches")

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        with self._translated(f"looking for {self.where(name)}"):
            self._fs.invalidate_cache(self._path)
            return self._is_there(posixpath.join(self._path, name))

    def names(self) -> list[str]:
        """Names of the files and folders here, sorted; empty when the folder does not exist."""
        with self._translated(f"listing {self.root}"):
            self._fs.invalidate_cache(self._path)
            try:
                found = self._fs.ls(self._path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            names = (posixpath.basename(path.rstrip("/")) for path in found)
            return sorted(name for name in names if not name.startswith(_TEMPORARY))

    def entries(self) -> list[Entry]:
        """Files and folders here with what the file system tells of them, temporary ones too; one listing."""
        with self._translated(f"listing {self.root}"):
            self._fs.invalidate_cache(self._path)
            try:
                found = self._fs.ls(self._path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(entry_of(info) for info in found)

    def changed_ns(self) -> int | None:
        """When a file came or went here last, by a local file system's clock; None elsewhere, and where nothing is."""
        if not self._local:
            return None
        with self._translated(f"looking at {self.root}"), contextlib.suppress(FileNotFoundError):
            return os.stat(self._path).st_mtime_ns
        return None

    def tree(self) -> list[Entry]:
        """All files here and in the folders below, by their path from here; one that cannot be listed is an error."""
        with self._translated(f"listing {self.root}"):
            self._fs.invalidate_cache(self._path)
            found = listed_whole(self._fs, self._path, self._atomic_put)
            files = ((posixpath.relpath(path, self._path), entry_of(info)) for path, info in found.items())
            return sorted(replace(entry, name=path) for path, entry in files if not entry.folder)

    def move(self, name: str, target: str) -> None:
        """Move a file within this folder; it may have been moved already. An object store copies it."""
        with self._translated(f"moving {self.where(name)}"), contextlib.suppress(FileNotFoundError):
            path = posixpath.join(self._path, target)
            if not self._atomic_put:
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            self._fs.mv(posixpath.join(self._path, name), path)

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens when it is gone already. Links on the way are refused: `refuse_links`."""
        with self._translated(f"removing {self.where(name)}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._removable(name))

    def remove_tree(self, name: str) -> None:
        """Remove a folder and what is in it; nothing happens when it is gone already. As for links, see `remove`."""
        with self._translated(f"removing {self.where(name)}"), contextlib.suppress(FileNotFoundError):
            path = self._removable(name)
            removal.remove_tree(path) if self._local else self._fs.rm(path, recursive=True)

    def remove_if_empty(self, *names: str) -> None:
        """Remove a folder in which nothing is; one that has something stays. Object stores have no folders."""
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
        return publishing.is_there(self._fs, path)

    def _renamed(self, temporary: str, target: str) -> bool:
        """Give a file its name; False where another one has it and keeps it."""
        if self._local:
            os.replace(temporary, target)
            # Without this a power failure may take the name away again, after Spark has made the pointer durable.
            publishing.sync_folder(posixpath.dirname(target))
            return True
        return publishing.renamed(self._fs, temporary, target)

    def _make_folder(self, path: str) -> None:
        if not self._local:
            self._fs.makedirs(path, exist_ok=True)
        elif path not in self._durable or not os.path.isdir(path):
            publishing.make_folder(path, self._top)
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
    def _removed_on_failure(self, temporary: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # The first error is what matters; a leftover temporary file harms nobody.
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    @contextlib.contextmanager
    def _translated(self, doing: str, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except StateError:  # some are an OSError too
            raise
        except FileNotFoundError as error:
            if writes:  # somebody removed the folder, or the local source; or it cannot be made
                raise StorageError(f"{doing}: {error}. {advice_on(error, self._local)}") from error
            raise MissingCheckpointError(f"{doing}: it does not exist") from error
        except OSError as error:
            if used_up(error):
                raise too_many(doing) from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFullError(f"{doing}: {error}. Make room where the root lies.") from error
            raise StorageError(f"{doing}: {error}. {advice_on(error, self._local)}") from error
        except Exception as error:
            # Clients of object stores have errors of their own that are no OSError.
            said = f"{type(error).__name__}: {error}"
            raise StorageError(f"{doing}: {said}. {advice_on(error, self._local)}") from error


def _device(path: str) -> int | None:
    """The disk that a local folder lies on; None: there is no folder."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_dev
    return None


def _opened(root: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """A file system and a path in it."""
    try:
        root.encode()
    except UnicodeEncodeError as error:
        # Neither LMDB nor PyArrow opens such a path.
        raise ValueError("its name is not UTF-8") from error
    options = dict(options)
    implementation = options.pop("implementation", None)
    if implementation is None:
        opened: tuple[Any, str] = fsspec.core.url_to_fs(root, **options)
        return opened
    module, _, name = str(implementation).rpartition(".")
    try:
        made = getattr(importlib.import_module(module), name)
    except (AttributeError, ValueError) as error:
        raise ImportError(f"there is no class {implementation!r}: {error}") from error
    # Such classes may serve several protocols, and so do not know which prefix a root has.
    return made(**options), root.partition("://")[2] or root


def refuse_relative(root: str, what: str) -> None:
    """Raise a UsageError for a root that each process would look for in its own working folder."""
    if "://" not in root and not root.startswith("/"):
        raise UsageError(f"{what} must be a URL or an absolute path, as executors have other working folders: {root!r}")
    if _RELATIVE_URL.match(root):
        raise UsageError(
            f"{what} must be an absolute path, in a URL too, as executors have other working folders: {root!r} lacks "
            "the third slash of file:///…"
        )


def taken(where: str) -> StorageError:
    """That a file is there with other bytes than it must have, and stays."""
    return StorageError(
        f"{where} is there with other bytes than it must have, as one that is damaged has, and this file system does "
        "not put one file in another's place. Nobody can use it: delete it, and start again."
    )


def is_temporary(name: str) -> bool:
    """Whether a name is of a file that is being written, or was when its writer died."""
    return name.startswith(_TEMPORARY)
