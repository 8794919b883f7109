"""The commands standby settings and standby status: which hosts are alive, and how far replicas lag."""

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

from spark_state_ext.cli.exit_codes import DONE, NO
from spark_state_ext.cli.options import OutputOption, StorageOptions
from spark_state_ext.cli.output import Output, parse_columns, say, write_record, write_table
from spark_state_ext.cli.paths import list_operators, strip_slash
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.printable import printable
from spark_state_ext.standby.buckets_below_root import Finder
from spark_state_ext.standby.members import read_settings, write_settings
from spark_state_ext.standby.recovery import estimate_host_recovery_s, estimate_recovery_s
from spark_state_ext.standby.status import StandbyStatus, read_status

__all__ = [
    "HOSTS",
    "REPLICAS",
    "build_host_rows",
    "build_host_table",
    "build_replica_rows",
    "build_replica_table",
    "describe_failures",
    "format_recovery",
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
# Fits into 80 characters if names are short.
_HOST_TABLE = parse_columns(
    "host, alive bool, active int, in_sync, failing int, lag_s float, recover_s, removable bool"
)
_REPLICA_TABLE = parse_columns("operator, folder, bucket int, active, host, replica, lag_s float, recover_s")
_SETTINGS = parse_columns("enabled bool, standby_replicas int, heartbeat_s float")
_UNKNOWN = "unknown"
# At most so many failing replicas are named.
_FAILING_MAX = 10
# So many characters of a query folder's name are shown, to distinguish the query folders of an operator.
_FOLDER_CHARACTERS = 6
_RootPath = Annotated[str, typer.Argument(metavar="ROOT", help="the root that ArrowState has: a path or a URL")]


def _open_root(root: str, storage_options: Mapping[str, Any]) -> Folder:
    """Open the root that a command got. It may be empty, if no job has written there yet."""
    folder = Folder(strip_slash(root), storage_options)
    list_operators(folder, allow_empty=True)
    return folder


# -- settings -------------------------------------------------------------------------------------


def settings(
    root: _RootPath,
    enabled: Annotated[bool | None, typer.Option("--on/--off", help="enable or disable replicas")] = None,
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", min=0, help="copies of each bucket, in addition to its active task's own state"),
    ] = None,
    heartbeat_s: Annotated[
        float | None, typer.Option("--heartbeat", min=0.1, metavar="SECONDS", help="how often hosts write their record")
    ] = None,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the settings of all hosts of a root, after changing those for which an option is given.

    Services read the settings again at each heartbeat.
    """
    folder = _open_root(root, storage_options)
    discovery = Finder(folder).find()
    if not discovery.operators and not discovery.errors:
        say(f"no job has written to {folder.root} yet: is it exactly the root that ArrowState has?")
    before = read_settings(folder)
    options: dict[str, Any] = {"enabled": enabled, "standby_replicas": replicas, "heartbeat_s": heartbeat_s}
    changed = replace(before, **{name: value for name, value in options.items() if value is not None})
    if changed != before:
        write_settings(folder, changed)
    write_record(asdict(changed), _SETTINGS, output)


# -- status ---------------------------------------------------------------------------------------


def status(
    root: _RootPath,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="wait until every bucket has all its replicas in sync; a terminal shows progress"),
    ] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.0, metavar="SECONDS", help="with --wait: wait at most so long")
    ] = None,
    replicas: Annotated[bool, typer.Option("--replicas", help="print every replica instead of every host")] = False,
    remove: Annotated[
        str | None,
        typer.Option("--safe-to-remove", metavar="HOST", help="exit with 1 if HOST cannot be removed safely"),
    ] = None,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the hosts with a standby service, and their replicas.

    It exits with 1 while a bucket has too few replicas in sync, a replica cannot be followed, or two services have the
    same name.

    It first waits until each host has written another record, up to one and a half heartbeats. That shows which hosts
    are alive, without comparing the clocks of machines.
    """
    if timeout_s is not None and not wait:
        raise UsageError("--timeout limits how long --wait waits: give both, or neither")
    folder = _open_root(root, storage_options)
    report = _wait_until_in_sync(folder, timeout_s) if wait else _survey(folder)
    if not wait and not report.buckets and not report.hosts():
        raise UsageError(
            f"there is no state below {folder.root}, and no standby service: give the root that ArrowState has, or "
            "give --wait to wait until a job has written there"
        )
    if output is Output.TABLE:
        table = build_replica_table(report) if replicas else build_host_table(report)
    else:
        rows, schema = (build_replica_rows(report), REPLICAS) if replicas else (build_host_rows(report), HOSTS)
        table = pa.Table.from_pylist(rows, schema=schema)
    write_table(table, output)
    for problem in (*report.problems, *describe_failures(report)):
        say(problem)
    if not report.buckets:
        say(f"there are no buckets below {folder.root} yet: replicas can follow only after a batch has written a file")
        raise typer.Exit(NO)
    counts = f"buckets={len(report.buckets)} replicas_wanted={report.settings.replicas}"
    say(f"{counts} lacking={sum(report.lacking().values())} recover_s={format_recovery(report)}")
    is_well = report.is_well() if remove is None else _is_safe_to_remove(report, remove, folder)
    raise typer.Exit(DONE if is_well else NO)


def _is_safe_to_remove(report: StandbyStatus, host: str, folder: Folder) -> bool:
    """Return True if no bucket has to be restored from files when a host is removed; print why."""
    if host not in report.hosts():
        known_hosts = ", ".join(report.hosts()) or "none"
        raise UsageError(
            f"there is no host {host} below {folder.root}: it has no standby service, and no bucket is active there. "
            f"Known hosts: {known_hosts}"
        )
    removal = report.removal(host)
    if host not in report.records:
        say(f"no standby service is alive on {host}")
    if removal.safe:
        say(f"{host} can be removed: each bucket that is active there has a replica in sync elsewhere")
    else:
        say(
            f"{host} should stay: {len(removal.exposed)} buckets that are or may be active there have no replica in "
            f"sync elsewhere, such as {removal.exposed[0]}"
        )
    return removal.safe


def _survey(folder: Folder) -> StandbyStatus:
    discovery = Finder(folder).find()
    for error in discovery.errors.values():
        # If an operator cannot be read, it is unknown whether its replicas are in sync.
        raise error
    return read_status(folder, discovery.operators)


def _wait_until_in_sync(folder: Folder, timeout_s: float | None) -> StandbyStatus:
    """Survey repeatedly until all replicas are in sync or time is up; show progress on stderr."""
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    obstacles: list[str] = []
    with _live_table(sys.stderr) as show:
        while True:
            report = _survey(folder)
            show(report)
            left_s = deadline_s - time.monotonic()
            if (report.buckets and report.is_well()) or left_s <= 0:
                return report
            earlier, obstacles = obstacles, _list_obstacles(folder, report)
            for line in obstacles:
                if line not in earlier:
                    say(f"waiting: {line}")
            if not report.records:
                # With records, the survey itself has waited for new ones.
                time.sleep(min(left_s, report.settings.heartbeat_s / 2))


def _list_obstacles(folder: Folder, report: StandbyStatus) -> list[str]:
    """Return what must change from outside before all replicas can be in sync."""
    if not report.buckets:
        return [f"no job has written to {folder.root} yet"]
    if not report.records:
        return [f"no standby service of {folder.root} is alive"]
    return [*report.problems, *describe_failures(report)]


def build_host_rows(status: StandbyStatus) -> list[dict[str, Any]]:
    """Return a row for each host (`HOSTS`): alive hosts, silent ones, and hosts that only run tasks."""
    active = [host for host in status.buckets.values() if host is not None]
    rows = []
    for host in sorted({*status.records, *status.silent, *active}):
        record = status.records.get(host)
        replicas = status.held(host)
        rate = None if record is None else record.restore_bytes_per_s
        rows.append(
            {
                "host": host,
                "rack": None if record is None else record.rack,
                "alive": record is not None,
                "active": active.count(host),
                "replicas": len(replicas),
                "in_sync": sum(replica.in_sync for replica in replicas),
                "failing": len(status.failing(host)),
                "bytes": sum(replica.bytes for replica in replicas),
                "lag_versions": max((replica.lag_versions for replica in replicas), default=0),
                "lag_bytes": sum(replica.lag_bytes for replica in replicas),
                "lag_s": max((replica.lag_s for replica in replicas), default=0.0),
                "restore_bytes_per_s": rate,
                "restore_rows_per_s": None if record is None else record.restore_rows_per_s,
                "recover_s": None if record is None else _round_seconds(estimate_host_recovery_s(replicas, rate)),
                "safe_to_remove": status.removal(host).safe,
            }
        )
    return rows


def build_replica_rows(status: StandbyStatus) -> list[dict[str, Any]]:
    """Return a row for each replica (`REPLICAS`), and a row without a host for each bucket without replicas."""
    rows: list[dict[str, Any]] = []
    by_bucket: dict[Any, list[dict[str, Any]]] = {key: [] for key in status.buckets}
    for host, record in status.records.items():
        failing = status.failing(host)
        for replica in status.held(host):
            values = {name: getattr(replica, name) for name in REPLICAS.names[5:-2]}
            recovery_s = _round_seconds(estimate_recovery_s(replica, record.restore_bytes_per_s))
            by_bucket[replica.key].append(
                {"host": host, **values, "recover_s": recovery_s, "failing": failing.get(replica.key)}
            )
    for key, bucket_rows in by_bucket.items():
        bucket_values = {**key._asdict(), "active": status.buckets[key]}
        rows += [{**bucket_values, **row} for row in bucket_rows or [dict.fromkeys(REPLICAS.names[4:])]]
    return rows


def build_host_table(status: StandbyStatus) -> pa.Table:
    """Return a table of hosts for people; the other output formats have all columns of `HOSTS`."""
    rows = [
        {
            "host": row["host"],
            "alive": row["alive"],
            "active": row["active"],
            "in_sync": f"{row['in_sync']} of {row['replicas']}",
            "failing": row["failing"],
            "lag_s": _round_seconds(row["lag_s"]),
            "recover_s": _format_recover_s(row),
            "removable": row["safe_to_remove"],
        }
        for row in build_host_rows(status)
    ]
    return pa.Table.from_pylist(rows, schema=_HOST_TABLE)


def build_replica_table(status: StandbyStatus) -> pa.Table:
    """Return a table of replicas for people."""
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
            "replica": _describe_replica(row),
            "lag_s": _round_seconds(row["lag_s"]),
            "recover_s": _format_recover_s(row),
        }
        for row in build_replica_rows(status)
    ]
    table = pa.Table.from_pylist(rows, schema=_REPLICA_TABLE)
    return table if any(len(names) > 1 for names in folders.values()) else table.drop_columns(["folder"])


