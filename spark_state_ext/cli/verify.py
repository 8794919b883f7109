"""The command verify: reads every byte of state, compares digests, and reports damaged files."""

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
from arrow_schemas.checksum import open_document, report_damage
from arrow_schemas.equality import IndexArray, group_by_key
from arrow_schemas.erase import EraseDone
from arrow_schemas.lineage import CheckpointRef, parse_file_name
from arrow_schemas.operator import OperatorFile
from arrow_schemas.partitions import PartitionAssignment
from arrow_schemas.row import KEY_HASH
from arrow_schemas.savepoint import MANIFEST_NAME, SavedFile, SavepointManifest
from spark_state_ext.cli.exit_codes import DONE, NO
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
from spark_state_ext.files.checkpoint import read_announced, verify_checkpoint
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
from spark_state_ext.reading.bodies import read_hashes
from spark_state_ext.reading.columns import BUCKET
from spark_state_ext.reading.state import OpenState
from spark_state_ext.reading.state_opener import open_state
from spark_state_ext.rescale.parents import Parent, parse_parent_name
from spark_state_ext.rescale.parents_notes import parse_notes
from spark_state_ext.savepoints.claims import SavepointClaim
from spark_state_ext.savepoints.file_copy import digest_text
from spark_state_ext.savepoints.manifest_file import decode_manifest, read_manifest
from spark_state_ext.savepoints.start_records import StartRecord
from spark_state_ext.timeline.records import decode_epochs
from spark_state_ext.worker.local_folders import scratch_folder
from spark_state_ext.worker.threads import map_in_parallel

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
    """Read every byte of each file, compare digests, and print which files are damaged.

    In a savepoint, each file must be the one that the manifest names. Only Spark knows which files a running query
    needs, so files that were removed from a query folder are not reported. If buckets are the partitions of the source,
    each key of the newest state must be in one bucket (kind keys).
    """
    target = find_target(open_folder(path, storage_options))
    checks = list_checks(target, scratch_folder(local_dir))
    if all(check.read is None for check in checks):
        raise UsageError(
            f"{target.folder.root} has no state: none of the {len(checks)} files below it is from this package. Give "
            "the root that ArrowState has, a query folder below it, or a savepoint"
        )
    checks += list_key_checks(target, local_dir, storage_options)
    results = _run_checks(checks)
    listed = [result for result in results if every or result.status not in (WHOLE, GONE)]
    rows = [{**vars(result), "bytes": result.size_bytes, "problem": result.problem or None} for result in listed]
    write_records(rows, _ROWS, output, if_empty=False)
    counts = {status: sum(result.status == status for result in results) for status in (DAMAGED, MISSING, UNKNOWN)}
    say(
        f"files={len(results)} bytes={sum(result.size_bytes for result in results)} "
        + " ".join(f"{status}={count}" for status, count in counts.items())
    )
    raise typer.Exit(NO if counts[DAMAGED] or counts[MISSING] else DONE)


def _run_checks(checks: list[Check]) -> list[CheckResult]:
    with show_progress("reading", sum(check.size_bytes for check in checks)) as advance:

        def work(check: Check) -> CheckResult:
            result = check.run()
            advance(check.size_bytes)
            return result

        return map_in_parallel("verify", _PARALLEL_MAX, work, checks) if checks else []


WHOLE, DAMAGED, MISSING, GONE, UNKNOWN = "whole", "damaged", "missing", "gone", "unknown"
_DOCUMENT_FORMAT_MAX = 1
_CLAIM = "claim"


@dataclass(frozen=True)
class CheckResult:
    """The result of checking a file."""

    path: str
    kind: str
    size_bytes: int
    # `WHOLE`, `DAMAGED`, `MISSING`, `GONE` if a running query removed it meanwhile, or `UNKNOWN` if it is not ours.
    status: str
    # What is wrong; empty if the file is fine.
    problem: str = ""


@dataclass(frozen=True)
class Check:
    """A file to check."""

    path: str
    kind: str
    size_bytes: int
    # Reads the file and raises an error if it is damaged; None if it is not ours.
    read: Callable[[], object] | None
    # Lists again whether the file exists, because clean-up and leases remove files; None if the file must exist.
    is_listed: Callable[[], bool] | None = None

    def run(self) -> CheckResult:
        """Read the file and return the result."""
        if self.read is None:
            return CheckResult(self.path, self.kind, self.size_bytes, UNKNOWN, "not a file of this package")
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
    """Return a check for each file of a root, query folder or savepoint."""
    if target.savepoint:
        return list(_check_savepoint(target.folder, scratch))
    return [check for query_folder in target.query_folders for check in _check_query_folder(query_folder, scratch)]


