"""Standby: settings and status, which hosts live, and how far replicas are."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Annotated, Any, TextIO

import pyarrow as pa
import typer

from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.options import OutputOption, StorageOptions
from spark_state_ext.cli.output import Output, parse_columns, say, write_record, write_table
from spark_state_ext.cli.paths import list_operators, strip_slash
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.printable import printable
from spark_state_ext.standby.finding import Finder
from spark_state_ext.standby.members import read_settings, write_settings
from spark_state_ext.standby.recovery import recover_host_s, recover_s
from spark_state_ext.standby.status import StandbyStatus, survey

__all__ = [
    "HOSTS",
    "REPLICAS",
    "describe_failures",
    "build_host_rows",
    "build_host_table",
    "format_recovery",
    "build_replica_rows",
    "build_replica_table",
    "settings",
    "status",
]

HOSTS = parse_columns(
    "host, rack, alive bool, active int, replicas int, in_sync int, failing int, bytes int, lag_versions int, "
    "lag_bytes int, lag_s float, restore_bytes_per_s float, restore_rows_per_s float, recover_s float, "
    "safe_to_remove bool"
)
REPLICAS = parse_columns(
    "operator, query_folder, bucket int, active, host, version int, in_sync bool, bytes int, lag_versions int, "
    "lag_bytes int, lag_s float, recover_s float, failing"
)
# In 80 columns where names are short.
_HOST_TABLE = parse_columns(
    "host, alive bool, active int, in_sync, failing int, lag_s float, recover_s, removable bool"
)
_REPLICA_TABLE = parse_columns("operator, folder, bucket int, active, host, replica, lag_s float, recover_s")
_SETTINGS = parse_columns("enabled bool, standby_replicas int, heartbeat_s float")
_UNKNOWN = "unknown"
# So many replicas that fail are named.
_FAILING_MAX = 10
# What tells query folders of one operator apart.
_FOLDER_CHARACTERS = 6
_RootPath = Annotated[str, typer.Argument(metavar="ROOT", help="the root, as ArrowState has it: a path or a URL")]


def _root_at(root: str, storage_options: Mapping[str, Any]) -> Folder:
    """The root that a command was given. There may be nothing in it, where no job has written there yet."""
    folder = Folder(strip_slash(root), storage_options)
    list_operators(folder, allow_empty=True)
    return folder


# -- settings -------------------------------------------------------------------------------------


def settings(
    root: _RootPath,
    enabled: Annotated[bool | None, typer.Option("--on/--off", help="whether there are replicas at all")] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=0, help="of each bucket, beside the state of its active task")
    ] = None,
    heartbeat_s: Annotated[
        float | None, typer.Option("--heartbeat", min=0.1, metavar="SECONDS", help="how often hosts write their record")
    ] = None,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what all hosts of a root go by, and change it first where an option says so.

    Services read it again at each heartbeat.
    """
    folder = _root_at(root, storage_options)
    found = Finder(folder).find()
    if not found.operators and not found.errors:
        say(f"no job has written to {folder.root} yet: is it the root as ArrowState has it, to the letter?")
    before = read_settings(folder)
    given: dict[str, Any] = {"enabled": enabled, "standby_replicas": replicas, "heartbeat_s": heartbeat_s}
    changed = replace(before, **{name: value for name, value in given.items() if value is not None})
    if changed != before:
        write_settings(folder, changed)
    write_record(asdict(changed), _SETTINGS, output)


# -- status ---------------------------------------------------------------------------------------


