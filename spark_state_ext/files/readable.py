"""Protocols for checkpoint files that can be read by name, wherever they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.listing import Entry

if TYPE_CHECKING:
    from spark_state_ext.files.checkpoint import CheckpointFile
    from spark_state_ext.files.folder import Folder

__all__ = ["Answering", "Duplicable", "Listed", "Making", "Readable", "read_document"]

T = TypeVar("T")


class Readable(Protocol):
    """Files that can be read by name. All methods raise `MissingCheckpointError` and `StorageError`."""

    def where(self, name: str) -> str:
        """Return a file's name for messages."""
        ...

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        ...

    def get(self, name: str) -> bytes:
        """Read a whole file."""
        ...

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Read bytes `start` to `end` of a file; fewer if the file ends before."""
        ...

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """Copy a file to a local path; a failure of the local disk may be an `OSError`."""
        ...

    def open_local(self, name: str) -> pa.NativeFile | None:
        """Open a file in place; None if it is not on a local disk."""
        ...


@runtime_checkable
class Duplicable(Protocol):
    """Files that can be duplicated to a folder without being read; a backend's `Readable` may support this or not."""

    def duplicate_to(self, target: Folder, name: str) -> bool:
        """Duplicate a file to a target folder, see `Folder.duplicate`."""
        ...


@runtime_checkable
class Answering(Protocol):
    """Files that are made on request, which takes long: they report early that their store has answered."""

    def tell(self, answered: Callable[[], None]) -> None:
        """Register a function to call as soon as the store has answered."""
        ...


@runtime_checkable
class Making(Protocol):
    """Files that are made on request, and whose rows a local store can take without an actual file."""

    def make(self, name: str, keep: Path) -> CheckpointFile | None:
        """Return the rows by `files.checkpoint.make_checkpoint`; None if there is a file to read instead."""
        ...


class Listed(Readable, Protocol):
    """A bucket's files, as clean-up sees them."""

    root: str
    """The bucket and its place, for messages."""

    @property
    def identity(self) -> str:
        """The key for caches about these files; unique, as two stores may have folders of the same name."""
        ...

    def entries(self) -> list[Entry]:
        """List all files."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file, unless it is gone already."""
        ...


def read_document(files: Readable, name: str, decode: Callable[[bytes, str], T]) -> T | None:
    """Read a small file with `decode`, which gets its bytes and its name for messages; None if the file is missing."""
    try:
        data = files.get(name)
    except MissingCheckpointError:
        return None
    return decode(data, files.where(name))
