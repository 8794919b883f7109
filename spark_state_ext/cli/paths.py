"""What a path is that a command was given: a root, a query folder or a savepoint; and the folders below it."""

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
from spark_state_ext.reading.finding import find_state

__all__ = [
    "QueryFolder",
    "Target",
    "make_absolute",
    "strip_slash",
    "list_bucket_folders",
    "open_folder",
    "list_operators",
    "read_operator_in_force",
    "find_query_folder",
    "find_target",
]

# Operators in a message.
_NAMED_MAX = 10


def list_operators(root: Folder, wanted: Collection[str] = (), *, allow_empty: bool = False) -> dict[str, list[Entry]]:
    """What lies in the folders of the operators of a root."""
    here = root.entries()
    if not here and not allow_empty:
        raise UsageError(f"there is no folder {root.root}, or it is empty: give the root, as ArrowState has it")
    # No operator's name begins with "_": such a folder is what hosts with a standby service tell each other.
    there = [entry.name for entry in here if entry.folder and not entry.name.startswith("_")]
    missing = sorted(set(wanted).difference(there))
    # Where one is missing, all are looked at, as the folder of an operator has none.
    listed = {name: root.child(name).entries() for name in there if missing or not wanted or name in wanted}
    for where, entries in [(root.root, here), *((root.child(name).root, found) for name, found in listed.items())]:
        if any(not entry.folder and parse_operator_file_name(entry.name) is not None for entry in entries):
            raise UsageError(
                f"give the root, not a folder in it: {where} has an operator file, so {root.root} is the folder of "
                "an operator or of a query"
            )
    if not there and not allow_empty:
        raise UsageError(f"{root.root} has no operators, as it has no folders: give the root, as ArrowState has it")
    if missing:
        shown = ", ".join(there[:_NAMED_MAX]) + (", …" if len(there) > _NAMED_MAX else "")
        raise UsageError(f"{root.root} has no operator {missing[0]!r}; it has: {shown}")
    return listed


@dataclass(frozen=True)
class QueryFolder:
    """A folder of one query's state; `operator` is empty where only the query folder was given."""

    operator: str
    folder: Folder


@dataclass(frozen=True)
class Target:
    """What was given: a savepoint, or a folder with query folders, which may be itself."""

    folder: Folder
    savepoint: bool
    query_folders: tuple[QueryFolder, ...] = ()


def open_folder(path: str, storage_options: Mapping[str, Any]) -> Folder:
    """A folder as somebody gave it; a relative path is of this process's folder."""
    return Folder(strip_slash(path), storage_options)


def strip_slash(path: str) -> str:
    """A path as somebody gave it, without a slash at its end."""
    return path.rstrip("/") or path


def make_absolute(path: str) -> str:
    """A path that other processes understand too: a relative one is of this process's folder."""
    given = strip_slash(path)
    found = given if "://" in given else os.path.abspath(given)
    refuse_relative(found, "a root or savepoint")
    return found


def find_target(folder: Folder) -> Target:
    """Find out what a folder is."""
    entries = folder.entries()
    if any(entry.name == MANIFEST_NAME and not entry.folder for entry in entries):
        return Target(folder, savepoint=True)
    if _is_query_folder(entries):
        return Target(folder, savepoint=False, query_folders=(QueryFolder("", folder),))
    found = [
        QueryFolder(operator, folder.child(operator, entry.name))
        for operator, listed in sorted(list_operators(folder).items())
        for entry in listed
        if entry.folder and entry.name not in (STARTING_FOLDER, SPILL_FOLDER)
    ]
    return Target(folder, savepoint=False, query_folders=tuple(found))


def _is_query_folder(entries: Sequence[Entry]) -> bool:
    return any(
        parse_operator_file_name(entry.name) is not None or (entry.folder and entry.name == LEASE_FOLDER)
        for entry in entries
    )


def read_operator_in_force(folder: Folder) -> OperatorFile:
    """The operator file in force of a query folder."""
    numbers = [number for name in folder.names() if (number := parse_operator_file_name(name)) is not None]
    if not numbers:
        below = _query_folders_below(folder)
        raise UsageError(
            f"{folder.root} is no query folder, as it has no operator file: give "
            f"{', '.join(below[:_NAMED_MAX]) if below else '<root>/<operator>/<query folder>'}"
            f"{', …' if len(below) > _NAMED_MAX else ''}"
        )
    name = operator_file_name(max(numbers))
    try:
        return OperatorFile.decode(folder.get(name), folder.where(name))
    except MissingCheckpointError as error:
        raise UsageError(f"{folder.where(name)} went away meanwhile: run the command again") from error


def find_query_folder(
    path: str, storage_options: Mapping[str, Any], operator: str | None, query_folder: str | None
) -> tuple[Folder, OperatorFile]:
    """Find a query folder as `show` does: a path may be the folder itself, or a root."""
    given = open_folder(path, storage_options)
    found = find_state(given, operator, query_folder)
    if found.operator is None:
        raise UsageError(f"{given.root} is a savepoint: give a root as ArrowState has it, or a query folder below it")
    if found.folder.root != given.root:
        say(f"query folder: {found.folder.root}")
    return found.folder, found.operator


def _query_folders_below(folder: Folder) -> list[str]:
    """Query folders of a root, or of the folder of an operator: one of them may be meant."""
    found: list[str] = []
    near = [folder.child(entry.name) for entry in folder.entries() if entry.folder]
    for each in near:
        entries = each.entries()
        if _is_query_folder(entries):
            found.append(each.root)
            continue
        further = [each.child(entry.name) for entry in entries if entry.folder]
        found += [it.root for it in further if _is_query_folder(it.entries())]
    return found


def list_bucket_folders(folder: Folder) -> list[tuple[int, Folder]]:
    """The folders of buckets in a query folder, or in an operator's folder of a savepoint, in order."""
    numbers = sorted(int(entry.name) for entry in folder.entries() if entry.folder and entry.name.isdecimal())
    return [(number, folder.child(str(number))) for number in numbers]
