"""``savepoint release``: free a claim whose query is gone for good."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.output import say
from spark_state_ext.cli.parameters import StorageOptions, options_of
from spark_state_ext.cli.savepoint import release
from spark_state_ext.cli.targets import given_folder

__all__ = ["command"]


def command(
    path: Annotated[str, typer.Argument(help="the savepoint's folder, or a query folder: an absolute path or a URL")],
    force: Annotated[bool, typer.Option("--force", help="also where a first batch may be committed")] = False,
    storage_options: StorageOptions = "{}",
) -> None:
    """Free the claim to a savepoint or to a query folder, whose query is gone for good."""
    say(f"released: the claim of {release(given_folder(path, options_of(storage_options)), force)}")