def _describe_replica(row: Mapping[str, Any]) -> str:
    """Return the state of a replica: missing, failing, in sync or behind."""
    if row["host"] is None:
        return "missing"
    if row["failing"] is not None:
        return "failing"
    return "in sync" if row["in_sync"] else "behind"


def describe_failures(status: StandbyStatus) -> list[str]:
    """Return a line with the reason for each of the first failing replicas."""
    lines = [
        f"{host} cannot follow {key}: {reason or 'see the log of its service'}"
        for host in sorted(status.records)
        for key, reason in sorted(status.failing(host).items())
    ]
    more_count = len(lines) - _FAILING_MAX
    return lines if more_count <= 0 else [*lines[:_FAILING_MAX], f"{more_count} more replicas fail"]


def format_recovery(status: StandbyStatus) -> str:
    """Return the estimated seconds until all replicas have caught up, or ``unknown``."""
    seconds = _round_seconds(status.recover_s())
    return _UNKNOWN if seconds is None else str(seconds)


def _format_recover_s(row: Mapping[str, Any]) -> str | None:
    # A host without a service and a bucket without a replica have no estimate.
    if row.get("alive") is False or row["host"] is None:
        return None
    return _UNKNOWN if row["recover_s"] is None else str(row["recover_s"])


def _round_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


@contextmanager
def _live_table(stream: TextIO) -> Iterator[Callable[[StandbyStatus], None]]:
    """Show a table of hosts that is redrawn with each status, on a terminal only."""
    if not stream.isatty():
        yield lambda status: None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=stream), auto_refresh=False, transient=True) as live:
        yield lambda status: live.update(_build_live_table(status), refresh=True)


def _build_live_table(status: StandbyStatus) -> Any:
    from rich.table import Table
    from rich.text import Text

    missing = sum(status.lacking().values())
    title = f"{missing} replicas are not in sync yet; estimated seconds until they are: {format_recovery(status)}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    rows = build_host_table(status)
    for name in rows.column_names:
        table.add_column(name)
    for row in rows.to_pylist():
        # Host names are chosen by the user, so print them without interpreting markup.
        table.add_row(*(Text("" if value is None else printable(str(value))) for value in row.values()))
    return table
