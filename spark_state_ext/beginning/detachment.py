"""Detach a query after its first committed batch: put its folder in force, and release the snapshot it began with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from spark_state_ext.engine.folders import operator_folders
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.start_from import CLAIM, RetainedCheckpoint, Savepoint, StartFrom
from spark_state_ext.errors import MissingCheckpointError, OwnershipError, StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.ownership.holds import Hold
from spark_state_ext.rescale.folder_in_force import put_in_force
from spark_state_ext.savepoints.captured_pointers import Captured
from spark_state_ext.savepoints.claims import delete_claimed_savepoint
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.start_records import (
    StartRecord,
    is_detached,
    list_held,
    note_detached,
    read_start,
    remove_held,
)
from spark_state_ext.worker.background import Background

__all__ = ["Detaching", "detach"]

_LOGGER = logging.getLogger("spark_state_ext")


class Detaching:
    """The plans that a process has detached; a `Worker` owns it. A query's first bucket starts this, once per plan."""

    def __init__(self) -> None:
        self._done: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def in_turn(self, job: Job, query_folder: Folder, still_ours: Callable[[], None], background: Background) -> None:
        """Detach the query in the background, once per plan."""
        key = (query_folder.identity, job.plan_id)
        with self._lock:
            if key in self._done:
                return
            self._done.add(key)

        def detach_query() -> None:
            try:
                put_in_force(operator_folders(job), query_folder.name, job.plan_id, still_ours)
                detach(job, query_folder, still_ours)
            except OwnershipError:
                raise
            except StateError as error:
                _LOGGER.warning("%s does not record yet that a batch is committed: %s", query_folder.root, error)
                with self._lock:
                    self._done.discard(key)

        if not background.submit(f"detaching of {query_folder.root}", detach_query):
            with self._lock:
                self._done.discard(key)


def detach(job: Job, query_folder: Folder, still_ours: Callable[[], None]) -> None:
    """Record that a query no longer needs the snapshot that it was started from, and release that snapshot."""
    record, start = read_start(query_folder), job.options.start_from
    if record is not None and not is_detached(query_folder):
        still_ours()
        note_detached(query_folder)
        _LOGGER.info("%s no longer needs %s", query_folder.root, record.source)
    _warn_if_unused(query_folder, record, start)
    if isinstance(start, RetainedCheckpoint):
        if job.captured is not None:
            _release_hold(job, start, job.captured)
        # Also release the holds of plans whose run ended, or was killed, before it was handed a pointer.
        for file in list_held(query_folder):
            _release_hold(job, start, file)
            remove_held(query_folder, file)
    if record is None or record.mode != CLAIM or not isinstance(start, Savepoint) or not job.options.clean_up:
        return
    # This does nothing if the query has claimed another savepoint.
    claim_id = record.claim or query_folder.name
    delete_claimed_savepoint(Folder(start.path, start.storage_options), claim_id, still_ours, record.operator)


def _warn_if_unused(query_folder: Folder, record: StartRecord | None, start: StartFrom | None) -> None:
    """Warn that `start_from` is not used, if the query has another state, as its checkpoint location is not new."""
    if start is None or _may_be_started_from(record, start):
        return
    _LOGGER.warning(
        "start_from=%s is not used: the query at %s already has state, which began %s. To begin from what "
        "start_from names, start the query with a new checkpointLocation",
        start.path if isinstance(start, Savepoint) else start,
        query_folder.root,
        "empty" if record is None else f"from {record}",
    )


def _may_be_started_from(record: StartRecord | None, start: StartFrom) -> bool:
    """True if a query may have been started from `start`, by the records in its folder."""
    if isinstance(start, RetainedCheckpoint):
        # A claimed folder was made by another query, and so was its record.
        return start.mode == CLAIM or record is not None
    if record is None or record.source == start.path:
        return record is not None
    try:
        # The savepoint may have been moved.
        return read_manifest(Folder(start.path, start.storage_options)).header.id == record.source_id
    except StateError:
        return False


def _release_hold(job: Job, start: RetainedCheckpoint, file: str) -> None:
    """Release the hold that a plan of the query made, this plan or an earlier one."""
    starting_folder = Folder(job.options.root, job.options.storage_options).child(job.operator, STARTING_FOLDER)
    try:
        captured = Captured.decode(starting_folder.get(file), starting_folder.where(file))
    except MissingCheckpointError:
        return
    for folder in {pointer.query_folder for pointer in captured.pointers.values()}:
        files = Folder(start.root, start.storage_options).child(captured.operator, folder)
        Hold(files, captured.hold_id).release()
