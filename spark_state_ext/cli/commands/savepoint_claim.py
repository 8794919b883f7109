"""``savepoint claim``: keep queries from a savepoint, until it is released."""

from __future__ import annotations

import uuid
from typing import Annotated

import typer

from spark_state_ext.cli.output import say
from spark_state_ext.cli.parameters import StorageOptions, options_of
from spark_state_ext.cli.targets import given_folder
from spark_state_ext.errors import UsageError
from spark_state_ext.savepoints.claims import SavepointClaim, claim_savepoint
from spark_state_ext.savepoints.manifest_file import read_manifest

__all__ = ["command"]


def command(
    path: Annotated[str, typer.Argument(help="the savepoint's folder: a path or a URL")],
    by: Annotated[str, typer.Option(metavar="NAME", help="who claims it, for people")],
    storage_options: StorageOptions = "{}",
) -> None:
    """Claim a savepoint by hand: no query can start from it, and none deletes it, until savepoint release.

    Refused where a query has claimed it already, with that query's name.
    """
    if not by.strip():
        raise UsageError("--by must name somebody, so that others know whom to ask")
    folder = given_folder(path, options_of(storage_options))
    claim = SavepointClaim(read_manifest(folder).header.id, f"{by} (claimed by hand)", uuid.uuid4().hex)
    claim_savepoint(folder, claim, ())
    say(f"claimed: {folder.root} by {claim.by}")
