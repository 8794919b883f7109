"""``log``: versions, batches and sizes of checkpoint files, by time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import pyarrow as pa
import typer

from arrow_schemas.operator import OperatorFile
from spark_state_ext.cli.bucket_files import CheckpointEntry, checkpoint_files
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.opening import OperatorOption, QueryFolderOption, QueryPath
from spark_state_ext.cli.output import Output, say, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.targets import bucket_folders, query_folder_of
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder

__all__ = ["command", "files_of"]

_FILES = pa.schema(
    [
        ("written", pa.timestamp("ms", "UTC")),
        ("batch", pa.int64()),
        ("bucket", pa.int64()),
        ("version", pa.int64()),
        ("id", pa.string()),
        ("kind", pa.string()),
        ("rows", pa.int64()),
        ("tombstones", pa.int64()),
        ("bytes", pa.int64()),
        ("heartbeat", pa.int64()),
        ("host", pa.string()),
        ("problem", pa.string()),
    ]
)
# What is summed up over a batch's files, and under which name.
_SUMS = [
    ("written", "max", "written"),
    ("bucket", "count_distinct", "buckets"),
    ("version", "min", "version_min"),
    ("version", "max", "version_max"),
    ("delta", "sum", "deltas"),
    ("snapshot", "sum", "snapshots"),
    ("rows", "sum", "rows"),
    ("tombstones", "sum", "tombstones"),
    ("bytes", "sum", "bytes"),
]


def command(
    path: QueryPath,
    bucket: Annotated[list[int] | None, typer.Option(metavar="N", help="this bucket only")] = None,
    files: Annotated[bool, typer.Option("--files", help="every file")] = False,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Print a row for each batch that has checkpoint files in a query folder: which versions, how many files and bytes.

    A batch whose rows are in Spark's checkpoint only has none yet, and those that clean-up has deleted have none any
    more.
    """
    folder, in_force = query_folder_of(path, options_of(storage_options), operator, query_folder)
    found = files_of(folder, in_force, bucket)
    table = pa.Table.from_pylist([_row(it) for it in found], schema=_FILES)
    table = table.sort_by([("batch", "ascending"), ("written", "ascending"), ("bucket", "ascending")])
    write_table(table if files else _by_batch(table), output)
    damaged = [it for it in found if it.problem]
    for it in damaged:
        say(it.problem)
    raise typer.Exit(NO if damaged else DONE)


def files_of(folder: Folder, operator: OperatorFile, buckets: Sequence[int] | None) -> list[CheckpointEntry]:
    """The checkpoint files of a query folder, or of some of its buckets."""
    wanted = bucket_folders(folder)
    unknown = sorted(number for number in buckets or () if not 0 <= number < operator.buckets)
    if unknown:
        raise UsageError(f"{folder.root} has no bucket {unknown[0]}: there are {operator.buckets}, from 0")
    return checkpoint_files([(number, files) for number, files in wanted if not buckets or number in buckets])


def _row(file: CheckpointEntry) -> dict[str, Any]:
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
    import pyarrow.compute as pc

    for kind in ("delta", "snapshot"):
        files = files.append_column(kind, pc.equal(files["kind"], kind).cast(pa.int64()))
    summed = files.group_by("batch").aggregate([(column, how) for column, how, _ in _SUMS])
    names = {f"{column}_{how}": name for column, how, name in _SUMS}
    summed = summed.rename_columns([names.get(name, name) for name in summed.column_names])
    return summed.select(["batch", *(name for *_, name in _SUMS)]).sort_by("batch")
