"""Starting from a snapshot with another bucket map: each bucket begins with parts of the saved ones, its parents.

Its first call has its parents' files in the query's own folder, as for any start, and the bucket begins a history of
its own. No row is written anew: that happens when the bucket writes its first snapshot, in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer, ReplicationStatus
from arrow_schemas.savepoint import NATIVE, SavedBucket
from spark_state_ext.backends.registry import FSSPEC
from spark_state_ext.backends.replication import Restorable
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.start_from import CLAIM
from spark_state_ext.errors import ChangedJobError, UsageError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.files.folder import Folder
from spark_state_ext.rescale.notes import note_free
from spark_state_ext.rescale.parents import Parent, note_parent, origin_of, parent_files
from spark_state_ext.savepoints.copying import copied
from spark_state_ext.savepoints.starting import Beginning, Begun, Starts
from spark_state_ext.savepoints.taking import save_bucket

__all__ = [
    "RESCALE",
    "Division",
    "DividingStarts",
    "begun_pointer",
    "combined_pointer",
    "divided_pointer",
    "refuse_requests",
    "refuse_rescaling",
]

# Kind of the record of a query's start, where it was rescaled in place.
RESCALE = "rescale"


def refuse_rescaling(
    query_folder: Folder, stored: OperatorFile, wanted: OperatorFile, case_sensitive: bool = False
) -> None:
    """Refuse to rescale a query in place, as far as files tell when it is planned."""
    asked = wanted.bucket_map
    if not (stored.bucket_map.by_hash and asked.by_hash):
        # No hash tells the new bucket of a row.
        stored.refuse_other_map(asked)
    stored.with_map(asked).begins(wanted, case_sensitive=case_sensitive)
    refuse_requests(query_folder, stored)


def refuse_requests(query_folder: Folder, stored: OperatorFile) -> None:
    """Refuse to rescale while an erase request waits: requests are numbered by query folder."""
    numbers = EraseFolder(query_folder).numbers()
    waiting = sorted(numbers.requests - numbers.done)
    if waiting:
        raise ChangedJobError(
            f"operator {stored.operator!r} is not rescaled, as erase request {waiting[0]} in {query_folder.root} is "
            f"not done yet: go on with {stored.bucket_map} and erase_requests=True until erase_status says that it is "
            "done, and rescale then. A request that was withdrawn needs such a run too"
        )


def combined_pointer(operator: str, bucket_map: BucketMap, bucket: int, parents: Sequence[Parent]) -> Pointer:
    """What a bucket that is made of parts of others knows of its past, before it has a checkpoint."""
    pointers = [parent.pointer for parent in parents]
    names = dict.fromkeys(name for it in pointers for name in (*it.origins, it.operator))
    return Pointer(
        operator=operator,
        bucket=bucket,
        buckets=bucket_map.buckets,
        schema_id=0,
        batch=-1,
        watermark_ms=max((it.watermark_ms for it in pointers if it.watermark_ms is not None), default=None),
        rows=sum(it.rows for it in pointers),
        earliest_timeout_ms=min(
            (it.earliest_timeout_ms for it in pointers if it.earliest_timeout_ms is not None), default=None
        ),
        calls=max(it.calls for it in pointers),
        heartbeats=max(it.heartbeats for it in pointers),
        retained=max(it.retained for it in pointers),
        retained_heartbeat=max(it.retained_heartbeat for it in pointers),
        origins=tuple(name for name in names if name != operator),
    )


def divided_pointer(job: Job, query_folder: str, bucket: int, parents: Sequence[Parent]) -> Pointer:
    """The pointer of a bucket that begins with parts of others, as if it had been committed."""
    bucket_map = job.options.bucket_map
    origin = origin_of(parents, bucket_map, bucket)
    made = combined_pointer(job.operator, bucket_map, bucket, parents)
    return replace(
        made,
        query_folder=query_folder,
        lineage=() if origin is None else (LineageEntry(origin, 0, made.heartbeats),),
        # They have what comes from now on, and everything once the first snapshot has arrived.
        replication={}
        if origin is None
        else {backend.name: ReplicationStatus(origin, origin) for backend in job.options.backends},
        parents=origin,
    )


def begun_pointer(job: Job, query_folder: Folder, bucket: int, parents: Sequence[Parent]) -> Pointer:
    """As `divided_pointer`, with its parents in the query folder. Of a bucket without state it is noted that it needs
    none.
    """
    pointer = divided_pointer(job, query_folder.name, bucket, parents)
    if pointer.parents is None:
        note_free(query_folder, bucket, pointer.heartbeats)
    return pointer


@dataclass(frozen=True)
class Division(Beginning):
    """Where the state of a bucket comes from that begins with parts of others.

    Parameters
    ----------
    pointer, operator_file, record, source, files, captured
        As for `Beginning`; `pointer` is the bucket's own.
    saved
        The saved buckets that it begins with parts of, in the order of their hashes.
    """

    saved: tuple[Beginning, ...] = ()

    @property
    def parts(self) -> tuple[Beginning, ...]:
        """The saved buckets that it is made of."""
        return self.saved

    def leaves_behind(self, job: Job) -> bool:
        """As for `Beginning`; a query that is rescaled in place leaves nothing behind."""
        return self.record.kind != RESCALE and super().leaves_behind(job)

    def begins(self, job: Job, query_folder: str) -> OperatorFile:
        """The first operator file of the query, which has the job's bucket map."""
        return self.operator_file.with_map(job.options.bucket_map).begins(
            job.operator_file(query_folder),
            leave_behind=self.leaves_behind(job),
            case_sensitive=job.case_sensitive,
        )

    def detached_from(
        self, job: Job, query_folder: str, replicas: Sequence[Sequence[Restorable]], scratch: Path
    ) -> Begun:
        """Have the parents in the query's folder, and the pointer to go on from."""
        backend = next(it for it in job.options.backends if it.kind == FSSPEC)
        folder = Folder(backend.root, backend.storage_options).child(job.operator, query_folder)
        parents = []
        for part, of_one in zip(self.saved, replicas, strict=True):
            parents.append(note_parent(folder, Parent(self.operator_file, _brought(part, folder, of_one, scratch))))
        return Begun(begun_pointer(job, folder, self.pointer.bucket, parents))


