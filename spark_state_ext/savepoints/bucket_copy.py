"""Saves one bucket to a savepoint, without changing the query's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arrow_schemas.lineage import Writer, file_name
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import RowSchema
from arrow_schemas.savepoint import CANONICAL, NATIVE, SavedBucket, SavedFile, make_relocatable
from spark_state_ext.backends.replication import Restorable, adapt_to_backends
from spark_state_ext.files.folder import Folder
from spark_state_ext.restore.needed_files import find_needed_files
from spark_state_ext.restore.sources import Sources, restore_order
from spark_state_ext.savepoints.file_copy import CopyMethod, copy_file, digest_text
from spark_state_ext.savepoints.saved_rows import scan_rows
from spark_state_ext.savepoints.writer import write_snapshot

__all__ = ["BucketCopy", "ReadOptions", "save_bucket"]


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading the query's files.

    Parameters
    ----------
    restore_from
        Name of the backend to copy from, if there are several.
    verify
        True: read every byte of files that are copied unchanged.
    """

    restore_from: str | None = None
    verify: bool = False


@dataclass(frozen=True)
class BucketCopy:
    """A saved bucket, and the work that saving it took.

    Parameters
    ----------
    saved
        The bucket, as in the manifest.
    duplicated, streamed
        Number of files that were duplicated, and that were streamed through this process.
    streamed_bytes
        Bytes of the streamed files.
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
    reading: ReadOptions = ReadOptions(),
    writer: Writer | None = None,
) -> BucketCopy:
    """Copy the files or rows of a bucket's state to a folder; safe to stop and repeat at any time."""
    if pointer.ref is None:
        return BucketCopy(SavedBucket(pointer.operator, pointer.bucket, make_relocatable(pointer, ()), ()))
    if form == CANONICAL:
        with scan_rows(pointer, replicas, schema, scratch, reading.restore_from) as rows:
            compacted = write_snapshot(pointer, schema, rows, target, scratch, writer)
        return BucketCopy(compacted, 0, 1, compacted.files[0].size_bytes)
    assert form == NATIVE, form
    replication = adapt_to_backends(pointer, replicas)
    sources = Sources(restore_order(replicas, replication, reading.restore_from), pointer, reading.restore_from)
    needed = find_needed_files(pointer, sources, scratch if reading.verify else None)
    files, copies = [], []
    for source in needed.files:
        body = source.announced.body
        file = SavedFile(file_name(source.fetch.ref, source.fetch.kind), source.announced.size_bytes, digest_text(body))
        copies.append((copy_file(source.files, file, target, scratch), file.size_bytes))
        files.append(file)
    target.sync()
    saved_bucket = SavedBucket(
        pointer.operator, pointer.bucket, make_relocatable(pointer, needed.lineage), tuple(files)
    )
    streamed = [size for how, size in copies if how is CopyMethod.STREAMED]
    return BucketCopy(
        saved_bucket, sum(how is CopyMethod.DUPLICATED for how, _ in copies), len(streamed), sum(streamed)
    )
