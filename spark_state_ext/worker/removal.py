"""Removing files and folders of this machine: nothing is removed behind a symbolic link.

Anybody who may write to a folder can put a link there that leads anywhere. So a link may be removed itself, and what it
leads to stays. A link may stand above the folder that the user named, or be that folder; below it a link is refused.
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
    """Return whether a path is a symbolic link itself."""
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError:
        return False


def refuse_links(folder: str | os.PathLike[str], below: str | os.PathLike[str]) -> None:
    """Raise an UnsafeFolderError if a folder, or one between it and the folder `below` that it is in, is a link."""
    at, top = Path(folder), Path(below)
    while at != top and top in at.parents:
        if is_link(at):
            raise UnsafeFolderError(
                f"{at} is a symbolic link, and nothing is removed behind a link. Put a real folder there, or mount the "
                f"other disk there; {top} itself may be a link."
            )
        at = at.parent


def real_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders in a folder that are no links; none if it is gone."""
    try:
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from found


def remove_file(
    path: str | os.PathLike[str], below: str | os.PathLike[str] | None = None, *, missing_ok: bool = False
) -> None:
    """Remove a file, or a link itself. `below`: a folder that it is in, down from which links are refused."""
    if below is not None:
        refuse_links(Path(path).parent, below)
    with contextlib.suppress(FileNotFoundError) if missing_ok else contextlib.nullcontext():
        os.unlink(path)


def remove_tree(
    path: str | os.PathLike[str], below: str | os.PathLike[str] | None = None, *, ignore_errors: bool = False
) -> None:
    """Remove a folder with what is in it; of a link, only the link. Other parameters are those of `remove_file`."""
    if below is not None:
        refuse_links(Path(path).parent, below)
    if not is_link(path) and os.path.isdir(path):
        # It follows no links either, also if they come while it runs.
        shutil.rmtree(path, ignore_errors=ignore_errors)
        return
    with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
        os.unlink(path)


def remove_empty(folder: str | os.PathLike[str]) -> None:
    """Remove a folder in which nothing is; another one is an OSError, and so is a link."""
    os.rmdir(folder)
