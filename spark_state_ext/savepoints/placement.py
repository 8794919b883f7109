"""Refuses a savepoint inside the root of a query's state.

Deleting the query's state would delete the savepoint too, and a savepoint in a bucket's folder stops the bucket's
clean-up. A root is recognised by its files, ``<operator>/<query folder>/operator_<n>.json``, because most writers of
savepoints do not know a query's root.
"""

from __future__ import annotations

import logging
import re
from functools import partial

from arrow_schemas.operator import parse_operator_file_name
from spark_state_ext.errors import StorageError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.threads import map_in_parallel

__all__ = ["refuse_in_state"]

_LOGGER = logging.getLogger("spark_state_ext")
# Name of a query folder: Spark's id of the query or a name by `new_query_folder`, then rescaling's suffix, if any.
_QUERY_FOLDER = re.compile(
    r"(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|t\d{1,15}-[0-9a-f]{32})(?:\.r[0-9a-f]{12})?"
)
# All folders in a root belong to operators, so it is enough to look into a few of them.
_CHECKED_FOLDERS_MAX = 32
_THREADS = 16


def refuse_in_state(savepoint: Folder) -> None:
    """Refuse a folder for a savepoint if it is in the root of a query's state, at any depth."""
    for above in savepoint.above():
        state = _find_state(above)
        if state is not None:
            raise UsageError(
                f"a savepoint cannot be at {savepoint.root}: {above.root} contains the state of a query "
                f"({state.root}), which is deleted and cleaned up as a whole. Use a folder outside the root of "
                "ArrowState"
            )


def _find_state(folder: Folder) -> Folder | None:
    """Find a query folder at a folder, in it, or in one of its folders; None: there is none."""
    names = _list_names(folder)
    if _is_query_folder(names):
        return folder
    query_folder = _find_query_folder(folder, names)
    if query_folder is not None:
        return query_folder
    # An operator's default name is `state`.
    below = sorted(names, key=lambda name: name != "state")[:_CHECKED_FOLDERS_MAX]
    look = partial(_find_query_folder_below, folder)
    query_folders = map(look, below) if folder.is_local else map_in_parallel("look", _THREADS, look, below)
    return next((query_folder for query_folder in query_folders if query_folder is not None), None)


def _find_query_folder_below(folder: Folder, name: str) -> Folder | None:
    operator = folder.child(name)
    return _find_query_folder(operator, _list_names(operator))


def _find_query_folder(operator: Folder, names: list[str]) -> Folder | None:
    """Return the first query folder among the names in an operator's folder; None: there is none."""
    candidates = (operator.child(name) for name in names if _QUERY_FOLDER.fullmatch(name))
    return next((candidate for candidate in candidates if _is_query_folder(_list_names(candidate))), None)


def _list_names(folder: Folder) -> list[str]:
    """List a folder; empty if that fails, because credentials may allow only the savepoint's folder."""
    try:
        return folder.names()
    except StorageError as error:
        _LOGGER.debug("could not check whether there is state in %s: %s", folder.root, error)
        return []


def _is_query_folder(names: list[str]) -> bool:
    return any(parse_operator_file_name(name) is not None for name in names)
