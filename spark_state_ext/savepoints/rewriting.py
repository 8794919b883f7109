"""A bucket of a savepoint with other rows: one snapshot, under a name of its own, as its content is its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader, Writer
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.row import RowSchema
from arrow_schemas.savepoint import SavedBucket, relocatable
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed import seal
from spark_state_ext.savepoints.copying import put_whole
from spark_state_ext.version import __version__

__all__ = ["bucket_of_rows"]


def bucket_of_rows(
    pointer: Pointer, checkpoint_id: str, schema: RowSchema, rows: Iterable[pa.RecordBatch], into: Folder, scratch: Path
) -> SavedBucket:
    """Write a bucket's rows as one snapshot."""
    ref = CheckpointRef(pointer.version, checkpoint_id)
    heartbeat = pointer.lineage[-1].heartbeat
    header = LineageHeader(
        kind=SNAPSHOT,
        operator=pointer.operator,
        bucket=pointer.bucket,
        ref=ref,
        parent=None,
        lineage=(),
        schema_id=pointer.schema_id,
        writer=Writer("", "", pointer.batch, "", heartbeat),
        package_version=__version__,
    )
    count = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal count
        for batch in rows:
            count += batch.num_rows
            yield batch

    sealed = seal(header, schema, counted(), scratch)
    try:
        file = put_whole(into, sealed)
    finally:
        sealed.let_go()
    lineage = (LineageEntry(ref, 0, heartbeat),)
    saved = relocatable(replace(pointer, lineage=lineage, parent=None), lineage)
    return SavedBucket(pointer.operator, pointer.bucket, replace(saved, origins=(), rows=count), (file,))
