"""A state backend like one of another package: checkpoint files are rows of a SQLite database.

It cannot be used over a network. It is an example, and tests the interfaces that other packages rely on.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from arrow_schemas import CheckpointRef
from spark_state_ext.backends import BackendContext, Checkpoint, CleanUp, Markers
from spark_state_ext.errors import ChangedJobError, InterruptedRestoreError, MissingCheckpointError, StorageError
from spark_state_ext.files.folder import Entry
from spark_state_ext.files.retention import clean_up
from spark_state_ext.files.sealed_file import SealedFile

__all__ = ["SqliteBackend"]

_TABLE = "CREATE TABLE IF NOT EXISTS files (place TEXT, name TEXT, data BLOB, made_s REAL, PRIMARY KEY (place, name))"


class SqliteBackend:
    """The factory; its option is the ``path`` of the database."""

    def backup_manager(self, context: BackendContext) -> SqliteBackup:
        return SqliteBackup(SqliteFiles(context), context)

    def restore_manager(self, context: BackendContext) -> SqliteRestore:
        return SqliteRestore(SqliteFiles(context))

    def admin(self, context: BackendContext) -> SqliteAdmin:
        return SqliteAdmin(SqliteFiles(context), context.resources)


class SqliteFiles:
    """The files of one bucket, or those that all buckets share."""

    def __init__(self, context: BackendContext) -> None:
        self._path = str(context.options["path"])
        bucket = "" if context.bucket is None else context.bucket
        self.root = f"sqlite:{self._path}/{context.operator}/{context.query_folder}/{bucket}"
        self.identity = self.root
        self.closed = threading.Event()

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        if self.closed.is_set():
            raise InterruptedRestoreError(f"the restore from {self._path} was told to stop")
        try:
            with closing(sqlite3.connect(self._path, timeout=30)) as database, database:
                database.execute(_TABLE)
                yield database
        except sqlite3.Error as error:
            raise StorageError(f"{self._path}: {error}") from error

    def where(self, name: str) -> str:
        return f"{self.root}/{name}"

    def put(self, name: str, data: bytes) -> None:
        with self._database() as database:
            row = (self.root, name, data)
            database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, unixepoch('subsec'))", row)

    def get(self, name: str) -> bytes:
        with self._database() as database:
            row = database.execute("SELECT data FROM files WHERE place = ? AND name = ?", (self.root, name)).fetchone()
        if row is None:
            raise MissingCheckpointError(f"{self.where(name)} does not exist")
        return bytes(row[0])

    def size(self, name: str) -> int:
        return len(self.get(name))

    def get_range(self, name: str, start: int, end: int) -> bytes:
        return self.get(name)[start:end]

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        Path(local_path).write_bytes(self.get(name))

    def open_local(self, name: str) -> Any:
        return None

    def entries(self) -> list[Entry]:
        with self._database() as database:
            rows = database.execute("SELECT name, length(data), made_s FROM files WHERE place = ?", (self.root,))
            return [Entry(name, size, made_s, False) for name, size, made_s in rows.fetchall()]

    def remove(self, name: str) -> None:
        with self._database() as database:
            database.execute("DELETE FROM files WHERE place = ? AND name = ?", (self.root, name))


class SqliteBackup:
    """Writes a bucket's files to the database."""

    def __init__(self, files: SqliteFiles, context: BackendContext) -> None:
        self._files = files
        self._context = context
        self._held: dict[str, SealedFile] = {}

    def init(self, checkpoint: Checkpoint | None) -> None:
        """Do nothing, because files do not depend on each other."""

    def snapshot(self, ref: CheckpointRef, files: Mapping[str, SealedFile]) -> Markers:
        self._held.update({file.name: file for file in files.values()})
        return {store: file.name for store, file in files.items()}

    def upload(self, ref: CheckpointRef, markers: Markers) -> Future[Markers]:
        def work() -> Markers:
            for name in markers.values():
                file = self._held.pop(name, None)
                if file is not None:
                    data = file.get_range(0, file.size_bytes)
                    self._files.put(name, data)
                    if self._files.get(name) != data:
                        raise StorageError(f"{self._files.where(name)} was written and reads otherwise")
            return markers

        return self._context.executor.submit(work)

    def clean_up(self, request: CleanUp) -> Future[int]:
        def work() -> int:
            return clean_up(self._files, request, self._context.scratch)

        return self._context.executor.submit(work)

    def close(self) -> None:
        self._held.clear()


class SqliteRestore:
    """Reads a bucket's files."""

    def __init__(self, files: SqliteFiles) -> None:
        self._files = files

    def init(self, checkpoint: Checkpoint) -> None:
        """Do nothing, because files are found by their names."""

    def restore(self) -> SqliteFiles:
        return self._files

    def close(self) -> None:
        self._files.closed.set()


class SqliteAdmin:
    """Writes and checks the files that all buckets share."""

    def __init__(self, files: SqliteFiles, resources: Mapping[str, bytes]) -> None:
        self._files = files
        self._resources = resources

    def create_resources(self) -> None:
        present = {entry.name for entry in self._files.entries()}
        for name, content in self._resources.items():
            if name not in present:
                self._files.put(name, content)

    def validate_resources(self) -> None:
        for name, content in self._resources.items():
            if self._files.get(name) != content:
                raise ChangedJobError(f"{self._files.where(name)} is not the operator file of this job")
