"""``metrics``: what executors noted of their calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spark_state_ext.cli.output import Output, write_table
from spark_state_ext.cli.parameters import OutputOption
from spark_state_ext.errors import UsageError
from spark_state_ext.worker.metrics import FILES, by_batch, read

__all__ = ["command"]


def command(
    folder: Annotated[Path, typer.Argument(help="folder of the files; those in folders below count too")],
    calls: Annotated[bool, typer.Option("--calls", help="every call of every bucket")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what each batch did: sums over its buckets, from the files that executors write."""
    _refuse_nothing(folder)
    table = read(folder)
    write_table(table if calls else by_batch(table), output)


def _refuse_nothing(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}{', that is a file' if folder.exists() else ''}")
    if next(folder.rglob(FILES), None) is None:
        raise UsageError(f"no {FILES} files below {folder}")