def status(
    root: _RootPath,
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
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print hosts with a standby service, and what they have.

    It exits with 1 while a bucket lacks a replica in sync, a replica cannot be followed, or two services have one name.

    It waits until each host has written another record, which takes up to one and a half heartbeats: so it is seen who
    lives, and no clock is compared with another.
    """
    if timeout_s is not None and not wait:
        raise UsageError("--timeout is how long --wait waits: give both, or neither")
    folder = _root_at(root, storage_options)
    seen = _until_in_sync(folder, timeout_s) if wait else _survey(folder)
    if not wait and not seen.buckets and not seen.hosts():
        raise UsageError(
            f"there is no state below {folder.root}, and no standby service: give the root as ArrowState has it, or "
            "--wait until a job has written there"
        )
    if output is Output.TABLE:
        table = build_replica_table(seen) if replicas else build_host_table(seen)
    else:
        rows, schema = (build_replica_rows(seen), REPLICAS) if replicas else (build_host_rows(seen), HOSTS)
        table = pa.Table.from_pylist(rows, schema=schema)
    write_table(table, output)
    for problem in (*seen.problems, *describe_failures(seen)):
        say(problem)
    if not seen.buckets:
        say(f"there are no buckets below {folder.root} yet: nothing can be followed before a batch has written a file")
        raise typer.Exit(NO)
    counts = f"buckets={len(seen.buckets)} replicas_wanted={seen.settings.replicas}"
    say(f"{counts} lacking={sum(seen.lacking().values())} recover_s={format_recovery(seen)}")
    well = seen.is_well() if remove is None else _is_safe_to_remove(seen, remove, folder)
    raise typer.Exit(DONE if well else NO)


def _is_safe_to_remove(seen: StandbyStatus, host: str, folder: Folder) -> bool:
    """Whether a host can go without that a bucket has to be restored from files; says why."""
    if host not in seen.hosts():
        known = ", ".join(seen.hosts()) or "none"
        raise UsageError(
            f"no host {host} is known below {folder.root}: it has no standby service, and no bucket is active there. "
            f"Known are: {known}"
        )
    removal = seen.removal(host)
    if host not in seen.records:
        say(f"no standby service lives on {host}")
    if removal.safe:
        say(f"{host} can go: each bucket that is active there has a replica in sync elsewhere")
    else:
        say(
            f"{host} should stay: {len(removal.exposed)} buckets that are active there, or may be, have no replica "
            f"in sync elsewhere, such as {removal.exposed[0]}"
        )
    return removal.safe


def _survey(folder: Folder) -> StandbyStatus:
    found = Finder(folder).find()
    for error in found.errors.values():
        # Nobody can say that all is in sync, where an operator could not be looked at.
        raise error
    return survey(folder, found.operators)


def _until_in_sync(folder: Folder, timeout_s: float | None) -> StandbyStatus:
    """Look again and again; in a terminal what is seen is shown on stderr meanwhile."""
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    lacks: list[str] = []
    with _shown(sys.stderr) as show:
        while True:
            seen = _survey(folder)
            show(seen)
            left_s = deadline_s - time.monotonic()
            if (seen.buckets and seen.is_well()) or left_s <= 0:
                return seen
            before, lacks = lacks, _lacks(folder, seen)
            for line in lacks:
                if line not in before:
                    say(f"waiting: {line}")
            if not seen.records:
                # Else the look itself has waited for records.
                time.sleep(min(left_s, seen.settings.heartbeat_s / 2))


def _lacks(folder: Folder, seen: StandbyStatus) -> list[str]:
    """What must come from outside before all can be in sync."""
    if not seen.buckets:
        return [f"no job has written to {folder.root} yet"]
    if not seen.records:
        return [f"no standby service of {folder.root} lives"]
    return [*seen.problems, *describe_failures(seen)]


def build_host_rows(status: StandbyStatus) -> list[dict[str, Any]]:
    """A row for each host (`HOSTS`): those that live, those that have fallen silent, and those that only have tasks."""
    active = [host for host in status.buckets.values() if host is not None]
    rows = []
    for host in sorted({*status.records, *status.silent, *active}):
        record = status.records.get(host)
        held = status.held(host)
        rate = None if record is None else record.restore_bytes_per_s
        rows.append(
            {
                "host": host,
                "rack": None if record is None else record.rack,
                "alive": record is not None,
                "active": active.count(host),
                "replicas": len(held),
                "in_sync": sum(it.in_sync for it in held),
                "failing": len(status.failing(host)),
                "bytes": sum(it.bytes for it in held),
                "lag_versions": max((it.lag_versions for it in held), default=0),
                "lag_bytes": sum(it.lag_bytes for it in held),
                "lag_s": max((it.lag_s for it in held), default=0.0),
                "restore_bytes_per_s": rate,
                "restore_rows_per_s": None if record is None else record.restore_rows_per_s,
                "recover_s": None if record is None else _rounded(recover_host_s(held, rate)),
                "safe_to_remove": status.removal(host).safe,
            }
        )
    return rows


def build_replica_rows(status: StandbyStatus) -> list[dict[str, Any]]:
    """A row for each replica (`REPLICAS`), and one without a host for each bucket that has none."""
    rows: list[dict[str, Any]] = []
    by_bucket: dict[Any, list[dict[str, Any]]] = {key: [] for key in status.buckets}
    for host, record in status.records.items():
        failing = status.failing(host)
        for it in status.held(host):
            told = {name: getattr(it, name) for name in REPLICAS.names[5:-2]}
            each_s = _rounded(recover_s(it, record.restore_bytes_per_s))
            by_bucket[it.key].append({"host": host, **told, "recover_s": each_s, "failing": failing.get(it.key)})
    for key, found in by_bucket.items():
        whose = {**key._asdict(), "active": status.buckets[key]}
        rows += [{**whose, **it} for it in found or [dict.fromkeys(REPLICAS.names[4:])]]
    return rows


def build_host_table(status: StandbyStatus) -> pa.Table:
    """Rows of hosts for people, in 80 columns where names are short; the other forms of output have all of `HOSTS`."""
    rows = [
        {
            "host": row["host"],
            "alive": row["alive"],
            "active": row["active"],
            "in_sync": f"{row['in_sync']} of {row['replicas']}",
            "failing": row["failing"],
            "lag_s": _rounded(row["lag_s"]),
            "recover_s": _told(row),
            "removable": row["safe_to_remove"],
        }
        for row in build_host_rows(status)
    ]
    return pa.Table.from_pylist(rows, schema=_HOST_TABLE)


def build_replica_table(status: StandbyStatus) -> pa.Table:
    """Rows of replicas for people, as `build_host_table`."""
    folders: dict[str, set[str]] = {}
    for key in status.buckets:
        folders.setdefault(key.operator, set()).add(key.query_folder)
    rows = [
        {
            "operator": row["operator"],
            "folder": row["query_folder"][:_FOLDER_CHARACTERS],
            "bucket": row["bucket"],
            "active": row["active"],
            "host": row["host"],
            "replica": _state(row),
            "lag_s": _rounded(row["lag_s"]),
            "recover_s": _told(row),
        }
        for row in build_replica_rows(status)
    ]
    table = pa.Table.from_pylist(rows, schema=_REPLICA_TABLE)
    return table if any(len(them) > 1 for them in folders.values()) else table.drop_columns(["folder"])


def _state(row: Mapping[str, Any]) -> str:
    """How a replica is, in a word."""
    if row["host"] is None:
        return "missing"
    if row["failing"] is not None:
        return "failing"
    return "in sync" if row["in_sync"] else "behind"


def describe_failures(status: StandbyStatus) -> list[str]:
    """What to say of replicas that fail: a line each for the first ones, with the reason."""
    lines = [
        f"{host} cannot follow {key}: {reason or 'the log of its service says why'}"
        for host in sorted(status.records)
        for key, reason in sorted(status.failing(host).items())
    ]
    more = len(lines) - _FAILING_MAX
    return lines if more <= 0 else [*lines[:_FAILING_MAX], f"{more} more replicas fail"]


def format_recovery(status: StandbyStatus) -> str:
    """How long until all replicas have caught up, in seconds, or ``unknown``."""
    found = _rounded(status.recover_s())
    return _UNKNOWN if found is None else str(found)


def _told(row: Mapping[str, Any]) -> str | None:
    # Of a host without a service, or a bucket without a replica, there is nothing to estimate.
    if row.get("alive") is False or row["host"] is None:
        return None
    return _UNKNOWN if row["recover_s"] is None else str(row["recover_s"])


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


@contextmanager
def _shown(stream: TextIO) -> Iterator[Callable[[StandbyStatus], None]]:
    """A table of hosts in a terminal that is drawn again with each status; elsewhere nothing."""
    if not stream.isatty():
        yield lambda status: None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=stream), auto_refresh=False, transient=True) as live:
        yield lambda status: live.update(_table(status), refresh=True)


def _table(status: StandbyStatus) -> Any:
    from rich.table import Table
    from rich.text import Text

    lacking = sum(status.lacking().values())
    title = f"{lacking} replicas are not in sync yet; estimated seconds until they are: {format_recovery(status)}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    rows = build_host_table(status)
    for name in rows.column_names:
        table.add_column(name)
    for row in rows.to_pylist():
        # Names of hosts are the user's: what looks like markup in them is shown as it is.
        table.add_row(*(Text("" if value is None else printable(str(value))) for value in row.values()))
    return table
