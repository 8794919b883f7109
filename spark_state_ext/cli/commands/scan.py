"""``scan``: all keys and their state, or those that a filter is true of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.filters import filter_of
from spark_state_ext.cli.opening import (
    AtOption,
    CheckpointOption,
    HoldOption,
    OperatorOption,
    QueryFolderOption,
    StatePath,
    UnprovenOption,
    opened,
)
from spark_state_ext.cli.output import Output, say, write_rows
from spark_state_ext.cli.parameters import OutputOption, StorageOptions

__all__ = ["command"]

# Beside those of the schema.
_MORE = (("defined", pa.bool_()), ("key_hash", pa.uint64()), ("bucket", pa.int32()))


def command(
    path: StatePath,
    columns: Annotated[str | None, typer.Option(metavar="NAMES", help="separated by commas")] = None,
    filter_text: Annotated[
        str | None, typer.Option("--filter", metavar="TEXT", help="as in: count > 10 and name in ('ann', 'bob')")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="rows at most")] = None,
    bucket: Annotated[list[int] | None, typer.Option(metavar="N", help="this bucket only")] = None,
    at: AtOption = None,
    checkpoint: CheckpointOption = None,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    unproven: UnprovenOption = False,
    hold: HoldOption = True,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Print keys with their state, bucket by bucket, in the order of the keys' hashes.

    Beside the key and state columns there are defined (false: the key has only a timeout), key_hash and bucket.
    """
    with opened(path, at, operator, query_folder, unproven, hold, storage_options, checkpoint) as state:
        known = pa.schema([*state.schema, *(pa.field(name, kind) for name, kind in _MORE)])
        names = None if columns is None else [name.strip() for name in columns.split(",")]
        condition = None if filter_text is None else filter_of(filter_text, known)
        reader = state.scan(names, filter=condition, buckets=bucket)
        rows = write_rows(reader.schema, reader if limit is None else limited(reader, limit), output)
        say(f"rows={rows} {state.unit}={state.batch}")


def limited(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The first rows; no more batches are read than these need."""
    if not rows:
        return
    for batch in batches:
        yield batch.slice(0, rows)
        rows -= batch.num_rows
        if rows <= 0:
            return
