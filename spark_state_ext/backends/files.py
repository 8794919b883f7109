"""The backend ``fsspec``: a folder of any fsspec file system.

Files lie under ``<root>/<operator>/<query folder>/<bucket>/``, each under its own name, which is also its marker. A
file is confirmed when it has been read back and compared to the last byte. A file that exists already, because another
attempt sent it, is compared and kept: a pointer may rely on it already.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, parse_file_name
from spark_state_ext.backends import BackendContext, BackupManager, Checkpoint, CleanUp, Markers, RestoreManager
from spark_state_ext.backends.replication import Replica
from spark_state_ext.errors import (
    ChangedJobError,
    CorruptError,
    InterruptedRestoreError,
    LineageError,
    MissingCheckpointError,
    StorageError,
    UsageError,
)
from spark_state_ext.files.checkpoint import verify_checkpoint
from spark_state_ext.files.folder import Folder, Readable, make_taken_error
from spark_state_ext.files.header_cache import KnownFiles
from spark_state_ext.files.retention import clean_up, is_crowded
from spark_state_ext.files.sealed_file import SealedFile, publish
from spark_state_ext.worker.retry import call_with_retries
from spark_state_ext.worker.threads import CallerExecutor
from spark_state_ext.worker.worker import Worker

__all__ = ["FilesAdmin", "FilesBackend", "FilesBackup", "FilesRestore", "sole_replica"]

T = TypeVar("T")

# Files are compared in pieces of this size.
_PIECE_BYTES = 8 << 20
# How long a restore tries to read. Then it uses another backend, or the task fails and Spark tries again.
RESTORE_TIMEOUT_S_MAX = 60.0


class FilesBackend:
    """Factory of the backend ``fsspec``. Its options are ``root`` and ``storage_options``."""

    def backup_manager(self, context: BackendContext) -> BackupManager:
        # The caller only has the context, so the process-wide object is looked up here.
        return FilesBackup(_bucket_folder(context), context, Worker.current().own(KnownFiles))

    def restore_manager(self, context: BackendContext) -> RestoreManager:
        return FilesRestore(_bucket_folder(context), min(context.timeout_s, RESTORE_TIMEOUT_S_MAX))

    def admin(self, context: BackendContext) -> FilesAdmin:
        return FilesAdmin(_query_folder(context), context.resources)


def _query_folder(context: BackendContext) -> Folder:
    options = dict(context.options)
    root, storage_options = options.pop("root", None), options.pop("storage_options", None)
    if not isinstance(root, str) or options:
        raise UsageError(f"the backend {context.name!r} takes root and storage_options, not {sorted(context.options)}")
    return Folder(root, storage_options).child(context.operator, context.query_folder)


def _bucket_folder(context: BackendContext) -> Folder:
    assert context.bucket is not None, "managers are made for a bucket"
    return _query_folder(context).child(str(context.bucket))


class FilesBackup:
    """Stores files in a folder."""

    def __init__(self, folder: Folder, context: BackendContext, known_files: KnownFiles | None = None) -> None:
        self.folder = folder
        self._context = context
        self._known_files = known_files or KnownFiles()
        # By name, until the file is stored: an upload that hangs may be started a second time.
        self._pending: dict[str, SealedFile] = {}
        self._closed = threading.Event()

    def init(self, checkpoint: Checkpoint | None) -> None:
        """Do nothing: files do not depend on each other."""

    def snapshot(self, ref: CheckpointRef, files: Mapping[str, SealedFile]) -> Markers:
        self._pending.update({file.name: file for file in files.values()})
        return {store: file.name for store, file in files.items()}

    def upload(self, ref: CheckpointRef, markers: Markers) -> Future[Markers]:
        def work() -> Markers:
            for name in markers.values():
                # None: another upload of the same file has confirmed it already.
                file = self._pending.get(name)
                if self._closed.is_set():
                    raise StorageError(f"{name} was not sent to {self.folder.root} because the backend was closed")
                if file is not None:
                    call_with_retries(partial(self._put, file), self._context.timeout_s, self._closed)
                    self._pending.pop(name, None)
            return markers

        return self._context.executor.submit(work)

    def clean_up(self, request: CleanUp) -> Future[int]:
        def work() -> int:
            return clean_up(self.folder, request, self._context.scratch, known=self._known_files)

        return (self._context.cleaner or self._context.executor).submit(work)

    def is_crowded(self, batches_retained: int) -> bool:
        """Return True if the folder has so many files that clean-up cannot have run for long."""
        return is_crowded(self.folder.entries(), batches_retained)

    def close(self) -> None:
        self._closed.set()
        self._pending.clear()

    def _put(self, file: SealedFile) -> None:
        """Store a file and compare it; a complete file that exists already is kept."""
        same = self._compare(file)
        if same or (same is False and self._is_whole(file)):
            return
        where = self.folder.where(file.name)
        if same is False and not self.folder.replaces:
            raise make_taken_error(where) from FileExistsError(errno.EEXIST, "another file has this name", where)
        # If another attempt sent the file meanwhile, that file is compared.
        publish(self.folder, file)
        same = self._compare(file)
        if same is None:
            raise StorageError(f"{where} was written but does not exist")
        if not same:
            raise StorageError(f"{where} was written but reads differently: the upload was torn or damaged on its way")

    def _compare(self, file: SealedFile) -> bool | None:
        """Return True if the stored file of that name has the same bytes, False if not, None if it does not exist."""
        try:
            if file.size_bytes <= _PIECE_BYTES:
                return self.folder.get(file.name) == file.get_range(0, file.size_bytes)
            if self.folder.size(file.name) != file.size_bytes:
                return False
            return all(self._is_piece_same(file, at) for at in range(0, file.size_bytes, _PIECE_BYTES))
        except MissingCheckpointError:
            return None

    def _is_piece_same(self, file: SealedFile, start: int) -> bool:
        if self._closed.is_set():
            raise StorageError(f"{file.name} was not compared in {self.folder.root} because the backend was closed")
        end = min(start + _PIECE_BYTES, file.size_bytes)
        return self.folder.get_range(file.name, start, end) == file.get_range(start, end)

    def _is_whole(self, file: SealedFile) -> bool:
        """Return True if the stored file is a valid snapshot of the same checkpoint, even with other bytes."""
        parsed = parse_file_name(file.name)
        if parsed is None or parsed[1] != SNAPSHOT:
            return False
        try:
            verify_checkpoint(self.folder, *parsed, self._context.scratch)
        except (CorruptError, LineageError):
            return False
        return True


class FilesRestore:
    """Reads files from a folder."""

    def __init__(self, folder: Folder, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._closed = threading.Event()

    def init(self, checkpoint: Checkpoint) -> None:
        """Do nothing: files are found by their names."""

    def restore(self) -> Readable:
        return _Interruptible(self._folder, self._timeout_s, self._closed)

    def close(self) -> None:
        self._closed.set()


class _Interruptible:
    """A folder whose reads are retried until they are stopped."""

    # A large file is fetched in pieces of this size, so that a stopped read ends after at most one piece.
    _PIECE_BYTES = 64 << 20

    def __init__(self, folder: Folder, timeout_s: float, stop: threading.Event) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._stop = stop

    def where(self, name: str) -> str:
        return self._folder.where(name)

    def size(self, name: str) -> int:
        return self._retry(lambda: self._folder.size(name))

    def get(self, name: str) -> bytes:
        return self._retry(lambda: self._folder.get(name))

    def get_range(self, name: str, start: int, end: int) -> bytes:
        return self._retry(lambda: self._folder.get_range(name, start, end))

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        if self._folder.is_local:
            self._retry(lambda: self._folder.get_file(name, local_path))
            return
        size = self.size(name)
        with open(local_path, "wb") as file:
            for at in range(0, size, self._PIECE_BYTES):
                file.write(self.get_range(name, at, min(at + self._PIECE_BYTES, size)))

    def open_local(self, name: str) -> pa.NativeFile | None:
        return self._retry(lambda: self._folder.open_local(name))

    def duplicate_to(self, target: Folder, name: str) -> bool:
        return self._retry(lambda: target.duplicate(name, self._folder))

    def _retry(self, work: Callable[[], T]) -> T:
        if self._stop.is_set():
            raise InterruptedRestoreError(f"the restore from {self._folder.root} was stopped")
        return call_with_retries(work, self._timeout_s, self._stop)


def sole_replica(folder: Folder, scratch: Path, name: str = "files") -> list[Replica]:
    """Return a bucket's folder as its only backend; writing to it is synchronous and is not retried."""
    context = BackendContext(name, {}, "", "", 0, CallerExecutor(), scratch, 0.0)
    return [Replica(name, FilesBackup(folder, context), FilesRestore(folder, 0.0), root=True)]


class FilesAdmin:
    """Manages the files that all buckets of a query folder share."""

    def __init__(self, query_folder: Folder, resources: Mapping[str, bytes]) -> None:
        self._query_folder = query_folder
        self._resources = resources

    def create_resources(self) -> None:
        existing = set(self._query_folder.names())
        for name, content in self._resources.items():
            if name not in existing:
                # If another process creates the file meanwhile, `validate_resources` checks that file.
                self._query_folder.create(name, content)

    def validate_resources(self) -> None:
        """Check that all files exist and are right, and that files can be written, read and deleted."""
        for name, content in self._resources.items():
            if self._query_folder.get(name) != content:
                raise ChangedJobError(
                    f"{self._query_folder.where(name)} is not the operator file of this job: "
                    "the folder belongs to another job"
                )
        probe, content = f"probe-{uuid.uuid4().hex}", b"spark_state_ext"
        self._query_folder.put(probe, content)
        stored = self._query_folder.get(probe)
        self._query_folder.as_named().remove(probe)
        if stored != content:
            raise StorageError(f"{self._query_folder.where(probe)} does not read as it was written")
