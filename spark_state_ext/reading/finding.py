"""What a path is that somebody wants to read: a root, an operator's folder, a query folder, or a savepoint."""

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
_NAMED_MAX = 10


@dataclass(frozen=True)
class StateFolder:
    """A folder with state.

    Parameters
    ----------
    folder
        A query folder, or a savepoint.
    operator
        The operator file in force; None of a savepoint, whose manifest tells.
    """

    folder: Folder
    operator: OperatorFile | None


def find_state(given: Folder, operator: str | None, query_folder: str | None) -> StateFolder:
    """Find the state that is meant."""
    here = given.entries()
    files = {entry.name for entry in here if not entry.folder}
    if MANIFEST_NAME in files:
        return StateFolder(given, None)
    if _has_operator_file(here):
        return StateFolder(given, _in_force(given, here, operator))
    if not here:
        raise UsageError(
            f"there is no folder {given.root}, or it is empty: give a root as ArrowState has it, a query folder "
            "below it, or a savepoint"
        )
    below = {entry.name: given.child(entry.name).entries() for entry in here if entry.folder}
    if any(_has_operator_file(entries) for entries in below.values()):
        # The folder of an operator.
        return _chosen(given, below, operator, query_folder)
    folders = [name for name, entries in below.items() if _queries_in(given.child(name), entries)]
    if operator is None and len(folders) > 1:
        raise UsageError(f"{given.root} has the operators {_shown(folders)}: name one, with operator=…")
    name = operator if operator is not None else next(iter(folders), None)
    if name is None or name not in folders:
        what = "no state of an operator" if name is None else f"no operator {name!r} with state"
        raise UsageError(
            f"{given.root} has {what}{f'; it has {_shown(folders)}' if folders else ''}: give a root as ArrowState "
            "has it, a query folder below it, or a savepoint"
        )
    found = given.child(name)
    return _chosen(found, _queries_in(found, below[name]), operator, query_folder)


def _queries_in(operator_folder: Folder, entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The query folders of an operator that have an operator file, and what lies in them."""
    names = [entry.name for entry in entries if entry.folder and entry.name not in _NOT_QUERIES]
    listed = {name: operator_folder.child(name).entries() for name in names}
    return {name: found for name, found in listed.items() if _has_operator_file(found)}


def _chosen(
    operator_folder: Folder, below: dict[str, list[Entry]], operator: str | None, query_folder: str | None
) -> StateFolder:
    queries = {name: entries for name, entries in below.items() if _has_operator_file(entries)}
    if query_folder is not None and query_folder not in queries:
        raise UsageError(
            f"{operator_folder.root} has no query folder {query_folder!r}; it has {_shown(sorted(queries))}"
        )
    name = query_folder or _written_last(operator_folder, _in_force_of(queries))
    folder = operator_folder.child(name)
    return StateFolder(folder, _in_force(folder, queries[name], operator))


def _in_force_of(queries: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
    """The query folders without those of rescalings that are not, or no longer, in force."""
    in_force = folders_in_force({name: [entry.name for entry in entries] for name, entries in queries.items()})
    return {name: entries for name, entries in queries.items() if name in in_force}


def _written_last(operator_folder: Folder, queries: dict[str, list[Entry]]) -> str:
    """The query folder whose lease a run of its query renewed last."""
    if len(queries) == 1:
        return next(iter(queries))
    renewed_ms: dict[str, int] = {}
    for name in queries:
        at_ms = last_renewed_ms(operator_folder.child(name))
        if at_ms is None:
            raise UsageError(
                f"{operator_folder.root} has the query folders {_shown(sorted(queries))}, and {name} has no lease, "
                "which would tell when it was written: name one, with query_folder=…"
            )
        renewed_ms[name] = at_ms
    return max(renewed_ms, key=lambda name: (renewed_ms[name], name))


def _has_operator_file(entries: Iterable[Entry]) -> bool:
    return any(not entry.folder and parse_operator_file_name(entry.name) is not None for entry in entries)


def _in_force(folder: Folder, entries: Iterable[Entry], operator: str | None) -> OperatorFile:
    try:
        found = newest_operator(folder, [entry.name for entry in entries])
    except MissingCheckpointError as error:
        raise CorruptFileError(f"a file was listed and is not there: open the state anew ({error})") from error
    assert found is not None, "only folders with an operator file are taken"
    if operator is not None and found.operator != operator:
        raise UsageError(f"{folder.root} has the state of operator {found.operator!r}, not {operator!r}")
    return found


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED_MAX]) + (", …" if len(names) > _NAMED_MAX else "")
