"""Commands about checkpoint files of buckets: log, gc and why."""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from arrow_schemas.lineage import CheckpointRef, LineageHeader, parse_file_name
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.savepoint import MANIFEST_NAME
from spark_state_ext.cli.exit_codes import DONE, NO
from spark_state_ext.cli.options import (
    BucketsOption,
    OperatorOption,
    OutputOption,
    QueryFolderOption,
    QueryPath,
    RetainedOption,
    StorageOptions,
)
from spark_state_ext.cli.output import (
    Output,
    parse_columns,
    say,
    show_progress,
    write_record,
    write_records,
    write_table,
)
from spark_state_ext.cli.paths import find_query_folder, list_bucket_folders, open_folder, read_operator_in_force
from spark_state_ext.errors import CorruptError, MissingCheckpointError, MissingError, UsageError
from spark_state_ext.files.checkpoint import Announced, read_announced
from spark_state_ext.files.explanation import Explanation, explain
from spark_state_ext.files.folder import Entry, Folder, is_temporary
from spark_state_ext.files.header_cache import FileHeaders, KnownFiles
from spark_state_ext.files.layout import (
    CLAIM_FOLDER,
    HOLDS_FOLDER,
    PARENT,
    PARENTS_FOLDER,
    STARTING_FOLDER,
    kind_of,
)
from spark_state_ext.files.retention import Decision
from spark_state_ext.savepoints.claims import read_claim
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.worker.threads import map_in_parallel

__all__ = ["CheckpointEntry", "QueryChoice", "gc", "list_checkpoint_files", "log", "report_damage", "why"]

# Spark's default of spark.sql.streaming.minBatchesToRetain.
_RETAINED = 100
_LOG = parse_columns(
    "written time_ms, batch int, bucket int, version int, id, kind, rows int, tombstones int, bytes int, "
    "heartbeat int, host, problem"
)
# Aggregates over a batch's files: column, function, and name of the result.
_SUMS = [
    ("written", "max", "written"),
    ("bucket", "count_distinct", "buckets"),
    ("version", "min", "version_min"),
    ("version", "max", "version_max"),
    *((name, "sum", f"{name}s") for name in ("delta", "snapshot")),
    *((name, "sum", name) for name in ("rows", "tombstones", "bytes")),
]
_CLEAN_UP = parse_columns("does, bucket int, file, bytes int, why")
_WHY = parse_columns("file, kind, owner, does, why")


@dataclass(frozen=True, kw_only=True)
class QueryChoice:
    """The options that choose a query folder below a path."""

    operator: OperatorOption = None
    query_folder: QueryFolderOption = None
    storage_options: StorageOptions

    def find(self, path: str) -> tuple[Folder, OperatorFile]:
        """Return the query folder and the operator file in force there."""
        return find_query_folder(path, self.storage_options, self.operator, self.query_folder)


# -- log ------------------------------------------------------------------------------------------


