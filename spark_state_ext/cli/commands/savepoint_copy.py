"""``savepoint copy``: copy a savepoint by its manifest."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.copying import copy_savepoint
from spark_state_ext.cli.output import progress, say
from spark_state_ext.cli.parameters import StorageOptions, options_for, options_of
from spark_state_ext.cli.targets import given_folder
from spark_state_ext.savepoints.manifest_file import read_manifest

__all__ = ["command"]


def command(
    path: Annotated[str, typer.Argument(help="the savepoint's folder: a path or a URL")],
    to: Annotated[str, typer.Argument(metavar="TARGET", help="the copy's folder, which does not exist yet")],
    storage_options: StorageOptions = "{}",
    to_options: Annotated[str, options_for("the copy")] = "{}",
) -> None:
    """Copy what the manifest of a savepoint names, and the manifest last. The copy has the same id.

    Files are linked, or copied by the store, where both are in one and have equal options. Else each is read to the
    last byte on its way.
    """
    source, target = (
        given_folder(path, options_of(storage_options)),
        given_folder(to, options_of(to_options)),
    )
    manifest = read_manifest(source)
    with progress("copying", sum(file.size_bytes for it in manifest.buckets for file in it.files)) as advance:
        done = copy_savepoint(source, manifest, target, advance)
    say(f"files={done.files} bytes={done.size_bytes} duplicated={done.duplicated} to={target.root}")
