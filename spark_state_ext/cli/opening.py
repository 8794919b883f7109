"""Opening a state to read, as commands say which: `open_state` with options of a command line."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.parameters import options_of
from spark_state_ext.cli.targets import as_given
from spark_state_ext.reading.opening import open_state
from spark_state_ext.reading.state import OpenState

__all__ = [
    "AtOption",
    "HoldOption",
    "OperatorOption",
    "QueryFolderOption",
    "StatePath",
    "UnprovenOption",
    "opened",
]

StatePath = Annotated[
    str, typer.Argument(metavar="PATH", help="a root, a query folder or a savepoint: a path or a URL")
]
AtOption = Annotated[
    int | None, typer.Option("--at", metavar="BATCH", help="after which batch; by default the newest that files prove")
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
) -> OpenState:
    """Open a state, to be closed.

    Parameters
    ----------
    path, at, operator, query_folder, unproven, hold, storage_options
        As the options of commands say.

    Raises
    ------
    StateError
        As `open_state`.
    """
    return open_state(
        as_given(path),
        operator=operator,
        batch=at,
        query_folder=query_folder,
        unproven=unproven,
        hold=hold,
        storage_options=options_of(storage_options),
    )
