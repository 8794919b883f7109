"""Makes a pointer from the files of a bucket's folder, and the sources that a load reads."""

from __future__ import annotations

from dataclasses import replace

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer, ReplicationStatus
from spark_state_ext.backends.replication import ReadOnly, Restorable
from spark_state_ext.files.folder import Folder, Readable
from spark_state_ext.restore.sources import Sources
from spark_state_ext.timeline.bucket_files import BucketFiles

__all__ = ["make_pointer", "make_sources"]


def make_sources(
    folder: Folder, pointer: Pointer, *others: Restorable, files: Readable | None = None, in_thread: bool = False
) -> Sources:
    """Return the sources of a bucket's state: its folder, the pointer's inline deltas and `others`."""
    # The state is read from this folder only, whatever other backends have.
    status = {} if pointer.ref is None else {folder.root: ReplicationStatus(pointer.ref)}
    return Sources(
        [ReadOnly(folder.root, folder if files is None else files), *others],
        replace(pointer, replication=status),
        in_thread=in_thread,
    )


def make_pointer(
    files: BucketFiles, ref: CheckpointRef | None, operator: OperatorFile, origin: CheckpointRef | None = None
) -> Pointer:
    """Make a pointer from a file's header, with the fields that a load needs."""
    pointer = Pointer(operator.operator, files.bucket, operator.buckets, operator.schema_id, -1, None)
    if ref is None:
        return pointer
    if ref == origin:
        return replace(pointer, lineage=(LineageEntry(ref, 0),), parents=ref)
    header = files.header(ref)
    lineage = (*header.lineage, ref)
    # A load starts at the newest snapshot file. Without one, the delta's header leads further back.
    snapshots_at = [at for at, ancestor in enumerate(lineage) if SNAPSHOT in files.kinds.get(ancestor, ())]
    lineage = lineage[snapshots_at[-1] if snapshots_at else 0 :]
    # A query that began with another operator's state has files with that operator's name.
    operators = {files.header(end).operator for end in (lineage[0], ref) if end in files}
    return Pointer(
        operator.operator,
        files.bucket,
        operator.buckets,
        operator.schema_id,
        header.writer.batch,
        None,
        lineage=tuple(LineageEntry(ancestor, 0) for ancestor in lineage),
        parent=header.parent,
        origins=tuple(sorted(operators - {operator.operator})),
    )
