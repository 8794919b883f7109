"""Erasing keys from savepoints that the user names for it; nothing else changes one (`docs/design/006-savepoints.md`).

Each bucket that has a key gets one snapshot of its rows without the keys, beside its files and under a name of its own.
Then the manifest is put in its place in one step, and then the files that it named before go. A record says which these
are, so whoever is stopped anywhere finishes that first. At every moment the savepoint is whole, as it was or without
the keys. While that goes on, it is claimed: no query starts from it.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.row import RowSchema
from arrow_schemas.savepoint import SavedBucket, SavepointManifest
from spark_state_ext.engine.erasing import matching
from spark_state_ext.engine.start_from import CLAIM
from spark_state_ext.erasing.folders import keys_as_stored
from spark_state_ext.erasing.past import read_past
from spark_state_ext.erasing.receipt import OutOfReach
from spark_state_ext.errors import ClaimedError, LiveRunError, MissingCheckpointError, StateError, UsageError
from spark_state_ext.files.folder import Folder, is_temporary, refuse_relative
from spark_state_ext.files.layout import CLAIM_FOLDER
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.savepoints.claims import (
    ERASES,
    SavepointClaim,
    claim_of,
    claim_savepoint,
    drop_claim,
)
from spark_state_ext.savepoints.copying import refuse_incomplete
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.reading import read_saved_rows
from spark_state_ext.savepoints.records import is_detached, start_of
from spark_state_ext.savepoints.replaced import REPLACED_NAME, ReplacedFiles, drop_replaced, read_replaced
from spark_state_ext.savepoints.status import started_below
from spark_state_ext.savepoints.writer import point_at_new, replace_manifest, write_snapshot

__all__ = ["SavepointBegunWith", "SavepointErasure", "savepoint_erasure"]

_LOGGER = logging.getLogger("spark_state_ext")
_NAMED_MAX = 10


def savepoint_erasure(
    path: str, keys: Any, operator: str, query_folder: Folder, root: Folder, storage_options: Mapping[str, Any] | None
) -> SavepointErasure:
    """See that keys can be erased from a savepoint; nothing is changed."""
    refuse_relative(path, "a savepoint")
    folder = Folder(path.rstrip("/") or path, storage_options)
    manifest = read_manifest(folder)
    operators = manifest.header.operators
    record = start_of(query_folder)
    if record is not None and record.source_id == manifest.header.id:
        # The query began with it: that is the operator's name there.
        operator = record.operator
    if operator not in operators:
        raise UsageError(
            f"the savepoint at {path} has no operator {operator!r}; it has {', '.join(sorted(operators)[:_NAMED_MAX])}"
        )
    if not (folder.replaces and folder.creates_exclusively):
        raise UsageError(
            f"{path} lies in a store that does not put one file in another's place in one step, or does not let "
            "exactly one of several make a file: delete the savepoint, and take a new one"
        )
    wanted = keys_as_stored(keys, operators[operator].row_schema(), "erase_history()")
    marked = hashlib.blake2b(query_folder.root.encode(), digest_size=16).hexdigest()
    claim = SavepointClaim(manifest.header.id, f"{ERASES}{query_folder.root}", f"erase-{marked}")
    made = SavepointErasure(folder, operator, wanted.columns, claim, root)
    made.refuse_in_use()
    return made


@dataclass(frozen=True)
class SavepointBegunWith:
    """The savepoint that a query began with, which nobody may have thought of.

    Parameters
    ----------
    paths
        Where it is: none, or one.
    out_of_reach
        That it is not where it was, or cannot be read.
    """

    paths: tuple[str, ...] = ()
    out_of_reach: tuple[OutOfReach, ...] = ()

    @staticmethod
    def of(query_folder: Folder, named: Sequence[str], storage_options: Mapping[str, Any] | None) -> SavepointBegunWith:
        """What a query folder tells of it, unless it is one of those that were named."""
        record = start_of(query_folder)
        if record is None or not record.source_id:
            return SavepointBegunWith()
        path = record.source.rstrip("/")
        if path in {it.rstrip("/") for it in named}:
            return SavepointBegunWith()
        why = "another savepoint lies there now"
        try:
            if read_manifest(Folder(path, storage_options)).header.id == record.source_id:
                return SavepointBegunWith((path,))
        except MissingCheckpointError:
            if record.mode == CLAIM and is_detached(query_folder):
                # The query owned it, and needs it no more: it is what deletes it.
                return SavepointBegunWith()
            why = "it is not there"
        except StateError as error:
            why = f"the query began with it, and it cannot be read: {error}"
            return SavepointBegunWith((), (OutOfReach("savepoint", path, 0, 0, why, unread=True),))
        if any(_is_at(it, record.source_id, storage_options) for it in named):
            # It was moved, and is looked at there.
            return SavepointBegunWith()
        why = (
            f"the query began with it, and {why}: if you moved it, name it with savepoints where it is now; if you "
            "deleted it, nothing is left to do"
        )
        return SavepointBegunWith((), (OutOfReach("savepoint", path, 0, 0, why),))


def _is_at(path: str, savepoint_id: str, storage_options: Mapping[str, Any] | None) -> bool:
    """Whether a savepoint lies at a path."""
    try:
        return read_manifest(Folder(path.rstrip("/") or path, storage_options)).header.id == savepoint_id
    except MissingCheckpointError:
        return False


@dataclass(frozen=True)
class SavepointErasure:
    """A savepoint that keys are erased from.

    Parameters
    ----------
    folder, operator
        Where it lies, and the operator in it.
    keys
        Columns of the keys.
    claim
        The claim under which they are erased.
    root
        Where queries that started from it are looked for.
    """

    folder: Folder
    operator: str
    keys: Sequence[pa.Array]
    claim: SavepointClaim
    root: Folder

    def refuse_in_use(self) -> None:
        """Refuse a savepoint that somebody owns, or that a query below the root is being started from."""
        there = claim_of(self.folder)
        if there is not None and there != self.claim:
            raise ClaimedError(
                f"the savepoint at {self.folder.root} is claimed by {there.by}: wait until that one has let go of it "
                "(or free it with spark-state-ext savepoint release, where that one is gone for good), or name it "
                "without having it written anew"
            )
        for it in started_below(self.root, self.folder.root, self.claim.savepoint_id):
            if not it.detached:
                raise LiveRunError(
                    f"the query at {it.query_folder} is being started from the savepoint at {self.folder.root}: run "
                    "it for two batches with data, or remove that folder where the query is gone for good"
                )

    def carry_out(self, lease: Lease, scratch: Path) -> bool:
        """Erase the keys; whether there were any, or something was left of a run that was stopped."""
        lease.hold()
        if claim_of(self.folder) is None and not _Work(self, read_manifest(self.folder), scratch, lease).look().any:
            # What has no key is not touched at all.
            return False
        there = claim_savepoint(self.folder, self.claim, ())
        try:
            manifest = read_manifest(self.folder)
            if there.savepoint_id != manifest.header.id:
                raise ClaimedError(
                    f"another savepoint lies at {self.folder.root} than the one that {there.by} has claimed: run this "
                    "again; where it says that again, free it with spark-state-ext savepoint release"
                )
            # Whoever began before the claim was there did not see it; who begins now does.
            self.refuse_in_use()
            work = _Work(self, manifest, scratch, lease)
            finished = work.finish()
            refuse_incomplete(self.folder, manifest)
            found = work.look()
        except BaseException:
            self._let_go()
            raise
        if found.buckets:
            work.write_anew(found.buckets)
        work.remove(found.others)
        self.release()
        return finished or found.any

    def _let_go(self) -> None:
        """Release the claim after a failure, unless something is half done."""
        try:
            if read_replaced(self.folder) is None:
                self.release()
        except StateError as error:
            _LOGGER.warning("the claim to %s is not released: %s. Run this again", self.folder.root, error)

    def release(self) -> None:
        """Let queries start from the savepoint again."""
        if claim_of(self.folder) == self.claim:
            drop_claim(self.folder)


@dataclass(frozen=True)
class _Found:
    """What has a key.

    Parameters
    ----------
    buckets
        Buckets, by the files that the manifest names.
    others
        Checkpoint files beside these, and files that nobody has finished, each with its folder.
    """

    buckets: list[SavedBucket]
    others: list[tuple[Folder, str]]

    @property
    def any(self) -> bool:
        """Whether there is something."""
        return bool(self.buckets or self.others)


class _Work:
    """What is done while the savepoint is claimed."""

    def __init__(self, erasure: SavepointErasure, manifest: SavepointManifest, scratch: Path, lease: Lease) -> None:
        self._folder, self._operator, self._keys = erasure.folder, erasure.operator, erasure.keys
        self._claim, self._claims = erasure.claim, erasure.folder.child(CLAIM_FOLDER)
        self._manifest, self._scratch, self._lease = manifest, scratch, lease

    @property
    def _schema(self) -> RowSchema:
        return self._manifest.header.operators[self._operator].row_schema()

    @property
    def _buckets(self) -> Iterator[SavedBucket]:
        return (it for it in self._manifest.buckets if it.operator == self._operator)

    def _files(self, bucket: int) -> Folder:
        return self._folder.child(self._operator, str(bucket))

    def finish(self) -> bool:
        """Remove what a run that was stopped has left; whether there was something."""
        replaced = read_replaced(self._folder)
        if replaced is None:
            return False
        if replaced.savepoint_id == self._manifest.header.id:
            drop_replaced(self._folder, replaced, self._manifest, self._allowed)
        else:
            self._allowed()
            self._claims.remove(REPLACED_NAME)
        return True

    def look(self) -> _Found:
        """Read all checkpoint files of the operator, and tell which have a key."""
        found = _Found([], [])
        for folder in (self._folder, self._claims):
            found.others.extend((folder, it.name) for it in folder.entries() if is_temporary(it.name))
        for saved in self._buckets:
            files, named = self._files(saved.bucket), {file.name for file in saved.files}
            # A manifest as this package makes it has none.
            has_key = bool(saved.pointer.inline)
            for entry in files.entries():
                self._lease.hold()
                past = read_past(files, entry, self._schema, self._keys, self._scratch)
                if entry.name in named:
                    has_key |= past is not None and bool(past.rows)
                elif (past is not None and past.rows) or is_temporary(entry.name):
                    found.others.append((files, entry.name))
            if has_key:
                found.buckets.append(saved)
        return found

    def write_anew(self, buckets: Sequence[SavedBucket]) -> None:
        """Have a snapshot without the keys in the place of each bucket's files."""
        ids = {it.bucket: uuid.uuid4().hex for it in buckets}
        replaced = ReplacedFiles(
            self._claim.savepoint_id,
            {
                it.bucket: (
                    file_name(CheckpointRef(it.pointer.version, ids[it.bucket]), SNAPSHOT),
                    *(file.name for file in it.files),
                )
                for it in buckets
            },
        )
        self._allowed()
        self._claims.put(REPLACED_NAME, replaced.encode())
        made = {}
        for it in buckets:
            self._allowed()
            files = self._files(it.bucket)
            pointer, rows = point_at_new(it.pointer, ids[it.bucket]), self._others(files, it)
            made[it.bucket] = write_snapshot(pointer, self._schema, rows, files, self._scratch)
        new = tuple(made.get(it.bucket, it) if it.operator == self._operator else it for it in self._manifest.buckets)
        self._manifest = replace(self._manifest, buckets=new)
        replace_manifest(self._folder, self._manifest, self._allowed)
        drop_replaced(self._folder, replaced, self._manifest, self._allowed)

    def _others(self, files: Folder, saved: SavedBucket) -> Iterator[pa.RecordBatch]:
        """A bucket's rows without those of the keys."""
        for rows in read_saved_rows(files, saved.pointer, saved.files, self._schema, self._scratch):
            self._lease.hold()
            gone = matching(self._schema.key_columns(rows), self._keys)
            yield rows.filter(pa.array(~gone)) if gone.any() else rows

    def remove(self, others: Sequence[tuple[Folder, str]]) -> None:
        """Remove files that have a key and belong to no savepoint."""
        for files, name in others:
            self._allowed()
            files.remove(name)

    def _allowed(self) -> None:
        self._lease.hold()
        self._lease.check()
        if claim_of(self._folder) != self._claim:
            raise ClaimedError(
                f"the claim to the savepoint at {self._folder.root} was released while it was written anew: run this "
                "again"
            )
