"""``check``: what is installed, and whether this machine can run it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.check import findings
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.output import Output, say, table_of, write_table
from spark_state_ext.cli.parameters import OutputOption

__all__ = ["command"]

_ROWS = pa.schema([("what", pa.string()), ("seen", pa.string()), ("problem", pa.string())])


def command(
    local_dir: Annotated[
        Path | None, typer.Option(help="as given to ArrowState; by default the system's temporary folder")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what is installed, and whether this machine can run it.

    Run it with the Python that the executors use, on a machine of theirs.
    """
    found = findings(local_dir or Path(tempfile.gettempdir()))
    rows = [{"what": it.what, "seen": it.seen, "problem": it.problem} for it in found]
    write_table(table_of(rows, _ROWS), output)
    problems = sum(bool(it.problem) for it in found)
    say("this machine can run it" if not problems else f"{problems} problem(s), see above")
    raise typer.Exit(NO if problems else DONE)
