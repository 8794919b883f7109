"""``savepoint verify``: read every byte of a savepoint."""

from __future__ import annotations

from typing import Annotated

import typer

from arrow_schemas.savepoint import MANIFEST_NAME
from spark_state_ext.cli.commands import verify
from spark_state_ext.cli.output import Output
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.targets import given_folder
from spark_state_ext.savepoints.manifest_file import read_manifest

__all__ = ["command"]


def command(
    path: Annotated[str, typer.Argument(help="the savepoint's folder: a path or a URL")],
    every: Annotated[bool, typer.Option("--all", help="list files that are whole, too")] = False,
    local_dir: Annotated[str | None, typer.Option(help="local folder for large files of object stores")] = None,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Read every byte of a savepoint, and say which file is damaged, missing or another one. Exits with 1 then."""
    folder = given_folder(path, options_of(storage_options))
    if not folder.exists(MANIFEST_NAME):
        # Says so.
        read_manifest(folder)
    verify.command(path, every, local_dir, storage_options, output)
