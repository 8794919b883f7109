"""``standby settings``: what all hosts of a root go by."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.output import Output, say, write_record
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.standby import RootArgument, root_at
from spark_state_ext.standby.finding import Finder
from spark_state_ext.standby.members import read_settings, write_settings

__all__ = ["command"]

_ROW = pa.schema([("enabled", pa.bool_()), ("standby_replicas", pa.int64()), ("heartbeat_s", pa.float64())])


def command(
    root: RootArgument,
    enabled: Annotated[bool | None, typer.Option("--on/--off", help="whether there are replicas at all")] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=0, help="of each bucket, beside the state of its active task")
    ] = None,
    heartbeat_s: Annotated[
        float | None, typer.Option("--heartbeat", min=0.1, metavar="SECONDS", help="how often hosts write their record")
    ] = None,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what all hosts of a root go by, and change it first where an option says so.

    Services read it again at each heartbeat.
    """
    folder = root_at(root, options_of(storage_options))
    found = Finder(folder).find()
    if not found.operators and not found.errors:
        say(f"no job has written to {folder.root} yet: is it the root as ArrowState has it, to the letter?")
    settings = before = read_settings(folder)
    if enabled is not None:
        settings = replace(settings, enabled=enabled)
    if replicas is not None:
        settings = replace(settings, standby_replicas=replicas)
    if heartbeat_s is not None:
        settings = replace(settings, heartbeat_s=heartbeat_s)
    if settings != before:
        write_settings(folder, settings)
    write_record(asdict(settings), _ROW, output)
