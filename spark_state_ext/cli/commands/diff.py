"""``diff``: what differs between two states, key by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.commands.scan import limited
from spark_state_ext.cli.differences import compared
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.opening import CheckpointOption, HoldOption, OperatorOption, StatePath, UnprovenOption, opened
from spark_state_ext.cli.output import Output, say, write_rows
from spark_state_ext.cli.parameters import OutputOption, StorageOptions
from spark_state_ext.errors import UsageError
from spark_state_ext.reading.state import OpenState

__all__ = ["command"]


def command(
    path: StatePath,
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="the later state; by default another batch of PATH")
    ] = None,
    at: Annotated[int | None, typer.Option("--at", metavar="BATCH", help="of PATH, after which batch")] = None,
    other_at: Annotated[
        int | None, typer.Option("--other-at", metavar="BATCH", help="of OTHER, or the later batch of PATH")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="NAMES", help="compare these state columns only; separated by commas")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, metavar="N", help="rows at most")] = None,
    checkpoint: CheckpointOption = None,
    operator: OperatorOption = None,
    unproven: UnprovenOption = False,
    hold: HoldOption = True,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the keys whose state differs, with what it was before and is after; exits with 1 if there are any.

    Without OTHER two batches of one state are compared: by default the newest and the one before it. --other-at is the
    later one, and --at the earlier one.
    """
    if other is not None and checkpoint is not None:
        raise UsageError("--checkpoint goes with two batches of one state: leave it out, or leave OTHER out")
    with ExitStack() as states:
        second = states.enter_context(
            opened(other or path, other_at, operator, None, unproven, hold, storage_options, checkpoint)
        )
        before = _batch_before(second) if other is None and at is None else at
        first = states.enter_context(opened(path, before, operator, None, unproven, hold, storage_options, checkpoint))
        names = None if columns is None else [name.strip() for name in columns.split(",")]
        found = compared(first, second, names)
        # One more than is printed says whether there are more.
        differences = found.differences if limit is None else limited(found.differences, limit + 1)
        rows, more = _write(found.schema, differences, limit, output)
        for only, where in ((found.only_first, first), (found.only_second, second)):
            if only:
                say(f"only in {where.path}, or of another type there: {', '.join(only)}")
        said = f"differences={rows}" + (" (there are more: --limit)" if more else "")
        say(f"{said} between batch {first.batch} of {first.path} and batch {second.batch} of {second.path}")
        raise typer.Exit(NO if rows or more or found.only_first or found.only_second else DONE)


def _batch_before(state: OpenState) -> int:
    if state.batch <= state.oldest_batch:
        raise UsageError(
            f"{state.path} has one batch that can be read, {state.unit} {state.batch}: there is none before it to "
            "compare it with. Name another state, or wait for the next batch"
        )
    return state.batch - 1


def _write(schema: pa.Schema, batches: Iterable[pa.RecordBatch], limit: int | None, output: Output) -> tuple[int, bool]:
    """Print at most so many rows; gives how many there were, and whether there are more."""
    seen = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal seen
        for batch in batches:
            left = batch.num_rows if limit is None else max(limit - seen, 0)
            seen += batch.num_rows
            yield batch.slice(0, left)

    rows = write_rows(schema, counted(), output)
    return rows, seen > rows
