"""``erase withdraw``: take back an erase request."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.erasing import RootPath, operator_at
from spark_state_ext.cli.opening import OperatorOption
from spark_state_ext.cli.output import say
from spark_state_ext.cli.parameters import StorageOptions, options_of
from spark_state_ext.erasing.asking import withdraw_erasure

__all__ = ["command"]


def command(
    root: RootPath,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="of the request, as erase status prints it")],
    operator: OperatorOption = None,
    query_folder: Annotated[
        str | None, typer.Option("--query-folder", metavar="NAME", help="needed if the operator has several")
    ] = None,
    storage_options: StorageOptions = "{}",
) -> None:
    """Withdraw an erase request that was a mistake, or that cannot be read. The query skips it in its next batch.

    Buckets that have erased its keys already stay without them. The number stays in use, with no key.
    """
    options = options_of(storage_options)
    root, operator = operator_at(root, operator, options)
    withdraw_erasure(root, number, operator=operator, query_folder=query_folder, storage_options=options)
    say(f"request {number} of operator {operator} is withdrawn: it names no key, and is done after the next batches")
