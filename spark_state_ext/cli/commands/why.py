"""``why FILE``: what a file is, whose it is, and what keeps it."""

from __future__ import annotations

import posixpath
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.clean_ups import RETAINED
from spark_state_ext.cli.commands.gc import RetainedOption
from spark_state_ext.cli.output import Output, write_record
from spark_state_ext.cli.owners import owner_of
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.targets import given_folder
from spark_state_ext.errors import MissingCheckpointError, UsageError

__all__ = ["command"]

_RECORD = pa.schema(
    [("file", pa.string()), ("kind", pa.string()), ("owner", pa.string()), ("does", pa.string()), ("why", pa.string())]
)


def command(
    file: Annotated[str, typer.Argument(help="a file of a root or of a savepoint: an absolute path or a URL")],
    retained: RetainedOption = RETAINED,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what a file is, whose it is, whether the next clean-up deletes it, and why it is still there."""
    above, name = posixpath.split(file.rstrip("/"))
    options = options_of(storage_options)
    folder = given_folder(above or ".", options)
    if not folder.exists(name):
        raise MissingCheckpointError(f"there is no file {folder.where(name)}")
    if any(it.folder and it.name == name for it in folder.entries()):
        raise UsageError(f"{folder.where(name)} is a folder: name a file in it")
    owned = owner_of(folder, name, options, retained)
    write_record(
        {"file": folder.where(name), "kind": owned.kind, "owner": owned.owner, "does": owned.does, "why": owned.why},
        _RECORD,
        output,
    )
