"""``erase scan``: look for what holds keys."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.erasing import (
    BackendOptions,
    BackendsOption,
    JsonKeys,
    KeyWords,
    LocalDirsOption,
    RootPath,
    backends_of,
    keys_of,
    operator_at,
    write_receipt,
)
from spark_state_ext.cli.opening import OperatorOption
from spark_state_ext.cli.output import Output
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.erasing.scanning import erase_scan

__all__ = ["command"]


def command(
    root: RootPath,
    keys: KeyWords = None,
    as_json: JsonKeys = None,
    operator: OperatorOption = None,
    backend: BackendsOption = None,
    savepoint: Annotated[list[str] | None, typer.Option(metavar="FOLDER", help="a savepoint to look at")] = None,
    local_dir: LocalDirsOption = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="LOCATION", help="the query's checkpointLocation, whose state is counted")
    ] = None,
    storage_options: StorageOptions = "{}",
    backend_options: BackendOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Look for what holds keys, and print a receipt: what has one, what was looked at, and what is out of reach.

    Reads every file, and changes nothing. Exits with 1 where something has a key. The receipt names no key. Words are
    as get takes them; before one that begins with a dash write --.
    """
    options = options_of(storage_options)
    root, operator = operator_at(root, operator, options)
    receipt = erase_scan(
        root,
        keys_of(root, operator, None, keys, as_json, options),
        operator=operator,
        storage_options=options,
        backends=backends_of(backend, backend_options),
        savepoints=savepoint or (),
        local_dirs=local_dir or (),
        checkpoint_location=checkpoint,
    )
    raise typer.Exit(write_receipt(receipt, output))
