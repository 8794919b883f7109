"""The only writer of savepoints: it writes files and rows of buckets first, and the manifest last and exclusively.

Taking, copying, transforming, rescaling and erasing all write savepoints through this module. A savepoint has its own
folder outside of any query's state. If several writers use one folder at once, one succeeds and the others remove their
files. The files of a failed writer have no manifest, so they are not a savepoint.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader, Writer
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.row import RowSchema
from arrow_schemas.savepoint import (
    MANIFEST_NAME,
    SavedBucket,
    SavedFile,
    SavepointHeader,
    SavepointManifest,
    make_relocatable,
)
from spark_state_ext.errors import ClaimedError, CorruptFileError, MissingCheckpointError, StateError, UsageError
from spark_state_ext.files.folder import Folder, is_temporary
from spark_state_ext.files.sealed_file import seal
from spark_state_ext.savepoints.claims import read_claim, refuse_claimed
from spark_state_ext.savepoints.file_copy import CopyMethod, copy_file, put_whole, refuse_incomplete
from spark_state_ext.savepoints.manifest_file import encode_manifest, read_manifest
from spark_state_ext.savepoints.placement import refuse_in_state
from spark_state_ext.savepoints.saved_rows import read_saved_rows
from spark_state_ext.version import __version__
from spark_state_ext.worker.local_folders import scratch_folder
from spark_state_ext.worker.threads import map_in_parallel

__all__ = [
    "SavepointWriter",
    "finish_savepoint",
    "point_at_new",
    "refuse_existing",
    "replace_manifest",
    "write_manifest",
    "write_snapshot",
]

_LOGGER = logging.getLogger("spark_state_ext")
_PARALLEL_MAX = 8


class SavepointWriter:
    """Writes a new savepoint from another one: copies its files unchanged, or writes rows."""

    def __init__(
        self, source: Folder, manifest: SavepointManifest, target: Folder, own_files: Iterable[str] = ()
    ) -> None:
        refuse_existing(target, own_files)
        refuse_claimed(source)
        self.source, self._manifest, self.target = source, manifest, target
        self._scratch = scratch_folder(None)
        self._written: list[SavedBucket] = []
        self.id = uuid.uuid4().hex

    def copy(self, buckets: Sequence[SavedBucket], advance: Callable[[int], None] = lambda size: None) -> int:
        """Copy the files of buckets unchanged; return how many were duplicated."""

        def copy_one(named_file: tuple[SavedBucket, SavedFile]) -> CopyMethod:
            bucket, file = named_file
            files, target = (_find_folder(savepoint, bucket) for savepoint in (self.source, self.target))
            how = copy_file(files, file, target, self._scratch)
            advance(file.size_bytes)
            return how

        named_files = [(bucket, file) for bucket in buckets for file in bucket.files]
        methods = map_in_parallel("copy", _PARALLEL_MAX, copy_one, named_files) if named_files else []
        for bucket in buckets:
            _find_folder(self.target, bucket).sync()
        self._written += buckets
        return sum(how is CopyMethod.DUPLICATED for how in methods)

    def read(self, saved_bucket: SavedBucket) -> Iterator[pa.RecordBatch]:
        """Read the rows of a bucket of the source savepoint."""
        schema = self._manifest.header.operators[saved_bucket.operator].row_schema()
        return read_saved_rows(
            _find_folder(self.source, saved_bucket), saved_bucket.pointer, saved_bucket.files, schema, self._scratch
        )

    def read_back(self, saved_bucket: SavedBucket, schema: RowSchema) -> Iterator[pa.RecordBatch]:
        """Read the rows of a bucket from the new savepoint."""
        return read_saved_rows(
            _find_folder(self.target, saved_bucket), saved_bucket.pointer, saved_bucket.files, schema, self._scratch
        )

    def write(self, pointer: Pointer, schema: RowSchema, rows: Iterable[pa.RecordBatch]) -> SavedBucket:
        """Write the rows of a bucket with `write_snapshot`."""
        target = self.target.child(pointer.operator, str(pointer.bucket))
        saved_bucket = write_snapshot(pointer, schema, rows, target, self._scratch)
        self._written.append(saved_bucket)
        return saved_bucket

    def changed_header(self, form: str, operators: Mapping[str, OperatorFile]) -> SavepointHeader:
        """Return the source's header with the new id, form, time and operators."""
        return replace(
            self._manifest.header,
            id=self.id,
            form=form,
            made_ms=int(time.time() * 1000),
            operators=operators,
            package_version=__version__,
        )

    def finish(self, header: SavepointHeader) -> None:
        """Write the manifest for all buckets that were written."""
        self._refuse_erased()
        finish_savepoint(self.target, SavepointManifest(header, tuple(self._written)))

    def _refuse_erased(self) -> None:
        """Raise if keys were erased from the source meanwhile, because the new savepoint would still have them."""
        claim = read_claim(self.source)
        if claim is not None and claim.erases:
            refuse_claimed(self.source)
        try:
            manifest = read_manifest(self.source)
        except MissingCheckpointError:
            # A query claimed and deleted the source meanwhile; the rows that were read are complete.
            return
        if manifest != self._manifest:
            raise ClaimedError(
                f"the savepoint at {self.source.root} was rewritten meanwhile, because keys were erased from it: "
                f"remove {self.target.root}, and run this again"
            )


