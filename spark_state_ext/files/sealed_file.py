"""Sealed files: checkpoint files whose bytes are final before they are used.

The same bytes go into the pointer and to each backend, and are compared with what a backend returns.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from arrow_schemas.lineage import LineageHeader, file_name
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.checkpoint import write_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.removal import remove_file
from spark_state_ext.worker.spill import SpillBuffer, translate_local_errors

__all__ = ["SealedFile", "SealedFiles", "publish", "seal"]

# Files that wait for their upload are held in memory up to this size.
MEMORY_BYTES_MAX = 8 << 20


@dataclass(frozen=True)
class SealedFile:
    """A file that will not change.

    Parameters
    ----------
    name
        Its name; the same name always has the same content.
    size_bytes
        Its size.
    data
        Its bytes, if it is small.
    path
        A local file that holds its bytes, if it is large.
    owner
        Removes that local file.
    """

    name: str
    size_bytes: int
    data: bytes | None = None
    path: Path | None = None
    owner: _Owner | None = None

    @staticmethod
    def of(name: str, data: bytes) -> SealedFile:
        """Return a sealed file in memory."""
        return SealedFile(name, len(data), data)

    def take(self) -> None:
        """Count one more user of the file."""
        if self.owner is not None:
            self.owner.change(1)

    def let_go(self) -> None:
        """Count one user less; the maker of the file is a user too."""
        if self.owner is not None:
            self.owner.change(-1)

    def get_range(self, start: int, end: int) -> bytes:
        """Read bytes `start` to `end`."""
        if self.data is not None:
            return self.data[start:end]
        assert self.path is not None, "a sealed file is in memory or on the disk"
        with translate_local_errors(self.path.parent), self.path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)
        raise AssertionError("unreachable: local_errors raises what it catches")


class _Owner:
    """Removes a file when all its users have let go of it, at the latest when this object is garbage-collected."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._users = 1
        self._lock = threading.Lock()
        # The file's folder may have been removed before.
        self._remove = weakref.finalize(self, _remove, path, os.getpid())

    def change(self, users: int) -> None:
        with self._lock:
            self._users += users
            left = self._users
        if left <= 0:
            self._remove()


def _remove(path: Path, pid: int) -> None:
    # Do not remove it when a forked child process ends.
    if os.getpid() == pid:
        remove_file(path, missing_ok=True)


class SealedFiles:
    """Sealed files that can be read like any other files."""

    def __init__(self, files: Iterable[SealedFile], place: str) -> None:
        self._files = {file.name: file for file in files}
        self._place = place

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def hold(self, file: SealedFile) -> None:
        """Add a file."""
        self._files[file.name] = file

    def where(self, name: str) -> str:
        return f"{name} {self._place}"

    def size(self, name: str) -> int:
        return self._file(name).size_bytes

    def get(self, name: str) -> bytes:
        return self.get_range(name, 0, self.size(name))

    def get_range(self, name: str, start: int, end: int) -> bytes:
        return self._file(name).get_range(start, end)

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        file, path = self._file(name), Path(local_path)
        if file.path is None:
            path.write_bytes(self.get(name))
            return
        try:
            # The file never changes, so both names may share its bytes.
            path.hardlink_to(file.path)
        except OSError:  # another disk
            shutil.copyfile(file.path, path)

    def open_local(self, name: str) -> pa.NativeFile | None:
        return None

    def _file(self, name: str) -> SealedFile:
        if name not in self._files:
            raise MissingCheckpointError(f"reading {self.where(name)}: it does not exist")
        return self._files[name]


def seal(header: LineageHeader, schema: RowSchema, batches: Iterable[pa.RecordBatch], scratch: Path) -> SealedFile:
    """Make a sealed checkpoint file."""
    name = file_name(header.ref, header.kind)
    if isinstance(batches, SpillBuffer) and batches.size_bytes <= MEMORY_BYTES_MAX:
        buffer = io.BytesIO()
        write_checkpoint(buffer, header, schema, batches)
        # Not getbuffer(): a view of a BytesIO that an error's traceback keeps alive crashes CPython's collector.
        return SealedFile.of(name, buffer.getvalue())
    with translate_local_errors(scratch):
        handle, path = tempfile.mkstemp(dir=scratch, prefix="checkpoint-")
        owner = _Owner(Path(path))
        try:
            with os.fdopen(handle, "wb") as file:
                write_checkpoint(file, header, schema, batches)
                size_bytes = file.tell()
        except BaseException:
            owner.change(-1)
            raise
        return SealedFile(name, size_bytes, None, owner.path, owner)
    raise AssertionError("unreachable: local_errors raises what it catches")


def publish(folder: Folder, file: SealedFile) -> None:
    """Publish a sealed file under its name in a folder."""
    if file.path is not None:
        folder.put_file(file.name, file.path)
    elif folder.replaces:
        folder.put(file.name, file.get_range(0, file.size_bytes))
    else:
        folder.create(file.name, file.get_range(0, file.size_bytes))
