"""Commands that check whether this machine and a configuration work well: check and doctor."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from spark_state_ext.cli.check import check_machine
from spark_state_ext.cli.exit_codes import DONE, NO
from spark_state_ext.cli.options import JobDirOption, OutputOption, RootPath, StorageOptions
from spark_state_ext.cli.output import Output, parse_columns, say, write_records
from spark_state_ext.errors import UsageError

__all__ = ["check", "doctor"]

_CHECK_COLUMNS = parse_columns("what, seen, problem")
_DOCTOR_COLUMNS = parse_columns("what, seen, problem, change")


def check(local_dir: JobDirOption = None, output: OutputOption = Output.TABLE) -> None:
    """Print what is installed, and whether this machine can run it.

    Run it on an executor's machine, with the executors' Python.
    """
    results = check_machine(local_dir or Path(tempfile.gettempdir()))
    write_records(map(vars, results), _CHECK_COLUMNS, output)
    problems = sum(bool(result.problem) for result in results)
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
        bool, typer.Option("--spark", help="start a session with these settings, and ask its executors")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="list also what is fine")] = False,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what is wrong with a configuration, and what to change. Exits with 1 if something must be changed.

    Run it on an executor's machine, with the executors' Python. It writes a small file below the root, and removes it.
    Spark's settings are checked if --conf or --properties-file gives some. With --spark, a small job asks the executors
    which releases they have; in that case run it where the client runs.
    """
    # Imported here, because `check` must work without the packages that it reports as missing.
    from spark_state_ext.cli import configuration

    settings = {} if properties_file is None else configuration.read_properties(properties_file)
    settings |= dict(map(_split_setting, conf or ()))
    results = configuration.diagnose_machine(local_dir or Path(tempfile.gettempdir()), buckets)
    results += configuration.diagnose_root(root, storage_options, settings)
    results += configuration.diagnose_settings(settings, buckets) if settings else []
    if spark:
        results += configuration.diagnose_spark(settings)
    rows = [
        {**vars(result), "problem": result.problem or None, "change": result.change or None}
        for result in results
        if every or result.problem
    ]
    write_records(rows, _DOCTOR_COLUMNS, output, if_empty=False)
    problems = sum(bool(result.problem) for result in results)
    say(f"{len(results)} checks: {problems} to change" + ("" if settings else "; no Spark settings were given"))
    raise typer.Exit(NO if problems else DONE)


def _split_setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (sign and name):
        raise UsageError(f"--conf must be NAME=VALUE, not {text!r}")
    return name.strip(), value.strip()
