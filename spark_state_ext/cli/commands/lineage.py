"""``lineage``: how the checkpoints of a bucket were built upon each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

from spark_state_ext.cli.commands.log import files_of
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.opening import OperatorOption, QueryFolderOption, QueryPath
from spark_state_ext.cli.output import Output, say, table_of, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.targets import query_folder_of
from spark_state_ext.cli.tree import Node, drawn, nodes_of, text_lines
from spark_state_ext.errors import UsageError

__all__ = ["command"]

_PICTURES = (".svg", ".png")
_ROWS = pa.schema(
    [
        ("bucket", pa.int64()),
        ("version", pa.int64()),
        ("id", pa.string()),
        ("parent_version", pa.int64()),
        ("parent_id", pa.string()),
        ("kinds", pa.list_(pa.string())),
        ("batch", pa.int64()),
        ("heartbeat", pa.int64()),
        ("bytes", pa.int64()),
    ]
)


def command(
    path: QueryPath,
    bucket: Annotated[int, typer.Option(metavar="N", help="of which bucket")],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="draw a picture: a file that ends in .svg or .png")
    ] = None,
    operator: OperatorOption = None,
    query_folder: QueryFolderOption = None,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the checkpoints of a bucket as a tree, the newest last. Attempts that Spark made again are branches.

    Pictures need matplotlib: pip install 'spark_state_ext[report]'.
    """
    if to is not None and to.suffix not in _PICTURES:
        raise UsageError(f"--to must end in {' or '.join(_PICTURES)}, not {to.name!r}")
    folder, in_force = query_folder_of(path, options_of(storage_options), operator, query_folder)
    files = files_of(folder, in_force, [bucket])
    nodes = nodes_of(files)
    if to is not None:
        drawn(nodes, f"bucket {bucket} of {folder.root}", to)
        say(f"drawn: {len(nodes)} checkpoints in {to}")
    elif output is Output.TABLE:
        for line in text_lines(nodes):
            typer.echo(line)
    else:
        write_table(table_of([_row(bucket, it) for it in nodes], _ROWS), output)
    damaged = [it for it in files if it.problem]
    for it in damaged:
        say(it.problem)
    raise typer.Exit(NO if damaged else DONE)


def _row(bucket: int, node: Node) -> dict[str, Any]:
    return {
        "bucket": bucket,
        "version": node.ref.version,
        "id": node.ref.id,
        "parent_version": None if node.parent is None else node.parent.version,
        "parent_id": None if node.parent is None else node.parent.id,
        "kinds": list(node.kinds),
        "batch": node.batch,
        "heartbeat": node.heartbeat,
        "bytes": node.size_bytes,
    }
