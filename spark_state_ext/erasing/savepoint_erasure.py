"""Erases keys from savepoints that the user names; nothing else changes a savepoint (`docs/design/006-savepoints.md`).

Each bucket that has a key gets a new snapshot file without the keys, next to its old files. Then the manifest is
replaced in one step, and then the old files are removed. A record lists the replaced files, so that a stopped run is
finished by the next one. At every moment the savepoint is complete, either with or without the keys. Meanwhile it is
claimed, so that no query starts from it.
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
from spark_state_ext.engine.erased_rows import find_matching
from spark_state_ext.engine.start_from import CLAIM
from spark_state_ext.erasing.checkpoint_files import read_past
from spark_state_ext.erasing.query_folders import convert_keys
from spark_state_ext.erasing.receipt import OutOfReach
from spark_state_ext.errors import ClaimedError, LiveRunError, MissingCheckpointError, StateError, UsageError
from spark_state_ext.files.folder import Folder, is_temporary, refuse_relative
from spark_state_ext.files.layout import CLAIM_FOLDER
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.savepoints.claims import (
    ERASES,
    SavepointClaim,
    claim_savepoint,
    drop_claim,
    read_claim,
)
from spark_state_ext.savepoints.file_copy import refuse_incomplete
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.replaced_files import REPLACED_NAME, ReplacedFiles, drop_replaced, read_replaced
from spark_state_ext.savepoints.saved_rows import read_saved_rows
from spark_state_ext.savepoints.start_records import is_detached, read_start
from spark_state_ext.savepoints.status import find_started_queries
from spark_state_ext.savepoints.writer import point_at_new, replace_manifest, write_snapshot

__all__ = ["SavepointBegunWith", "SavepointErasure", "plan_erasure"]

_LOGGER = logging.getLogger("spark_state_ext")
_NAMED_MAX = 10


def plan_erasure(
    path: str, keys: Any, operator: str, query_folder: Folder, root: Folder, storage_options: Mapping[str, Any] | None
) -> SavepointErasure:
    """Check that keys can be erased from a savepoint, and return the erasure to carry out."""
    refuse_relative(path, "a savepoint")
    folder = Folder(path.rstrip("/") or path, storage_options)
    manifest = read_manifest(folder)
    operators = manifest.header.operators
    record = read_start(query_folder)
    if record is not None and record.source_id == manifest.header.id:
        # The query began with this savepoint, in which the operator may have another name.
        operator = record.operator
    if operator not in operators:
        raise UsageError(
            f"the savepoint at {path} has no operator {operator!r}; it has {', '.join(sorted(operators)[:_NAMED_MAX])}"
        )
    if not (folder.replaces and folder.creates_exclusively):
        raise UsageError(
            f"the file system of {path} cannot replace a file in one step, or cannot create a file exclusively: delete "
            "the savepoint, and take a new one"
        )
    stored_keys = convert_keys(keys, operators[operator].row_schema(), "erase_history()")
    query_digest = hashlib.blake2b(query_folder.root.encode(), digest_size=16).hexdigest()
    claim = SavepointClaim(manifest.header.id, f"{ERASES}{query_folder.root}", f"erase-{query_digest}")
    erasure = SavepointErasure(folder, operator, stored_keys.columns, claim, root)
    erasure.refuse_in_use()
    return erasure


@dataclass(frozen=True)
class SavepointBegunWith:
    """The savepoint that a query began with, if the user did not name it.

    Parameters
    ----------
    paths
        The path of the savepoint; empty if there is none or the user named it.
    out_of_reach
        An entry for the receipt if the savepoint is missing or unreadable.
    """

    paths: tuple[str, ...] = ()
    out_of_reach: tuple[OutOfReach, ...] = ()

    @staticmethod
    def of(
        query_folder: Folder, named_paths: Sequence[str], storage_options: Mapping[str, Any] | None
    ) -> SavepointBegunWith:
        """Find the savepoint from the query folder's start record, unless it is one of `named_paths`."""
        record = read_start(query_folder)
        if record is None or not record.source_id:
            return SavepointBegunWith()
        path = record.source.rstrip("/")
        if path in {named_path.rstrip("/") for named_path in named_paths}:
            return SavepointBegunWith()
        why = "another savepoint is there now"
        try:
            if read_manifest(Folder(path, storage_options)).header.id == record.source_id:
                return SavepointBegunWith((path,))
        except MissingCheckpointError:
            if record.mode == CLAIM and is_detached(query_folder):
                # The query owned the savepoint and no longer needs it, so the query deletes it.
                return SavepointBegunWith()
            why = "it is missing"
        except StateError as error:
            why = f"the query began with it, but it cannot be read: {error}"
            return SavepointBegunWith((), (OutOfReach("savepoint", path, 0, 0, why, unread=True),))
        if any(_is_at(named_path, record.source_id, storage_options) for named_path in named_paths):
            # The savepoint was moved, and is scanned at its new path.
            return SavepointBegunWith()
        why = (
            f"the query began with it, but {why}: if you moved it, name its new path in savepoints; if you deleted it, "
            "there is nothing left to do"
        )
        return SavepointBegunWith((), (OutOfReach("savepoint", path, 0, 0, why),))


