"""Folders on this machine that only the current user may access.

The name of the folder for local stores can be guessed, and it may lie in a folder that everybody may write to, such as
/tmp. So another user may have created it first, or a link in its place.
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
    """Create a folder with access for this user only.

    An existing folder must not be a link and must belong to this user; access by others is removed.
    """
    try:
        # Check first: this runs in each call of each bucket, and the folder nearly always exists.
        mode = check_private(folder)
    except FileNotFoundError:
        _make_parents(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        mode = check_private(folder)
    if mode & _OTHERS:
        _revoke_access(folder)


def check_private(folder: Path) -> int:
    """Return the mode of a folder; raise an UnsafeFolderError if it is a link or belongs to another user."""
    status = os.lstat(folder)
    if stat.S_ISLNK(status.st_mode):
        raise UnsafeFolderError(
            f"the local folder {folder} is a symbolic link, which another user may have made. Remove the link, and set "
            "local_dir to the folder that you want to use."
        )
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if status.st_uid != os.getuid():
        raise UnsafeFolderError(
            f"the local folder {folder} belongs to another user (uid {status.st_uid}); set local_dir to a folder of "
            "your own"
        )
    return stat.S_IMODE(status.st_mode)


def _make_parents(folder: Path) -> None:
    """Create missing folders with a mode in which other users cannot replace entries, whatever the umask is."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)


def _revoke_access(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        _refuse_foreign(folder, mode)
        os.fchmod(descriptor, mode & ~_OTHERS)
        remaining = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if remaining & _OTHERS:
            raise UnsafeFolderError(
                f"other users have access to the local folder {folder} (mode {remaining:o}), and its disk does not let "
                "this be changed: set local_dir to another disk"
            )
        try:
            # Check again for entries made since the first check; if there is one, restore the mode, so that the next
            # task finds it too.
            _refuse_foreign(folder, mode)
        except UnsafeFolderError:
            os.fchmod(descriptor, mode)
            raise
    finally:
        os.close(descriptor)
    _LOGGER.warning("other users had access to the local folder %s (mode %o); this was revoked", folder, mode)


def _refuse_foreign(folder: Path, mode: int) -> None:
    """Raise an UnsafeFolderError if others could write to a folder and it contains a link or another user's file."""
    if not mode & _OTHERS_WRITE:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() or entry.stat(follow_symlinks=False).st_uid != os.getuid():
                raise UnsafeFolderError(
                    f"other users could write to the local folder {folder} (mode {mode:o}), and {entry.name!r} in it "
                    "is a link or belongs to another user: inspect and remove it, or set local_dir to another folder"
                )
