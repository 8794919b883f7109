"""What can be read by name: checkpoint files, wherever they are."""

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

__all__ = ["Answering", "Duplicable", "Listed", "Making", "Readable", "document_in"]

T = TypeVar("T")


class Readable(Protocol):
    """Files that can be read by name. All methods raise `MissingCheckpointError` and `StorageError`."""

    def where(self, name: str) -> str:
        """How to call a file in messages."""
        ...

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        ...

    def get(self, name: str) -> bytes:
        """A whole file."""
        ...

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of a file; shorter where the file ends."""
        ...

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """Copy a file to a local path. What fails there may be an `OSError`."""
        ...

    def open_local(self, name: str) -> pa.NativeFile | None:
        """A file opened where it lies; None when it does not lie on a local disk."""
        ...


@runtime_checkable
class Duplicable(Protocol):
    """Files that can be duplicated to a folder without being read; a backend's `Readable` may be able to or not."""

    def duplicate_to(self, target: Folder, name: str) -> bool:
        """As `Folder.duplicate` of the target."""
        ...


@runtime_checkable
class Answering(Protocol):
    """Files that are made where they are asked for, which takes long: these say before that their store answers."""

    def tell(self, answered: Callable[[], None]) -> None:
        """Call this as soon as the store has answered."""
        ...


@runtime_checkable
class Making(Protocol):
    """Files that are made where they are asked for, and whose rows a local store can take without a file of them."""

    def make(self, name: str, keep: Path) -> CheckpointFile | None:
        """Return what `files.checkpoint.make_checkpoint` makes of the rows; None if there is a file to read."""
        ...


class Listed(Readable, Protocol):
    """A bucket's files, as clean-up sees them."""

    root: str
    """Names the bucket and where it lies, in messages."""

    @property
    def identity(self) -> str:
        """What is known of the files is remembered under it; two stores may have a folder of one name."""
        ...

    def entries(self) -> list[Entry]:
        """All that is there."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file; it may be gone already."""
        ...


def document_in(files: Readable, name: str, decode: Callable[[bytes, str], T]) -> T | None:
    """A small file of a folder, as `decode` reads its bytes, told where they are from; None where there is none."""
    try:
        data = files.get(name)
    except MissingCheckpointError:
        return None
    return decode(data, files.where(name))
