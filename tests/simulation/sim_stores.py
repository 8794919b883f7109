"""Stores that the simulated world keeps checkpoint files in, and what goes wrong there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder

__all__ = ["DiedError", "Fault", "FaultyFolder", "Share", "dies", "fails", "opened"]

# What publishes a file.
_WRITES = frozenset({"put", "put_file", "create"})


class DiedError(BaseException):
    """The process dies at this line; nothing in it can catch that."""


class Share(DirFileSystem):  # type: ignore[misc]
    """As an SMB share: a rename never puts a file in another one's place."""

    protocol: ClassVar[Any] = "smb"

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", fs=MemoryFileSystem(), **options)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Rename."""
        if self.exists(path2):
            raise OSError(errno.EEXIST, "STATUS_OBJECT_NAME_COLLISION", path2)
        super().mv(path1, path2, **kwargs)


def opened(path: str, *, replaces: bool) -> Folder:
    """A folder in memory.

    Parameters
    ----------
    path
        Its path.
    replaces
        A file takes another one's place there in one step.
    """
    return Folder(f"memory://{path}", None if replaces else {"implementation": f"{__name__}.Share"})


class Fault:
    """Which of the next operations on files is special, and how.

    Parameters
    ----------
    at
        Its number, from 0.
    happens
        What happens then; may raise.
    after
        The operation is done all the same, before that.
    torn
        What is written then is damaged; called with its name in messages.
    """

    def __init__(
        self, at: int, happens: Callable[[], None], after: bool, torn: Callable[[str], None] | None = None
    ) -> None:
        self.left = at
        self.happens = happens
        self.after = after
        self.torn = torn
        # It has come to pass.
        self.over = False

    def hit(self) -> bool:
        self.left -= 1
        self.over |= self.left == -1
        return self.left == -1


def fails() -> None:
    """The operation does."""
    raise StorageError("fails on purpose")


def dies() -> None:
    """The process does."""
    raise DiedError


class FaultyFolder:
    """A folder of which one operation is special."""

    def __init__(self, real: Folder, fault: Fault) -> None:
        self._real = real
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found) or name in ("where", "child"):
            return found

        def call(*args: Any) -> Any:
            hit = self._fault.hit()
            if hit and not self._fault.after:
                self._fault.happens()
            result = self._torn(*args) if hit and self._fault.torn and name in _WRITES else found(*args)
            if hit and self._fault.after:
                self._fault.happens()
            return result

        return call

    def _torn(self, name: str, content: Any) -> bool:
        """A file of the right size, of which the second half has not arrived."""
        data = bytes(content) if isinstance(content, (bytes, memoryview)) else Path(content).read_bytes()
        self._real.put(name, data[: len(data) // 2].ljust(len(data), b"\0"))
        assert self._fault.torn is not None
        self._fault.torn(self._real.where(name))
        return True
