"""Remote file systems that never overwrite a file by a rename, simulated by a folder of this machine."""

from __future__ import annotations

import errno
import os
from typing import Any, ClassVar

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

__all__ = ["ByNameNode", "Share"]


class Share(DirFileSystem):  # type: ignore[misc]
    """An SMB share: a rename to an existing name raises an error of a class of its client."""

    protocol: ClassVar[Any] = "smb"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", fs=LocalFileSystem(), **options)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Rename a file; only one of several callers succeeds, because one server decides."""
        try:
            os.link(path1, path2)
        except FileExistsError:
            self.taken(path2)
            return
        os.unlink(path1)

    def taken(self, path: str) -> None:
        """Raise the error for an existing name."""
        raise NameTakenError(errno.EEXIST, "STATUS_OBJECT_NAME_COLLISION", path)


class NameTakenError(OSError):
    """Like smbclient's error, which is not a `FileExistsError`."""


class ByNameNode(Share):
    """WebHDFS: a rename to an existing name has no effect and raises no error."""

    protocol: ClassVar[Any] = ("webhdfs", "webHDFS")

    def taken(self, path: str) -> None:
        """Do nothing: the answer is ``{"boolean": false}``, which fsspec ignores."""