def _is_at(path: str, savepoint_id: str, storage_options: Mapping[str, Any] | None) -> bool:
    """True if the savepoint with an id is at a path."""
    try:
        return read_manifest(Folder(path.rstrip("/") or path, storage_options)).header.id == savepoint_id
    except MissingCheckpointError:
        return False


@dataclass(frozen=True)
class SavepointErasure:
    """The erasure of keys from one savepoint.

    Parameters
    ----------
    folder, operator
        Folder of the savepoint, and the operator's name in it.
    keys
        Columns of the keys.
    claim
        The claim for this erasure.
    root
        Root in which queries that started from the savepoint are searched.
    """

    folder: Folder
    operator: str
    keys: Sequence[pa.Array]
    claim: SavepointClaim
    root: Folder

    def refuse_in_use(self) -> None:
        """Raise if the savepoint has another claim, or a query below the root is starting from it."""
        claim = read_claim(self.folder)
        if claim is not None and claim != self.claim:
            raise ClaimedError(
                f"the savepoint at {self.folder.root} is claimed by {claim.by}: wait until that claim is released (or "
                "free the savepoint with spark-state-ext savepoint release, if the owner is gone for good), or name "
                "it without having it rewritten"
            )
        for query in find_started_queries(self.root, self.folder.root, self.claim.savepoint_id):
            if not query.detached:
                raise LiveRunError(
                    f"the query at {query.query_folder} is starting from the savepoint at {self.folder.root}: run it "
                    "for two batches with data, or remove its folder if the query is gone for good"
                )

    def carry_out(self, lease: Lease, scratch: Path) -> bool:
        """Erase the keys; return True if there were any, or a stopped run had left files."""
        lease.hold()
        if (
            read_claim(self.folder) is None
            and not _Rewrite(self, read_manifest(self.folder), scratch, lease).find().any
        ):
            # A savepoint without the keys is not changed at all.
            return False
        claim = claim_savepoint(self.folder, self.claim, ())
        try:
            manifest = read_manifest(self.folder)
            if claim.savepoint_id != manifest.header.id:
                raise ClaimedError(
                    f"the savepoint at {self.folder.root} is not the one that {claim.by} has claimed: run this again; "
                    "if the error remains, free the savepoint with spark-state-ext savepoint release"
                )
            # Checked again: a query that started before the claim was made did not see it.
            self.refuse_in_use()
            rewrite = _Rewrite(self, manifest, scratch, lease)
            finished = rewrite.finish_stopped()
            refuse_incomplete(self.folder, manifest)
            findings = rewrite.find()
        except BaseException:
            self._release_after_failure()
            raise
        if findings.buckets:
            rewrite.rewrite_buckets(findings.buckets)
        rewrite.remove(findings.others)
        self.release()
        return finished or findings.any

    def _release_after_failure(self) -> None:
        """Release the claim after a failure, unless files are half replaced."""
        try:
            if read_replaced(self.folder) is None:
                self.release()
        except StateError as error:
            _LOGGER.warning("the claim to %s is not released: %s. Run this again", self.folder.root, error)

    def release(self) -> None:
        """Remove the claim, so that queries can start from the savepoint again."""
        if read_claim(self.folder) == self.claim:
            drop_claim(self.folder)


@dataclass(frozen=True)
class _Findings:
    """The buckets and files that have a key.

    Parameters
    ----------
    buckets
        Buckets with a key in files of the manifest.
    others
        Checkpoint files with a key that are not in the manifest, and unfinished files, each with its folder.
    """

    buckets: list[SavedBucket]
    others: list[tuple[Folder, str]]

    @property
    def any(self) -> bool:
        """True if anything was found."""
        return bool(self.buckets or self.others)


