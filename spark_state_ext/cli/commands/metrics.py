"""``metrics``: what executors noted of their calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spark_state_ext.cli.metrics_folder import refuse_nothing
from spark_state_ext.cli.output import Output, write_table
from spark_state_ext.cli.parameters import OutputOption
from spark_state_ext.cli.top import watch, write_batches
from spark_state_ext.errors import UsageError
from spark_state_ext.worker.metrics import by_batch, read

__all__ = ["command"]

_EVERY_S = 2.0


def command(
    folder: Annotated[Path, typer.Argument(help="folder of the files; those in folders below count too")],
    calls: Annotated[bool, typer.Option("--calls", help="every call of every bucket")] = False,
    live: Annotated[bool, typer.Option("--watch", help="show what operators are at, until you interrupt it")] = False,
    every_s: Annotated[
        float | None, typer.Option("--every", min=0.1, metavar="SECONDS", help="with --watch: between looks; 2")
    ] = None,
    looks: Annotated[
        int | None, typer.Option("--looks", min=1, metavar="N", help="with --watch: end after so many")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what each batch did: sums over its buckets, from the files that executors write.

    A table has what is looked at most; -o json, jsonl and arrow have all columns.

    With --watch: a line for each operator, with rates since the look before, again and again.
    """
    if not live and (every_s is not None or looks is not None):
        raise UsageError("--every and --looks go with --watch")
    if live and (calls or output is not Output.TABLE):
        raise UsageError("--watch shows a table of operators: it goes neither with --calls nor with -o")
    refuse_nothing(folder)
    if live:
        watch(folder, _EVERY_S if every_s is None else every_s, looks)
        return
    found = read(folder) if calls else by_batch(read(folder))
    if output is Output.TABLE:
        write_batches(found)
    else:
        write_table(found, output)
