"""``erase status``: what has become of erase requests."""

from __future__ import annotations

import pyarrow as pa
import typer

from spark_state_ext.cli.erasing import RootPath, operator_at
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.opening import OperatorOption, QueryFolderOption
from spark_state_ext.cli.output import Output, say, table_of, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.erasing.asking import WAITING, EraseStatus, erase_status

__all__ = ["command"]

_TIME = pa.timestamp("ms", "UTC")
_ROWS = pa.schema(
    [
        ("operator", pa.string()),
        ("query_folder", pa.string()),
        ("number", pa.int64()),
        ("keys", pa.int64()),
        ("asked", _TIME),
        ("state", pa.string()),
        ("done", _TIME),
        ("batch", pa.int64()),
        ("kept", pa.bool_()),
    ]
)


def command(
    root: RootPath,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what has become of an operator's erase requests; exits with 1 while one of them waits.

    kept says whether the request, which holds the keys, is there still.
    """
    options = options_of(storage_options)
    root, operator = operator_at(root, operator, options)
    found = erase_status(root, operator=operator, query_folder=query_folder, storage_options=options)
    if found or output is not Output.TABLE:
        write_table(table_of([_row(it) for it in found], _ROWS), output)
    waiting = sum(it.state == WAITING for it in found)
    say(f"requests={len(found)} waiting={waiting}")
    raise typer.Exit(NO if waiting else DONE)


def _row(it: EraseStatus) -> dict[str, object]:
    return {**vars(it), "asked": it.asked_ms, "done": it.done_ms}