# -- query folders --------------------------------------------------------------------------------


def _check_query_folder(query_folder: QueryFolder, scratch: Path) -> Iterator[Check]:
    folder = query_folder.folder
    for entry in folder.entries():
        if not entry.folder:
            yield _check_document(folder, entry)
        elif entry.name == PARENTS_FOLDER:
            yield from _check_parents(folder.child(PARENTS_FOLDER), scratch)
        elif entry.name not in (*DOCUMENT_FOLDERS, SPILL_FOLDER) and not entry.name.isdecimal():
            yield Check(folder.where(entry.name), "folder", 0, None)
    for name in DOCUMENT_FOLDERS:
        for entry in folder.child(name).entries():
            if not entry.folder and not is_temporary(entry.name):
                yield _check_document(folder.child(name), entry, name)
    for bucket, files in list_bucket_folders(folder):
        for entry in files.entries():
            if not is_temporary(entry.name):
                yield _check_checkpoint_file(files, entry, bucket, scratch)


def _check_parents(parents: Folder, scratch: Path) -> Iterator[Check]:
    """Check what a query was rescaled from: records of buckets, the files that they name, and empty notes."""
    parents_by_bucket: dict[str, Parent] = {}
    for entry in parents.entries():
        where = parents.where(entry.name)
        if entry.folder and entry.name.isdecimal():
            continue
        if (bucket := parse_parent_name(entry.name)) is not None:
            data = parents.get(entry.name)
            yield Check(where, "parent", entry.size_bytes, partial(Parent.decode, data, where))
            with suppress(CorruptError, ChangedJobError):
                parents_by_bucket[str(bucket)] = Parent.decode(data, where)
        elif not is_temporary(entry.name):
            yield Check(where, "note", entry.size_bytes, (lambda: None) if parse_notes([entry.name]) else None)
    for bucket_name, parent in parents_by_bucket.items():
        for file in parent.saved.files:
            files = parents.child(bucket_name)
            kind = (parse_file_name(file.name) or (None, "file"))[1]
            yield Check(
                files.where(file.name), kind, file.size_bytes, partial(_verify_named_file, files, file, scratch)
            )
    for bucket, files in list_bucket_folders(parents):
        known_names = (
            {file.name for file in parents_by_bucket[str(bucket)].saved.files}
            if str(bucket) in parents_by_bucket
            else set()
        )
        for entry in files.entries():
            if entry.name not in known_names and not is_temporary(entry.name):
                yield _check_checkpoint_file(files, entry, bucket, scratch)


def _check_document(folder: Folder, entry: Entry, within: str = "") -> Check:
    name, where = entry.name, folder.where(entry.name)

    def check(kind: str, decode: Callable[[bytes], object]) -> Check:
        return Check(where, kind, entry.size_bytes, lambda: decode(folder.get(name)), partial(_is_listed, folder, name))

    kind = kind_of(f"{within}/{name}" if within else name)
    if kind is LEASE and not within:
        # Next to a claim there is a lease file that makes older releases refuse the folder.
        return check("lease", lambda data: data == refusal() or LeaseRecord.decode_format_1(data, where))
    if kind not in DECODERS:
        return Check(where, "file", entry.size_bytes, None)
    label, decode = DECODERS[kind]
    if kind is START and name != START_NAME:
        label = "record"
    return check(label, lambda data: decode(data, where))


def _decode_document(data: bytes, where: str) -> object:
    with report_damage(where, "record"):
        return open_document(data, where, _DOCUMENT_FORMAT_MAX)
    raise AssertionError("unreachable: readable raises what it catches")


def _decode_start(data: bytes, where: str) -> object:
    return StartRecord.decode(data, where) if where.endswith(START_NAME) else _decode_document(data, where)