# -- one bucket -----------------------------------------------------------------------------------


def _find_folder(savepoint: Folder, saved_bucket: SavedBucket) -> Folder:
    return savepoint.child(saved_bucket.operator, str(saved_bucket.bucket))


def write_snapshot(
    pointer: Pointer,
    schema: RowSchema,
    rows: Iterable[pa.RecordBatch],
    target: Folder,
    scratch: Path,
    writer: Writer | None = None,
) -> SavedBucket:
    """Write the rows of a bucket as one snapshot of its pointer's checkpoint."""
    if pointer.ref is None:
        return SavedBucket(pointer.operator, pointer.bucket, make_relocatable(pointer, ()), ())
    newest = LineageEntry(pointer.ref, 0, pointer.lineage[-1].heartbeat)
    header = LineageHeader(
        kind=SNAPSHOT,
        operator=pointer.operator,
        bucket=pointer.bucket,
        ref=pointer.ref,
        parent=pointer.parent,
        lineage=(pointer.parent,) if pointer.parent is not None else (),
        schema_id=pointer.schema_id,
        writer=replace(writer or Writer("", "", pointer.batch, ""), heartbeat=newest.heartbeat),
        package_version=__version__,
    )
    count = 0

    def count_rows() -> Iterator[pa.RecordBatch]:
        nonlocal count
        for batch in rows:
            count += batch.num_rows
            yield batch

    sealed = seal(header, schema, count_rows(), scratch)
    try:
        file = put_whole(target, sealed)
    finally:
        sealed.let_go()
    target.sync()
    saved_pointer = replace(make_relocatable(pointer, (newest,)), origins=(), rows=count)
    return SavedBucket(pointer.operator, pointer.bucket, saved_pointer, (file,))


def point_at_new(pointer: Pointer, checkpoint_id: str) -> Pointer:
    """Return a pointer to a new checkpoint of the same version, because changed rows need a new file name."""
    if pointer.ref is None:
        return pointer
    ref = CheckpointRef(pointer.version, checkpoint_id)
    return replace(pointer, lineage=(LineageEntry(ref, 0, pointer.lineage[-1].heartbeat),), parent=None)


# -- the whole ------------------------------------------------------------------------------------


def refuse_existing(savepoint: Folder, own_files: Iterable[str] = ()) -> None:
    """Refuse a folder that is in a query's root, or has a savepoint or any file except `own_files`."""
    refuse_in_state(savepoint)
    names = savepoint.names()
    if MANIFEST_NAME in names:
        raise _exists_error(savepoint)
    if names and not _has_only(savepoint, set(own_files)):
        raise UsageError(
            f"{savepoint.root} is not empty ({', '.join(names[:3])}): a savepoint needs its own folder. Use one that "
            "does not exist yet, or remove the files of a failed savepoint there."
        )


def _has_only(savepoint: Folder, own_files: set[str]) -> bool:
    """True if a folder has only `own_files` and temporary files, and `own_files` is not empty."""
    names = (entry.name for entry in savepoint.tree()) if own_files else ()
    return bool(own_files) and all(name in own_files or is_temporary(name.rpartition("/")[2]) for name in names)


def _exists_error(savepoint: Folder) -> UsageError:
    return UsageError(f"there is already a savepoint at {savepoint.root}: use a folder that does not exist yet")


def finish_savepoint(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Check that all files are in the savepoint's folder, then write the manifest."""
    try:
        refuse_incomplete(savepoint, manifest)
    except CorruptFileError:
        # A writer that lost the folder may have removed a file that this writer relied on.
        if not savepoint.exists(MANIFEST_NAME):
            raise
    write_manifest(savepoint, manifest)


def replace_manifest(savepoint: Folder, manifest: SavepointManifest, check_allowed: Callable[[], None]) -> None:
    """Check that the new manifest's files exist, then replace the manifest in one step."""
    refuse_incomplete(savepoint, manifest)
    check_allowed()
    savepoint.put(MANIFEST_NAME, encode_manifest(manifest))


def write_manifest(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Create the manifest exclusively; if another writer was first, remove this writer's files and raise."""
    if not savepoint.create(MANIFEST_NAME, encode_manifest(manifest)):
        _remove_lost_files(savepoint, manifest)
        raise _exists_error(savepoint)


def _remove_lost_files(savepoint: Folder, lost: SavepointManifest) -> None:
    """Remove the files of a writer that lost the folder, except files that the existing savepoint also has."""
    try:
        existing_files = _list_files(read_manifest(savepoint))
    except StateError as error:
        # The files of the existing savepoint are unknown, so no file is removed.
        _LOGGER.warning("files of a savepoint that was not finished remain at %s: %s", savepoint.root, error)
        return
    for operator, bucket, name in sorted(_list_files(lost) - existing_files):
        savepoint.child(operator, bucket).remove(name)
    for saved_bucket in lost.buckets:
        savepoint.remove_if_empty(saved_bucket.operator, str(saved_bucket.bucket))
    for operator in lost.header.operators:
        savepoint.remove_if_empty(operator)


def _list_files(manifest: SavepointManifest) -> set[tuple[str, str, str]]:
    """Return operator, bucket and name of each file in a manifest."""
    return {(bucket.operator, str(bucket.bucket), file.name) for bucket in manifest.buckets for file in bucket.files}
