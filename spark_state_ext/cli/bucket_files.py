"""Checkpoint files of buckets: log, gc and why."""

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
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.options import (
    BucketsOption,
    OperatorOption,
    OutputOption,
    QueryFolderOption,
    QueryPath,
    RetainedOption,
    StorageOptions,
)
from spark_state_ext.cli.output import Output, columns, progress, say, write_record, write_records, write_table
from spark_state_ext.cli.paths import bucket_folders, given_folder, query_folder_at, query_folder_of
from spark_state_ext.errors import CorruptError, MissingCheckpointError, MissingError, UsageError
from spark_state_ext.files.checkpoint import Announced, announced
from spark_state_ext.files.explained import Explanation, explained
from spark_state_ext.files.folder import Entry, Folder, is_temporary
from spark_state_ext.files.known_files import FileHeaders, KnownFiles
from spark_state_ext.files.layout import (
    CLAIM_FOLDER,
    HOLDS_FOLDER,
    PARENT,
    PARENTS_FOLDER,
    STARTING_FOLDER,
    kind_of,
)
from spark_state_ext.files.retention import Decision
from spark_state_ext.savepoints.claims import claim_of
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.worker.threads import side_by_side

__all__ = ["CheckpointEntry", "QueryChoice", "files_of", "gc", "log", "report_damage", "why"]

# Spark's own default of spark.sql.streaming.minBatchesToRetain.
_RETAINED = 100
_LOG = columns(
    "written time_ms, batch int, bucket int, version int, id, kind, rows int, tombstones int, bytes int, "
    "heartbeat int, host, problem"
)
# What is summed up over a batch's files, and under which name.
_SUMS = [
    ("written", "max", "written"),
    ("bucket", "count_distinct", "buckets"),
    ("version", "min", "version_min"),
    ("version", "max", "version_max"),
    *((name, "sum", f"{name}s") for name in ("delta", "snapshot")),
    *((name, "sum", name) for name in ("rows", "tombstones", "bytes")),
]
_CLEAN_UP = columns("does, bucket int, file, bytes int, why")
_WHY = columns("file, kind, owner, does, why")


@dataclass(frozen=True, kw_only=True)
class QueryChoice:
    """Which query folder of a path is meant."""

    operator: OperatorOption = None
    query_folder: QueryFolderOption = None
    storage_options: StorageOptions

    def find(self, path: str) -> tuple[Folder, OperatorFile]:
        """The folder, and the operator file in force there."""
        return query_folder_of(path, self.storage_options, self.operator, self.query_folder)


# -- log ------------------------------------------------------------------------------------------


