"""``rollback``: make an older batch the last one of a Spark checkpoint."""

from __future__ import annotations

import time
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.output import Output, say, table_of, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.rollback import Rollback, carry_out, check_idle, planned, written_ago_s
from spark_state_ext.cli.spark_checkpoint import COMMITS, OFFSETS, ROLLED_BACK, STATE
from spark_state_ext.files.folder import Folder

__all__ = ["command"]

# Twice Spark's maintenance interval: in an application that goes on, maintenance uploads a last snapshot of a query
# that has stopped, up to an interval later. A query that was rolled back before that may read it.
_IDLE_S = 120.0
_ROWS = pa.schema([("kind", pa.string()), ("number", pa.int64()), ("path", pa.string())])


def command(
    checkpoint: Annotated[str, typer.Argument(help="Spark's checkpointLocation: an absolute path or a URL")],
    to_batch: Annotated[int, typer.Option(metavar="N", help="the last batch that is kept")],
    apply: Annotated[
        bool, typer.Option("--apply", help=f"move the files to {ROLLED_BACK}… in the checkpoint location")
    ] = False,
    delete: Annotated[bool, typer.Option("--delete", help="with --apply: delete them")] = False,
    idle_s: Annotated[float, typer.Option(help="refuse where anything was written this recently")] = _IDLE_S,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Make an older batch the last one of a Spark checkpoint. Stop the query first.

    Prints the files that go, with the version of state or the batch that each is of. Without --apply nothing is
    changed.
    """
    if delete and not apply:
        raise typer.BadParameter("--delete goes with --apply")
    folder = Folder(checkpoint, options_of(storage_options))
    plan = planned(folder, to_batch)
    if not apply:
        _write(plan, output)
        say(_what_next(written_ago_s(plan, time.time(), idle_s), idle_s))
        return
    check_idle(plan, time.time(), idle_s, folder.root)
    _write(plan, output)
    aside = f"{ROLLED_BACK}to-{plan.to_batch}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    done = carry_out(folder, plan, None if delete else aside)
    say(f"deleted={done}" if delete else f"moved={done} to={folder.where(aside)}")


def _write(plan: Rollback, output: Output) -> None:
    rows = [{"kind": file.kind, "number": file.number, "path": file.path} for file in plan.files]
    write_table(table_of(rows, _ROWS), output)
    counts = {kind: sum(file.kind == kind for file in plan.files) for kind in (STATE, COMMITS, OFFSETS)}
    say(f"files={len(plan.files)} " + " ".join(f"{kind}={count}" for kind, count in counts.items()))


def _what_next(written_s: float | None, idle_s: float) -> str:
    if written_s is None:
        return "nothing was changed: --apply does it"
    return (
        f"nothing was changed. --apply would refuse now (not yet: written {written_s:.0f} s ago): stop the query, "
        f"and wait until {idle_s:g} s have passed, or say --idle-s 0"
    )
