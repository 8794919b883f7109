"""What a process has read of the states that its queries begin with, in savepoints and checkpoints."""

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
from spark_state_ext.beginning.initial_state import InitialState, divided_pointer
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
from spark_state_ext.savepoints.captured import Captured
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.records import RETAINED, SAVEPOINT, StartRecord

__all__ = ["Starts", "refuse_unfit_start"]

_LOGGER = logging.getLogger("spark_state_ext")

T = TypeVar("T")


class _Once(Generic[T]):
    """What was read of a few snapshots, which do not change: each is read once."""

    _MAX = 16

    def __init__(self) -> None:
        self._read: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: str, read: Callable[[], T]) -> T:
        """What was read before under a key, or is read now."""
        with self._lock:
            if key in self._read:
                return self._read[key]
        found = read()
        with self._lock:
            self._read[key] = found
            while len(self._read) > self._MAX:
                self._read.popitem(last=False)
        return found


class Starts:
    """What a process has read of the states that its queries begin with."""

    def __init__(self, said: Collection[str] = ()) -> None:
        self._manifests: _Once[SavepointManifest] = _Once()
        self._captured: _Once[Captured] = _Once()
        self._operator_files: _Once[OperatorFile] = _Once()
        self._assignments: _Once[tuple[int, PartitionAssignment] | None] = _Once()
        # Plans of which it was said that they begin without state.
        self._said = set(said)

    def of(self, job: Job, bucket: int, imported: ImportMark | None = None) -> InitialState | None:
        """What a bucket of a query that is not rescaled begins with; None: with nothing."""
        start, state = job.options.start_from, None
        if isinstance(start, Savepoint):
            state = self._in_savepoint(job, start, start.operator or job.operator, bucket)
        elif start is not None:
            state = self._in_checkpoint(job, start, start.operator or job.operator, bucket)
        _refuse_without_import(job, state, imported)
        return state

    def rescaling(self, job: Job, bucket: int, stored: Pointer | None) -> Rescaling | None:
        """What a call is to do; None: its bucket is not to be rescaled, or was before."""
        # What it came from may be removed by now.
        if job.rescaled_from is None or (stored is not None and is_rescaled_by(stored.query_folder, job.plan_id)):
            return None
        try:
            captured = self._read_captured(job, job.rescaled_from)
            newest = max(captured.pointers.values(), key=lambda pointer: pointer.schema_id)
            old = operator_folder(job).child(newest.query_folder)
            operator_file = self._read_operator_file(old, newest.schema_id)
        except MissingCheckpointError as error:
            raise LineageError(
                f"operator {job.operator!r} is not rescaled, as its query has gone on since it was planned, and what "
                f"it was is removed: {error}. Start the program again. Late tasks of batches that are over end so too"
            ) from error
        if captured.pointers.keys() != set(range(operator_file.buckets)):
            where = operator_folder(job).child(STARTING_FOLDER).where(job.rescaled_from)
            raise CorruptFileError(
                f"{where} has {len(captured.pointers)} of {operator_file.buckets} buckets. Plan the query again."
            )
        if stored is not None and stored.query_folder != old.name:
            return None
        if stored is None and bucket < min(operator_file.buckets, job.options.buckets):
            # Of the query that was read each of these has one, before and after.
            raise LineageError(
                f"bucket {bucket} of operator {job.operator!r} has no state at this checkpointLocation, and has some "
                f"at rescale={job.options.rescale!r}: rescale is for the query that has its checkpoint there. Leave it "
                "out, and to begin a new query with that state give start_from=RetainedCheckpoint(…)"
            )
        return Rescaling(job, bucket, stored, captured, operator_file, old)

    def _say_without(self, job: Job, why: str) -> None:
        if job.plan_id not in self._said:
            self._said.add(job.plan_id)
            _LOGGER.warning(
                "operator %r begins without state: %s. allow_non_restored=True allows that. Where its state is there "
                "under another name, say which with operator=…, and begin with a new checkpointLocation",
                job.operator,
                why,
            )

    def _in_savepoint(self, job: Job, start: Savepoint, name: str, bucket: int) -> InitialState | None:
        folder = Folder(start.path, start.storage_options)
        manifest = self._manifests.of(f"savepoint {folder.identity} {job.plan_id}", lambda: read_manifest(folder))
        header = manifest.header
        if name not in header.operators:
            if start.allow_non_restored:
                there = ", ".join(sorted(header.operators))
                self._say_without(job, f"the savepoint at {start.path} has no operator {name!r}; it has {there}")
                return None
            raise _not_there(name, start.path, manifest)
        operator_file = header.operators[name]
        record = StartRecord(SAVEPOINT, start.path, header.id, header.batch, start.mode, name)

        def read(number: int) -> Parent:
            return Parent(operator_file, manifest.bucket(name, number))

        return _state_of(job, bucket, operator_file, record, folder.child(name), read)

    def _in_checkpoint(self, job: Job, start: RetainedCheckpoint, name: str, bucket: int) -> InitialState | None:
        if job.captured is None:
            if start.allow_non_restored and not job.not_captured:
                self._say_without(job, f"{start} has no operator {name!r}")
                return None
            raise MissingCheckpointError(
                f"operator {job.operator!r} cannot start from {start}: {job.not_captured}. Nothing was written."
            )
        file, captured = job.captured, self._read_captured(job, job.captured)
        # For a bucket that is not there any other tells how many there are.
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
                raise CorruptFileError(f"{where} lacks bucket {number}. Plan the query again.")
            return Parent.unsaved(operator_file, captured.pointers[number])

        return _state_of(job, bucket, operator_file, record, files, read, captured)

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
    """Raise what a query without state would raise in its first batch, as far as the snapshot tells."""
    # Without a word of what begins without state: the query may have some.
    state = Starts(said=[job.plan_id]).of(job, 0)
    if state is not None:
        state.begins(job, "")


