"""The one writer of savepoints: files and rows of buckets first, and the manifest last, exclusively.

Whoever takes, copies, transforms, rescales or erases says what is to be in a savepoint; this module puts it there. A
savepoint has a folder of its own outside of any query's state. Of several who write to one folder at once one succeeds,
and each other one removes its files. What a writer leaves that failed has no manifest, so it is no savepoint.
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
    relocatable,
)
from spark_state_ext.errors import ClaimedError, CorruptFileError, MissingCheckpointError, StateError, UsageError
from spark_state_ext.files.folder import Folder, is_temporary
from spark_state_ext.files.sealed import seal
from spark_state_ext.savepoints.claims import claim_of, refuse_claimed
from spark_state_ext.savepoints.copying import How, copied, put_whole, refuse_incomplete
from spark_state_ext.savepoints.manifest_file import encode_manifest, read_manifest
from spark_state_ext.savepoints.placement import refuse_in_state
from spark_state_ext.savepoints.reading import saved_rows
from spark_state_ext.version import __version__
from spark_state_ext.worker.local_folders import scratch_folder
from spark_state_ext.worker.threads import side_by_side

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
    """Writes a new savepoint of what another one has: of its files as they are, and of rows."""

    def __init__(self, source: Folder, manifest: SavepointManifest, target: Folder, mine: Iterable[str] = ()) -> None:
        refuse_existing(target, mine)
        refuse_claimed(source)
        self.source, self._manifest, self.target = source, manifest, target
        self._scratch = scratch_folder(None)
        self._written: list[SavedBucket] = []
        self.id = uuid.uuid4().hex

    def copy(self, buckets: Sequence[SavedBucket], advance: Callable[[int], None] = lambda size: None) -> int:
        """Copy files of buckets as they are; returns how many were duplicated."""

        def work(named: tuple[SavedBucket, SavedFile]) -> How:
            bucket, file = named
            files, into = (_folder_of(it, bucket) for it in (self.source, self.target))
            how = copied(files, file, into, self._scratch)
            advance(file.size_bytes)
            return how

        named = [(bucket, file) for bucket in buckets for file in bucket.files]
        how = side_by_side("copy", _PARALLEL_MAX, work, named) if named else []
        for bucket in buckets:
            _folder_of(self.target, bucket).sync()
        self._written += buckets
        return sum(it is How.DUPLICATED for it in how)

    def read(self, saved: SavedBucket) -> Iterator[pa.RecordBatch]:
        """Read the rows of a bucket of the other savepoint."""
        schema = self._manifest.header.operators[saved.operator].row_schema()
        return saved_rows(_folder_of(self.source, saved), saved.pointer, saved.files, schema, self._scratch)

    def read_back(self, saved: SavedBucket, schema: RowSchema) -> Iterator[pa.RecordBatch]:
        """Read the rows of a bucket as they lie in the new savepoint."""
        return saved_rows(_folder_of(self.target, saved), saved.pointer, saved.files, schema, self._scratch)

    def write(self, pointer: Pointer, schema: RowSchema, rows: Iterable[pa.RecordBatch]) -> SavedBucket:
        """Write the rows of a bucket, as `write_snapshot`."""
        into = self.target.child(pointer.operator, str(pointer.bucket))
        saved = write_snapshot(pointer, schema, rows, into, self._scratch)
        self._written.append(saved)
        return saved

    def changed_header(self, form: str, operators: Mapping[str, OperatorFile]) -> SavepointHeader:
        """The header of the other savepoint, with what is new."""
        return replace(
            self._manifest.header,
            id=self.id,
            form=form,
            made_ms=int(time.time() * 1000),
            operators=operators,
            package_version=__version__,
        )

    def finish(self, header: SavepointHeader) -> None:
        """Make a savepoint of all that was written."""
        self._refuse_erased()
        finish_savepoint(self.target, SavepointManifest(header, tuple(self._written)))

    def _refuse_erased(self) -> None:
        """Refuse to finish if keys were erased from the other savepoint meanwhile: the new one would have them."""
        claim = claim_of(self.source)
        if claim is not None and claim.erases:
            refuse_claimed(self.source)
        try:
            now = read_manifest(self.source)
        except MissingCheckpointError:
            # A query that has claimed it meanwhile has deleted it; what was read of it is whole.
            return
        if now != self._manifest:
            raise ClaimedError(
                f"the savepoint at {self.source.root} was written anew meanwhile, as it is when keys are erased: "
                f"remove {self.target.root}, and run this again"
            )


# -- one bucket -----------------------------------------------------------------------------------


def _folder_of(savepoint: Folder, saved: SavedBucket) -> Folder:
    return savepoint.child(saved.operator, str(saved.bucket))


def write_snapshot(
    pointer: Pointer,
    schema: RowSchema,
    rows: Iterable[pa.RecordBatch],
    into: Folder,
    scratch: Path,
    writer: Writer | None = None,
) -> SavedBucket:
    """Write the rows of a bucket as the one snapshot of the checkpoint that its pointer is at."""
    if pointer.ref is None:
        return SavedBucket(pointer.operator, pointer.bucket, relocatable(pointer, ()), ())
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
    into.sync()
    saved = replace(relocatable(pointer, (newest,)), origins=(), rows=count)
    return SavedBucket(pointer.operator, pointer.bucket, saved, (file,))


def point_at_new(pointer: Pointer, checkpoint_id: str) -> Pointer:
    """Point at another checkpoint of the same version, as a bucket with other rows needs a name of its own."""
    if pointer.ref is None:
        return pointer
    ref = CheckpointRef(pointer.version, checkpoint_id)
    return replace(pointer, lineage=(LineageEntry(ref, 0, pointer.lineage[-1].heartbeat),), parent=None)


# -- the whole ------------------------------------------------------------------------------------


def refuse_existing(savepoint: Folder, mine: Iterable[str] = ()) -> None:
    """Refuse a folder in the root of a query's state, or in which there is a savepoint, or anything but `mine`."""
    refuse_in_state(savepoint)
    names = savepoint.names()
    if MANIFEST_NAME in names:
        raise _there_is_one(savepoint)
    if names and not _has_only(savepoint, set(mine)):
        raise UsageError(
            f"{savepoint.root} is not empty ({', '.join(names[:3])}): a savepoint needs a folder of its own. Name one "
            "that does not exist yet, or remove what a savepoint that failed has left there."
        )


