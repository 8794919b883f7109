"""``export``: rows of a state to a Parquet or Arrow file."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.exporting import exported
from spark_state_ext.cli.output import progress, say
from spark_state_ext.cli.parameters import StorageOptions, json_object, options_of
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.reading import operator_named, savepoint_tables

__all__ = ["command"]


def command(
    path: Annotated[str, typer.Argument(help="a savepoint: an absolute path or a URL")],
    to: Annotated[str, typer.Argument(metavar="FILE", help="a path or URL that ends in .parquet or .arrow")],
    operator: Annotated[str | None, typer.Option(metavar="NAME", help="which one, where there are several")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="also where the file is there")] = False,
    storage_options: StorageOptions = "{}",
    to_options: Annotated[
        str, typer.Option(metavar="JSON", callback=json_object, help="as --storage-options, of the file")
    ] = "{}",
) -> None:
    """Write all keys with their state to a file: Parquet, or an Arrow IPC file.

    The file appears when it is whole.
    """
    options = options_of(storage_options)
    folder = Folder(path.rstrip("/") or path, options)
    manifest = read_manifest(folder)
    name = operator_named(manifest, operator, folder.root)
    tables = savepoint_tables(Savepoint(folder.root, operator=name, storage_options=options))
    with progress("exporting", manifest.header.operators[name].buckets) as advance:
        rows = exported(tables, to, options_of(to_options), overwrite, lambda: advance(1))
    say(f"rows={rows} file={to}")
