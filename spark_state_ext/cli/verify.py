"""Verify: reads every byte of state against its digests, and says which file is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import typer

from arrow_schemas.bucket_map import BY_PARTITION, BucketMap
from arrow_schemas.checksum import opened_document, readable
from arrow_schemas.equality import IndexArray, group_by_key
from arrow_schemas.erase import EraseDone
from arrow_schemas.lineage import CheckpointRef, parse_file_name
from arrow_schemas.operator import OperatorFile
from arrow_schemas.partitions import PartitionAssignment
from arrow_schemas.row import KEY_HASH
from arrow_schemas.savepoint import MANIFEST_NAME, SavedFile, SavepointManifest
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.options import AllFilesOption, OutputOption, ScratchOption, StatePath, StorageOptions
from spark_state_ext.cli.output import Output, parse_columns, say, show_progress, write_records
from spark_state_ext.cli.paths import QueryFolder, Target, find_target, list_bucket_folders, open_folder
from spark_state_ext.errors import (
    CannotHoldError,
    ChangedJobError,
    CorruptError,
    CorruptFileError,
    LineageError,
    MissingError,
    PartitionsChangedError,
    UsageError,
)
from spark_state_ext.files.checkpoint import announced, verify_checkpoint
from spark_state_ext.files.erase_requests import decode_request
from spark_state_ext.files.folder import Entry, Folder, is_temporary
from spark_state_ext.files.layout import (
    ASSIGNMENT,
    CLAIM_NOTE,
    DOCUMENT_FOLDERS,
    EPOCH,
    ERASE_DONE,
    ERASE_REQUEST,
    HOLD,
    LEASE,
    OPERATOR,
    PARENTS_FOLDER,
    SPILL_FOLDER,
    START,
    START_NAME,
    FileKind,
    kind_of,
)
from spark_state_ext.files.operator_catalog import newest_operator
from spark_state_ext.ownership.holds import HoldRecord
from spark_state_ext.ownership.lease_record import LeaseRecord, refusal
from spark_state_ext.reading.bodies import hashes_in
from spark_state_ext.reading.opening import open_state
from spark_state_ext.reading.shown import BUCKET
from spark_state_ext.reading.state import OpenState
from spark_state_ext.rescale.notes import notes_among
from spark_state_ext.rescale.parents import Parent, parse_parent_name
from spark_state_ext.savepoints.claims import SavepointClaim
from spark_state_ext.savepoints.copying import digest_text
from spark_state_ext.savepoints.manifest_file import decode_manifest, read_manifest
from spark_state_ext.savepoints.records import StartRecord
from spark_state_ext.timeline.records import decode_epochs
from spark_state_ext.worker.local_folders import scratch_folder
from spark_state_ext.worker.threads import side_by_side

__all__ = ["DECODERS", "Check", "list_checks", "verify"]

_PARALLEL_MAX = 8
_ROWS = parse_columns("status, kind, bytes int, path, problem")


def verify(
    path: StatePath,
    every: AllFilesOption = False,
    local_dir: ScratchOption = None,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Read every byte of each file against its digests, and say which is damaged, and whether a key is in two buckets.

    Of a savepoint, each file must be the one that the manifest names. Which files a running query needs only Spark
    knows: files that are gone from a query folder are not missed. Where buckets are the partitions of the source, each
    key of the newest state must be in one bucket (kind keys).
    """
    target = find_target(open_folder(path, storage_options))
    checks = list_checks(target, scratch_folder(local_dir))
    if all(check.read is None for check in checks):
        raise UsageError(
            f"{target.folder.root} has no state: none of the {len(checks)} files below it is one of this package. Give "
            "a root as ArrowState has it, a query folder below it, or a savepoint"
        )
    checks += list_key_checks(target, local_dir, storage_options)
    found = _carried_out(checks)
    shown = [it for it in found if every or it.status not in (WHOLE, GONE)]
    rows = [{**vars(it), "bytes": it.size_bytes, "problem": it.problem or None} for it in shown]
    write_records(rows, _ROWS, output, if_empty=False)
    counts = {status: sum(it.status == status for it in found) for status in (DAMAGED, MISSING, UNKNOWN)}
    say(
        f"files={len(found)} bytes={sum(it.size_bytes for it in found)} "
        + " ".join(f"{status}={count}" for status, count in counts.items())
    )
    raise typer.Exit(NO if counts[DAMAGED] or counts[MISSING] else DONE)


def _carried_out(checks: list[Check]) -> list[CheckResult]:
    with show_progress("reading", sum(it.size_bytes for it in checks)) as advance:

        def work(check: Check) -> CheckResult:
            done = check.carried_out()
            advance(check.size_bytes)
            return done

        return side_by_side("verify", _PARALLEL_MAX, work, checks) if checks else []


