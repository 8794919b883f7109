"""Folders in memory for the checkpoint files of a simulation, and faults of single operations."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder

__all__ = ["DiedError", "Fault", "FaultyFolder", "Share", "die_here", "fail_here", "open_folder"]

# Operations that publish a file.
_WRITES = frozenset({"put", "put_file", "create"})


class DiedError(BaseException):
    """The simulated process dies at this line; product code does not catch a `BaseException`."""


class Share(DirFileSystem):  # type: ignore[misc]
    """A file system like an SMB share: renaming a file never replaces another one."""

    protocol: ClassVar[Any] = "smb"

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", fs=MemoryFileSystem(), **options)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Rename a file; fails if the new name exists."""
        if self.exists(path2):
            raise OSError(errno.EEXIST, "STATUS_OBJECT_NAME_COLLISION", path2)
        super().mv(path1, path2, **kwargs)


def open_folder(path: str, *, replaces: bool) -> Folder:
    """Open a folder in memory.

    Parameters
    ----------
    path
        Its path.
    replaces
        Whether a rename replaces an existing file in one step.
    """
    return Folder(f"memory://{path}", None if replaces else {"implementation": f"{__name__}.Share"})


class Fault:
    """A fault in one of the next operations on files.

    Parameters
    ----------
    at
        Number of the operation, from 0.
    action
        Called at that operation; may raise.
    after
        Whether the operation is carried out first.
    on_torn
        If given, the file that the operation writes is damaged; called with the file's location.
    """

    def __init__(
        self, at: int, action: Callable[[], None], after: bool, on_torn: Callable[[str], None] | None = None
    ) -> None:
        self.left = at
        self.action = action
        self.after = after
        self.on_torn = on_torn
        # The operation was reached.
        self.has_happened = False

    def hit(self) -> bool:
        self.left -= 1
        self.has_happened |= self.left == -1
        return self.left == -1


def fail_here() -> None:
    """Fail the operation."""
    raise StorageError("fails on purpose")


def die_here() -> None:
    """Kill the simulated process."""
    raise DiedError


class FaultyFolder:
    """A folder in which one operation has a fault."""

    def __init__(self, real: Folder, fault: Fault) -> None:
        self._real = real
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._real, name)
        if not callable(attribute) or name in ("where", "child"):
            return attribute

        def call(*args: Any) -> Any:
            hit = self._fault.hit()
            if hit and not self._fault.after:
                self._fault.action()
            result = self._write_torn(*args) if hit and self._fault.on_torn and name in _WRITES else attribute(*args)
            if hit and self._fault.after:
                self._fault.action()
            return result

        return call

    def _write_torn(self, name: str, content: Any) -> bool:
        """Write a file of the right size whose second half has not arrived."""
        data = bytes(content) if isinstance(content, (bytes, memoryview)) else Path(content).read_bytes()
        self._real.put(name, data[: len(data) // 2].ljust(len(data), b"\0"))
        assert self._fault.on_torn is not None
        self._fault.on_torn(self._real.where(name))
        return True
