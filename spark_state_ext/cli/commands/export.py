"""``export``: rows of a state to a Parquet or Arrow file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.exporting import exported
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
from spark_state_ext.cli.output import progress, say
from spark_state_ext.cli.parameters import StorageOptions, options_for, options_of
from spark_state_ext.reading.state import OpenState

__all__ = ["command"]


def command(
    path: StatePath,
    to: Annotated[str, typer.Argument(metavar="FILE", help="a path or URL that ends in .parquet or .arrow")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="also where the file is there")] = False,
    at: AtOption = None,
    checkpoint: CheckpointOption = None,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    unproven: UnprovenOption = False,
    hold: HoldOption = True,
    storage_options: StorageOptions = "{}",
    to_options: Annotated[str, options_for("the file")] = "{}",
) -> None:
    """Write all keys with their state to a file: Parquet, or an Arrow IPC file.

    The file appears when it is whole.
    """
    with opened(path, at, operator, query_folder, unproven, hold, storage_options, checkpoint) as state:
        with progress("exporting", state.buckets) as advance:
            rows = exported(state.schema, _batches(state, advance), to, options_of(to_options), overwrite)
        say(f"rows={rows} {state.unit}={state.batch} file={to}")


def _batches(state: OpenState, advance: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    for bucket in range(state.buckets):
        yield from state.scan(buckets=[bucket])
        advance(1)
