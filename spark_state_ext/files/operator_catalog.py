"""The folder ``<root>/<operator>``: the operator files of a query folder below it, and which other queries have one."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable

from arrow_schemas.operator import OperatorFile, operator_file_name, parse_operator_file_name
from spark_state_ext.errors import ExistingStateError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import (
    HOLDS_FOLDER,
    LEASE_FOLDER,
    LEASE_FORMAT_1_NAME,
    LEFT_BEHIND_NAME,
    SPILL_FOLDER,
    START_NAME,
    STARTING_FOLDER,
)
from spark_state_ext.files.left_behind import refuse_left_behind

__all__ = [
    "OperatorCatalog",
    "query_folders_of_batch",
    "is_query_folder",
    "is_new_query_folder",
    "newest_operator",
    "new_query_folder",
    "others_beside",
    "shown_ids",
]

_LOGGER = logging.getLogger("spark_state_ext")
# What a query's folder may have before its state begins; `lease.json` was the lease of formats 1 to 3.
_BEFORE_STATE = frozenset({SPILL_FOLDER, LEASE_FOLDER, LEASE_FORMAT_1_NAME, HOLDS_FOLDER, START_NAME, LEFT_BEHIND_NAME})
_QUERY_FOLDER = re.compile(r"[A-Za-z0-9._-]{1,100}")
_NEW_QUERY_FOLDER = re.compile(r"t\d{1,15}-[0-9a-f]{32}")
# Each round ends with the file of one job written, and a job writes one.
_ROUNDS_MAX = 5


def is_query_folder(name: str) -> bool:
    """Whether a query's folder may have this name: Spark's id of a query, or one of `new_query_folder`."""
    return _QUERY_FOLDER.fullmatch(name) is not None


class OperatorCatalog:
    """Which operator files this process has compared with which jobs."""

    def __init__(self) -> None:
        self._admitted: dict[tuple[str, bytes], OperatorFile] = {}
        # For which run of the query they were looked at last, by query folder.
        self._runs: dict[str, str] = {}
        self._lock = threading.Lock()

    def admit(
        self,
        operator_files: Folder,
        wanted: OperatorFile,
        strict: bool,
        *,
        again: bool = False,
        batch_ms: int | None = None,
        case_sensitive: bool = False,
        leave_behind: bool = False,
        with_state: bool = False,
    ) -> OperatorFile:
        """Compare a job with what is stored and write the operator file it needs. Done once a process and job."""
        key = (operator_files.identity, wanted.encode())

        def look_beside() -> None:
            if not with_state:
                _look_beside(operator_files, wanted, strict, batch_ms)

        with self._lock:
            if again or key not in self._admitted:
                self._admitted[key] = _admit(operator_files, wanted, look_beside, case_sensitive, leave_behind)
            return self._admitted[key]

    def is_looked_at(self, query_folder: Folder, run: str) -> bool:
        """Whether this process has looked at a folder's operator files for a run of the query.

        Between two runs somebody may have made a newer one (`erasing.history`).
        """
        return self._runs.get(query_folder.identity) == run

    def note_run(self, query_folder: Folder, run: str) -> None:
        """It has, with success."""
        self._runs[query_folder.identity] = run


def _admit(
    operator_files: Folder,
    wanted: OperatorFile,
    look_beside: Callable[[], None],
    case_sensitive: bool,
    leave_behind: bool,
) -> OperatorFile:
    for _ in range(_ROUNDS_MAX):
        in_force = _admitted_by(operator_files, wanted, look_beside, case_sensitive, leave_behind)
        if in_force is not None:
            return in_force
    raise StorageError(
        f"the operator file of {wanted.operator!r} cannot be written to {operator_files.child(wanted.query_id).root}: "
        "the store says that there is one, and does not list it. Start again."
    )


def _admitted_by(
    operator_files: Folder,
    wanted: OperatorFile,
    look_beside: Callable[[], None],
    case_sensitive: bool,
    leave_behind: bool,
) -> OperatorFile | None:
    """The operator file in force; None where another job wrote one of its own at the same time."""
    files = operator_files.child(wanted.query_id)
    newest = newest_operator(files)
    if newest is not None:
        in_force = newest.succeeded_by(wanted, case_sensitive=case_sensitive, leave_behind=leave_behind)
        if in_force is newest:
            return newest
        refuse_left_behind(files, wanted.operator, [field.name for field in in_force.row_schema().state])
    else:
        in_force = wanted
        look_beside()
    made = files.create(operator_file_name(in_force.schema_id), in_force.encode())
    return in_force if made else None


def newest_operator(query_folder: Folder, names: Iterable[str] | None = None) -> OperatorFile | None:
    """The operator file in force of a query folder, by the names in it; None where there is none."""
    found = query_folder.names() if names is None else names
    stored = [n for n in map(parse_operator_file_name, found) if n is not None]
    if not stored:
        return None
    name = operator_file_name(max(stored))
    return OperatorFile.decode(query_folder.get(name), query_folder.where(name))


def new_query_folder(batch_ms: int, nonce: str) -> str:
    """Name of a query folder where tasks are not told their query."""
    return f"t{batch_ms}-{nonce}"


def is_new_query_folder(name: str) -> bool:
    """Whether a query's folder has a name of `new_query_folder`, which no checkpoint's ``metadata`` tells."""
    return _NEW_QUERY_FOLDER.fullmatch(name) is not None


def query_folders_of_batch(operator_files: Folder, batch_ms: int) -> set[str]:
    """The query folders that attempts at a first batch took, by the records that they left
    (`engine.first_query_folder`).
    """
    notes = operator_files.child(STARTING_FOLDER)
    names = [name for name in notes.names() if name.startswith(f"{batch_ms}-")]
    return {query_folder for name in names if is_query_folder(query_folder := notes.get(name).decode(errors="replace"))}


def others_beside(operator_files: Folder, query_id: str = "", batch_ms: int | None = None) -> list[str]:
    """Ids of the other queries that have state in the folder ``<root>/<operator>``."""
    mine = {query_id, STARTING_FOLDER, SPILL_FOLDER}
    names = [name for name in operator_files.names() if name not in mine]
    others = sorted(name for name in names if not _BEFORE_STATE.issuperset(operator_files.child(name).names()))
    if not others or batch_ms is None:
        return others
    attempts = query_folders_of_batch(operator_files, batch_ms)
    return [name for name in others if name not in attempts]


def shown_ids(ids: list[str]) -> str:
    """Ids of queries for a message; the first few."""
    return f"{', '.join(ids[:3])}{', …' if len(ids) > 3 else ''}"


def _look_beside(operator_files: Folder, wanted: OperatorFile, strict: bool, batch_ms: int | None) -> None:
    others = others_beside(operator_files, wanted.query_id, batch_ms)
    if not others:
        return
    text = (
        f"operator {wanted.operator!r} begins without state under {operator_files.root}, where other queries have "
        f"theirs: {shown_ids(others)}. A query finds its state through its Spark checkpoint: to go on with old state, "
        "start it with the old checkpointLocation."
    )
    if strict:
        raise ExistingStateError(text + " (strict=True refuses to begin anew here; use another operator name or root.)")
    _LOGGER.warning(text)
