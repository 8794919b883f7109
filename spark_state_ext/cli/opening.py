"""Opening a state to read, as commands say which: `open_state` with options of a command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from spark_state_ext.cli.output import say
from spark_state_ext.cli.parameters import options_of
from spark_state_ext.cli.targets import as_given, given_folder
from spark_state_ext.errors import UsageError
from spark_state_ext.reading.opening import open_state
from spark_state_ext.reading.state import OpenState

__all__ = [
    "AtOption",
    "CheckpointOption",
    "HoldOption",
    "OperatorOption",
    "QueryFolderOption",
    "QueryPath",
    "StatePath",
    "UnprovenOption",
    "opened",
]

StatePath = Annotated[
    str, typer.Argument(metavar="PATH", help="a root, a query folder or a savepoint: a path or a URL")
]
QueryPath = Annotated[str, typer.Argument(metavar="PATH", help="a root or a query folder: a path or a URL")]
AtOption = Annotated[
    int | None,
    typer.Option("--at", metavar="BATCH", help="after which batch; by default the newest known to be committed"),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="LOCATION",
        help="the query's checkpointLocation: Spark (4.0 or newer) says what is committed, so the last batch is read",
    ),
]
OperatorOption = Annotated[str | None, typer.Option("--operator", metavar="NAME", help="where there are several")]
QueryFolderOption = Annotated[
    str | None, typer.Option("--query-folder", metavar="NAME", help="where there are several; by default the newest")
]
UnprovenOption = Annotated[
    bool, typer.Option("--unproven", help="also what files do not prove to be committed, with a word on stderr")
]
HoldOption = Annotated[
    bool, typer.Option("--hold/--no-hold", help="keep clean-up away meanwhile, which writes a small file there")
]


def opened(
    path: str,
    at: int | None = None,
    operator: str | None = None,
    query_folder: str | None = None,
    unproven: bool = False,
    hold: bool = True,
    storage_options: str = "{}",
    checkpoint: str | None = None,
) -> OpenState:
    """Open a state, to be closed."""
    if checkpoint is not None:
        return _opened_by_spark(
            path, checkpoint, at, operator, query_folder, unproven, hold, options_of(storage_options)
        )
    state = open_state(
        as_given(path),
        operator=operator,
        batch=at,
        query_folder=query_folder,
        unproven=unproven,
        hold=hold,
        storage_options=options_of(storage_options),
    )
    if not state.proven:
        say(
            f"unproven: files do not prove what is read of {state.unit} {state.batch}. It may have rows of an attempt "
            "that failed, and lack rows that no file has yet"
        )
    return state


def _opened_by_spark(
    path: str,
    checkpoint: str,
    at: int | None,
    operator: str | None,
    query_folder: str | None,
    unproven: bool,
    hold: bool,
    storage_options: Mapping[str, Any],
) -> OpenState:
    if unproven:
        raise UsageError("--unproven does not go with --checkpoint, by which all that is read is committed")
    if query_folder is not None:
        raise UsageError("--query-folder does not go with --checkpoint, whose pointers name the folder: leave it out")
    # Before Spark starts. Which operator is meant only its pointers say.
    if not given_folder(path, storage_options).names():
        raise UsageError(
            f"there is no folder {path}, or it is empty: give a root as ArrowState has it, or a query folder"
        )
    # PySpark is imported by nothing else here.
    from spark_state_ext.cli.query_folders import session
    from spark_state_ext.spark.source.exact import open_committed

    return open_committed(
        session(checkpoint),
        as_given(path),
        checkpoint,
        operator=operator,
        batch=at,
        hold=hold,
        storage_options=storage_options,
    )
