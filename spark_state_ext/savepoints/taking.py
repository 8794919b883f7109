"""Taking a savepoint: what becomes of one bucket. Nothing here touches the query whose state it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arrow_schemas.lineage import Writer, file_name
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import RowSchema
from arrow_schemas.savepoint import CANONICAL, NATIVE, SavedBucket, SavedFile, relocatable
from spark_state_ext.backends.replication import Restorable, taken_over
from spark_state_ext.files.folder import Folder
from spark_state_ext.restore.needed import needed_files
from spark_state_ext.restore.sources import Sources, restore_order
from spark_state_ext.savepoints.copying import How, copied, digest_text
from spark_state_ext.savepoints.reading import scanned_rows
from spark_state_ext.savepoints.writer import write_snapshot

__all__ = ["Copy", "Reading", "save_bucket"]


@dataclass(frozen=True)
class Reading:
    """How the query's files are read.

    Parameters
    ----------
    restore_from
        Name of the backend to copy from, where there is a choice.
    verify
        What is taken as it is is read to the last byte.
    """

    restore_from: str | None = None
    verify: bool = False


@dataclass(frozen=True)
class Copy:
    """What saving a bucket took.

    Parameters
    ----------
    saved
        The bucket, as the manifest has it.
    duplicated, streamed
        How many files were duplicated, and how many went through this process.
    streamed_bytes
        Bytes of the latter.
    """

    saved: SavedBucket
    duplicated: int = 0
    streamed: int = 0
    streamed_bytes: int = 0


def save_bucket(
    pointer: Pointer,
    replicas: Sequence[Restorable],
    target: Folder,
    form: str,
    schema: RowSchema,
    scratch: Path,
    *,
    reading: Reading = Reading(),
    writer: Writer | None = None,
) -> Copy:
    """Copy what a bucket's state is made of into a folder. May be repeated, and stopped, at any time."""
    if pointer.ref is None:
        return Copy(SavedBucket(pointer.operator, pointer.bucket, relocatable(pointer, ()), ()))
    if form == CANONICAL:
        with scanned_rows(pointer, replicas, schema, scratch, reading.restore_from) as rows:
            compacted = write_snapshot(pointer, schema, rows, target, scratch, writer)
        return Copy(compacted, 0, 1, compacted.files[0].size_bytes)
    assert form == NATIVE, form
    known = taken_over(pointer, replicas)
    sources = Sources(restore_order(replicas, known, reading.restore_from), pointer, reading.restore_from)
    needed = needed_files(pointer, sources, scratch if reading.verify else None)
    files, how = [], []
    for it in needed.files:
        body = it.announced.body
        file = SavedFile(file_name(it.fetch.ref, it.fetch.kind), it.announced.size_bytes, digest_text(body))
        how.append((copied(it.files, file, target, scratch), file.size_bytes))
        files.append(file)
    target.sync()
    saved = SavedBucket(pointer.operator, pointer.bucket, relocatable(pointer, needed.lineage), tuple(files))
    streamed = [size for it, size in how if it is How.STREAMED]
    return Copy(saved, sum(it is How.DUPLICATED for it, _ in how), len(streamed), sum(streamed))
