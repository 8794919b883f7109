"""A pointer made from the files of a bucket's folder, and the folder as a place to read its files from."""

from __future__ import annotations

from dataclasses import replace

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer, ReplicationStatus
from spark_state_ext.backends.replication import ReadOnly, Restorable
from spark_state_ext.files.folder import Folder, Readable
from spark_state_ext.restore.sources import Sources
from spark_state_ext.timeline.bucket_files import BucketFiles

__all__ = ["pointer_to", "sources_in"]


def sources_in(
    folder: Folder, pointer: Pointer, *beside: Restorable, files: Readable | None = None, in_thread: bool = False
) -> Sources:
    """The files of a bucket's folder, what is inline in a pointer, and what else the state can be read from."""
    # Whatever other backends had: here is where one reads.
    status = {} if pointer.ref is None else {folder.root: ReplicationStatus(pointer.ref)}
    return Sources(
        [ReadOnly(folder.root, folder if files is None else files), *beside],
        replace(pointer, replication=status),
        in_thread=in_thread,
    )


def pointer_to(
    files: BucketFiles, ref: CheckpointRef | None, operator: OperatorFile, origin: CheckpointRef | None = None
) -> Pointer:
    """A pointer as Spark holds one, as far as a load needs it, made from a file's header."""
    made = Pointer(operator.operator, files.bucket, operator.buckets, operator.schema_id, -1, None)
    if ref is None:
        return made
    if ref == origin:
        return replace(made, lineage=(LineageEntry(ref, 0),), parents=ref)
    header = files.header(ref)
    lineage = (*header.lineage, ref)
    # Loads begin at the newest snapshot that is there. Where none is, the delta's own header leads further back.
    whole = [at for at, it in enumerate(lineage) if SNAPSHOT in files.kinds.get(it, ())]
    lineage = lineage[whole[-1] if whole else 0 :]
    # A query that began with another operator's state has files that name that one.
    named = {files.header(it).operator for it in (lineage[0], ref) if it in files}
    return Pointer(
        operator.operator,
        files.bucket,
        operator.buckets,
        operator.schema_id,
        header.writer.batch,
        None,
        lineage=tuple(LineageEntry(it, 0) for it in lineage),
        parent=header.parent,
        origins=tuple(sorted(named - {operator.operator})),
    )
