"""``gc --dry-run``: which files the next clean-up would delete, and why it keeps the rest."""

from __future__ import annotations

from typing import Annotated, Any

import pyarrow as pa
import typer

from arrow_schemas.lineage import parse_file_name
from spark_state_ext.cli.clean_ups import RETAINED, BucketCleanUp, clean_up_of, holders
from spark_state_ext.cli.opening import OperatorOption, QueryFolderOption, QueryPath
from spark_state_ext.cli.output import Output, progress, say, table_of, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.targets import bucket_folders, query_folder_of
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Entry

__all__ = ["RetainedOption", "command"]

RetainedOption = Annotated[
    int, typer.Option("--retained", min=1, metavar="N", help="Spark's spark.sql.streaming.minBatchesToRetain")
]
_ROWS = pa.schema(
    [("does", pa.string()), ("bucket", pa.int64()), ("file", pa.string()), ("bytes", pa.int64()), ("why", pa.string())]
)


def command(
    path: QueryPath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="the only way: it deletes nothing")] = False,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="LOCATION", help="read the committed pointers of the query, with PySpark 4")
    ] = None,
    bucket: Annotated[list[int] | None, typer.Option(metavar="N", help="this bucket only")] = None,
    retained: RetainedOption = RETAINED,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    storage_options: StorageOptions = "{}",
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
    folder, in_force = query_folder_of(path, options_of(storage_options), operator, query_folder)
    found = bucket_folders(folder)
    wanted = [(number, files) for number, files in found if not bucket or number in bucket]
    if bucket and len(wanted) < len(set(bucket)):
        raise UsageError(f"{folder.root} has no bucket {min(set(bucket) - {number for number, _ in found})}")
    pointers = None
    if checkpoint is not None:
        from spark_state_ext.cli.query_folders import pointers_of, session

        pointers = pointers_of(session(checkpoint), checkpoint, in_force.operator, folder.name)
    done = []
    with progress("deciding", len(wanted)) as advance:
        for number, files in wanted:
            done.append(clean_up_of(number, files, in_force, retained, pointers))
            advance(1)
    write_table(table_of([row for it in done for row in _rows(it)], _ROWS), output)
    _sum_up(done, holders(folder), pointers is None)


def _rows(done: BucketCleanUp) -> list[dict[str, Any]]:
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


def _sum_up(done: list[BucketCleanUp], held_by: list[str], suggested: bool) -> None:
    going = [entry for it in done for entry in it.entries if it.explanation.goes(entry.name)]
    files = sum(len(it.entries) for it in done)
    say(f"buckets={len(done)} files={files} going={len(going)} bytes={sum(entry.size_bytes for entry in going)}")
    if held_by:
        say(f"nothing is deleted while somebody copies from here: {', '.join(held_by)}")
    if suggested:
        say("the newest checkpoint of each bucket was taken for the committed one: --checkpoint tells which that is")
