"""``savepoint delete``: delete what a manifest names, where it may go."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.commands.savepoint_status import RootsOption
from spark_state_ext.cli.output import say
from spark_state_ext.cli.parameters import StorageOptions, options_of
from spark_state_ext.cli.savepoint import delete
from spark_state_ext.cli.targets import given_folder

__all__ = ["command"]


def command(
    path: Annotated[str, typer.Argument(help="the savepoint's folder: an absolute path or a URL")],
    root: RootsOption = None,
    force: Annotated[bool, typer.Option("--force", help="also where a query may still need it")] = False,
    storage_options: StorageOptions = "{}",
) -> None:
    """Delete what the manifest of a savepoint names, where no query needs it any more."""
    options = options_of(storage_options)
    say(f"deleted={delete(given_folder(path, options), root or (), options, force)}")
