"""Where a savepoint may not lie: in the root of a query's state.

What deletes a query's state would delete the savepoint with it, and a savepoint in a bucket's folder stops that
bucket's clean-up. A root is known by what lies in it, ``<operator>/<query folder>/operator_<n>.json``: most writers of
savepoints are not given the root of any query.
"""

from __future__ import annotations

import logging
import re
from functools import partial

from arrow_schemas.operator import parse_operator_file_name
from spark_state_ext.errors import StorageError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.threads import side_by_side

__all__ = ["refuse_in_state"]

_LOGGER = logging.getLogger("spark_state_ext")
# Names of query folders: Spark's id of the query, or what `new_query_folder` makes; with what rescaling adds.
_QUERY_FOLDER = re.compile(
    r"(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|t\d{1,15}-[0-9a-f]{32})(?:\.r[0-9a-f]{12})?"
)
# All folders in a root are of operators. So of a folder with many others a few tell whether it is one.
_LOOKED_AT_MAX = 32
_THREADS = 16


def refuse_in_state(savepoint: Folder) -> None:
    """Refuse a folder for a savepoint that lies in the root of a query's state, at any depth."""
    for above in savepoint.above():
        state = _state_in(above)
        if state is not None:
            raise UsageError(
                f"a savepoint cannot lie at {savepoint.root}: {above.root} has the state of a query ({state.root}), "
                "which is deleted and cleaned up as a whole. Name a folder outside of the root of ArrowState"
            )


def _state_in(folder: Folder) -> Folder | None:
    """A query folder at a folder, in it, or in a folder in it; None: there is none."""
    names = _names_in(folder)
    if _is_query_folder(names):
        return folder
    found = _query_folder_of(folder, names)
    if found is not None:
        return found
    # Operators by default are called so.
    below = sorted(names, key=lambda name: name != "state")[:_LOOKED_AT_MAX]
    look = partial(_query_folder_below, folder)
    found_below = map(look, below) if folder.is_local else side_by_side("look", _THREADS, look, below)
    return next((it for it in found_below if it is not None), None)


def _query_folder_below(folder: Folder, name: str) -> Folder | None:
    operator = folder.child(name)
    return _query_folder_of(operator, _names_in(operator))


def _query_folder_of(operator: Folder, names: list[str]) -> Folder | None:
    """The first folder of a query among the names in a folder."""
    named = (operator.child(name) for name in names if _QUERY_FOLDER.fullmatch(name))
    return next((it for it in named if _is_query_folder(_names_in(it))), None)


def _names_in(folder: Folder) -> list[str]:
    """What lies in a folder; nothing if that cannot be listed, as credentials may allow the savepoint's folder only."""
    try:
        return folder.names()
    except StorageError as error:
        _LOGGER.debug("whether there is state in %s is not known: %s", folder.root, error)
        return []


def _is_query_folder(names: list[str]) -> bool:
    return any(parse_operator_file_name(name) is not None for name in names)
