"""Taking a savepoint: what becomes of one bucket. Nothing here touches the query whose state it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from arrow_schemas.lineage import SNAPSHOT, LineageHeader, Writer, file_name
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.row import RowSchema
from arrow_schemas.savepoint import CANONICAL, NATIVE, SavedBucket, SavedFile, relocatable
from spark_state_ext.backends.replication import Restorable, taken_over
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed import seal
from spark_state_ext.restore.needed import needed_files
from spark_state_ext.restore.sources import Sources, restore_order
from spark_state_ext.savepoints.copying import How, copied, digest_text, put_whole
from spark_state_ext.savepoints.reading import scanned_rows
from spark_state_ext.version import __version__

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
        return _compacted(pointer, replicas, target, schema, scratch, reading.restore_from, writer)
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
    return _counted(
        SavedBucket(pointer.operator, pointer.bucket, relocatable(pointer, needed.lineage), tuple(files)), how
    )


def _counted(saved: SavedBucket, how: Iterable[tuple[How, int]]) -> Copy:
    how = list(how)
    streamed = [size for it, size in how if it is How.STREAMED]
    return Copy(saved, sum(it is How.DUPLICATED for it, _ in how), len(streamed), sum(streamed))


def _compacted(
    pointer: Pointer,
    replicas: Sequence[Restorable],
    target: Folder,
    schema: RowSchema,
    scratch: Path,
    restore_from: str | None,
    writer: Writer | None,
) -> Copy:
    """One snapshot of a bucket's rows, which are restored to a store of their own."""
    assert pointer.ref is not None, "there is a state"
    by = writer or Writer("", "", pointer.batch, "")
    with scanned_rows(pointer, replicas, schema, scratch, restore_from) as rows:
        sealed = seal(_header(pointer, by), schema, rows, scratch)
    try:
        file = put_whole(target, sealed)
    finally:
        sealed.let_go()
    newest = pointer.lineage[-1]
    saved = relocatable(pointer, [LineageEntry(newest.ref, 0, newest.heartbeat)])
    return Copy(
        SavedBucket(pointer.operator, pointer.bucket, replace(saved, origins=()), (file,)), 0, 1, file.size_bytes
    )


def _header(pointer: Pointer, writer: Writer) -> LineageHeader:
    assert pointer.ref is not None, "there is a state"
    return LineageHeader(
        kind=SNAPSHOT,
        operator=pointer.operator,
        bucket=pointer.bucket,
        ref=pointer.ref,
        parent=pointer.parent,
        lineage=(pointer.parent,) if pointer.parent is not None else (),
        schema_id=pointer.schema_id,
        writer=replace(writer, heartbeat=pointer.lineage[-1].heartbeat),
        package_version=__version__,
    )