def _has_only(savepoint: Folder, mine: set[str]) -> bool:
    """Whether a folder has nothing but some files, and what nobody finished."""
    there = (it.name for it in savepoint.tree()) if mine else ()
    return bool(mine) and all(name in mine or is_temporary(name.rpartition("/")[2]) for name in there)


def _there_is_one(savepoint: Folder) -> UsageError:
    return UsageError(f"there is a savepoint at {savepoint.root} already: name a folder that does not exist yet")


def finish_savepoint(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Make a savepoint of the files that lie in a folder, after a look at whether all are there."""
    try:
        refuse_incomplete(savepoint, manifest)
    except CorruptFileError:
        # One that lost the folder may have removed a file that this one has found there.
        if not savepoint.exists(MANIFEST_NAME):
            raise
    write_manifest(savepoint, manifest)


def replace_manifest(savepoint: Folder, manifest: SavepointManifest, allowed: Callable[[], None]) -> None:
    """Put another manifest in the place of a savepoint's in one step, after a look at whether its files are there."""
    refuse_incomplete(savepoint, manifest)
    allowed()
    savepoint.put(MANIFEST_NAME, encode_manifest(manifest))


def write_manifest(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Write the manifest exclusively; whoever comes too late removes its files that are not in the other savepoint."""
    if not savepoint.create(MANIFEST_NAME, encode_manifest(manifest)):
        _remove_others(savepoint, manifest)
        raise _there_is_one(savepoint)


def _remove_others(savepoint: Folder, lost: SavepointManifest) -> None:
    """Remove the files of a savepoint that lost its folder to another one, but for those that both have."""
    try:
        named = _files_of(read_manifest(savepoint))
    except StateError as error:
        # What belongs to the other savepoint is not known, so nothing is removed.
        _LOGGER.warning("files of a savepoint that could not be made stay at %s: %s", savepoint.root, error)
        return
    for operator, bucket, name in sorted(_files_of(lost) - named):
        savepoint.child(operator, bucket).remove(name)
    for saved in lost.buckets:
        savepoint.remove_if_empty(saved.operator, str(saved.bucket))
    for operator in lost.header.operators:
        savepoint.remove_if_empty(operator)


def _files_of(manifest: SavepointManifest) -> set[tuple[str, str, str]]:
    """Operator, bucket and name of each file that a manifest names."""
    return {(it.operator, str(it.bucket), file.name) for it in manifest.buckets for file in it.files}
