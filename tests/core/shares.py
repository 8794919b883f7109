"""File systems elsewhere that never put a renamed file in another one's place, played by a folder of this machine."""

from __future__ import annotations

import errno
import os
from typing import Any, ClassVar

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

__all__ = ["ByNameNode", "Share"]


class Share(DirFileSystem):  # type: ignore[misc]
    """As an SMB share: to rename a file to a name that is taken is an error, of a class of its client's own."""

    protocol: ClassVar[Any] = "smb"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", fs=LocalFileSystem(), **options)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Rename; one of several callers wins, as one server decides."""
        try:
            os.link(path1, path2)
        except FileExistsError:
            self.taken(path2)
            return
        os.unlink(path1)

    def taken(self, path: str) -> None:
        """Say that there is one already."""
        raise NameTakenError(errno.EEXIST, "STATUS_OBJECT_NAME_COLLISION", path)


class NameTakenError(OSError):
    """As smbclient's error, which is no `FileExistsError`."""


class ByNameNode(Share):
    """As WebHDFS: nothing happens, and no error says so."""

    protocol: ClassVar[Any] = ("webhdfs", "webHDFS")

    def taken(self, path: str) -> None:
        """The answer is ``{"boolean": false}``, which fsspec does not look at."""
