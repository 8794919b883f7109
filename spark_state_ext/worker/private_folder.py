"""A folder on this machine that only its user may use.

The name of the folder for local stores can be guessed, and everybody may write to some folders that it lies in, such as
/tmp. So another user may have made it first, or a link in its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

from spark_state_ext.errors import UnsafeFolderError

__all__ = ["check_private", "make_private"]

_LOGGER = logging.getLogger("spark_state_ext")
_OTHERS = 0o077
_OTHERS_WRITE = 0o022


def make_private(folder: Path) -> None:
    """Make a folder for this user alone; one that exists must be real and this user's, and others lose their rights."""
    try:
        # Each call of each bucket asks, and the folder is nearly always there.
        mode = check_private(folder)
    except FileNotFoundError:
        _make_parents(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        mode = check_private(folder)
    if mode & _OTHERS:
        _take_rights(folder)


def check_private(folder: Path) -> int:
    """Return the mode of a folder that is real and this user's."""
    found = os.lstat(folder)
    if stat.S_ISLNK(found.st_mode):
        raise UnsafeFolderError(
            f"the local folder {folder} is a symbolic link, which another user may have made. Remove the link, and set "
            "local_dir to the folder that you want to use."
        )
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if found.st_uid != os.getuid():
        raise UnsafeFolderError(
            f"the local folder {folder} belongs to another user (uid {found.st_uid}); set local_dir to a folder of "
            "your own"
        )
    return stat.S_IMODE(found.st_mode)


def _make_parents(folder: Path) -> None:
    """Make folders that are missing, so that others cannot replace what is in them, whatever the umask is."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)


def _take_rights(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        mode = stat.S_IMODE(os.fstat(opened).st_mode)
        _refuse_foreign(folder, mode)
        os.fchmod(opened, mode & ~_OTHERS)
        left = stat.S_IMODE(os.fstat(opened).st_mode)
        if left & _OTHERS:
            raise UnsafeFolderError(
                f"other users have rights in the local folder {folder} (mode {left:o}), and its disk does not let "
                "them be taken away: set local_dir to another disk"
            )
        try:
            # What came since the first look; if there is something, the next task must find it too.
            _refuse_foreign(folder, mode)
        except UnsafeFolderError:
            os.fchmod(opened, mode)
            raise
    finally:
        os.close(opened)
    _LOGGER.warning("other users had rights in the local folder %s (mode %o); these are taken away now", folder, mode)


def _refuse_foreign(folder: Path, mode: int) -> None:
    """Raise an UnsafeFolderError if others could write to a folder, and a link or another user's file is in it."""
    if not mode & _OTHERS_WRITE:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() or entry.stat(follow_symlinks=False).st_uid != os.getuid():
                raise UnsafeFolderError(
                    f"other users could write to the local folder {folder} (mode {mode:o}), and {entry.name!r} in it "
                    "is a link or belongs to another user: look at it and remove it, or set local_dir to another folder"
                )
