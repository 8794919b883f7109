"""What operators are at now: looks at a folder of metrics, and what changed from one look to the next.

`looked` and `rates` are functions of files and tables; `shown` makes a table for a terminal, and `watch` looks again
and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_state_ext.cli.output import write_cells
from spark_state_ext.files.printable import printable
from spark_state_ext.worker.metrics import read

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["LOOK", "RATES", "looked", "rates", "shown", "watch", "write_batches"]

_KEYS = ("query_id", "operator")
# Sums over all calls that the folder has, of which rates are made.
_COUNTED = (
    *("rows", "changed_rows", "timeouts", "uploads", "uploaded_bytes", "restored_files", "restore_gaps"),
    *("deleted_files", "upload_failures", "snapshot_failures"),
)
_TIMED = ("read_ms", "user_ms", "commit_ms", "wait_ms", "total_ms")
# Of a bucket's newest call.
_HELD = ("state_rows", "state_rows_min", "state_bytes")
_OLDEST = ("oldest_inline_ms", "lease_age_ms")


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


_OPERATOR = {
    **dict.fromkeys(_KEYS, pa.string()),
    **dict.fromkeys(("batch", "ended_ms", "buckets", "job_buckets", *_HELD, *_OLDEST), pa.int64()),
}
LOOK = _schema(
    looked_ms=pa.int64(),
    **_OPERATOR,
    calls=pa.int64(),
    **dict.fromkeys(_COUNTED, pa.int64()),
    **dict.fromkeys(_TIMED, pa.float64()),
)
RATES = _schema(
    seconds=pa.float64(),
    **_OPERATOR,
    calls=pa.int64(),
    **dict.fromkeys(_COUNTED, pa.int64()),
    **{f"{name}_per_s": pa.float64() for name in ("calls", "rows", "changed_rows", "uploaded_bytes")},
    **{f"{name}_per_call": pa.float64() for name in _TIMED},
)


def looked(folder: Path | str, now_ms: int | None = None) -> pa.Table:
    """One look at a folder of metrics."""
    now_ms = int(time.time() * 1000) if now_ms is None else now_ms
    calls = read(folder)
    calls = calls.append_column("at", pa.array(range(calls.num_rows), pa.int64()))
    sums = calls.group_by(list(_KEYS)).aggregate(
        [("batch", "max"), ("ended_ms", "max"), ("bucket", "count"), *((name, "sum") for name in (*_COUNTED, *_TIMED))]
    )
    newest = calls.take(calls.group_by([*_KEYS, "bucket"]).aggregate([("at", "max")]).column("at_max"))
    held = newest.group_by(list(_KEYS)).aggregate(
        [
            ("bucket", "count"),
            ("job_buckets", "max"),
            *((name, "sum") for name in _HELD),
            *((name, "max") for name in _OLDEST),
        ]
    )
    sums = sums.rename_columns(["calls" if name == "bucket_count" else _plain(name) for name in sums.column_names])
    held = held.rename_columns(["buckets" if name == "bucket_count" else _plain(name) for name in held.column_names])
    found = sums.join(held, list(_KEYS), join_type="inner")
    found = found.append_column("looked_ms", pa.array([now_ms] * found.num_rows, pa.int64()))
    return found.select(LOOK.names).cast(LOOK).sort_by([(name, "ascending") for name in _KEYS])


def rates(before: pa.Table, after: pa.Table) -> pa.Table:
    """What happened between two looks."""
    old = before.select([*_KEYS, "looked_ms", "calls", *_COUNTED, *_TIMED])
    both = after.join(old, list(_KEYS), join_type="left outer", right_suffix="_before")
    both = both.sort_by([(name, "ascending") for name in _KEYS])
    whole = pc.greater_equal(both["calls"], both["calls_before"])
    columns: dict[str, Any] = {name: both[name] for name in _OPERATOR}
    passed_ms = pc.subtract(both["looked_ms"], both["looked_ms_before"])
    seconds = pc.divide(_where(pc.greater(passed_ms, 0), passed_ms).cast(pa.float64()), 1000.0)
    columns["seconds"] = seconds
    more = {name: _where(whole, pc.subtract(both[name], both[f"{name}_before"])) for name in ("calls", *_COUNTED)}
    columns |= more
    for name in ("calls", "rows", "changed_rows", "uploaded_bytes"):
        columns[f"{name}_per_s"] = pc.divide(more[name].cast(pa.float64()), seconds)
    calls = _where(pc.greater(more["calls"], 0), more["calls"]).cast(pa.float64())
    for name in _TIMED:
        columns[f"{name}_per_call"] = pc.divide(_where(whole, pc.subtract(both[name], both[f"{name}_before"])), calls)
    return pa.table({name: columns[name] for name in RATES.names}, schema=RATES)


def _plain(name: str) -> str:
    for how in ("_sum", "_max"):
        name = name.removesuffix(how)
    return name


def _where(holds: pa.ChunkedArray, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values, and NULL where that does not hold or nobody knows."""
    return pc.if_else(holds, values, pa.scalar(None, values.type))


