"""``diff``: what differs between two states, key by key."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.differences import compared
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.opening import CheckpointOption, HoldOption, OperatorOption, StatePath, UnprovenOption, opened
from spark_state_ext.cli.output import Output, say, write_rows
from spark_state_ext.cli.parameters import OutputOption, StorageOptions
from spark_state_ext.errors import UsageError

__all__ = ["command"]


def command(
    path: StatePath,
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="the later state; by default another batch of PATH")
    ] = None,
    at: Annotated[int | None, typer.Option("--at", metavar="BATCH", help="of PATH, after which batch")] = None,
    other_at: Annotated[int | None, typer.Option("--other-at", metavar="BATCH", help="of OTHER")] = None,
    checkpoint: CheckpointOption = None,
    operator: OperatorOption = None,
    unproven: UnprovenOption = False,
    hold: HoldOption = True,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the keys whose state differs, with what it was before and is after; exits with 1 where there are any.

    Without OTHER two batches of one state are compared: --at, and --other-at or the newest.
    """
    if other is not None and checkpoint is not None:
        raise UsageError("--checkpoint goes with two batches of one state: leave it out, or leave OTHER out")
    with (
        opened(path, at, operator, None, unproven, hold, storage_options, checkpoint) as first,
        opened(other or path, other_at, operator, None, unproven, hold, storage_options, checkpoint) as second,
    ):
        found = compared(first, second)
        rows = write_rows(found.schema, found.differences, output)
        for names, where in ((found.only_first, first), (found.only_second, second)):
            if names:
                say(f"only in {where.path}, or of another type there: {', '.join(names)}")
        say(f"differences={rows} between batch {first.batch} of {first.path} and batch {second.batch} of {second.path}")
        raise typer.Exit(NO if rows or found.only_first or found.only_second else DONE)
