"""Find the initial states of queries in savepoints and retained checkpoints, and cache what was read of these."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from arrow_schemas.import_mark import ImportMark
from arrow_schemas.operator import OperatorFile, operator_file_name
from arrow_schemas.partitions import PartitionAssignment
from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import SavepointManifest
from spark_state_ext.backends.registry import FSSPEC
from spark_state_ext.beginning.initial_state import InitialState, make_divided_pointer
from spark_state_ext.beginning.rescaling import Rescaling
from spark_state_ext.engine.folders import operator_folder
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.start_from import CLAIM, RetainedCheckpoint, Savepoint
from spark_state_ext.errors import (
    CorruptFileError,
    LineageError,
    MissingCheckpointError,
    OperatorChangedError,
    StateError,
    UsageError,
)
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.files.partition_files import newest_assignment
from spark_state_ext.rescale.folders import is_rescaled_by
from spark_state_ext.rescale.parents import Parent
from spark_state_ext.savepoints.captured_pointers import Captured
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.start_records import RETAINED, SAVEPOINT, StartRecord

__all__ = ["Starts", "refuse_unfit_start"]

_LOGGER = logging.getLogger("spark_state_ext")

T = TypeVar("T")


class _Cache(Generic[T]):
    """A cache of a few values that never change, so that each is read once."""

    _MAX = 16

    def __init__(self) -> None:
        self._read: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: str, read: Callable[[], T]) -> T:
        """Return the value of a key, which is read if it is not cached."""
        with self._lock:
            if key in self._read:
                return self._read[key]
        value = read()
        with self._lock:
            self._read[key] = value
            while len(self._read) > self._MAX:
                self._read.popitem(last=False)
        return value


class Starts:
    """Finds initial states, and caches what the process has read of savepoints and retained checkpoints."""

    def __init__(self, warned_plans: Collection[str] = ()) -> None:
        self._manifests: _Cache[SavepointManifest] = _Cache()
        self._captured: _Cache[Captured] = _Cache()
        self._operator_files: _Cache[OperatorFile] = _Cache()
        self._assignments: _Cache[tuple[int, PartitionAssignment] | None] = _Cache()
        # Plans for which the log already says that they begin without state.
        self._warned_plans = set(warned_plans)

    def of(self, job: Job, bucket: int, imported: ImportMark | None = None) -> InitialState | None:
        """Return the initial state of a bucket whose query is not rescaled; None if it begins without state."""
        start, state = job.options.start_from, None
        if isinstance(start, Savepoint):
            state = self._find_in_savepoint(job, start, start.operator or job.operator, bucket)
        elif start is not None:
            state = self._find_in_checkpoint(job, start, start.operator or job.operator, bucket)
        _refuse_without_import(job, state, imported)
        return state

    def rescaling(self, job: Job, bucket: int, stored: Pointer | None) -> Rescaling | None:
        """Return the rescaling to do in a call; None if its bucket is not rescaled, or was rescaled already."""
        # After rescaling, the old query folder may have been removed.
        if job.rescaled_from is None or (stored is not None and is_rescaled_by(stored.query_folder, job.plan_id)):
            return None
        try:
            captured = self._read_captured(job, job.rescaled_from)
            newest = max(captured.pointers.values(), key=lambda pointer: pointer.schema_id)
            old_folder = operator_folder(job).child(newest.query_folder)
            operator_file = self._read_operator_file(old_folder, newest.schema_id)
        except MissingCheckpointError as error:
            raise LineageError(
                f"operator {job.operator!r} is not rescaled, as its query has gone on since it was planned, and its "
                f"old state was removed: {error}. Start the program again. (Late tasks of finished batches also end "
                "with this error)"
            ) from error
        if captured.pointers.keys() != set(range(operator_file.buckets)):
            where = operator_folder(job).child(STARTING_FOLDER).where(job.rescaled_from)
            raise CorruptFileError(
                f"{where} has {len(captured.pointers)} of {operator_file.buckets} buckets. Plan the query again."
            )
        if stored is not None and stored.query_folder != old_folder.name:
            return None
        if stored is None and bucket < min(operator_file.buckets, job.options.buckets):
            # In the query that was captured, each bucket of the old and the new map has a pointer.
            raise LineageError(
                f"bucket {bucket} of operator {job.operator!r} has no state at this checkpointLocation, but has state "
                f"at rescale={job.options.rescale!r}: rescale is only for the query whose checkpoint is there. Leave "
                "it out; to begin a new query with that state, give start_from=RetainedCheckpoint(…)"
            )
        return Rescaling(job, bucket, stored, captured, operator_file, old_folder)

    def _warn_without_state(self, job: Job, why: str) -> None:
        if job.plan_id not in self._warned_plans:
            self._warned_plans.add(job.plan_id)
            _LOGGER.warning(
                "operator %r begins without state: %s. allow_non_restored=True allows that. If its state is there "
                "under another name, give that name with operator=…, and begin with a new checkpointLocation",
                job.operator,
                why,
            )

    def _find_in_savepoint(self, job: Job, start: Savepoint, name: str, bucket: int) -> InitialState | None:
        folder = Folder(start.path, start.storage_options)
        manifest = self._manifests.of(f"savepoint {folder.identity} {job.plan_id}", lambda: read_manifest(folder))
        header = manifest.header
        if name not in header.operators:
            if start.allow_non_restored:
                names = ", ".join(sorted(header.operators))
                self._warn_without_state(job, f"the savepoint at {start.path} has no operator {name!r}; it has {names}")
                return None
            raise _missing_operator_error(name, start.path, manifest)
        operator_file = header.operators[name]
        record = StartRecord(SAVEPOINT, start.path, header.id, header.batch, start.mode, name)

        def read(number: int) -> Parent:
            return Parent(operator_file, manifest.bucket(name, number))

        return _make_state(job, bucket, operator_file, record, folder.child(name), read)

    def _find_in_checkpoint(self, job: Job, start: RetainedCheckpoint, name: str, bucket: int) -> InitialState | None:
        if job.captured is None:
            if start.allow_non_restored and not job.not_captured:
                self._warn_without_state(job, f"{start} has no operator {name!r}")
                return None
            raise MissingCheckpointError(
                f"operator {job.operator!r} cannot start from {start}: {job.not_captured}. Nothing was written."
            )
        file, captured = job.captured, self._read_captured(job, job.captured)
        # If this bucket has no pointer, any other one leads to the operator file, with the number of buckets.
        pointer = captured.pointers.get(bucket) or next(iter(captured.pointers.values()))
        files = Folder(start.root, start.storage_options).child(name, pointer.query_folder)
        operator_file = self._read_operator_file(files, pointer.schema_id)
        source = job.options.source_partition
        if source is not None:
            newest = self._assignments.of(f"{files.identity} {job.plan_id}", lambda: newest_assignment(files))
            if newest is not None:
                newest[1].grown_to(source.assignment)
        record = StartRecord(RETAINED, files.root, "", captured.batch, start.mode, name)

        def read(number: int) -> Parent:
            if number not in captured.pointers:
                where = operator_folder(job).child(STARTING_FOLDER).where(file)
                raise CorruptFileError(f"{where} is missing bucket {number}. Plan the query again.")
            return Parent.unsaved(operator_file, captured.pointers[number])

        return _make_state(job, bucket, operator_file, record, files, read, captured)

    def _read_captured(self, job: Job, file: str) -> Captured:
        notes = operator_folder(job).child(STARTING_FOLDER)
        captured = self._captured.of(
            f"captured {notes.identity} {file}", lambda: Captured.decode(notes.get(file), notes.where(file))
        )
        if not captured.pointers:
            raise CorruptFileError(f"{notes.where(file)} has no bucket. Plan the query again.")
        return captured

    def _read_operator_file(self, files: Folder, schema_id: int) -> OperatorFile:
        name = operator_file_name(schema_id)
        return self._operator_files.of(
            f"operator {files.identity} {schema_id}", lambda: OperatorFile.decode(files.get(name), files.where(name))
        )


def refuse_unfit_start(job: Job) -> None:
    """Raise the error that a query without state would raise in its first batch, if the snapshot already shows it."""
    # Without the warning about beginning without state, as the query may have state.
    state = Starts(warned_plans=[job.plan_id]).of(job, 0)
    if state is not None:
        state.begins(job, "")


def _refuse_without_import(job: Job, state: InitialState | None, mark: ImportMark | None) -> None:
    """Raise an error if an imported bucket would not begin with the savepoint that its state was imported into."""
    start = job.options.start_from
    if mark is None or (state is not None and state.record.source_id == mark.savepoint_id):
        return
    if state is None and start is not None and start.allow_non_restored:
        return
    raise UsageError(
        f"the state of operator {job.operator!r} was imported into the savepoint {mark.savepoint_id}, but the job "
        f"starts from {start if start is not None else 'nothing'}: give the ArrowState "
        f"start_from=Savepoint({mark.savepoint!r}), or the savepoint's new path"
    )


def _make_state(
    job: Job,
    bucket: int,
    operator_file: OperatorFile,
    record: StartRecord,
    source: Folder,
    read: Callable[[int], Parent],
    captured: Captured | None = None,
) -> InitialState:
    """Return a bucket's initial state, made of saved buckets, which `read` returns by number."""
    new_map, stored = job.options.bucket_map, operator_file.bucket_map
    divides = new_map != stored and new_map.by_hash and stored.by_hash
    bucket_map = new_map if divides else stored
    # Check the bucket map before reading: with another number of buckets, the bucket may not exist.
    operator_file.with_map(bucket_map).begins(
        job.operator_file(""), leave_behind=True, case_sensitive=job.case_sensitive
    )
    if not divides:
        parent = read(bucket)
        return InitialState((parent,), bucket_map, parent.pointer, record, source, captured)
    if job.options.commit.erase_window_ms is not None:
        raise UsageError(
            f"operator {job.operator!r} has {new_map}, but what it starts from has {stored}: that cannot be combined "
            "with erase_within_s, as the old buckets' files keep bytes of removed keys for a while. Leave it out until "
            "the query has removed these files"
        )
    parents = tuple(read(number) for number in new_map.overlapping(stored, bucket))
    if captured is not None and record.mode == CLAIM:
        raise UsageError(
            f"operator {job.operator!r} has {new_map}, but the retained checkpoint that it claims has {stored}: a "
            "claimed query folder is used as it is. Start with mode='no_claim', or with the old number of buckets"
        )
    if all(backend.kind != FSSPEC for backend in job.options.backends):
        raise UsageError(
            f"operator {job.operator!r} has {new_map}, but what it starts from has {stored}: that needs a backend that "
            "is a file system, such as 'fsspec', for the old buckets' files"
        )
    pointer = make_divided_pointer(job, "", bucket, parents)
    return InitialState(parents, new_map, pointer, record, source, captured)


def _missing_operator_error(name: str, path: str, manifest: SavepointManifest) -> StateError:
    return OperatorChangedError(
        f"the savepoint at {path} has no operator {name!r}; it has {', '.join(sorted(manifest.header.operators))}. "
        "Give the name of the operator to start from with operator=…, or begin without state with "
        "allow_non_restored=True."
    )
