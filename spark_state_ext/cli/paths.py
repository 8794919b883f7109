"""Find out whether a path that a command got is a root, a query folder or a savepoint, and list the folders below."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arrow_schemas.operator import OperatorFile, operator_file_name, parse_operator_file_name
from arrow_schemas.savepoint import MANIFEST_NAME
from spark_state_ext.cli.output import say
from spark_state_ext.errors import MissingCheckpointError, UsageError
from spark_state_ext.files.folder import Entry, Folder, refuse_relative
from spark_state_ext.files.layout import LEASE_FOLDER, SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.reading.state_folder import find_state

__all__ = [
    "QueryFolder",
    "Target",
    "find_query_folder",
    "find_target",
    "list_bucket_folders",
    "list_operators",
    "make_absolute",
    "open_folder",
    "read_operator_in_force",
    "strip_slash",
]

# A message names at most so many operators.
_NAMED_MAX = 10


def list_operators(root: Folder, names: Collection[str] = (), *, allow_empty: bool = False) -> dict[str, list[Entry]]:
    """Return the entries of each operator's folder below a root, by operator."""
    root_entries = root.entries()
    if not root_entries and not allow_empty:
        raise UsageError(f"there is no folder {root.root}, or it is empty: give the root that ArrowState has")
    # No operator's name begins with "_". Hosts with a standby service use such a folder for their records.
    operators = [entry.name for entry in root_entries if entry.folder and not entry.name.startswith("_")]
    missing = sorted(set(names).difference(operators))
    # If one is missing, list all folders: root may really be the folder of an operator.
    listed = {name: root.child(name).entries() for name in operators if missing or not names or name in names}
    for path, entries in [
        (root.root, root_entries),
        *((root.child(name).root, entries) for name, entries in listed.items()),
    ]:
        if any(not entry.folder and parse_operator_file_name(entry.name) is not None for entry in entries):
            raise UsageError(
                f"give the root, not a folder below it: {path} has an operator file, so {root.root} is the folder of "
                "an operator or of a query"
            )
    if not operators and not allow_empty:
        raise UsageError(f"{root.root} has no folders, so it has no operators: give the root that ArrowState has")
    if missing:
        shown = ", ".join(operators[:_NAMED_MAX]) + (", …" if len(operators) > _NAMED_MAX else "")
        raise UsageError(f"{root.root} has no operator {missing[0]!r}; it has: {shown}")
    return listed


@dataclass(frozen=True)
class QueryFolder:
    """A folder of one query's state; `operator` is empty if the path was the query folder itself."""

    operator: str
    folder: Folder


@dataclass(frozen=True)
class Target:
    """The folder that a command got: a savepoint, or a folder with query folders, or itself a query folder."""

    folder: Folder
    savepoint: bool
    query_folders: tuple[QueryFolder, ...] = ()


def open_folder(path: str, storage_options: Mapping[str, Any]) -> Folder:
    """Return the folder at a path of the command line; a relative path starts at the working folder."""
    return Folder(strip_slash(path), storage_options)


def strip_slash(path: str) -> str:
    """Return a path without slashes at its end."""
    return path.rstrip("/") or path


def make_absolute(path: str) -> str:
    """Return an absolute path or URL, which other processes understand too."""
    stripped = strip_slash(path)
    absolute = stripped if "://" in stripped else os.path.abspath(stripped)
    refuse_relative(absolute, "a root or savepoint")
    return absolute


def find_target(folder: Folder) -> Target:
    """Find out whether a folder is a savepoint, a query folder or a root."""
    entries = folder.entries()
    if any(entry.name == MANIFEST_NAME and not entry.folder for entry in entries):
        return Target(folder, savepoint=True)
    if _is_query_folder(entries):
        return Target(folder, savepoint=False, query_folders=(QueryFolder("", folder),))
    query_folders = [
        QueryFolder(operator, folder.child(operator, entry.name))
        for operator, operator_entries in sorted(list_operators(folder).items())
        for entry in operator_entries
        if entry.folder and entry.name not in (STARTING_FOLDER, SPILL_FOLDER)
    ]
    return Target(folder, savepoint=False, query_folders=tuple(query_folders))


def _is_query_folder(entries: Sequence[Entry]) -> bool:
    return any(
        parse_operator_file_name(entry.name) is not None or (entry.folder and entry.name == LEASE_FOLDER)
        for entry in entries
    )


def read_operator_in_force(folder: Folder) -> OperatorFile:
    """Read the operator file that is in force in a query folder."""
    numbers = [number for name in folder.names() if (number := parse_operator_file_name(name)) is not None]
    if not numbers:
        below = _find_query_folders_below(folder)
        raise UsageError(
            f"{folder.root} is not a query folder, because it has no operator file: give "
            f"{', '.join(below[:_NAMED_MAX]) if below else '<root>/<operator>/<query folder>'}"
            f"{', …' if len(below) > _NAMED_MAX else ''}"
        )
    name = operator_file_name(max(numbers))
    try:
        return OperatorFile.decode(folder.get(name), folder.where(name))
    except MissingCheckpointError as error:
        raise UsageError(f"{folder.where(name)} was deleted meanwhile: run the command again") from error


def find_query_folder(
    path: str, storage_options: Mapping[str, Any], operator: str | None, query_folder: str | None
) -> tuple[Folder, OperatorFile]:
    """Find a query folder as `show` does; the path may be the folder itself or a root."""
    start = open_folder(path, storage_options)
    state = find_state(start, operator, query_folder)
    if state.operator is None:
        raise UsageError(f"{start.root} is a savepoint: give the root that ArrowState has, or a query folder below it")
    if state.folder.root != start.root:
        say(f"query folder: {state.folder.root}")
    return state.folder, state.operator


def _find_query_folders_below(folder: Folder) -> list[str]:
    """Return the query folders of a root or of an operator's folder, to suggest them."""
    query_folders: list[str] = []
    children = [folder.child(entry.name) for entry in folder.entries() if entry.folder]
    for child in children:
        entries = child.entries()
        if _is_query_folder(entries):
            query_folders.append(child.root)
            continue
        grandchildren = [child.child(entry.name) for entry in entries if entry.folder]
        query_folders += [grandchild.root for grandchild in grandchildren if _is_query_folder(grandchild.entries())]
    return query_folders


def list_bucket_folders(folder: Folder) -> list[tuple[int, Folder]]:
    """Return the bucket folders in a query folder, or in an operator's folder of a savepoint, by number."""
    numbers = sorted(int(entry.name) for entry in folder.entries() if entry.folder and entry.name.isdecimal())
    return [(number, folder.child(str(number))) for number in numbers]
