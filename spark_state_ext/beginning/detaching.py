"""What is due once a query has a committed batch: its folder is in force, and it lets go of what it began with."""

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
from spark_state_ext.rescale.in_force import put_in_force
from spark_state_ext.savepoints.captured import Captured
from spark_state_ext.savepoints.claims import consume
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.records import StartRecord, held_for, is_detached, note_detached, note_let_go, start_of
from spark_state_ext.worker.background import Background

__all__ = ["Detaching", "detach"]

_LOGGER = logging.getLogger("spark_state_ext")


class Detaching:
    """What a process has done of this; a `Worker` owns it. A query's first bucket has it done, once a plan."""

    def __init__(self) -> None:
        self._done: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def in_turn(self, job: Job, query_folder: Folder, still_ours: Callable[[], None], background: Background) -> None:
        """Have it done beside the batch."""
        key = (query_folder.identity, job.plan_id)
        with self._lock:
            if key in self._done:
                return
            self._done.add(key)

        def work() -> None:
            try:
                put_in_force(operator_folders(job), query_folder.name, job.plan_id, still_ours)
                detach(job, query_folder, still_ours)
            except OwnershipError:
                raise
            except StateError as error:
                _LOGGER.warning("%s does not say yet that a batch is committed: %s", query_folder.root, error)
                with self._lock:
                    self._done.discard(key)

        if not background.submit(f"detaching of {query_folder.root}", work):
            with self._lock:
                self._done.discard(key)


def detach(job: Job, query_folder: Folder, still_ours: Callable[[], None]) -> None:
    """Say that a query needs nothing of the snapshot that it was started from, and let go of that."""
    record, start = start_of(query_folder), job.options.start_from
    if record is not None and not is_detached(query_folder):
        still_ours()
        note_detached(query_folder)
        _LOGGER.info("%s needs nothing of %s any more", query_folder.root, record.source)
    _say_unused(query_folder, record, start)
    if isinstance(start, RetainedCheckpoint):
        if job.captured is not None:
            _let_go(job, start, job.captured)
        # Of plans whose run ended, or was killed, before it was handed a pointer.
        for file in held_for(query_folder):
            _let_go(job, start, file)
            note_let_go(query_folder, file)
    if record is None or record.mode != CLAIM or not isinstance(start, Savepoint) or not job.options.clean_up:
        return
    # Nothing happens where this is not the savepoint that the query has claimed.
    claim_id = record.claim or query_folder.name
    consume(Folder(start.path, start.storage_options), claim_id, still_ours, record.operator)


def _say_unused(query_folder: Folder, record: StartRecord | None, start: StartFrom | None) -> None:
    """Who wants to go back to a savepoint, and starts the query on its old checkpoint, is to be told."""
    if start is None or _may_be_of(record, start):
        return
    _LOGGER.warning(
        "start_from=%s is not used: the query at %s has a state of its own, which began %s. To begin from what "
        "start_from names, start the query with a new checkpointLocation",
        start.path if isinstance(start, Savepoint) else start,
        query_folder.root,
        "empty" if record is None else f"from {record}",
    )


def _may_be_of(record: StartRecord | None, start: StartFrom) -> bool:
    """Whether a query may have been begun from this, by what its folder tells."""
    if isinstance(start, RetainedCheckpoint):
        # A folder that was claimed is another query's, and so is its record.
        return start.mode == CLAIM or record is not None
    if record is None or record.source == start.path:
        return record is not None
    try:
        # It may have been moved.
        return read_manifest(Folder(start.path, start.storage_options)).header.id == record.source_id
    except StateError:
        return False


def _let_go(job: Job, start: RetainedCheckpoint, file: str) -> None:
    """Release the hold that was made when the query was planned, now or before."""
    notes = Folder(job.options.root, job.options.storage_options).child(job.operator, STARTING_FOLDER)
    try:
        found = Captured.decode(notes.get(file), notes.where(file))
    except MissingCheckpointError:
        return
    for folder in {pointer.query_folder for pointer in found.pointers.values()}:
        files = Folder(start.root, start.storage_options).child(found.operator, folder)
        Hold(files, found.hold_id).release()