# Label and decoder of each kind of document.
DECODERS: dict[FileKind | None, tuple[str, Callable[[bytes, str], object]]] = {
    OPERATOR: ("operator", OperatorFile.decode),
    ASSIGNMENT: ("assignment", PartitionAssignment.decode),
    LEASE: ("lease", LeaseRecord.decode),
    HOLD: ("hold", lambda data, where: HoldRecord.decode(data, 0, where)),
    ERASE_REQUEST: ("erase request", decode_request),
    ERASE_DONE: ("erase record", EraseDone.decode),
    EPOCH: ("epochs", decode_epochs),
    CLAIM_NOTE: ("record", _decode_document),
    START: ("start", _decode_start),
}


def _check_checkpoint_file(files: Folder, entry: Entry, bucket: int, scratch: Path) -> Check:
    parsed = parse_file_name(entry.name)
    where = files.where(entry.name)
    if parsed is None or entry.folder:
        return Check(where, "file", entry.size_bytes, None)
    ref, kind = parsed
    read, is_listed = partial(_verify_file, files, ref, kind, bucket, scratch), partial(_is_listed, files, entry.name)
    return Check(where, kind, entry.size_bytes, read, is_listed)


def _is_listed(folder: Folder, name: str) -> bool:
    return name in folder.names()


def _verify_file(files: Folder, ref: CheckpointRef, kind: str, bucket: int, scratch: Path) -> None:
    header = verify_checkpoint(files, ref, kind, scratch)
    if header.bucket != bucket:
        raise LineageError(f"{files.root} has the {kind} of checkpoint {ref} of bucket {header.bucket}")


# -- savepoints -----------------------------------------------------------------------------------


def _check_savepoint(savepoint: Folder, scratch: Path) -> Iterator[Check]:
    where, data = savepoint.where(MANIFEST_NAME), savepoint.get(MANIFEST_NAME)
    yield Check(where, "manifest", len(data), lambda: decode_manifest(data, where))
    for entry in savepoint.child(_CLAIM).entries():
        if entry.name == "claim.json":
            yield _check_claim(savepoint.child(_CLAIM), entry)
    try:
        manifest = decode_manifest(data, where)
    except (CorruptError, ChangedJobError):
        # The manifest should name the files. Without it, check all files that are there.
        for operator in (entry for entry in savepoint.entries() if entry.folder and entry.name != _CLAIM):
            yield from _check_query_folder(QueryFolder("", savepoint.child(operator.name)), scratch)
        return
    yield from _check_named_files(savepoint, manifest, scratch)


def _check_named_files(savepoint: Folder, manifest: SavepointManifest, scratch: Path) -> Iterator[Check]:
    for bucket in manifest.buckets:
        files = savepoint.child(bucket.operator, str(bucket.bucket))
        entries = {entry.name: entry for entry in files.entries()}
        for file in bucket.files:
            read = partial(_verify_named_file, files, file, scratch)
            kind = (parse_file_name(file.name) or (None, "file"))[1]
            yield Check(files.where(file.name), kind, file.size_bytes, read)
        for name in sorted(entries.keys() - {file.name for file in bucket.files}):
            if not is_temporary(name):
                yield Check(files.where(name), "file", entries[name].size_bytes, None)


def _verify_named_file(files: Folder, file: SavedFile, scratch: Path) -> None:
    parsed = parse_file_name(file.name)
    assert parsed is not None, "a manifest names checkpoint files only"
    verify_checkpoint(files, *parsed, scratch)
    contents = read_announced(files, *parsed)
    if (contents.size_bytes, digest_text(contents.body)) != (file.size_bytes, file.digest):
        raise CorruptFileError(
            f"{files.where(file.name)} is undamaged, but not the file that was saved ({file.size_bytes} bytes, "
            f"{file.digest}): it has {contents.size_bytes} bytes, {digest_text(contents.body)}"
        )


def _check_claim(folder: Folder, entry: Entry) -> Check:
    where = folder.where(entry.name)
    return Check(where, "claim", entry.size_bytes, lambda: SavepointClaim.decode(folder.get(entry.name), where))


def list_key_checks(target: Target, local_dir: str | None, storage_options: dict[str, Any]) -> list[Check]:
    """Return a check of the keys of each state in buckets by partition; skip states whose operator is unreadable."""
    checks = []
    for folder, operator in _list_operators_with_files(target):
        if operator.bucket_map.by_hash:
            continue
        path, name = (target.folder.root, operator.operator) if target.savepoint else (folder.root, None)
        read = partial(_refuse_keys_in_two_buckets, path, name, local_dir, storage_options)
        checks.append(Check(folder.root, "keys", 0, read))
    return checks