WHOLE, DAMAGED, MISSING, GONE, UNKNOWN = "whole", "damaged", "missing", "gone", "unknown"
_DOCUMENT_FORMAT_MAX = 1
_CLAIM = "claim"


@dataclass(frozen=True)
class CheckResult:
    """What was found out about a file."""

    path: str
    kind: str
    size_bytes: int
    # `WHOLE`, `DAMAGED`, `MISSING`, `GONE` for what a running query has removed meanwhile, or `UNKNOWN` for what is
    # none of ours.
    status: str
    # What is wrong; empty where nothing is.
    problem: str = ""


@dataclass(frozen=True)
class Check:
    """A file to look at."""

    path: str
    kind: str
    size_bytes: int
    # Reads it, and raises what is wrong; None: it is none of ours.
    read: Callable[[], object] | None
    # Looks again whether it is there: clean-up and leases remove files. None: something else says that it has to be.
    is_listed: Callable[[], bool] | None = None

    def carried_out(self) -> CheckResult:
        """Read it."""
        if self.read is None:
            return CheckResult(self.path, self.kind, self.size_bytes, UNKNOWN, "none of our files")
        try:
            self.read()
        except MissingError as error:
            if self.is_listed is not None and not self.is_listed():
                return CheckResult(self.path, self.kind, self.size_bytes, GONE, "removed after it was listed")
            return CheckResult(self.path, self.kind, self.size_bytes, MISSING, str(error))
        except (CorruptError, ChangedJobError) as error:
            return CheckResult(self.path, self.kind, self.size_bytes, DAMAGED, str(error))
        return CheckResult(self.path, self.kind, self.size_bytes, WHOLE)


def list_checks(target: Target, scratch: Path) -> list[Check]:
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
        elif entry.name not in (*DOCUMENT_FOLDERS, SPILL_FOLDER) and not entry.name.isdecimal():
            yield Check(folder.where(entry.name), "folder", 0, None)
    for name in DOCUMENT_FOLDERS:
        for entry in folder.child(name).entries():
            if not entry.folder and not is_temporary(entry.name):
                yield _document(folder.child(name), entry, name)
    for bucket, files in list_bucket_folders(folder):
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
    for bucket, files in list_bucket_folders(parents):
        known = {file.name for file in named[str(bucket)].saved.files} if str(bucket) in named else set()
        for entry in files.entries():
            if entry.name not in known and not is_temporary(entry.name):
                yield _checkpoint_file(files, entry, bucket, scratch)


def _document(folder: Folder, entry: Entry, within: str = "") -> Check:
    name, where = entry.name, folder.where(entry.name)

    def check(kind: str, decode: Callable[[bytes], object]) -> Check:
        return Check(where, kind, entry.size_bytes, lambda: decode(folder.get(name)), partial(_is_listed, folder, name))

    kind = kind_of(f"{within}/{name}" if within else name)
    if kind is LEASE and not within:
        # Beside a claim there is one that older releases refuse.
        return check("lease", lambda data: data == refusal() or LeaseRecord.decode_format_1(data, where))
    if kind not in DECODERS:
        return Check(where, "file", entry.size_bytes, None)
    label, decode = DECODERS[kind]
    if kind is START and name != START_NAME:
        label = "record"
    return check(label, lambda data: decode(data, where))


def _opened(data: bytes, where: str) -> object:
    with readable(where, "record"):
        return opened_document(data, where, _DOCUMENT_FORMAT_MAX)
    raise AssertionError("unreachable: readable raises what it catches")


def _start(data: bytes, where: str) -> object:
    return StartRecord.decode(data, where) if where.endswith(START_NAME) else _opened(data, where)


# Of documents: what a check calls them, and how they are read.
DECODERS: dict[FileKind | None, tuple[str, Callable[[bytes, str], object]]] = {
    OPERATOR: ("operator", OperatorFile.decode),
    ASSIGNMENT: ("assignment", PartitionAssignment.decode),
    LEASE: ("lease", LeaseRecord.decode),
    HOLD: ("hold", lambda data, where: HoldRecord.decode(data, 0, where)),
    ERASE_REQUEST: ("erase request", decode_request),
    ERASE_DONE: ("erase record", EraseDone.decode),
    EPOCH: ("epochs", decode_epochs),
    CLAIM_NOTE: ("record", _opened),
    START: ("start", _start),
}


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


