"""Check and doctor: whether this machine and a configuration can work, and what would make them faster."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from spark_state_ext.cli.check import check_machine
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.options import JobDirOption, OutputOption, RootPath, StorageOptions
from spark_state_ext.cli.output import Output, parse_columns, say, write_records
from spark_state_ext.errors import UsageError

__all__ = ["check", "doctor"]

_CHECKED = parse_columns("what, seen, problem")
_DIAGNOSED = parse_columns("what, seen, problem, change")


def check(local_dir: JobDirOption = None, output: OutputOption = Output.TABLE) -> None:
    """Say what is installed, and whether this machine can run it.

    Run it with the Python that the executors use, on a machine of theirs.
    """
    found = check_machine(local_dir or Path(tempfile.gettempdir()))
    write_records(map(vars, found), _CHECKED, output)
    problems = sum(bool(it.problem) for it in found)
    say("this machine can run it" if not problems else f"{problems} problem(s), see above")
    raise typer.Exit(NO if problems else DONE)


def doctor(
    root: RootPath,
    buckets: Annotated[int, typer.Option(min=1, metavar="N", help="as given to ArrowState")] = 16,
    local_dir: JobDirOption = None,
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
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what is wrong with a configuration, and what to change; exits with 1 where there is anything.

    Run it on a machine of an executor, with its Python. It writes a small file below the root, and removes it. Spark's
    settings are looked at where --conf or --properties-file gives some. With --spark a small job asks executors which
    releases they have; then run it where the client runs.
    """
    # Else `check` would fail without the packages whose absence it tells.
    from spark_state_ext.cli import configuration

    settings = {} if properties_file is None else configuration.read_properties(properties_file)
    settings |= dict(map(_pair, conf or ()))
    found = configuration.diagnose_machine(local_dir or Path(tempfile.gettempdir()), buckets)
    found += configuration.diagnose_root(root, storage_options, settings)
    found += configuration.diagnose_settings(settings, buckets) if settings else []
    if spark:
        found += configuration.diagnose_spark(settings)
    rows = [
        {**vars(it), "problem": it.problem or None, "change": it.change or None} for it in found if every or it.problem
    ]
    write_records(rows, _DIAGNOSED, output, if_none=False)
    problems = sum(bool(it.problem) for it in found)
    say(f"looked at {len(found)} things: {problems} to change" + ("" if settings else "; no Spark settings were given"))
    raise typer.Exit(NO if problems else DONE)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (sign and name):
        raise UsageError(f"--conf must be NAME=VALUE, not {text!r}")
    return name.strip(), value.strip()
