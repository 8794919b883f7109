"""``savepoint transform``: a new savepoint with other columns, or fewer keys, without Spark."""

from __future__ import annotations

from typing import Annotated

import typer

from spark_state_ext.cli.output import progress, say
from spark_state_ext.cli.parameters import StorageOptions, options_for, options_of
from spark_state_ext.cli.targets import given_folder
from spark_state_ext.cli.transforming import Transformation, transformed
from spark_state_ext.errors import UsageError
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.reading import operator_named

__all__ = ["command"]


def command(
    path: Annotated[str, typer.Argument(help="the savepoint's folder: a path or a URL")],
    to: Annotated[str, typer.Argument(metavar="TARGET", help="folder of the new one, which does not exist yet")],
    operator: Annotated[str | None, typer.Option(metavar="NAME", help="which one, where there are several")] = None,
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW", help="a key or state column")] = None,
    drop: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="a state column")] = None,
    retype: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=TYPE", help="a state column, to a type of Spark such as bigint")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="FILTER", help="keep the keys that it is true of, such as: count > 10")
    ] = None,
    storage_options: StorageOptions = "{}",
    to_options: Annotated[str, options_for("the new one")] = "{}",
) -> None:
    """Write a new canonical savepoint of a savepoint's rows, with other columns or fewer keys, without Spark.

    Columns are named as they are before the change. Batch, watermark, offsets and times to live stay; buckets, too.
    """
    source = given_folder(path, options_of(storage_options))
    target = given_folder(to, options_of(to_options))
    manifest = read_manifest(source)
    wanted = Transformation(
        operator_named(manifest, operator, source.root),
        _pairs(rename, "--rename"),
        tuple(drop or ()),
        _pairs(retype, "--retype"),
        keep,
    )
    with progress("transforming", len(manifest.buckets)) as advance:
        rows, saved = transformed(source, manifest, target, wanted, advance)
    say(f"rows={rows} kept={saved} to={target.root}")


def _pairs(given: list[str] | None, option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not (sign and name and value):
            raise UsageError(f"{option} must be two names with = between them, not {text!r}")
        if name in found:
            raise UsageError(f"{option} names the column {name!r} twice")
        found[name] = value
    return found
