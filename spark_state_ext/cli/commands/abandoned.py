"""``abandoned``: folders of queries that no Spark checkpoint names."""

from __future__ import annotations

import time
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.abandoned import (
    ABANDONED,
    OLDER_THAN_DAYS,
    RECENT_DAYS_MIN,
    Found,
    judge,
    look,
    query_folders_of_checkpoints,
    reason_of,
    remove,
)
from spark_state_ext.cli.output import Output, say, table_of, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_for, options_of
from spark_state_ext.cli.roots import operators_below
from spark_state_ext.files.folder import Folder, refuse_relative

__all__ = ["command"]

_DAY_S = 86_400.0
_ROWS = pa.schema(
    [
        ("verdict", pa.string()),
        ("operator", pa.string()),
        ("query", pa.string()),
        ("files", pa.int64()),
        ("bytes", pa.int64()),
        ("newest", pa.timestamp("s", "UTC")),
        ("lease", pa.timestamp("s", "UTC")),
        ("reason", pa.string()),
    ]
)


def command(
    root: Annotated[str, typer.Argument(help="as given to ArrowState: an absolute path or a URL")],
    checkpoint: Annotated[
        list[str],
        typer.Option("--checkpoint", "-c", metavar="LOCATION", help="every checkpointLocation in use, on this root"),
    ],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[LOCATION]...", help="further ones, after --checkpoint")
    ] = None,
    operator: Annotated[list[str] | None, typer.Option(metavar="NAME", help="look at this one only")] = None,
    spark: Annotated[
        bool,
        typer.Option("--spark", help="read the checkpoints' state with Spark 4, which tells all that they name"),
    ] = False,
    older_than: Annotated[
        float,
        typer.Option(metavar="DAYS", min=RECENT_DAYS_MIN, help="without --spark: nobody has written there for so long"),
    ] = OLDER_THAN_DAYS,
    do_remove: Annotated[bool, typer.Option("--remove", help="remove what is abandoned")] = False,
    storage_options: StorageOptions = "{}",
    checkpoint_options: Annotated[str, options_for("the checkpoints")] = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """List the folders of queries that no Spark checkpoint names. Without --remove nothing is changed."""
    locations = [*checkpoint, *(more or [])]
    for location in [root, *locations]:
        refuse_relative(location, "a root or checkpoint")
    folder = Folder(root, options_of(storage_options))
    # Before Spark starts.
    operators_below(folder, operator or ())
    query_folders = query_folders_of_checkpoints(locations, options_of(checkpoint_options), spark)
    found = [(it, judge(it, query_folders, time.time(), older_than * _DAY_S)) for it in look(folder, operator or ())]
    rows = [_row(it, verdict, reason_of(it, verdict, query_folders)) for it, verdict in found]
    write_table(table_of(rows, _ROWS), output)
    abandoned = [it for it, verdict in found if verdict == ABANDONED]
    size_bytes = sum(it.size_bytes for it in abandoned)
    say(f"folders={len(found)} abandoned={len(abandoned)} bytes={size_bytes}")
    if not do_remove:
        say("nothing was removed: --remove removes what is abandoned")
        return
    for it in abandoned:
        remove(folder, it)
        say(f"removed operator={it.operator} query={it.query_folder}")


def _row(found: Found, verdict: str, reason: str) -> dict[str, object]:
    return {
        "verdict": verdict,
        "operator": found.operator,
        "query": found.query_folder,
        "files": found.files,
        "bytes": found.size_bytes,
        "newest": _second(found.newest_s),
        "lease": _second(found.lease_s),
        "reason": reason or None,
    }


def _second(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)