class _Rewrite:
    """The steps of an erasure while the savepoint is claimed."""

    def __init__(self, erasure: SavepointErasure, manifest: SavepointManifest, scratch: Path, lease: Lease) -> None:
        self._folder, self._operator, self._keys = erasure.folder, erasure.operator, erasure.keys
        self._claim, self._claims = erasure.claim, erasure.folder.child(CLAIM_FOLDER)
        self._manifest, self._scratch, self._lease = manifest, scratch, lease

    @property
    def _schema(self) -> RowSchema:
        return self._manifest.header.operators[self._operator].row_schema()

    @property
    def _buckets(self) -> Iterator[SavedBucket]:
        return (bucket for bucket in self._manifest.buckets if bucket.operator == self._operator)

    def _find_folder(self, bucket: int) -> Folder:
        return self._folder.child(self._operator, str(bucket))

    def finish_stopped(self) -> bool:
        """Remove files that a stopped run left behind; return True if it left a record."""
        replaced = read_replaced(self._folder)
        if replaced is None:
            return False
        if replaced.savepoint_id == self._manifest.header.id:
            drop_replaced(self._folder, replaced, self._manifest, self._check_allowed)
        else:
            self._check_allowed()
            self._claims.remove(REPLACED_NAME)
        return True

    def find(self) -> _Findings:
        """Read all checkpoint files of the operator; return the buckets and files with a key."""
        findings = _Findings([], [])
        for folder in (self._folder, self._claims):
            findings.others.extend((folder, entry.name) for entry in folder.entries() if is_temporary(entry.name))
        for saved in self._buckets:
            files, manifest_names = self._find_folder(saved.bucket), {file.name for file in saved.files}
            # Manifests of this package have no inline deltas.
            has_key = bool(saved.pointer.inline)
            for entry in files.entries():
                self._lease.hold()
                past = read_past(files, entry, self._schema, self._keys, self._scratch)
                if entry.name in manifest_names:
                    has_key |= past is not None and bool(past.rows)
                elif (past is not None and past.rows) or is_temporary(entry.name):
                    findings.others.append((files, entry.name))
            if has_key:
                findings.buckets.append(saved)
        return findings

    def rewrite_buckets(self, buckets: Sequence[SavedBucket]) -> None:
        """Replace each bucket's files by one snapshot without the keys."""
        ids = {saved.bucket: uuid.uuid4().hex for saved in buckets}
        replaced = ReplacedFiles(
            self._claim.savepoint_id,
            {
                saved.bucket: (
                    file_name(CheckpointRef(saved.pointer.version, ids[saved.bucket]), SNAPSHOT),
                    *(file.name for file in saved.files),
                )
                for saved in buckets
            },
        )
        self._check_allowed()
        self._claims.put(REPLACED_NAME, replaced.encode())
        rewritten = {}
        for saved in buckets:
            self._check_allowed()
            files = self._find_folder(saved.bucket)
            pointer, rows = point_at_new(saved.pointer, ids[saved.bucket]), self._read_other_rows(files, saved)
            rewritten[saved.bucket] = write_snapshot(pointer, self._schema, rows, files, self._scratch)
        new = tuple(
            rewritten.get(saved.bucket, saved) if saved.operator == self._operator else saved
            for saved in self._manifest.buckets
        )
        self._manifest = replace(self._manifest, buckets=new)
        replace_manifest(self._folder, self._manifest, self._check_allowed)
        drop_replaced(self._folder, replaced, self._manifest, self._check_allowed)

    def _read_other_rows(self, files: Folder, saved: SavedBucket) -> Iterator[pa.RecordBatch]:
        """Yield a bucket's rows except the rows of the keys."""
        for rows in read_saved_rows(files, saved.pointer, saved.files, self._schema, self._scratch):
            self._lease.hold()
            erased = find_matching(self._schema.key_columns(rows), self._keys)
            yield rows.filter(pa.array(~erased)) if erased.any() else rows

    def remove(self, others: Sequence[tuple[Folder, str]]) -> None:
        """Remove files that have a key and are not in the manifest."""
        for files, name in others:
            self._check_allowed()
            files.remove(name)

    def _check_allowed(self) -> None:
        self._lease.hold()
        self._lease.check()
        if read_claim(self._folder) != self._claim:
            raise ClaimedError(
                f"the claim to the savepoint at {self._folder.root} was released while it was being rewritten: run "
                "this again"
            )
