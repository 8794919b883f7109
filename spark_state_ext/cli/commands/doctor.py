"""``doctor``: whether a configuration can work, and what would make it faster."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.output import Output, say, table_of, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.places import diagnoses_of_machine, diagnoses_of_root
from spark_state_ext.cli.settings import Diagnosis, diagnoses_of_settings, read_properties
from spark_state_ext.errors import UsageError

__all__ = ["command"]

_ROWS = pa.schema([("what", pa.string()), ("seen", pa.string()), ("problem", pa.string()), ("change", pa.string())])


def command(
    root: Annotated[str, typer.Argument(help="as given to ArrowState: an absolute path or a URL")],
    buckets: Annotated[int, typer.Option(min=1, metavar="N", help="as given to ArrowState")] = 16,
    local_dir: Annotated[
        Path | None, typer.Option(help="as given to ArrowState; by default the system's temporary folder")
    ] = None,
    conf: Annotated[
        list[str] | None, typer.Option("--conf", "-c", metavar="NAME=VALUE", help="a Spark setting")
    ] = None,
    properties_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Spark settings, such as spark-defaults.conf")
    ] = None,
    spark: Annotated[
        bool, typer.Option("--spark", help="ask the executors of a session, which is made with these settings")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="list what is fine, too")] = False,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what is wrong with a configuration, and what to change; exits with 1 where there is anything.

    Run it on a machine of an executor, with its Python. It writes a small file below the root, and removes it. Spark's
    settings are looked at where --conf or --properties-file gives some. With --spark a small job asks executors which
    releases they have; then run it where the client runs.
    """
    settings = {} if properties_file is None else read_properties(properties_file)
    settings |= dict(map(_pair, conf or ()))
    found = diagnoses_of_machine(local_dir or Path(tempfile.gettempdir()), buckets)
    found += diagnoses_of_root(root, options_of(storage_options), settings)
    found += diagnoses_of_settings(settings, buckets) if settings else []
    if spark:
        from spark_state_ext.cli.executors import diagnoses_of_spark

        found += diagnoses_of_spark(settings)
    shown = [it for it in found if every or it.problem]
    if shown or output is not Output.TABLE:
        write_table(table_of([_row(it) for it in shown], _ROWS), output)
    problems = sum(bool(it.problem) for it in found)
    say(f"looked at {len(found)} things: {problems} to change" + ("" if settings else "; no Spark settings were given"))
    raise typer.Exit(NO if problems else DONE)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (sign and name):
        raise UsageError(f"--conf must be NAME=VALUE, not {text!r}")
    return name.strip(), value.strip()


def _row(it: Diagnosis) -> dict[str, str | None]:
    return {"what": it.what, "seen": it.seen, "problem": it.problem or None, "change": it.change or None}