def _brought(part: Beginning, query_folder: Folder, replicas: Sequence[Restorable], scratch: Path) -> SavedBucket:
    """Have the files of a saved bucket among the parents."""
    pointer = part.pointer
    target = parent_files(query_folder, pointer.bucket)
    if part.files is None:
        return save_bucket(pointer, replicas, target, NATIVE, part.operator_file.row_schema(), scratch).saved
    for file in part.files:
        copied(part.source, file, target, scratch)
    target.sync()
    return SavedBucket(pointer.operator, pointer.bucket, pointer, part.files)


class DividingStarts(Starts):
    """What a process has read of the snapshots that its queries start from, whatever bucket maps these have."""

    def _begun_with(
        self, job: Job, operator_file: OperatorFile, bucket: int, saved: Callable[[int], Beginning]
    ) -> Beginning:
        asked, stored = job.options.bucket_map, operator_file.bucket_map
        if asked == stored or not (asked.by_hash and stored.by_hash):
            return super()._begun_with(job, operator_file, bucket, saved)
        operator_file.with_map(asked).begins(
            job.operator_file(""), leave_behind=True, case_sensitive=job.case_sensitive
        )
        if job.options.commit.erase_window_ms is not None:
            raise UsageError(
                f"operator {job.operator!r} has {asked}, and what it starts from {stored}: that cannot go with "
                "erase_within_s, as the old buckets' files keep bytes of removed keys for a while. Leave it out until "
                "the query has removed them"
            )
        parts = tuple(saved(number) for number in asked.overlapping(stored, bucket))
        first = parts[0]
        if first.captured is not None and first.record.mode == CLAIM:
            raise UsageError(
                f"operator {job.operator!r} has {asked}, and the retained checkpoint that it claims {stored}: what is "
                "claimed is gone on with as it is. Start with mode='no_claim', or with the old number of buckets"
            )
        if all(backend.kind != FSSPEC for backend in job.options.backends):
            raise UsageError(
                f"operator {job.operator!r} has {asked}, and what it starts from {stored}: that needs a backend that "
                "is a file system, such as 'fsspec', for the old buckets' files"
            )
        parents = [Parent.unsaved(operator_file, it.pointer) for it in parts]
        pointer = divided_pointer(job, "", bucket, parents)
        return Division(pointer, operator_file, first.record, first.source, first.files, first.captured, saved=parts)