def _refuse_without_import(job: Job, state: InitialState | None, mark: ImportMark | None) -> None:
    """Refuse to begin an imported bucket with anything but the savepoint that its state was imported into."""
    start = job.options.start_from
    if mark is None or (state is not None and state.record.source_id == mark.savepoint_id):
        return
    if state is None and start is not None and start.allow_non_restored:
        return
    raise UsageError(
        f"the state of operator {job.operator!r} was imported into the savepoint {mark.savepoint_id}, and the job "
        f"starts from {start if start is not None else 'nothing'}: give the ArrowState "
        f"start_from=Savepoint({mark.savepoint!r}), or where that savepoint lies now"
    )


def _state_of(
    job: Job,
    bucket: int,
    operator_file: OperatorFile,
    record: StartRecord,
    source: Folder,
    read: Callable[[int], Parent],
    captured: Captured | None = None,
) -> InitialState:
    """What a bucket begins with, of the saved buckets, which are read by number."""
    asked, stored = job.options.bucket_map, operator_file.bucket_map
    divides = asked != stored and asked.by_hash and stored.by_hash
    bucket_map = asked if divides else stored
    # The number of buckets first: without it there may be no such bucket.
    operator_file.with_map(bucket_map).begins(
        job.operator_file(""), leave_behind=True, case_sensitive=job.case_sensitive
    )
    if not divides:
        parent = read(bucket)
        return InitialState((parent,), bucket_map, parent.pointer, record, source, captured)
    if job.options.commit.erase_window_ms is not None:
        raise UsageError(
            f"operator {job.operator!r} has {asked}, and what it starts from {stored}: that cannot go with "
            "erase_within_s, as the old buckets' files keep bytes of removed keys for a while. Leave it out until "
            "the query has removed them"
        )
    parents = tuple(read(number) for number in asked.overlapping(stored, bucket))
    if captured is not None and record.mode == CLAIM:
        raise UsageError(
            f"operator {job.operator!r} has {asked}, and the retained checkpoint that it claims {stored}: what is "
            "claimed is gone on with as it is. Start with mode='no_claim', or with the old number of buckets"
        )
    if all(backend.kind != FSSPEC for backend in job.options.backends):
        raise UsageError(
            f"operator {job.operator!r} has {asked}, and what it starts from {stored}: that needs a backend that "
            "is a file system, such as 'fsspec', for the old buckets' files"
        )
    pointer = divided_pointer(job, "", bucket, parents)
    return InitialState(parents, asked, pointer, record, source, captured)


def _not_there(name: str, path: str, manifest: SavepointManifest) -> StateError:
    return OperatorChangedError(
        f"the savepoint at {path} has no operator {name!r}; it has {', '.join(sorted(manifest.header.operators))}. "
        "Name the one whose state is meant with operator=…, or begin without state with allow_non_restored=True."
    )