def list_key_checks(target: Target, local_dir: str | None, storage_options: dict[str, Any]) -> list[Check]:
    """A check of each state in buckets by partition; none of others, and of what the check of its files reports."""
    found = []
    for folder, operator in _operators(target):
        if operator.bucket_map.by_hash:
            continue
        path, name = (target.folder.root, operator.operator) if target.savepoint else (folder.root, None)
        read = partial(_refuse_keys_in_two_buckets, path, name, local_dir, storage_options)
        found.append(Check(folder.root, "keys", 0, read))
    return found


def _operators(target: Target) -> Iterator[tuple[Folder, OperatorFile]]:
    """Folders of buckets with files, and the operator file in force."""
    # The check of a file that cannot be read reports it.
    if target.savepoint:
        with suppress(CorruptError, ChangedJobError):
            named = read_manifest(target.folder).header.operators
            yield from ((target.folder.child(name), file) for name, file in named.items())
        return
    for query_folder in target.query_folders:
        folder = query_folder.folder
        with suppress(CorruptError, ChangedJobError):
            operator = newest_operator(folder)
            if operator is not None and any(files.names() for _, files in list_bucket_folders(folder)):
                yield folder, operator


def _refuse_keys_in_two_buckets(
    path: str, operator: str | None, local_dir: str | None, storage_options: dict[str, Any]
) -> None:
    def opened(hold: bool) -> OpenState:
        # The newest state that files have, so that a wrong batch is found soon.
        return open_state(
            path, operator=operator, unproven=True, hold=hold, local_dir=local_dir, storage_options=storage_options
        )

    try:
        state = opened(True)
    except CannotHoldError:
        state = opened(False)
    with state:
        count, example = _keys_in_two_buckets(state)
    if count:
        raise PartitionsChangedError(
            f"{count} keys lie in several buckets, and so have several states, such as {example}: the number of "
            'partitions changed in a way that the state could not follow. See "A number that cannot be followed" in '
            "docs/operating/source-partitions.md"
        )


def _keys_in_two_buckets(state: OpenState) -> tuple[int, str]:
    """How many keys lie in several buckets of one stream, and one of them."""
    count, example = 0, ""
    for buckets in _buckets_compared(state.bucket_map):
        for rows in _rows_by_hash(state, buckets):
            keys = [rows.column(at) for at in range(len(state.key_schema))]
            order, starts = group_by_key(hashes_in(rows), keys)
            if not len(starts):
                continue
            places = rows.column(BUCKET).to_numpy()[order]
            least, largest = np.minimum.reduceat(places, starts), np.maximum.reduceat(places, starts)
            several = np.flatnonzero(least != largest)
            if len(several) and not count:
                at = int(starts[several[0]])
                key = {
                    name: column[int(order[at])].as_py() for name, column in zip(rows.schema.names, keys, strict=False)
                }
                example = f"{key} in buckets {least[several[0]]} and {largest[several[0]]}"
            count += len(several)
    return count, example


def _buckets_compared(bucket_map: BucketMap) -> list[Sequence[int]]:
    """Buckets of which a key may be in one only."""
    if bucket_map.group_by == BY_PARTITION:
        return [range(bucket_map.buckets)]
    firsts = [(bucket_map.first_of(stream), count) for stream, count in bucket_map.streams]
    return [range(first, first + count) for first, count in firsts]


def _rows_by_hash(state: OpenState, buckets: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Rows of all buckets together, ascending by hash from batch to batch; all rows of a hash are in one batch.

    Rows with a hash that only one of the buckets has are left out.
    """
    fields = state.columns.fields([*state.key_schema.names, KEY_HASH, BUCKET])

    def of(bucket: int) -> Iterator[pa.RecordBatch]:
        return (state.columns.of(rows, fields, bucket) for rows in state.rows(bucket))

    sources = {bucket: of(bucket) for bucket in buckets}
    held: dict[int, pa.RecordBatch] = {}
    while True:
        for bucket in [it for it in sources if it not in held]:
            following = next(sources[bucket], None)
            if following is None:
                del sources[bucket]
            else:
                held[bucket] = following
        if not held:
            return
        # Up to here all buckets' rows are known: a batch has all rows of its hashes.
        last = min(hashes_in(rows)[-1] for rows in held.values())
        parts = []
        for bucket, rows in list(held.items()):
            end = int(np.searchsorted(hashes_in(rows), last, side="right"))
            parts.append(rows.slice(0, end))
            if end == rows.num_rows:
                del held[bucket]
            else:
                held[bucket] = rows.slice(end)
        hashes = np.concatenate([hashes_in(rows) for rows in parts])
        _, at, times = np.unique(hashes, return_inverse=True, return_counts=True)
        shared: IndexArray = np.flatnonzero(times[at.ravel()] > 1)
        if len(shared):
            together = pa.Table.from_batches([rows for rows in parts if rows.num_rows])
            yield together.take(pa.array(shared)).combine_chunks().to_batches()[0]
