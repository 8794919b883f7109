"""The folder ``<root>/<operator>``: operator files in the query folders below it, and other queries next to a query."""

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
from spark_state_ext.files.left_columns import refuse_left_behind

__all__ = [
    "OperatorCatalog",
    "query_folders_of_batch",
    "is_query_folder",
    "is_new_query_folder",
    "newest_operator",
    "new_query_folder",
    "list_other_queries",
    "format_ids",
]

_LOGGER = logging.getLogger("spark_state_ext")
# What a query folder may contain before its state begins; `lease.json` was the lease of formats 1 to 3.
_BEFORE_STATE = frozenset({SPILL_FOLDER, LEASE_FOLDER, LEASE_FORMAT_1_NAME, HOLDS_FOLDER, START_NAME, LEFT_BEHIND_NAME})
_QUERY_FOLDER = re.compile(r"[A-Za-z0-9._-]{1,100}")
_NEW_QUERY_FOLDER = re.compile(r"t\d{1,15}-[0-9a-f]{32}")
# In each round, some job writes its file, and a job writes only one.
_ROUNDS_MAX = 5


def is_query_folder(name: str) -> bool:
    """True if a query folder may have this name: Spark's id of a query, or a name of `new_query_folder`."""
    return _QUERY_FOLDER.fullmatch(name) is not None


class OperatorCatalog:
    """The operator files that this process has compared with its jobs."""

    def __init__(self) -> None:
        self._admitted: dict[tuple[str, bytes], OperatorFile] = {}
        # The run of the query for which they were last compared, by query folder.
        self._runs: dict[str, str] = {}
        self._lock = threading.Lock()

    def admit(
        self,
        operator_files: Folder,
        job_file: OperatorFile,
        strict: bool,
        *,
        again: bool = False,
        batch_ms: int | None = None,
        case_sensitive: bool = False,
        leave_behind: bool = False,
        with_state: bool = False,
    ) -> OperatorFile:
        """Compare a job with the stored operator file and write the one that it needs, once per process and job."""
        key = (operator_files.identity, job_file.encode())

        def warn_about_others() -> None:
            if not with_state:
                _warn_about_others(operator_files, job_file, strict, batch_ms)

        with self._lock:
            if again or key not in self._admitted:
                self._admitted[key] = _admit(operator_files, job_file, warn_about_others, case_sensitive, leave_behind)
            return self._admitted[key]

    def is_looked_at(self, query_folder: Folder, run: str) -> bool:
        """True if this process has compared a folder's operator files in this run of the query.

        A newer operator file may have been made between two runs (`erasing.history`).
        """
        return self._runs.get(query_folder.identity) == run

    def note_run(self, query_folder: Folder, run: str) -> None:
        """Note that the folder's operator files were compared successfully in this run of the query."""
        self._runs[query_folder.identity] = run


def _admit(
    operator_files: Folder,
    job_file: OperatorFile,
    warn_about_others: Callable[[], None],
    case_sensitive: bool,
    leave_behind: bool,
) -> OperatorFile:
    for _ in range(_ROUNDS_MAX):
        in_force = _admit_once(operator_files, job_file, warn_about_others, case_sensitive, leave_behind)
        if in_force is not None:
            return in_force
    raise StorageError(
        f"the operator file of {job_file.operator!r} cannot be written to "
        f"{operator_files.child(job_file.query_id).root}: the store says that the file exists, but does not list it. "
        "Start again."
    )


def _admit_once(
    operator_files: Folder,
    job_file: OperatorFile,
    warn_about_others: Callable[[], None],
    case_sensitive: bool,
    leave_behind: bool,
) -> OperatorFile | None:
    """Return the operator file in force; None if another job wrote its own at the same time."""
    files = operator_files.child(job_file.query_id)
    newest = newest_operator(files)
    if newest is not None:
        in_force = newest.succeeded_by(job_file, case_sensitive=case_sensitive, leave_behind=leave_behind)
        if in_force is newest:
            return newest
        refuse_left_behind(files, job_file.operator, [field.name for field in in_force.row_schema().state])
    else:
        in_force = job_file
        warn_about_others()
    is_created = files.create(operator_file_name(in_force.schema_id), in_force.encode())
    return in_force if is_created else None


def newest_operator(query_folder: Folder, names: Iterable[str] | None = None) -> OperatorFile | None:
    """Read the operator file in force in a query folder, given the names in it; None if the folder has none."""
    all_names = query_folder.names() if names is None else names
    schema_ids = [schema_id for schema_id in map(parse_operator_file_name, all_names) if schema_id is not None]
    if not schema_ids:
        return None
    name = operator_file_name(max(schema_ids))
    return OperatorFile.decode(query_folder.get(name), query_folder.where(name))


def new_query_folder(batch_ms: int, nonce: str) -> str:
    """Return the name of a query folder for tasks that do not know their query."""
    return f"t{batch_ms}-{nonce}"


def is_new_query_folder(name: str) -> bool:
    """True if the name was made by `new_query_folder`, and so is not in any checkpoint's ``metadata``."""
    return _NEW_QUERY_FOLDER.fullmatch(name) is not None


def query_folders_of_batch(operator_files: Folder, batch_ms: int) -> set[str]:
    """Return the query folders that attempts at a first batch chose and recorded (`engine.first_query_folder`)."""
    notes = operator_files.child(STARTING_FOLDER)
    names = [name for name in notes.names() if name.startswith(f"{batch_ms}-")]
    return {query_folder for name in names if is_query_folder(query_folder := notes.get(name).decode(errors="replace"))}


def list_other_queries(operator_files: Folder, query_id: str = "", batch_ms: int | None = None) -> list[str]:
    """Return the ids of the other queries that have state in the folder ``<root>/<operator>``."""
    own_names = {query_id, STARTING_FOLDER, SPILL_FOLDER}
    names = [name for name in operator_files.names() if name not in own_names]
    others = sorted(name for name in names if not _BEFORE_STATE.issuperset(operator_files.child(name).names()))
    if not others or batch_ms is None:
        return others
    attempts = query_folders_of_batch(operator_files, batch_ms)
    return [name for name in others if name not in attempts]


def format_ids(ids: list[str]) -> str:
    """Return the first few ids of queries as text for a message."""
    return f"{', '.join(ids[:3])}{', …' if len(ids) > 3 else ''}"


def _warn_about_others(operator_files: Folder, job_file: OperatorFile, strict: bool, batch_ms: int | None) -> None:
    others = list_other_queries(operator_files, job_file.query_id, batch_ms)
    if not others:
        return
    text = (
        f"operator {job_file.operator!r} begins without state under {operator_files.root}, where other queries have "
        f"state: {format_ids(others)}. A query finds its state through its Spark checkpoint: to go on with old state, "
        "start it with the old checkpointLocation."
    )
    if strict:
        raise ExistingStateError(text + " (strict=True refuses to begin without it: use another operator or root.)")
    _LOGGER.warning(text)
