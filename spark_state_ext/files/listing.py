"""Listing a folder with all below it, such that nothing is passed over."""

from __future__ import annotations

from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

__all__ = ["listed_whole"]


def listed_whole(fs: AbstractFileSystem, path: str, is_object_store: bool) -> dict[str, Any]:
    """All files below a path, with what the file system tells of them.

    fsspec's own ``find`` takes a folder that cannot be listed for an empty one (``walk`` omits what fails, and hands
    ``on_error`` to its first folder only). That of an object store lists everything in one go, or fails.

    Parameters
    ----------
    fs, path
        Where.
    is_object_store
        Whether the file system is known to be one.

    Raises
    ------
    OSError
        When a folder cannot be listed.
    """
    if is_object_store and _lists_at_once(fs):
        found: dict[str, Any] = fs.find(path, detail=True)
        return found
    found, folders = {}, [path]
    while folders:
        folder = folders.pop()
        try:
            entries = fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            continue  # there is none, or it was removed meanwhile
        for entry in entries:
            name = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                found[name] = entry
            elif name != folder.rstrip("/"):
                folders.append(name)
    return found


def _lists_at_once(fs: AbstractFileSystem) -> bool:
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._find is not AsyncFileSystem._find
    return type(fs).find is not AbstractFileSystem.find