def _list_operators_with_files(target: Target) -> Iterator[tuple[Folder, OperatorFile]]:
    """Yield each folder with bucket files, and its operator file in force."""
    # A file that cannot be read is skipped here, because its own check reports it.
    if target.savepoint:
        with suppress(CorruptError, ChangedJobError):
            operators = read_manifest(target.folder).header.operators
            yield from ((target.folder.child(name), file) for name, file in operators.items())
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
    def open_target(hold: bool) -> OpenState:
        # Read the newest state in files, even if unproven, so that a wrong batch is found soon.
        return open_state(
            path, operator=operator, unproven=True, hold=hold, local_dir=local_dir, storage_options=storage_options
        )

    try:
        state = open_target(True)
    except CannotHoldError:
        state = open_target(False)
    with state:
        count, example = _count_keys_in_two_buckets(state)
    if count:
        raise PartitionsChangedError(
            f"{count} keys are in several buckets, and so have several states, such as {example}: the number of "
            'partitions changed in a way that the state could not follow. See "A number that cannot be followed" in '
            "docs/operating/source-partitions.md"
        )


def _count_keys_in_two_buckets(state: OpenState) -> tuple[int, str]:
    """Count the keys that are in several buckets of one stream, and return one of them as an example."""
    count, example = 0, ""
    for buckets in _group_comparable_buckets(state.bucket_map):
        for rows in _merge_rows_by_hash(state, buckets):
            keys = [rows.column(first) for first in range(len(state.key_schema))]
            order, starts = group_by_key(read_hashes(rows), keys)
            if not len(starts):
                continue
            places = rows.column(BUCKET).to_numpy()[order]
            least, largest = np.minimum.reduceat(places, starts), np.maximum.reduceat(places, starts)
            several = np.flatnonzero(least != largest)
            if len(several) and not count:
                first = int(starts[several[0]])
                key = {
                    name: column[int(order[first])].as_py()
                    for name, column in zip(rows.schema.names, keys, strict=False)
                }
                example = f"{key} in buckets {least[several[0]]} and {largest[several[0]]}"
            count += len(several)
    return count, example


def _group_comparable_buckets(bucket_map: BucketMap) -> list[Sequence[int]]:
    """Return groups of buckets: a key may be in only one bucket of each group."""
    if bucket_map.group_by == BY_PARTITION:
        return [range(bucket_map.buckets)]
    firsts = [(bucket_map.first_of(stream), count) for stream, count in bucket_map.streams]
    return [range(first, first + count) for first, count in firsts]


def _merge_rows_by_hash(state: OpenState, buckets: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of all buckets, ascending by hash from batch to batch; all rows of a hash are in one batch.

    Rows whose hash is in only one bucket are left out.
    """
    fields = state.columns.fields([*state.key_schema.names, KEY_HASH, BUCKET])

    def read_bucket(bucket: int) -> Iterator[pa.RecordBatch]:
        return (state.columns.of(rows, fields, bucket) for rows in state.rows(bucket))

    sources = {bucket: read_bucket(bucket) for bucket in buckets}
    pending: dict[int, pa.RecordBatch] = {}
    while True:
        for bucket in [bucket for bucket in sources if bucket not in pending]:
            batch = next(sources[bucket], None)
            if batch is None:
                del sources[bucket]
            else:
                pending[bucket] = batch
        if not pending:
            return
        # All buckets' rows up to this hash have been read. (A batch has all rows of its hashes.)
        last = min(read_hashes(rows)[-1] for rows in pending.values())
        parts = []
        for bucket, rows in list(pending.items()):
            end = int(np.searchsorted(read_hashes(rows), last, side="right"))
            parts.append(rows.slice(0, end))
            if end == rows.num_rows:
                del pending[bucket]
            else:
                pending[bucket] = rows.slice(end)
        hashes = np.concatenate([read_hashes(rows) for rows in parts])
        _, positions, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        shared: IndexArray = np.flatnonzero(counts[positions.ravel()] > 1)
        if len(shared):
            merged = pa.Table.from_batches([rows for rows in parts if rows.num_rows])
            yield merged.take(pa.array(shared)).combine_chunks().to_batches()[0]
