"""Reading every byte of state against its digests: which files there are, and what is wrong with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arrow_schemas.checksum import opened_document, readable
from arrow_schemas.erase import ERASE_FOLDER, EraseDone, parse_erase_name
from arrow_schemas.lineage import CheckpointRef, parse_file_name
from arrow_schemas.operator import OperatorFile, parse_operator_file_name
from arrow_schemas.partitions import PartitionAssignment, parse_partitions_name
from arrow_schemas.savepoint import MANIFEST_NAME, SavedFile, SavepointManifest
from spark_state_ext.cli.targets import QueryFolder, Target, bucket_folders
from spark_state_ext.errors import ChangedJobError, CorruptError, CorruptFileError, LineageError, MissingError
from spark_state_ext.files.checkpoint import announced, verify_checkpoint
from spark_state_ext.files.erase_requests import decode_request
from spark_state_ext.files.folder import Entry, Folder, is_temporary
from spark_state_ext.files.last_run import LAST_RUN_NAME, LastRun
from spark_state_ext.files.operator_catalog import SPILL_FOLDER
from spark_state_ext.ownership.claim_notes import CLAIMS_FOLDER
from spark_state_ext.ownership.holds import HOLDS_FOLDER, HoldRecord
from spark_state_ext.ownership.last_written import LAST_WRITTEN_NAME, decode_last_written_ms
from spark_state_ext.ownership.lease_log import LEASE_FOLDER
from spark_state_ext.ownership.lease_record import LeaseRecord, refusal
from spark_state_ext.rescale.notes import notes_among
from spark_state_ext.rescale.parents import PARENTS_FOLDER, Parent, parse_parent_name
from spark_state_ext.savepoints.claims import SavepointClaim
from spark_state_ext.savepoints.copying import digest_text
from spark_state_ext.savepoints.manifest_file import decode_manifest
from spark_state_ext.savepoints.records import START_NAME, StartRecord

__all__ = ["DAMAGED", "GONE", "MISSING", "UNKNOWN", "WHOLE", "Check", "Checked", "checks_of"]

WHOLE, DAMAGED, MISSING, GONE, UNKNOWN = "whole", "damaged", "missing", "gone", "unknown"
# Folders of a query folder that hold one kind of document each; rows in transit lie in another one.
_OF_DOCUMENTS = (LEASE_FOLDER, HOLDS_FOLDER, ERASE_FOLDER, CLAIMS_FOLDER)
_DOCUMENTS = ("detached.json", "left_behind.json")
_DOCUMENT_FORMAT_MAX = 1
_CLAIM = "claim"


@dataclass(frozen=True)
class Checked:
    """What was found out about a file.

    Parameters
    ----------
    path
        The file.
    kind
        What it is.
    size_bytes
        Its size.
    status
        `WHOLE`, `DAMAGED`, `MISSING`, `GONE` for what a running query has removed meanwhile, or `UNKNOWN` for what is
        none of ours.
    problem
        What is wrong; empty where nothing is.
    """

    path: str
    kind: str
    size_bytes: int
    status: str
    problem: str = ""


@dataclass(frozen=True)
class Check:
    """A file to look at.

    Parameters
    ----------
    path, kind, size_bytes
        As in `Checked`.
    read
        Reads it, and raises what is wrong; None: it is none of ours.
    is_listed
        Looks again whether it is there: clean-up and leases remove files. None: something else says that it has to be.
    """

    path: str
    kind: str
    size_bytes: int
    read: Callable[[], object] | None
    is_listed: Callable[[], bool] | None = None

    def carried_out(self) -> Checked:
        """Read it."""
        if self.read is None:
            return Checked(self.path, self.kind, self.size_bytes, UNKNOWN, "none of our files")
        try:
            self.read()
        except MissingError as error:
            if self.is_listed is not None and not self.is_listed():
                return Checked(self.path, self.kind, self.size_bytes, GONE, "removed after it was listed")
            return Checked(self.path, self.kind, self.size_bytes, MISSING, str(error))
        except (CorruptError, ChangedJobError) as error:
            return Checked(self.path, self.kind, self.size_bytes, DAMAGED, str(error))
        return Checked(self.path, self.kind, self.size_bytes, WHOLE)


def checks_of(target: Target, scratch: Path) -> list[Check]:
    """All files of a root, query folder or savepoint."""
    if target.savepoint:
        return list(_of_savepoint(target.folder, scratch))
    return [check for it in target.query_folders for check in _of_query_folder(it, scratch)]


# -- query folders --------------------------------------------------------------------------------


def _of_query_folder(query_folder: QueryFolder, scratch: Path) -> Iterator[Check]:
    folder = query_folder.folder
    for entry in folder.entries():
        if not entry.folder:
            yield _document(folder, entry)
        elif entry.name == PARENTS_FOLDER:
            yield from _of_parents(folder.child(PARENTS_FOLDER), scratch)
        elif entry.name not in (*_OF_DOCUMENTS, SPILL_FOLDER) and not entry.name.isdecimal():
            yield Check(folder.where(entry.name), "folder", 0, None)
    for name in _OF_DOCUMENTS:
        for entry in folder.child(name).entries():
            if not entry.folder and not is_temporary(entry.name):
                yield _document(folder.child(name), entry, name)
    for bucket, files in bucket_folders(folder):
        for entry in files.entries():
            if not is_temporary(entry.name):
                yield _checkpoint_file(files, entry, bucket, scratch)


def _of_parents(parents: Folder, scratch: Path) -> Iterator[Check]:
    """What a query was rescaled from: records of buckets, the files that they name, and notes, which are empty."""
    named: dict[str, Parent] = {}
    for entry in parents.entries():
        where = parents.where(entry.name)
        if entry.folder and entry.name.isdecimal():
            continue
        if (bucket := parse_parent_name(entry.name)) is not None:
            data = parents.get(entry.name)
            yield Check(where, "parent", entry.size_bytes, partial(Parent.decode, data, where))
            with suppress(CorruptError, ChangedJobError):
                named[str(bucket)] = Parent.decode(data, where)
        elif not is_temporary(entry.name):
            yield Check(where, "note", entry.size_bytes, (lambda: None) if notes_among([entry.name]) else None)
    for bucket_name, parent in named.items():
        for file in parent.saved.files:
            files = parents.child(bucket_name)
            kind = (parse_file_name(file.name) or (None, "file"))[1]
            yield Check(files.where(file.name), kind, file.size_bytes, partial(_read_named, files, file, scratch))
    for bucket, files in bucket_folders(parents):
        known = {file.name for file in named[str(bucket)].saved.files} if str(bucket) in named else set()
        for entry in files.entries():
            if entry.name not in known and not is_temporary(entry.name):
                yield _checkpoint_file(files, entry, bucket, scratch)


def _document(folder: Folder, entry: Entry, within: str = "") -> Check:
    name, where = entry.name, folder.where(entry.name)

    def check(kind: str, decode: Callable[[bytes], object]) -> Check:
        return Check(where, kind, entry.size_bytes, lambda: decode(folder.get(name)), partial(_is_listed, folder, name))

    if within == LEASE_FOLDER:
        return check("lease", lambda data: LeaseRecord.decode(data, where))
    if within == HOLDS_FOLDER:
        return check("hold", lambda data: HoldRecord.decode(data, 0, where))
    if within == ERASE_FOLDER and (parsed := parse_erase_name(name)) is not None:
        if parsed[1]:
            return check("erase record", lambda data: EraseDone.decode(data, where))
        return check("erase request", lambda data: decode_request(data, where))
    if within == ERASE_FOLDER and name == LAST_RUN_NAME:
        return check("record", lambda data: LastRun.decode(data, where))
    if within == ERASE_FOLDER and name == LAST_WRITTEN_NAME:
        return check("record", lambda data: decode_last_written_ms(data, where))
    if within == CLAIMS_FOLDER and name.endswith(".json"):
        return check("record", lambda data: _opened(data, where))
    if within:
        return Check(where, "file", entry.size_bytes, None)
    if parse_operator_file_name(name) is not None:
        return check("operator", lambda data: OperatorFile.decode(data, where))
    if parse_partitions_name(name) is not None:
        return check("assignment", lambda data: PartitionAssignment.decode(data, where))
    if name == START_NAME:
        return check("start", lambda data: StartRecord.decode(data, where))
    if name in _DOCUMENTS:
        return check("record", lambda data: _opened(data, where))
    if name.endswith(".start.arrow"):
        return check("record", lambda data: _opened(data, where))
    if name == "lease.json":
        # Beside a claim there is one that older releases refuse.
        return check("lease", lambda data: data == refusal() or LeaseRecord.decode_format_1(data, where))
    return Check(where, "file", entry.size_bytes, None)


def _opened(data: bytes, where: str) -> None:
    with readable(where, "record"):
        opened_document(data, where, _DOCUMENT_FORMAT_MAX)


def _checkpoint_file(files: Folder, entry: Entry, bucket: int, scratch: Path) -> Check:
    parsed = parse_file_name(entry.name)
    where = files.where(entry.name)
    if parsed is None or entry.folder:
        return Check(where, "file", entry.size_bytes, None)
    ref, kind = parsed
    read, is_listed = partial(_read, files, ref, kind, bucket, scratch), partial(_is_listed, files, entry.name)
    return Check(where, kind, entry.size_bytes, read, is_listed)


def _is_listed(folder: Folder, name: str) -> bool:
    return name in folder.names()


def _read(files: Folder, ref: CheckpointRef, kind: str, bucket: int, scratch: Path) -> None:
    header = verify_checkpoint(files, ref, kind, scratch)
    if header.bucket != bucket:
        raise LineageError(f"{files.root} has the {kind} of checkpoint {ref} of bucket {header.bucket}")


# -- savepoints -----------------------------------------------------------------------------------


def _of_savepoint(savepoint: Folder, scratch: Path) -> Iterator[Check]:
    where, data = savepoint.where(MANIFEST_NAME), savepoint.get(MANIFEST_NAME)
    yield Check(where, "manifest", len(data), lambda: decode_manifest(data, where))
    for entry in savepoint.child(_CLAIM).entries():
        if entry.name == "claim.json":
            yield _claim(savepoint.child(_CLAIM), entry)
    try:
        manifest = decode_manifest(data, where)
    except (CorruptError, ChangedJobError):
        # It is what tells which files there are. What lies there is read all the same.
        for operator in (it for it in savepoint.entries() if it.folder and it.name != _CLAIM):
            yield from _of_query_folder(QueryFolder("", savepoint.child(operator.name)), scratch)
        return
    yield from _named(savepoint, manifest, scratch)


def _named(savepoint: Folder, manifest: SavepointManifest, scratch: Path) -> Iterator[Check]:
    for bucket in manifest.buckets:
        files = savepoint.child(bucket.operator, str(bucket.bucket))
        there = {entry.name: entry for entry in files.entries()}
        for file in bucket.files:
            read = partial(_read_named, files, file, scratch)
            kind = (parse_file_name(file.name) or (None, "file"))[1]
            yield Check(files.where(file.name), kind, file.size_bytes, read)
        for name in sorted(there.keys() - {file.name for file in bucket.files}):
            if not is_temporary(name):
                yield Check(files.where(name), "file", there[name].size_bytes, None)


def _read_named(files: Folder, file: SavedFile, scratch: Path) -> None:
    parsed = parse_file_name(file.name)
    assert parsed is not None, "a manifest names checkpoint files only"
    verify_checkpoint(files, *parsed, scratch)
    found = announced(files, *parsed)
    if (found.size_bytes, digest_text(found.body)) != (file.size_bytes, file.digest):
        raise CorruptFileError(
            f"{files.where(file.name)} is whole, and not the file that was saved ({file.size_bytes} bytes, "
            f"{file.digest}): it has {found.size_bytes} bytes, {digest_text(found.body)}"
        )


def _claim(folder: Folder, entry: Entry) -> Check:
    where = folder.where(entry.name)
    return Check(where, "claim", entry.size_bytes, lambda: SavepointClaim.decode(folder.get(entry.name), where))
