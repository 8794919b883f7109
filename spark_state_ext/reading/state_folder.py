"""Finds the state at a path, which may be a root, an operator's folder, a query folder or a savepoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arrow_schemas.operator import OperatorFile, parse_operator_file_name
from arrow_schemas.savepoint import MANIFEST_NAME
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, UsageError
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.layout import SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.files.operator_catalog import newest_operator
from spark_state_ext.ownership.lease_log import last_renewed_ms
from spark_state_ext.rescale.folders import folders_in_force

__all__ = ["StateFolder", "find_state"]

_NOT_QUERIES = frozenset({STARTING_FOLDER, SPILL_FOLDER})
_LISTED_NAMES_MAX = 10


@dataclass(frozen=True)
class StateFolder:
    """A folder with state.

    Parameters
    ----------
    folder
        A query folder, or a savepoint.
    operator
        The operator file in force; None for a savepoint, which has operator files in its manifest.
    """

    folder: Folder
    operator: OperatorFile | None


def find_state(path_folder: Folder, operator: str | None, query_folder: str | None) -> StateFolder:
    """Find the state at a path; the operator and the query folder are needed only if there are several."""
    path_entries = path_folder.entries()
    files = {entry.name for entry in path_entries if not entry.folder}
    if MANIFEST_NAME in files:
        return StateFolder(path_folder, None)
    if _has_operator_file(path_entries):
        return StateFolder(path_folder, _read_operator_file(path_folder, path_entries, operator))
    if not path_entries:
        raise UsageError(
            f"there is no folder {path_folder.root}, or it is empty: give the root that ArrowState was given, a "
            "query folder below it, or a savepoint"
        )
    below = {entry.name: path_folder.child(entry.name).entries() for entry in path_entries if entry.folder}
    if any(_has_operator_file(entries) for entries in below.values()):
        # The path is the folder of an operator.
        return _choose_query_folder(path_folder, below, operator, query_folder)
    folders = [name for name, entries in below.items() if _list_query_folders(path_folder.child(name), entries)]
    if operator is None and len(folders) > 1:
        raise UsageError(f"{path_folder.root} has the operators {_join_names(folders)}: name one, with operator=…")
    name = operator if operator is not None else next(iter(folders), None)
    if name is None or name not in folders:
        content = "no state of an operator" if name is None else f"no operator {name!r} with state"
        raise UsageError(
            f"{path_folder.root} has {content}{f'; it has {_join_names(folders)}' if folders else ''}: give the root "
            "that ArrowState was given, a query folder below it, or a savepoint"
        )
    operator_folder = path_folder.child(name)
    return _choose_query_folder(
        operator_folder, _list_query_folders(operator_folder, below[name]), operator, query_folder
    )


def _list_query_folders(operator_folder: Folder, entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """List the query folders of an operator that have an operator file, with their entries."""
    names = [entry.name for entry in entries if entry.folder and entry.name not in _NOT_QUERIES]
    listed = {name: operator_folder.child(name).entries() for name in names}
    return {name: entries for name, entries in listed.items() if _has_operator_file(entries)}


def _choose_query_folder(
    operator_folder: Folder, below: dict[str, list[Entry]], operator: str | None, query_folder: str | None
) -> StateFolder:
    queries = {name: entries for name, entries in below.items() if _has_operator_file(entries)}
    if query_folder is not None and query_folder not in queries:
        raise UsageError(
            f"{operator_folder.root} has no query folder {query_folder!r}; it has {_join_names(sorted(queries))}"
        )
    name = query_folder or _find_written_last(operator_folder, _keep_in_force(queries))
    folder = operator_folder.child(name)
    return StateFolder(folder, _read_operator_file(folder, queries[name], operator))


def _keep_in_force(queries: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
    """Return the query folders without rescaled folders that are not yet, or no longer, in force."""
    in_force = folders_in_force({name: [entry.name for entry in entries] for name, entries in queries.items()})
    return {name: entries for name, entries in queries.items() if name in in_force}


def _find_written_last(operator_folder: Folder, queries: dict[str, list[Entry]]) -> str:
    """Return the name of the query folder whose lease was renewed last."""
    if len(queries) == 1:
        return next(iter(queries))
    renewed_ms: dict[str, int] = {}
    for name in queries:
        last_ms = last_renewed_ms(operator_folder.child(name))
        if last_ms is None:
            raise UsageError(
                f"{operator_folder.root} has the query folders {_join_names(sorted(queries))}, and {name} has no "
                "lease, so it is unknown which was written last: name one, with query_folder=…"
            )
        renewed_ms[name] = last_ms
    return max(renewed_ms, key=lambda name: (renewed_ms[name], name))


def _has_operator_file(entries: Iterable[Entry]) -> bool:
    return any(not entry.folder and parse_operator_file_name(entry.name) is not None for entry in entries)


def _read_operator_file(folder: Folder, entries: Iterable[Entry], operator: str | None) -> OperatorFile:
    try:
        operator_file = newest_operator(folder, [entry.name for entry in entries])
    except MissingCheckpointError as error:
        raise CorruptFileError(f"a file was listed but is gone now: open the state again ({error})") from error
    assert operator_file is not None, "every folder here has an operator file"
    if operator is not None and operator_file.operator != operator:
        raise UsageError(f"{folder.root} has the state of operator {operator_file.operator!r}, not {operator!r}")
    return operator_file


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED_NAMES_MAX]) + (", …" if len(names) > _LISTED_NAMES_MAX else "")
