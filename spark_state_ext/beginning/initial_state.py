"""The initial state of a bucket without a pointer, as a value: saved buckets (its parents) and a bucket map.

A start from a savepoint, from a retained checkpoint or with another bucket map, a claim, and rescaling in place differ
only in where the parents lie and which query owns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer, ReplicationStatus
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.start_from import CLAIM
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease_record import Claim
from spark_state_ext.rescale.parents import Parent, combine_pointers, compute_origin
from spark_state_ext.savepoints.captured_pointers import Captured
from spark_state_ext.savepoints.start_records import RESCALE, SAVEPOINT, StartRecord

__all__ = ["InitialState", "make_divided_pointer"]


@dataclass(frozen=True)
class InitialState:
    """The initial state of a bucket without a pointer.

    Parameters
    ----------
    parents
        The saved buckets that it is made of, in the order of their hashes.
    bucket_map
        The bucket map that it begins under; if it is the parents' own, the bucket is its one parent.
    pointer
        The bucket's pointer, as far as it is known before any file was read.
    record
        The record of the start, for the query folder.
    source
        Folder of the parents: the operator's folder in the savepoint, or the other or old query folder.
    captured
        The pointers that were read from a retained checkpoint, if the query starts from one.
    claim
        The claim to the other query's folder, after it was made.
    """

    parents: tuple[Parent, ...]
    bucket_map: BucketMap
    pointer: Pointer
    record: StartRecord
    source: Folder
    captured: Captured | None = None
    claim: Claim | None = None

    @property
    def operator_file(self) -> OperatorFile:
        """The operator file that was in force when the parents were saved."""
        return self.parents[0].operator_file

    @property
    def divides(self) -> bool:
        """True if the bucket begins with parts of its parents."""
        return self.bucket_map != self.operator_file.bucket_map

    @property
    def adopts(self) -> bool:
        """True if the other query's folder becomes the query's own."""
        return self.captured is not None and self.record.mode == CLAIM

    @property
    def in_place(self) -> bool:
        """True if the parents are the query's own old buckets."""
        return self.record.kind == RESCALE

    @property
    def in_savepoint(self) -> bool:
        """True if a savepoint's manifest names the parents' files."""
        return self.record.kind == SAVEPOINT

    def leaves_behind(self, job: Job) -> bool:
        """True if the query may leave behind state columns that the job does not have."""
        start = job.options.start_from
        return not self.in_place and start is not None and start.allow_non_restored

    def list_left_behind(self, job: Job) -> list[str]:
        """Return the names of the state columns that the job leaves behind."""
        kept_names = {field.name for field in job.operator_file("").row_schema().state}
        fields = () if self.in_place else self.operator_file.row_schema().without_expiry().state
        return [field.name for field in fields if field.name not in kept_names]

    def begins(self, job: Job, query_folder: str) -> OperatorFile:
        """Return the query's first operator file; raise an error if the job cannot go on with the state."""
        return self.operator_file.with_map(self.bucket_map).begins(
            job.operator_file(query_folder),
            leave_behind=self.leaves_behind(job),
            case_sensitive=job.case_sensitive,
        )


def make_divided_pointer(job: Job, query_folder: str, bucket: int, parents: Sequence[Parent]) -> Pointer:
    """Return the pointer of a bucket that begins with parts of its parents, as if it had been committed."""
    bucket_map = job.options.bucket_map
    origin = compute_origin(parents, bucket_map, bucket)
    pointer = combine_pointers(job.operator, bucket_map, bucket, parents)
    return replace(
        pointer,
        query_folder=query_folder,
        lineage=() if origin is None else (LineageEntry(origin, 0, pointer.heartbeats),),
        # Backends get new deltas from now on, and are complete after the first snapshot has arrived.
        replication={}
        if origin is None
        else {backend.name: ReplicationStatus(origin, origin) for backend in job.options.backends},
        parents=origin,
    )