def log(
    path: QueryPath,
    bucket: BucketsOption = None,
    files: Annotated[bool, typer.Option("--files", help="print a row for every file")] = False,
    *,
    choice: QueryChoice,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print a row for each batch that has checkpoint files in a query folder: versions, number of files and bytes.

    A batch has no row while its data is in Spark's checkpoint only, and after clean-up has deleted its files.
    """
    entries = list_checkpoint_files(*choice.find(path), bucket)
    table = pa.Table.from_pylist([_build_log_row(entry) for entry in entries], schema=_LOG)
    table = table.sort_by([("batch", "ascending"), ("written", "ascending"), ("bucket", "ascending")])
    write_table(table if files else _sum_by_batch(table), output)
    raise typer.Exit(report_damage(entries))


def list_checkpoint_files(
    folder: Folder, operator: OperatorFile, buckets: Sequence[int] | None
) -> list[CheckpointEntry]:
    """Return the checkpoint files of a query folder, or of some of its buckets."""
    folders = list_bucket_folders(folder)
    unknown = sorted(number for number in buckets or () if not 0 <= number < operator.buckets)
    if unknown:
        raise UsageError(
            f"{folder.root} has no bucket {unknown[0]}: it has {operator.buckets} buckets, numbered from 0"
        )
    return _read_checkpoint_entries([(number, files) for number, files in folders if not buckets or number in buckets])


def report_damage(files: Sequence[CheckpointEntry]) -> int:
    """Print which files cannot be read; return the exit code."""
    damaged = [file for file in files if file.problem]
    for file in damaged:
        say(file.problem)
    return NO if damaged else DONE


def _build_log_row(file: CheckpointEntry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "written": None if file.entry.modified_s is None else int(file.entry.modified_s * 1000),
        "bucket": file.bucket,
        "version": file.ref.version,
        "id": file.ref.id,
        "kind": file.kind,
        "bytes": file.entry.size_bytes,
        "problem": file.problem or None,
    }
    if file.announcement is not None:
        writer, body = file.announcement.header.writer, file.announcement.body
        row |= {"batch": writer.batch, "heartbeat": writer.heartbeat, "host": writer.host or None}
        row |= {"rows": body.rows, "tombstones": body.tombstones}
    return row


def _sum_by_batch(files: pa.Table) -> pa.Table:
    for kind in ("delta", "snapshot"):
        files = files.append_column(kind, pc.equal(files["kind"], kind).cast(pa.int64()))
    summed = files.group_by("batch").aggregate([(column, function) for column, function, _ in _SUMS])
    names = {f"{column}_{function}": name for column, function, name in _SUMS}
    summed = summed.rename_columns([names.get(name, name) for name in summed.column_names])
    return summed.select(["batch", *(name for *_, name in _SUMS)]).sort_by("batch")


# -- gc -------------------------------------------------------------------------------------------


def gc(
    path: QueryPath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="required: this command never deletes files")] = False,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="LOCATION", help="read the committed pointers of the query, with PySpark 4")
    ] = None,
    bucket: BucketsOption = None,
    retained: RetainedOption = _RETAINED,
    *,
    choice: QueryChoice,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print which files the next clean-up of a query folder would delete, and why it keeps the rest.

    Only Spark knows which checkpoint of a bucket is committed. Without --checkpoint this command assumes that it is the
    newest one. Files are deleted only by the query itself, in its batches.
    """
    if not dry_run:
        raise UsageError(
            "only the query itself deletes its files, in its batches: give --dry-run to see what it would delete"
        )
    folder, operator = choice.find(path)
    all_buckets = list_bucket_folders(folder)
    chosen = [(number, files) for number, files in all_buckets if not bucket or number in bucket]
    if bucket and len(chosen) < len(set(bucket)):
        raise UsageError(f"{folder.root} has no bucket {min(set(bucket) - {number for number, _ in all_buckets})}")
    pointers = None
    if checkpoint is not None:
        from spark_state_ext.cli.sessions import get_session, read_pointers

        pointers = read_pointers(get_session(checkpoint), checkpoint, operator.operator, folder.name)
    clean_ups = []
    with show_progress("deciding", len(chosen)) as advance:
        for number, files in chosen:
            clean_ups.append(_plan_clean_up(number, files, operator, retained, pointers))
            advance(1)
    write_records([row for clean_up in clean_ups for row in _build_clean_up_rows(clean_up)], _CLEAN_UP, output)
    deletable = [entry for clean_up in clean_ups for entry in clean_up.entries if clean_up.explanation.goes(entry.name)]
    file_count = sum(len(clean_up.entries) for clean_up in clean_ups)
    say(
        f"buckets={len(clean_ups)} files={file_count} going={len(deletable)} "
        f"bytes={sum(entry.size_bytes for entry in deletable)}"
    )
    if held_by := _list_holds(folder):
        say(f"clean-up deletes no files while these holds protect the query folder: {', '.join(held_by)}")
    if pointers is None:
        say(
            "this assumes that the newest checkpoint of each bucket is the committed one: give --checkpoint to read "
            "which one is"
        )


def _build_clean_up_rows(clean_up: BucketCleanUp) -> list[dict[str, Any]]:
    return [
        {
            "does": "goes" if clean_up.explanation.goes(entry.name) else "stays",
            "bucket": clean_up.bucket,
            "file": entry.name,
            "bytes": entry.size_bytes,
            "why": clean_up.explanation.reasons[entry.name],
        }
        for entry in sorted(clean_up.entries, key=_sort_key)
    ]


def _sort_key(entry: Entry) -> tuple[int, str]:
    """Return a sort key: by version; files without a version come first."""
    name_parts = parse_file_name(entry.name)
    return (0 if name_parts is None else name_parts[0].version, entry.name)


# -- why ------------------------------------------------------------------------------------------


def why(
    file: Annotated[str, typer.Argument(help="a file below a root or in a savepoint: an absolute path or a URL")],
    retained: RetainedOption = _RETAINED,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what a file is, who owns it, whether the next clean-up deletes it, and why it is still there."""
    parent, name = posixpath.split(file.rstrip("/"))
    folder = open_folder(parent or ".", storage_options)
    if not folder.exists(name):
        raise MissingCheckpointError(f"there is no file {folder.where(name)}")
    if any(entry.folder and entry.name == name for entry in folder.entries()):
        raise UsageError(f"{folder.where(name)} is a folder: name a file in it")
    ownership = _find_owner(folder, name, storage_options, retained)
    write_record({"file": folder.where(name), **vars(ownership)}, _WHY, output)


_PARALLEL_MAX = 8


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint file."""

    bucket: int
    entry: Entry
    # From its name.
    ref: CheckpointRef
    kind: str
    # From its contents; None if they cannot be read.
    announcement: Announced | None
    # Why it cannot be read; empty if it can.
    problem: str = ""

    @property
    def header(self) -> LineageHeader | None:
        """The lineage header; None if it cannot be read."""
        return None if self.announcement is None else self.announcement.header


def _read_checkpoint_entries(buckets: Sequence[tuple[int, Folder]]) -> list[CheckpointEntry]:
    """Return the checkpoint files of buckets, with two small reads each, by bucket, version, id and kind."""
    candidates = [
        (bucket, folder, entry, parsed)
        for bucket, folder in buckets
        for entry in folder.entries()
        if not entry.folder and (parsed := parse_file_name(entry.name)) is not None
    ]

    def read(candidate: tuple[int, Folder, Entry, tuple[CheckpointRef, str]]) -> CheckpointEntry:
        bucket, folder, entry, (ref, kind) = candidate
        try:
            return CheckpointEntry(bucket, entry, ref, kind, read_announced(folder, ref, kind))
        except (CorruptError, MissingError) as error:
            return CheckpointEntry(bucket, entry, ref, kind, None, str(error))

    entries = map_in_parallel("headers", _PARALLEL_MAX, read, candidates) if candidates else []
    return sorted(entries, key=lambda entry: (entry.bucket, entry.ref, entry.kind))


def _suggest_pointer(
    files: Sequence[CheckpointEntry], operator: OperatorFile, bucket: int, batches_retained: int
) -> Pointer:
    """Return a pointer to a bucket's newest checkpoint, as an estimate of the committed pointer.

    Only Spark knows the committed pointer. It has counted at least as many heartbeats. So if the newest checkpoint is
    from the committed attempt, the next clean-up deletes at least what it would delete with this pointer.
    """
    headers = [file.header for file in files if file.header is not None]
    empty = Pointer(operator.operator, bucket, operator.buckets, operator.schema_id, -1, None)
    if not headers:
        return empty
    newest = max(headers, key=lambda header: (header.writer.heartbeat, header.ref))
    heartbeat = newest.writer.heartbeat
    return Pointer(
        operator.operator,
        bucket,
        operator.buckets,
        newest.schema_id,
        newest.writer.batch,
        None,
        lineage=tuple(LineageEntry(ref, 0, heartbeat) for ref in (*newest.lineage, newest.ref)),
        parent=newest.parent,
        heartbeats=heartbeat,
        retained=batches_retained,
        retained_heartbeat=heartbeat,
    )


@dataclass(frozen=True)
class BucketCleanUp:
    """The files of a bucket's folder, and what the next clean-up would do with each, and why."""

    bucket: int
    entries: list[Entry]
    explanation: Explanation


def _plan_clean_up(
    bucket: int, folder: Folder, operator: OperatorFile, batches_retained: int, pointers: Mapping[int, Pointer] | None
) -> BucketCleanUp:
    """Decide what the next clean-up would do in a bucket's folder."""
    entries = folder.entries()
    pointer = (
        _suggest_pointer(_read_checkpoint_entries([(bucket, folder)]), operator, bucket, batches_retained)
        if pointers is None
        else _cut_to_files(pointers.get(bucket), operator, bucket, entries)
    )
    headers = FileHeaders(folder, {entry.name for entry in entries}, KnownFiles())
    try:
        explanation = explain(entries, pointer, batches_retained, time.time(), headers)
    except (CorruptError, MissingError) as error:
        reason = f"clean-up deletes no file of this bucket, because {error}"
        explanation = Explanation(Decision(doubt=str(error)), {entry.name: reason for entry in entries})
    return BucketCleanUp(bucket, entries, explanation)


def _cut_to_files(pointer: Pointer | None, operator: OperatorFile, bucket: int, entries: list[Entry]) -> Pointer:
    """Cut a pointer's lineage after its newest checkpoint that has a file; later ones are in Spark's state only."""
    if pointer is None:
        return Pointer(operator.operator, bucket, operator.buckets, operator.schema_id, -1, None)
    names = {entry.name.rsplit(".", 2)[0] for entry in entries}
    lineage = list(pointer.lineage)
    while len(lineage) > 1 and str(lineage[-1].ref) not in names:
        lineage.pop()
    parent = pointer.parent if len(lineage) == len(pointer.lineage) else None
    return replace(pointer, lineage=tuple(lineage), parent=parent)


def _list_holds(query_folder: Folder) -> list[str]:
    """Return the names of the holds in a query folder; clean-up deletes no file while a hold is alive."""
    return [entry.name for entry in query_folder.child(HOLDS_FOLDER).entries() if not entry.folder]


_GOES, _STAYS = "goes", "stays"
_YOU = "you"


@dataclass(frozen=True)
class _Ownership:
    """The owner of a file, and what clean-up does with it."""

    kind: str
    # Who may delete it.
    owner: str
    # What the next clean-up does with it: `_GOES` or `_STAYS`.
    does: str
    why: str


def _find_owner(folder: Folder, name: str, storage_options: Mapping[str, Any], batches_retained: int) -> _Ownership:
    """Find out who owns a file."""
    parent = _parent_folder(folder, storage_options)
    if name == MANIFEST_NAME:
        return _Ownership(
            "manifest", _YOU, _STAYS, "without it this folder is not a savepoint; savepoint delete removes it last"
        )
    if folder.name == CLAIM_FOLDER and MANIFEST_NAME in parent.names():
        return _find_claim_owner(parent)
    if PARENTS_FOLDER in (folder.name, parent.name):
        query_folder = parent if folder.name == PARENTS_FOLDER else _parent_folder(parent, storage_options)
        return _Ownership(PARENT.name, f"the query at {query_folder.root}", _STAYS, PARENT.why)
    if is_temporary(name) or parse_file_name(name) is not None:
        return _find_bucket_file_owner(folder, name, storage_options, batches_retained)
    if folder.name == STARTING_FOLDER:
        return _Ownership("record of a first batch", "the query", _GOES, "a later batch removes it after 30 days")
    for query_folder, path in ((folder, name), (parent, f"{folder.name}/{name}")):
        kind = kind_of(path)
        if kind is not None:
            # Spill files may lie next to query folders, and are deleted whichever query wrote them.
            owner = "the query" if kind.goes else f"the query at {query_folder.root}"
            return _Ownership(kind.name, owner, _GOES if kind.goes else _STAYS, kind.why)
    return _Ownership(
        "file", _YOU, _STAYS, "it is not a file of this package; in a bucket's folder it stops every clean-up"
    )


def _find_bucket_file_owner(
    folder: Folder, name: str, storage_options: Mapping[str, Any], batches_retained: int
) -> _Ownership:
    name_parts = parse_file_name(name)
    kind = "temporary file" if name_parts is None else f"{name_parts[1]} file"
    query_folder = _parent_folder(folder, storage_options)
    savepoint = _parent_folder(query_folder, storage_options)
    if MANIFEST_NAME in savepoint.names():
        return _find_savepoint_file_owner(savepoint, query_folder.name, folder.name, name, kind)
    operator = read_operator_in_force(query_folder)
    held_by = _list_holds(query_folder)
    clean_up = _plan_clean_up(
        int(folder.name) if folder.name.isdecimal() else 0, folder, operator, batches_retained, None
    )
    why = clean_up.explanation.reasons[name]
    action = _GOES if clean_up.explanation.goes(name) else _STAYS
    if held_by and action == _GOES:
        return _Ownership(
            kind, f"the query at {query_folder.root}", _STAYS, f"a hold protects the query folder: {held_by[0]}"
        )
    return _Ownership(kind, f"the query at {query_folder.root}", action, why)


def _find_savepoint_file_owner(savepoint: Folder, operator: str, bucket: str, name: str, kind: str) -> _Ownership:
    manifest = read_manifest(savepoint)
    is_named = any(
        file.name == name
        for saved_bucket in manifest.buckets
        if (saved_bucket.operator, str(saved_bucket.bucket)) == (operator, bucket)
        for file in saved_bucket.files
    )
    claim = read_claim(savepoint)
    owner = _YOU if claim is None else f"the query at {claim.by}"
    if not is_named:
        return _Ownership(
            kind, _YOU, _STAYS, f"it is in the savepoint at {savepoint.root}, but its manifest does not name it"
        )
    return _Ownership(kind, owner, _STAYS, f"the savepoint {manifest.header.id} at {savepoint.root} needs it")


def _find_claim_owner(savepoint: Folder) -> _Ownership:
    claim = read_claim(savepoint)
    by = "a query" if claim is None else f"the query at {claim.by}"
    return _Ownership("claim", by, _STAYS, f"{by} owns the savepoint and will delete it; savepoint release frees it")


def _parent_folder(folder: Folder, storage_options: Mapping[str, Any]) -> Folder:
    """Return the folder above a folder; the folder itself if there is no folder above it."""
    root = folder.root.rstrip("/")
    parent = posixpath.dirname(root) or posixpath.dirname(os.path.abspath(root))
    if not parent or parent.endswith(":/"):
        return folder
    return Folder(parent, storage_options)
