"""``get``: the state of one key."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.exits import DONE, NO
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
from spark_state_ext.cli.output import Output, say, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions
from spark_state_ext.cli.values import key_of

__all__ = ["command"]


def command(
    path: StatePath,
    key: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="a word for each key column, in their order")
    ] = None,
    as_json: Annotated[
        str | None, typer.Option("--json", metavar="JSON", help="the key as an object, which may have nulls")
    ] = None,
    at: AtOption = None,
    checkpoint: CheckpointOption = None,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    unproven: UnprovenOption = False,
    hold: HoldOption = True,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the state of one key, or exit with 1 where it has none. Reads the files of one bucket.

    Values are written as JSON has them, without the quotes: 2024-02-01, 2024-02-01T12:00:00Z, 1.10, true. Bytes are
    base64. Before a word that begins with a dash write --.
    """
    with opened(path, at, operator, query_folder, unproven, hold, storage_options, checkpoint) as state:
        found = state.get(key_of(key or (), as_json, state.key_schema))
        if found.num_rows or output is not Output.TABLE:
            write_table(found, output)
        if not found.num_rows:
            say(f"no such key after {state.unit} {state.batch} of {state.path}")
            raise typer.Exit(NO)
        raise typer.Exit(DONE)
