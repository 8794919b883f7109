"""The checkpoint files of a bucket, as their headers and footers tell of them; and the pointer that they suggest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arrow_schemas.lineage import CheckpointRef, LineageHeader, parse_file_name
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer
from spark_state_ext.errors import CorruptError, MissingError
from spark_state_ext.files.checkpoint import Announced, announced
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.known_files import FileHeaders, KnownFiles
from spark_state_ext.worker.threads import side_by_side

__all__ = ["CheckpointEntry", "checkpoint_files", "headers_of", "suggested_pointer"]

_PARALLEL_MAX = 8


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint file.

    Parameters
    ----------
    bucket
        Number of the bucket.
    entry
        As the listing has it.
    ref, kind
        As its name tells.
    said
        What it says of itself; None where that cannot be read.
    problem
        Why it cannot; empty where it can.
    """

    bucket: int
    entry: Entry
    ref: CheckpointRef
    kind: str
    said: Announced | None
    problem: str = ""

    @property
    def header(self) -> LineageHeader | None:
        """Its lineage header; None where it cannot be read."""
        return None if self.said is None else self.said.header


def checkpoint_files(buckets: Sequence[tuple[int, Folder]]) -> list[CheckpointEntry]:
    """The checkpoint files of buckets, by two small reads each; in order of bucket, version, id and kind."""
    found = [
        (bucket, folder, entry, parsed)
        for bucket, folder in buckets
        for entry in folder.entries()
        if not entry.folder and (parsed := parse_file_name(entry.name)) is not None
    ]

    def read(it: tuple[int, Folder, Entry, tuple[CheckpointRef, str]]) -> CheckpointEntry:
        bucket, folder, entry, (ref, kind) = it
        try:
            return CheckpointEntry(bucket, entry, ref, kind, announced(folder, ref, kind))
        except (CorruptError, MissingError) as error:
            return CheckpointEntry(bucket, entry, ref, kind, None, str(error))

    read_files = side_by_side("headers", _PARALLEL_MAX, read, found) if found else []
    return sorted(read_files, key=lambda it: (it.bucket, it.ref, it.kind))


def headers_of(folder: Folder, entries: Sequence[Entry]) -> FileHeaders:
    """Headers of a bucket's files, for `classify`."""
    return FileHeaders(folder, {entry.name for entry in entries}, KnownFiles())


def suggested_pointer(
    files: Sequence[CheckpointEntry], operator: OperatorFile, bucket: int, batches_retained: int
) -> Pointer:
    """The pointer that a bucket's files suggest: its newest checkpoint is taken for the committed one.

    Only Spark knows the committed pointer. That one has counted no fewer heartbeats, so that the next clean-up deletes
    no less than it would by this one, where the newest checkpoint is of the attempt that was committed.
    """
    readable = [it.header for it in files if it.header is not None]
    none = Pointer(operator.operator, bucket, operator.buckets, operator.schema_id, -1, None)
    if not readable:
        return none
    newest = max(readable, key=lambda it: (it.writer.heartbeat, it.ref))
    heartbeat = newest.writer.heartbeat
    return Pointer(
        operator.operator,
        bucket,
        operator.buckets,
        newest.schema_id,
        newest.writer.batch,
        None,
        lineage=tuple(LineageEntry(ref, 0, heartbeat) for ref in (*newest.lineage, newest.ref)),
        parent=newest.parent,
        heartbeats=heartbeat,
        retained=batches_retained,
        retained_heartbeat=heartbeat,
    )