# -- for a terminal --------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.1f}{letter}"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.1f}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "–"
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _time(value_ms: float | None) -> str:
    if value_ms is None:
        return "–"
    return f"{value_ms:.1f} ms" if value_ms < 1000 else f"{value_ms / 1000:.1f} s"


_LEFT = ("operator", "query")
# Heading, column, and how its values are written.
_SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("operator", "operator", str),
    ("query", "query_id", lambda it: str(it)[:8]),
    ("batch", "batch", str),
    ("buckets", "job_buckets", str),
    ("state", "state_bytes", _bytes),
    ("keys ≤", "state_rows", _number),
    ("rows/s", "rows_per_s", _number),
    ("calls/s", "calls_per_s", _number),
    ("commit", "commit_ms_per_call", _time),
    ("wait", "wait_ms_per_call", _time),
    ("restore", "read_ms_per_call", _time),
    ("function", "user_ms_per_call", _time),
    ("sent/s", "uploaded_bytes_per_s", _bytes),
    ("deleted", "deleted_files", _number),
    ("lease age", "lease_age_ms", _time),
    ("lag", "oldest_inline_ms", _time),
    ("failed", "failed", _number),
)


def shown(found: pa.Table) -> Table:
    """A table for a terminal; times are means of a call."""
    from rich.table import Table
    from rich.text import Text

    failed = pc.add(found["upload_failures"], found["snapshot_failures"])
    table = Table(title="spark_state_ext", box=None, pad_edge=False)
    for heading, _, _ in _SHOWN:
        table.add_column(heading, justify="left" if heading in _LEFT else "right", no_wrap=True)
    for row in found.append_column("failed", failed).to_pylist():
        # Names are the user's; what looks like markup in them is none.
        table.add_row(*(Text(printable(told(row[name]))) for _, name, told in _SHOWN))
    return table


# The same of a batch, or of a call of it: sums over its buckets.
_OF_A_BATCH: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("operator", "operator", str),
    ("query", "query_id", lambda it: str(it)[:8]),
    ("batch", "batch", str),
    ("bucket", "bucket", str),
    ("buckets", "buckets", str),
    ("ended (UTC)", "ended_ms", lambda it: f"{datetime.fromtimestamp(it / 1000, timezone.utc):%Y-%m-%d %H:%M:%S}"),
    ("rows", "rows", _number),
    ("changed", "changed_rows", _number),
    ("timeouts", "timeouts", _number),
    ("keys ≤", "state_rows", _number),
    ("state", "state_bytes", _bytes),
    ("total", "total_ms", _time),
    ("restore", "read_ms", _time),
    ("function", "user_ms", _time),
    ("commit", "commit_ms", _time),
    ("wait", "wait_ms", _time),
    ("sent", "uploaded_bytes", _bytes),
    ("failed", "failed", _number),
)


def write_batches(found: pa.Table) -> None:
    """Print what batches or calls did as a table for people, with units and without what few people look for."""
    found = found.append_column("failed", pc.add(found["upload_failures"], found["snapshot_failures"]))
    columns = [column for column in _OF_A_BATCH if column[1] in found.column_names]
    write_cells(
        [heading for heading, _, _ in columns],
        [heading not in _LEFT for heading, _, _ in columns],
        ([told(row[name]) for _, name, told in columns] for row in found.to_pylist()),
    )


def watch(
    folder: Path | str,
    every_s: float = 2.0,
    looks: int | None = None,
    console: Console | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Show what operators are at, and look again until somebody interrupts it."""
    from rich.live import Live

    before = looked(folder)
    with Live(shown(rates(before, before)), console=console, auto_refresh=False) as live:
        done = 1
        while looks is None or done < looks:
            pause(every_s)
            after = looked(folder)
            live.update(shown(rates(before, after)), refresh=True)
            before, done = after, done + 1
