"""Starting from a snapshot: what a query's first call of a bucket does in place of beginning without state.

The bucket's files come into the query's own folder under their own names, duplicated where the stores can, and the
saved pointer becomes the query's. Doing it again makes the same. Nothing refers to the snapshot afterwards: once a
pointer of the query is committed, every bucket is detached from it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.operator import OperatorFile, operator_file_name
from arrow_schemas.partitions import PartitionAssignment
from arrow_schemas.pointer import Pointer, ReplicationStatus
from arrow_schemas.savepoint import NATIVE, SavedFile, SavepointManifest
from spark_state_ext.backends import STATE
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.registry import FSSPEC
from spark_state_ext.backends.replication import Restorable, needs_parents
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.start_from import CLAIM, RetainedCheckpoint, Savepoint
from spark_state_ext.errors import (
    CorruptFileError,
    MissingCheckpointError,
    OperatorChangedError,
    StateElsewhereError,
    StateError,
)
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.files.partition_files import newest_assignment
from spark_state_ext.savepoints.captured import Captured
from spark_state_ext.savepoints.copying import copied
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.records import StartRecord
from spark_state_ext.savepoints.taking import save_bucket

__all__ = ["Beginning", "Begun", "Starts", "borrowed"]

_LOGGER = logging.getLogger("spark_state_ext")

T = TypeVar("T")


@dataclass(frozen=True)
class Begun:
    """What a bucket's first call begins with.

    Parameters
    ----------
    pointer
        The query's own, as if it had been committed.
    sources
        Backends that are not the query's, from which this call reads the state: none where its files were duplicated.
    """

    pointer: Pointer
    sources: tuple[Restorable, ...] = ()


@dataclass(frozen=True)
class Beginning:
    """Where the state of one bucket comes from.

    Parameters
    ----------
    pointer
        The bucket's, as it was saved.
    operator_file
        The operator file that was in force there.
    record
        What the query folder tells of it.
    source
        Folder with the bucket's files.
    files
        Which of these; None for a retained checkpoint, where they are looked for.
    captured
        Of a retained checkpoint, what was read of it.
    """

    pointer: Pointer
    operator_file: OperatorFile
    record: StartRecord
    source: Folder
    files: tuple[SavedFile, ...] | None
    captured: Captured | None = None

    @property
    def adopts(self) -> bool:
        """Whether the other query's folder becomes the query's own."""
        return self.captured is not None and self.record.mode == CLAIM

    @property
    def parts(self) -> tuple[Beginning, ...]:
        """The saved buckets that it is made of."""
        return (self,)

    def leaves_behind(self, job: Job) -> bool:
        """Whether state columns that the job does not have are left behind."""
        return job.options.start_from is not None and job.options.start_from.allow_non_restored

    def left_behind(self, job: Job) -> list[str]:
        """Names of the state columns that the job leaves behind."""
        names = {field.name for field in job.operator_file("").row_schema().state}
        return [
            field.name for field in self.operator_file.row_schema().without_expiry().state if field.name not in names
        ]

    def begins(self, job: Job, query_folder: str) -> OperatorFile:
        """The first operator file of the query."""
        return self.operator_file.begins(
            job.operator_file(query_folder),
            leave_behind=self.leaves_behind(job),
            case_sensitive=job.case_sensitive,
        )

    def detached_from(
        self, job: Job, query_folder: str, replicas: Sequence[Sequence[Restorable]], scratch: Path
    ) -> Begun:
        """As `detached`, with the backends of each of the `parts`."""
        (mine,) = replicas
        return self.detached(job, query_folder, mine, scratch)

    def detached(self, job: Job, query_folder: str, replicas: Sequence[Restorable], scratch: Path) -> Begun:
        """Have the bucket's files in the query's folder, and the pointer to go on from.

        Where no backend of the job is a file system, none can be given files. Then the call reads the state from where
        it is; as nothing of the job's holds it, the commit sends a full snapshot to each backend before it returns.
        """
        if self.pointer.ref is None:
            return Begun(self._renamed(job, query_folder, self.pointer, {}, {}))
        backend = next((it for it in job.options.backends if it.kind == FSSPEC), None)
        if backend is None:
            return self._read_in_place(job, query_folder, replicas, scratch)
        target = Folder(backend.root, backend.storage_options).child(
            job.operator, query_folder, str(self.pointer.bucket)
        )
        saved, files = self.pointer, self.files
        if files is None:
            copy = save_bucket(self.pointer, replicas, target, NATIVE, self.operator_file.row_schema(), scratch).saved
            saved, files = copy.pointer, copy.files
        else:
            for file in files:
                copied(self.source, file, target, scratch)
            target.sync()
        newest = _newest(self.pointer.ref, files)
        return Begun(
            self._renamed(
                job, query_folder, saved, {backend.name: ReplicationStatus(saved.ref)}, {backend.name: {STATE: newest}}
            )
        )

    def _read_in_place(self, job: Job, query_folder: str, replicas: Sequence[Restorable], scratch: Path) -> Begun:
        pointer = self.pointer
        if needs_parents(pointer):
            raise StateElsewhereError(
                f"bucket {pointer.bucket} of operator {pointer.operator!r} was rescaled, and has no snapshot of its "
                "own yet: start from it after some more batches of its query, or with a backend that is a file system"
            )
        if self.files is not None:
            name = borrowed(self.record.source)
            replicas = sole_replica(self.source, scratch, name)
            return Begun(
                self._renamed(job, query_folder, pointer, {name: ReplicationStatus(pointer.ref)}, {}), tuple(replicas)
            )
        replication = {borrowed(name): status for name, status in pointer.replication.items()}
        markers = {borrowed(name): of_one for name, of_one in pointer.markers.items()}
        return Begun(self._renamed(job, query_folder, pointer, replication, markers), tuple(replicas))

    def _renamed(
        self,
        job: Job,
        query_folder: str,
        saved: Pointer,
        replication: dict[str, ReplicationStatus],
        markers: dict[str, dict[str, str]],
    ) -> Pointer:
        origins = saved.origins if saved.operator == job.operator else (*saved.origins, saved.operator)
        return replace(
            saved,
            operator=job.operator,
            origins=tuple(dict.fromkeys(origins)),
            query_folder=query_folder,
            schema_id=0,
            batch=-1,
            replication=replication,
            markers=markers,
            partitioning=None,
            made_by=None,
            claim=None,
            erased=None,
            parents=None,
        )


def borrowed(name: str) -> str:
    """What a pointer calls a backend from which only its first call reads; no backend of the query has this name."""
    return f"start_from {name}"


def _newest(ref: CheckpointRef, files: Sequence[SavedFile]) -> str:
    """The file that a marker names: of the committed checkpoint."""
    names = {file.name for file in files}
    return next(name for kind in (DELTA, SNAPSHOT) if (name := file_name(ref, kind)) in names)


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
    """What a process has read of the snapshots that its queries start from."""

    def __init__(self) -> None:
        self._manifests: _Once[SavepointManifest] = _Once()
        self._captured: _Once[Captured] = _Once()
        self._operator_files: _Once[OperatorFile] = _Once()
        self._assignments: _Once[tuple[int, PartitionAssignment] | None] = _Once()
        # Plans of which it was said that they begin without state.
        self._said: set[str] = set()

    def of(self, job: Job, bucket: int) -> Beginning | None:
        """Where a bucket's state comes from; None: it begins without."""
        start = job.options.start_from
        if start is None:
            return None
        name = start.operator or job.operator
        if isinstance(start, Savepoint):
            return self._in_savepoint(job, start, name, bucket)
        return self._in_checkpoint(job, start, name, bucket)

    def _say_without(self, job: Job, why: str) -> None:
        if job.plan_id not in self._said:
            self._said.add(job.plan_id)
            _LOGGER.warning(
                "operator %r begins without state: %s. allow_non_restored=True allows that. Where its state is there "
                "under another name, say which with operator=…, and begin with a new checkpointLocation",
                job.operator,
                why,
            )

    def _in_savepoint(self, job: Job, start: Savepoint, name: str, bucket: int) -> Beginning | None:
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
        record = StartRecord("savepoint", start.path, header.id, header.batch, start.mode, name)

        def saved(number: int) -> Beginning:
            it = manifest.bucket(name, number)
            return Beginning(it.pointer, operator_file, record, folder.child(name, str(number)), it.files)

        return self._begun_with(job, operator_file, bucket, saved)

    def _begun_with(
        self, job: Job, operator_file: OperatorFile, bucket: int, saved: Callable[[int], Beginning]
    ) -> Beginning:
        """What a bucket begins with, of the saved buckets, by their numbers."""
        # The number of buckets first: without it there may be no such bucket.
        operator_file.begins(job.operator_file(""), leave_behind=True, case_sensitive=job.case_sensitive)
        return saved(bucket)

    def _in_checkpoint(self, job: Job, start: RetainedCheckpoint, name: str, bucket: int) -> Beginning | None:
        if job.captured is None:
            if start.allow_non_restored and not job.not_captured:
                self._say_without(job, f"{start} has no operator {name!r}")
                return None
            raise MissingCheckpointError(
                f"operator {job.operator!r} cannot start from {start}: {job.not_captured}. Nothing was written."
            )
        notes = Folder(job.options.root, job.options.storage_options).child(job.operator, STARTING_FOLDER)
        file = job.captured
        captured = self._captured.of(
            f"captured {notes.identity} {file}", lambda: Captured.decode(notes.get(file), notes.where(file))
        )
        # For a bucket that is not there any other tells how many there are.
        pointer = captured.pointers.get(bucket) or next(iter(captured.pointers.values()), None)
        if pointer is None:
            raise CorruptFileError(f"{notes.where(file)} has no bucket. Plan the query again.")
        files = Folder(start.root, start.storage_options).child(name, pointer.query_folder)
        operator_file = self._operator_files.of(
            f"operator {files.identity} {pointer.schema_id}",
            lambda: OperatorFile.decode(
                files.get(operator_file_name(pointer.schema_id)), files.where(operator_file_name(pointer.schema_id))
            ),
        )
        source = job.options.source_partition
        if source is not None:
            newest = self._assignments.of(f"{files.identity} {job.plan_id}", lambda: newest_assignment(files))
            if newest is not None:
                newest[1].grown_to(source.assignment)
        record = StartRecord("retained_checkpoint", files.root, "", captured.batch, start.mode, name)

        def saved(number: int) -> Beginning:
            if number not in captured.pointers:
                raise CorruptFileError(f"{notes.where(file)} lacks bucket {number}. Plan the query again.")
            return Beginning(captured.pointers[number], operator_file, record, files.child(str(number)), None, captured)

        return self._begun_with(job, operator_file, bucket, saved)


def _not_there(name: str, path: str, manifest: SavepointManifest) -> StateError:
    return OperatorChangedError(
        f"the savepoint at {path} has no operator {name!r}; it has {', '.join(sorted(manifest.header.operators))}. "
        "Name the one whose state is meant with operator=…, or begin without state with allow_non_restored=True."
    )
