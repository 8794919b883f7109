"""``standby status``: who lives, and how far replicas are."""

from __future__ import annotations

import math
import sys
import time
from typing import Annotated

import pyarrow as pa
import typer

from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.output import Output, say, write_table
from spark_state_ext.cli.parameters import OutputOption, StorageOptions, options_of
from spark_state_ext.cli.standby import (
    HOSTS,
    REPLICAS,
    RootArgument,
    failures,
    host_rows,
    host_table,
    recovery,
    replica_rows,
    replica_table,
    root_at,
    shown,
)
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.finding import Finder
from spark_state_ext.standby.status import StandbyStatus, survey

__all__ = ["command"]


def command(
    root: RootArgument,
    wait: Annotated[
        bool, typer.Option("--wait", help="until every bucket has its replicas, all in sync; live in a terminal")
    ] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.0, metavar="SECONDS", help="with --wait: at most so long")
    ] = None,
    replicas: Annotated[bool, typer.Option("--replicas", help="every replica, in place of every host")] = False,
    remove: Annotated[
        str | None, typer.Option("--safe-to-remove", metavar="HOST", help="exit with 1 where it is not")
    ] = None,
    storage_options: StorageOptions = "{}",
    output: OutputOption = Output.TABLE,
) -> None:
    """Print hosts with a standby service, and what they have.

    It exits with 1 while a bucket lacks a replica in sync, a replica cannot be followed, or two services have one name.

    It waits until each host has written another record, which takes up to one and a half heartbeats: so it is seen who
    lives, and no clock is compared with another.
    """
    if timeout_s is not None and not wait:
        raise UsageError("--timeout is how long --wait waits: give both, or neither")
    folder = root_at(root, options_of(storage_options))
    status = _until_in_sync(folder, timeout_s) if wait else _status(folder)
    if not wait and not status.buckets and not status.hosts():
        raise UsageError(
            f"there is no state below {folder.root}, and no standby service: give the root as ArrowState has it, or "
            "--wait until a job has written there"
        )
    if output is Output.TABLE:
        table = replica_table(status) if replicas else host_table(status)
    else:
        rows, schema = (replica_rows(status), REPLICAS) if replicas else (host_rows(status), HOSTS)
        table = pa.Table.from_pylist(rows, schema=schema)
    write_table(table, output)
    for problem in (*status.problems, *failures(status)):
        say(problem)
    if not status.buckets:
        say(f"there are no buckets below {folder.root} yet: nothing can be followed before a batch has written a file")
        raise typer.Exit(NO)
    lacking = status.lacking()
    wanted = status.settings.replicas
    counts = f"buckets={len(status.buckets)} replicas_wanted={wanted} lacking={sum(lacking.values())}"
    say(f"{counts} recover_s={recovery(status)}")
    if remove is None:
        raise typer.Exit(DONE if status.is_well() else NO)
    if remove not in status.hosts():
        known = ", ".join(status.hosts()) or "none"
        raise UsageError(
            f"no host {remove} is known below {folder.root}: it has no standby service, and no bucket is active there. "
            f"Known are: {known}"
        )
    removal = status.removal(remove)
    if remove not in status.records:
        say(f"no standby service lives on {remove}")
    if removal.safe:
        say(f"{remove} can go: each bucket that is active there has a replica in sync elsewhere")
    else:
        first = removal.exposed[0]
        say(
            f"{remove} should stay: {len(removal.exposed)} buckets that are active there, or may be, have no replica "
            f"in sync elsewhere, such as {first}"
        )
    raise typer.Exit(DONE if removal.safe else NO)


def _status(folder: Folder) -> StandbyStatus:
    found = Finder(folder).find()
    for error in found.errors.values():
        # Nobody can say that all is in sync, where an operator could not be looked at.
        raise error
    return survey(folder, found.operators)


def _until_in_sync(folder: Folder, timeout_s: float | None) -> StandbyStatus:
    """Look again and again; in a terminal what is seen is shown on stderr meanwhile."""
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    lacks: list[str] = []
    with shown(sys.stderr) as show:
        while True:
            status = _status(folder)
            show(status)
            left_s = deadline_s - time.monotonic()
            if (status.buckets and status.is_well()) or left_s <= 0:
                return status
            before, lacks = lacks, _lacks(folder, status)
            for line in lacks:
                if line not in before:
                    say(f"waiting: {line}")
            if not status.records:
                # Else the look itself has waited for records.
                time.sleep(min(left_s, status.settings.heartbeat_s / 2))


def _lacks(folder: Folder, status: StandbyStatus) -> list[str]:
    """What must come from outside before all can be in sync."""
    if not status.buckets:
        return [f"no job has written to {folder.root} yet"]
    if not status.records:
        return [f"no standby service of {folder.root} lives"]
    return [*status.problems, *failures(status)]
