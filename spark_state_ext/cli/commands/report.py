"""``report``: one page about a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spark_state_ext.cli.output import say
from spark_state_ext.cli.parameters import StorageOptions, options_of
from spark_state_ext.cli.targets import absolute
from spark_state_ext.reports.making import report

__all__ = ["command"]


def command(
    path: Annotated[str, typer.Argument(help="the root, as ArrowState has it, or a folder of metrics")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="the page; one that is there is replaced")] = Path(
        "report.html"
    ),
    metrics: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="of the job's metrics, such as its local_dir")
    ] = None,
    title: Annotated[str, typer.Option(help="of the page; by default it names the path")] = "",
    storage_options: StorageOptions = "{}",
) -> None:
    """Write a report of a job: one HTML file, from its root, its metrics, or both.

    Reads only. Needs matplotlib: pip install 'spark_state_ext[report]'.
    """
    made = report(absolute(path), out, metrics=metrics, storage_options=options_of(storage_options), title=title)
    say(f"file={made} bytes={made.stat().st_size}")
