"""Listings of folders, optionally with everything below them, such that no file is missed."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

__all__ = ["Entry", "entry_of", "list_tree"]


@dataclass(frozen=True, order=True)
class Entry:
    """A file or folder in a listing.

    Parameters
    ----------
    name
        Its name.
    size_bytes
        Its size; 0 for folders.
    modified_s
        When it was last written, seconds since 1970; None if the file system does not report it.
    folder
        It is a folder.
    """

    name: str
    size_bytes: int
    modified_s: float | None
    folder: bool


def list_tree(fs: AbstractFileSystem, path: str, is_object_store: bool) -> dict[str, Any]:
    """List all files below a path, with what the file system knows about them.

    fsspec's own ``find`` treats a folder that cannot be listed as empty (``walk`` omits what fails, and passes
    ``on_error`` to its first folder only). The ``find`` of an object store lists everything at once, or fails.
    """
    if is_object_store and _lists_at_once(fs):
        infos: dict[str, Any] = fs.find(path, detail=True)
        return infos
    infos, folders = {}, [path]
    while folders:
        folder = folders.pop()
        try:
            entries = fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            continue  # the folder does not exist, or was removed meanwhile
        for entry in entries:
            name = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                infos[name] = entry
            elif name != folder.rstrip("/"):
                folders.append(name)
    return infos


def _lists_at_once(fs: AbstractFileSystem) -> bool:
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._find is not AsyncFileSystem._find
    return type(fs).find is not AbstractFileSystem.find


def entry_of(info: Mapping[str, Any]) -> Entry:
    """Return the entry for what fsspec reports about a file or folder."""
    # Each file system of fsspec has its own name for this.
    modified = next(
        (info[key] for key in ("mtime", "LastModified", "last_modified", "updated", "created") if key in info), None
    )
    if isinstance(modified, str):
        with contextlib.suppress(ValueError):
            modified = datetime.fromisoformat(modified.replace("Z", "+00:00"))
    if isinstance(modified, datetime):
        modified = (modified if modified.tzinfo else modified.replace(tzinfo=timezone.utc)).timestamp()
    return Entry(
        posixpath.basename(info["name"].rstrip("/")),
        int(info.get("size") or 0),
        float(modified) if isinstance(modified, (int, float)) else None,
        info["type"] == "directory",
    )
