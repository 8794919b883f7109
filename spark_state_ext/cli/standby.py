"""What commands about standby share: the root, and rows of hosts and replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TextIO

import pyarrow as pa
import typer

from spark_state_ext.cli.roots import operators_below
from spark_state_ext.cli.targets import as_given
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.printable import printable
from spark_state_ext.standby.recovery import recover_host_s, recover_s
from spark_state_ext.standby.status import StandbyStatus

__all__ = [
    "HOSTS",
    "REPLICAS",
    "RootArgument",
    "failures",
    "host_rows",
    "host_table",
    "recovery",
    "replica_rows",
    "replica_table",
    "root_at",
    "shown",
]

_UNKNOWN = "unknown"

RootArgument = Annotated[str, typer.Argument(metavar="ROOT", help="the root, as ArrowState has it: a path or a URL")]
HOSTS = pa.schema(
    [
        ("host", pa.string()),
        ("rack", pa.string()),
        ("alive", pa.bool_()),
        ("active", pa.int64()),
        ("replicas", pa.int64()),
        ("in_sync", pa.int64()),
        ("failing", pa.int64()),
        ("bytes", pa.int64()),
        ("lag_versions", pa.int64()),
        ("lag_bytes", pa.int64()),
        ("lag_s", pa.float64()),
        ("restore_bytes_per_s", pa.float64()),
        ("restore_rows_per_s", pa.float64()),
        ("recover_s", pa.float64()),
        ("safe_to_remove", pa.bool_()),
    ]
)
REPLICAS = pa.schema(
    [
        ("operator", pa.string()),
        ("query_folder", pa.string()),
        ("bucket", pa.int64()),
        ("active", pa.string()),
        ("host", pa.string()),
        ("version", pa.int64()),
        ("in_sync", pa.bool_()),
        ("bytes", pa.int64()),
        ("lag_versions", pa.int64()),
        ("lag_bytes", pa.int64()),
        ("lag_s", pa.float64()),
        ("recover_s", pa.float64()),
        ("failing", pa.string()),
    ]
)
_HOST_TABLE = pa.schema(
    [
        ("host", pa.string()),
        ("alive", pa.bool_()),
        ("active", pa.int64()),
        ("in_sync", pa.string()),
        ("failing", pa.int64()),
        ("lag_s", pa.float64()),
        ("recover_s", pa.string()),
        ("removable", pa.bool_()),
    ]
)
_REPLICA_TABLE = pa.schema(
    [
        ("operator", pa.string()),
        ("folder", pa.string()),
        ("bucket", pa.int64()),
        ("active", pa.string()),
        ("host", pa.string()),
        ("replica", pa.string()),
        ("lag_s", pa.float64()),
        ("recover_s", pa.string()),
    ]
)
# So many replicas that fail are named.
_FAILING_MAX = 10
# What tells query folders of one operator apart.
_FOLDER_CHARACTERS = 6


def root_at(root: str, storage_options: Mapping[str, Any]) -> Folder:
    """The root that a command was given. There may be nothing in it, where no job has written there yet."""
    folder = Folder(as_given(root), storage_options)
    operators_below(folder, may_lack_all=True)
    return folder


def host_rows(status: StandbyStatus) -> list[dict[str, Any]]:
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


def replica_rows(status: StandbyStatus) -> list[dict[str, Any]]:
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


def host_table(status: StandbyStatus) -> pa.Table:
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
        for row in host_rows(status)
    ]
    return pa.Table.from_pylist(rows, schema=_HOST_TABLE)


def replica_table(status: StandbyStatus) -> pa.Table:
    """Rows of replicas for people, as `host_table`."""
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
        for row in replica_rows(status)
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


def failures(status: StandbyStatus) -> list[str]:
    """What to say of replicas that fail: a line each for the first ones, with the reason."""
    lines = [
        f"{host} cannot follow {key}: {reason or 'the log of its service says why'}"
        for host in sorted(status.records)
        for key, reason in sorted(status.failing(host).items())
    ]
    more = len(lines) - _FAILING_MAX
    return lines if more <= 0 else [*lines[:_FAILING_MAX], f"{more} more replicas fail"]


def recovery(status: StandbyStatus) -> str:
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
def shown(stream: TextIO) -> Iterator[Callable[[StandbyStatus], None]]:
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
    title = f"{lacking} replicas are not in sync yet; estimated seconds until they are: {recovery(status)}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    rows = host_table(status)
    for name in rows.column_names:
        table.add_column(name)
    for row in rows.to_pylist():
        # Names of hosts are the user's: what looks like markup in them is shown as it is.
        table.add_row(*(Text("" if value is None else printable(str(value))) for value in row.values()))
    return table