def log(
    path: QueryPath,
    bucket: BucketsOption = None,
    files: Annotated[bool, typer.Option("--files", help="every file")] = False,
    *,
    choice: QueryChoice,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print a row for each batch that has checkpoint files in a query folder: which versions, how many files and bytes.

    A batch whose rows are in Spark's checkpoint only has none yet, and those that clean-up has deleted have none any
    more.
    """
    found = files_of(*choice.find(path), bucket)
    table = pa.Table.from_pylist([_log_row(it) for it in found], schema=_LOG)
    table = table.sort_by([("batch", "ascending"), ("written", "ascending"), ("bucket", "ascending")])
    write_table(table if files else _by_batch(table), output)
    raise typer.Exit(report_damage(found))


def files_of(folder: Folder, operator: OperatorFile, buckets: Sequence[int] | None) -> list[CheckpointEntry]:
    """The checkpoint files of a query folder, or of some of its buckets."""
    wanted = bucket_folders(folder)
    unknown = sorted(number for number in buckets or () if not 0 <= number < operator.buckets)
    if unknown:
        raise UsageError(f"{folder.root} has no bucket {unknown[0]}: there are {operator.buckets}, from 0")
    return _checkpoint_files([(number, files) for number, files in wanted if not buckets or number in buckets])


def report_damage(files: Sequence[CheckpointEntry]) -> int:
    """Say which files cannot be read; gives the exit code."""
    damaged = [it for it in files if it.problem]
    for it in damaged:
        say(it.problem)
    return NO if damaged else DONE


def _log_row(file: CheckpointEntry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "written": None if file.entry.modified_s is None else int(file.entry.modified_s * 1000),
        "bucket": file.bucket,
        "version": file.ref.version,
        "id": file.ref.id,
        "kind": file.kind,
        "bytes": file.entry.size_bytes,
        "problem": file.problem or None,
    }
    if file.said is not None:
        writer, body = file.said.header.writer, file.said.body
        row |= {"batch": writer.batch, "heartbeat": writer.heartbeat, "host": writer.host or None}
        row |= {"rows": body.rows, "tombstones": body.tombstones}
    return row


def _by_batch(files: pa.Table) -> pa.Table:
    for kind in ("delta", "snapshot"):
        files = files.append_column(kind, pc.equal(files["kind"], kind).cast(pa.int64()))
    summed = files.group_by("batch").aggregate([(column, how) for column, how, _ in _SUMS])
    names = {f"{column}_{how}": name for column, how, name in _SUMS}
    summed = summed.rename_columns([names.get(name, name) for name in summed.column_names])
    return summed.select(["batch", *(name for *_, name in _SUMS)]).sort_by("batch")


# -- gc -------------------------------------------------------------------------------------------


def gc(
    path: QueryPath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="the only way: it deletes nothing")] = False,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="LOCATION", help="read the committed pointers of the query, with PySpark 4")
    ] = None,
    bucket: BucketsOption = None,
    retained: RetainedOption = _RETAINED,
    *,
    choice: QueryChoice,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say which files the next clean-up of a query folder would delete, and why it keeps the rest.

    Without --checkpoint the newest checkpoint of each bucket is taken for the committed one, as only Spark knows which
    that is. The query itself deletes, in its batches.
    """
    if not dry_run:
        raise UsageError(
            "a query deletes its files itself, in its batches, and nobody else may: give --dry-run to see what it "
            "would delete"
        )
    folder, in_force = choice.find(path)
    found = bucket_folders(folder)
    wanted = [(number, files) for number, files in found if not bucket or number in bucket]
    if bucket and len(wanted) < len(set(bucket)):
        raise UsageError(f"{folder.root} has no bucket {min(set(bucket) - {number for number, _ in found})}")
    pointers = None
    if checkpoint is not None:
        from spark_state_ext.cli.sessions import pointers_of, session

        pointers = pointers_of(session(checkpoint), checkpoint, in_force.operator, folder.name)
    done = []
    with progress("deciding", len(wanted)) as advance:
        for number, files in wanted:
            done.append(_clean_up_of(number, files, in_force, retained, pointers))
            advance(1)
    write_records([row for it in done for row in _clean_up_rows(it)], _CLEAN_UP, output)
    going = [entry for it in done for entry in it.entries if it.explanation.goes(entry.name)]
    files_seen = sum(len(it.entries) for it in done)
    say(f"buckets={len(done)} files={files_seen} going={len(going)} bytes={sum(entry.size_bytes for entry in going)}")
    if held_by := _holders(folder):
        say(f"nothing is deleted while somebody copies from here: {', '.join(held_by)}")
    if pointers is None:
        say("the newest checkpoint of each bucket was taken for the committed one: --checkpoint tells which that is")


def _clean_up_rows(done: BucketCleanUp) -> list[dict[str, Any]]:
    return [
        {
            "does": "goes" if done.explanation.goes(entry.name) else "stays",
            "bucket": done.bucket,
            "file": entry.name,
            "bytes": entry.size_bytes,
            "why": done.explanation.reasons[entry.name],
        }
        for entry in sorted(done.entries, key=_order)
    ]


def _order(entry: Entry) -> tuple[int, str]:
    """By version; what has none comes first."""
    parsed = parse_file_name(entry.name)
    return (0 if parsed is None else parsed[0].version, entry.name)


# -- why ------------------------------------------------------------------------------------------


def why(
    file: Annotated[str, typer.Argument(help="a file of a root or of a savepoint: an absolute path or a URL")],
    retained: RetainedOption = _RETAINED,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what a file is, whose it is, whether the next clean-up deletes it, and why it is still there."""
    above, name = posixpath.split(file.rstrip("/"))
    folder = given_folder(above or ".", storage_options)
    if not folder.exists(name):
        raise MissingCheckpointError(f"there is no file {folder.where(name)}")
    if any(it.folder and it.name == name for it in folder.entries()):
        raise UsageError(f"{folder.where(name)} is a folder: name a file in it")
    owned = _owner_of(folder, name, storage_options, retained)
    write_record({"file": folder.where(name), **vars(owned)}, _WHY, output)


_PARALLEL_MAX = 8


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint file."""

    bucket: int
    entry: Entry
    # What its name tells.
    ref: CheckpointRef
    kind: str
    # What it says of itself; None where that cannot be read.
    said: Announced | None
    # Why it cannot; empty where it can.
    problem: str = ""

    @property
    def header(self) -> LineageHeader | None:
        """Its lineage header; None where it cannot be read."""
        return None if self.said is None else self.said.header


def _checkpoint_files(buckets: Sequence[tuple[int, Folder]]) -> list[CheckpointEntry]:
    """The checkpoint files of buckets, by two small reads each; in order of bucket, version, id and kind."""
    found = [
        (bucket, folder, entry, parsed)
        for bucket, folder in buckets
        for entry in folder.entries()
        if not entry.folder and (parsed := parse_file_name(entry.name)) is not None
    ]

    def read(it: tuple[int, Folder, Entry, tuple[CheckpointRef, str]]) -> CheckpointEntry:
        bucket, folder, entry, (ref, kind) = it
        try:
            return CheckpointEntry(bucket, entry, ref, kind, announced(folder, ref, kind))
        except (CorruptError, MissingError) as error:
            return CheckpointEntry(bucket, entry, ref, kind, None, str(error))

    read_files = side_by_side("headers", _PARALLEL_MAX, read, found) if found else []
    return sorted(read_files, key=lambda it: (it.bucket, it.ref, it.kind))


def _suggested_pointer(
    files: Sequence[CheckpointEntry], operator: OperatorFile, bucket: int, batches_retained: int
) -> Pointer:
    """The pointer that a bucket's files suggest: its newest checkpoint is taken for the committed one.

    Only Spark knows the committed pointer. That one has counted no fewer heartbeats, so that the next clean-up deletes
    no less than it would by this one, where the newest checkpoint is of the attempt that was committed.
    """
    readable = [it.header for it in files if it.header is not None]
    none = Pointer(operator.operator, bucket, operator.buckets, operator.schema_id, -1, None)
    if not readable:
        return none
    newest = max(readable, key=lambda it: (it.writer.heartbeat, it.ref))
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
    """What the next clean-up would do with the files of a bucket's folder."""

    bucket: int
    entries: list[Entry]
    explanation: Explanation


def _clean_up_of(
    bucket: int, folder: Folder, operator: OperatorFile, batches_retained: int, pointers: Mapping[int, Pointer] | None
) -> BucketCleanUp:
    """Decide for a bucket."""
    entries = folder.entries()
    pointer = (
        _suggested_pointer(_checkpoint_files([(bucket, folder)]), operator, bucket, batches_retained)
        if pointers is None
        else _reached(pointers.get(bucket), operator, bucket, entries)
    )
    headers = FileHeaders(folder, {entry.name for entry in entries}, KnownFiles())
    try:
        found = explained(entries, pointer, batches_retained, time.time(), headers)
    except (CorruptError, MissingError) as error:
        reason = f"nothing is deleted here, as {error}"
        found = Explanation(Decision(doubt=str(error)), {entry.name: reason for entry in entries})
    return BucketCleanUp(bucket, entries, found)


def _reached(pointer: Pointer | None, operator: OperatorFile, bucket: int, entries: list[Entry]) -> Pointer:
    """The pointer back to its newest checkpoint that has a file here: later ones are in Spark's state only."""
    if pointer is None:
        return Pointer(operator.operator, bucket, operator.buckets, operator.schema_id, -1, None)
    names = {entry.name.rsplit(".", 2)[0] for entry in entries}
    lineage = list(pointer.lineage)
    while len(lineage) > 1 and str(lineage[-1].ref) not in names:
        lineage.pop()
    parent = pointer.parent if len(lineage) == len(pointer.lineage) else None
    return replace(pointer, lineage=tuple(lineage), parent=parent)


def _holders(query_folder: Folder) -> list[str]:
    """Names of the holds in a query folder: nothing is deleted while one of them lives."""
    return [entry.name for entry in query_folder.child(HOLDS_FOLDER).entries() if not entry.folder]


_GOES, _STAYS = "goes", "stays"
_YOU = "you"


@dataclass(frozen=True)
class _Owned:
    """Whose a file is."""

    kind: str
    # Who may delete it.
    owner: str
    # Whether the next clean-up deletes it: `_GOES` or `_STAYS`.
    does: str
    why: str


def _owner_of(folder: Folder, name: str, storage_options: Mapping[str, Any], batches_retained: int) -> _Owned:
    """Find out whose a file is."""
    above = _above(folder, storage_options)
    if name == MANIFEST_NAME:
        return _Owned(
            "manifest", _YOU, _STAYS, "without it there is no savepoint here; savepoint delete removes it last"
        )
    if folder.name == CLAIM_FOLDER and MANIFEST_NAME in above.names():
        return _of_claim(above)
    if PARENTS_FOLDER in (folder.name, above.name):
        query_folder = above if folder.name == PARENTS_FOLDER else _above(above, storage_options)
        return _Owned(PARENT.name, f"the query at {query_folder.root}", _STAYS, PARENT.why)
    if is_temporary(name) or parse_file_name(name) is not None:
        return _in_bucket(folder, name, storage_options, batches_retained)
    if folder.name == STARTING_FOLDER:
        return _Owned("record of a first batch", "the query", _GOES, "a later batch removes it after 30 days")
    for query_folder, path in ((folder, name), (above, f"{folder.name}/{name}")):
        kind = kind_of(path)
        if kind is not None:
            # Spill files may lie beside query folders, and go whosever they are.
            owner = "the query" if kind.goes else f"the query at {query_folder.root}"
            return _Owned(kind.name, owner, _GOES if kind.goes else _STAYS, kind.why)
    return _Owned("file", _YOU, _STAYS, "it is none of ours, and in a bucket's folder it stops every clean-up")


def _in_bucket(folder: Folder, name: str, storage_options: Mapping[str, Any], batches_retained: int) -> _Owned:
    parsed = parse_file_name(name)
    kind = "temporary file" if parsed is None else f"{parsed[1]} file"
    above = _above(folder, storage_options)
    savepoint = _above(above, storage_options)
    if MANIFEST_NAME in savepoint.names():
        return _in_savepoint(savepoint, above.name, folder.name, name, kind)
    operator = query_folder_at(above)
    held_by = _holders(above)
    found = _clean_up_of(int(folder.name) if folder.name.isdecimal() else 0, folder, operator, batches_retained, None)
    why = found.explanation.reasons[name]
    does = _GOES if found.explanation.goes(name) else _STAYS
    if held_by and does == _GOES:
        return _Owned(
            kind, f"the query at {above.root}", _STAYS, f"somebody copies from the query folder: {held_by[0]}"
        )
    return _Owned(kind, f"the query at {above.root}", does, why)


def _in_savepoint(savepoint: Folder, operator: str, bucket: str, name: str, kind: str) -> _Owned:
    manifest = read_manifest(savepoint)
    named = any(
        file.name == name
        for it in manifest.buckets
        if (it.operator, str(it.bucket)) == (operator, bucket)
        for file in it.files
    )
    claim = claim_of(savepoint)
    owner = _YOU if claim is None else f"the query at {claim.by}"
    if not named:
        return _Owned(
            kind, _YOU, _STAYS, f"it lies in the savepoint at {savepoint.root}, whose manifest does not name it"
        )
    return _Owned(kind, owner, _STAYS, f"the savepoint {manifest.header.id} at {savepoint.root} needs it")


def _of_claim(savepoint: Folder) -> _Owned:
    claim = claim_of(savepoint)
    by = "a query" if claim is None else f"the query at {claim.by}"
    return _Owned("claim", by, _STAYS, f"{by} owns the savepoint, and deletes it; savepoint release frees it")


def _above(folder: Folder, storage_options: Mapping[str, Any]) -> Folder:
    """The folder that one lies in; the same where there is none above it."""
    root = folder.root.rstrip("/")
    above = posixpath.dirname(root) or posixpath.dirname(os.path.abspath(root))
    if not above or above.endswith(":/"):
        return folder
    return Folder(above, storage_options)
