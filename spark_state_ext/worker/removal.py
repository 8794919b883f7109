"""Remove files and folders of this machine, without following symbolic links.

Any user who may write to a folder can put a link there that leads anywhere. So a link itself may be removed, but not
what it leads to. The folder that the user named, and folders above it, may be links; links below it are refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from spark_state_ext.errors import UnsafeFolderError

__all__ = ["is_link", "real_folders", "refuse_links", "remove_empty", "remove_file", "remove_tree"]


def is_link(path: str | os.PathLike[str]) -> bool:
    """True if a path is itself a symbolic link."""
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError:
        return False


def refuse_links(folder: str | os.PathLike[str], below: str | os.PathLike[str]) -> None:
    """Raise an UnsafeFolderError if `folder`, or a folder between it and its ancestor `below`, is a link."""
    current, top = Path(folder), Path(below)
    while current != top and top in current.parents:
        if is_link(current):
            raise UnsafeFolderError(
                f"{current} is a symbolic link, and files behind a link are not removed. Replace it by a real folder, "
                f"or mount the other disk there; {top} itself may be a link."
            )
        current = current.parent


def real_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders in a folder, except links; none if the folder does not exist."""
    try:
        with os.scandir(folder) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from folders


def remove_file(
    path: str | os.PathLike[str], below: str | os.PathLike[str] | None = None, *, missing_ok: bool = False
) -> None:
    """Remove a file, or a link itself; with an ancestor `below`, refuse links between it and the file."""
    if below is not None:
        refuse_links(Path(path).parent, below)
    with contextlib.suppress(FileNotFoundError) if missing_ok else contextlib.nullcontext():
        os.unlink(path)


def remove_tree(
    path: str | os.PathLike[str], below: str | os.PathLike[str] | None = None, *, ignore_errors: bool = False
) -> None:
    """Remove a folder and its content; if it is a link, only the link. Other parameters are as for `remove_file`."""
    if below is not None:
        refuse_links(Path(path).parent, below)
    if not is_link(path) and os.path.isdir(path):
        # `rmtree` does not follow links either, even if they appear while it runs.
        shutil.rmtree(path, ignore_errors=ignore_errors)
        return
    with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
        os.unlink(path)


def remove_empty(folder: str | os.PathLike[str]) -> None:
    """Remove an empty folder; raise an OSError if it is not empty or is a link."""
    os.rmdir(folder)
