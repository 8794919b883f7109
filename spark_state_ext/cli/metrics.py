"""Metrics: what executors noted of their calls, by batch, live, by bucket, and as a page."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.options import MetricsPath, OutputOption, StorageOptions
from spark_state_ext.cli.output import Output, parse_columns, say, write_cells, write_table
from spark_state_ext.errors import UsageError
from spark_state_ext.files.printable import printable
from spark_state_ext.reports.skew import BATCHES, OperatorLoad, format_findings, measure_loads
from spark_state_ext.worker.metrics import FILES, by_batch, read

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "LOOK",
    "RATES",
    "take_look",
    "metrics",
    "compute_rates",
    "report",
    "build_table",
    "skew",
    "watch",
    "write_batches",
]

_EVERY_S = 2.0


def _refuse_no_metrics(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}{', that is a file' if folder.exists() else ''}")
    if next(folder.rglob(FILES), None) is None:
        raise UsageError(f"no {FILES} files below {folder}: give the job's local_dir, where executors write them")


# -- metrics --------------------------------------------------------------------------------------


def metrics(
    folder: Annotated[Path, typer.Argument(help="folder of the files; those in folders below count too")],
    calls: Annotated[bool, typer.Option("--calls", help="every call of every bucket")] = False,
    live: Annotated[bool, typer.Option("--watch", help="show what operators are at, until you interrupt it")] = False,
    every_s: Annotated[
        float | None, typer.Option("--every", min=0.1, metavar="SECONDS", help="with --watch: between looks; 2")
    ] = None,
    looks: Annotated[
        int | None, typer.Option("--looks", min=1, metavar="N", help="with --watch: end after so many")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what each batch did: sums over its buckets, from the files that executors write.

    A table has what is looked at most; -o json, jsonl and arrow have all columns.

    With --watch: a line for each operator, with rates since the look before, again and again.
    """
    if not live and (every_s is not None or looks is not None):
        raise UsageError("--every and --looks go with --watch")
    if live and (calls or output is not Output.TABLE):
        raise UsageError("--watch shows a table of operators: it goes neither with --calls nor with -o")
    _refuse_no_metrics(folder)
    if live:
        watch(folder, _EVERY_S if every_s is None else every_s, looks)
        return
    found = read(folder) if calls else by_batch(read(folder))
    if output is Output.TABLE:
        write_batches(found)
    else:
        write_table(found, output)


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


def _columns(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


_OPERATOR = {
    **dict.fromkeys(_KEYS, pa.string()),
    **dict.fromkeys(("batch", "ended_ms", "buckets", "job_buckets", *_HELD, *_OLDEST), pa.int64()),
}
LOOK = _columns(
    looked_ms=pa.int64(),
    **_OPERATOR,
    calls=pa.int64(),
    **dict.fromkeys(_COUNTED, pa.int64()),
    **dict.fromkeys(_TIMED, pa.float64()),
)
RATES = _columns(
    seconds=pa.float64(),
    **_OPERATOR,
    calls=pa.int64(),
    **dict.fromkeys(_COUNTED, pa.int64()),
    **{f"{name}_per_s": pa.float64() for name in ("calls", "rows", "changed_rows", "uploaded_bytes")},
    **{f"{name}_per_call": pa.float64() for name in _TIMED},
)


def take_look(folder: Path | str, now_ms: int | None = None) -> pa.Table:
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


def compute_rates(before: pa.Table, after: pa.Table) -> pa.Table:
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


def build_table(found: pa.Table) -> Table:
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

    before = take_look(folder)
    with Live(build_table(compute_rates(before, before)), console=console, auto_refresh=False) as live:
        done = 1
        while looks is None or done < looks:
            pause(every_s)
            after = take_look(folder)
            live.update(build_table(compute_rates(before, after)), refresh=True)
            before, done = after, done + 1


# -- skew -----------------------------------------------------------------------------------------

_LOADS = parse_columns(
    "operator, query_id, bucket int, calls int, rows int, changed_rows int, top_key_rows int, state_rows int, "
    "state_bytes int, call_ms float, finding"
)


def skew(
    folder: MetricsPath,
    batches: Annotated[int, typer.Option(min=1, metavar="N", help="sum up the last N batches")] = BATCHES,
    cores: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="cores of the job; by default as workers were seen")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print rows, state and time of each bucket over the last batches, and say which is too heavy, and what mends it.

    Exits with 1 where something is to be changed.
    """
    _refuse_no_metrics(folder)
    loads = measure_loads(read(folder), batches, cores)
    write_table(pa.concat_tables([_load_rows(it) for it in loads]) if loads else _LOADS.empty_table(), output)
    for it in loads:
        say(
            f"operator={it.operator} query={it.query_id} batches={it.batches} buckets={it.job_buckets} "
            f"skew_rows={it.skew.rows:.2f} skew_state={it.skew.state_bytes:.2f} skew_time={it.skew.call_ms:.2f}"
        )
        for line in format_findings(it.findings):
            say(line)
    raise typer.Exit(DONE if all(it.is_even for it in loads) else NO)


def _load_rows(it: OperatorLoad) -> pa.Table:
    whose = {"operator": it.operator, "query_id": it.query_id}
    values = [
        pa.repeat(whose[name], it.buckets.num_rows) if name in whose else it.buckets[name] for name in _LOADS.names
    ]
    return pa.table(values, names=_LOADS.names).cast(_LOADS)


# -- report ---------------------------------------------------------------------------------------


def report(
    path: Annotated[str, typer.Argument(help="the root, as ArrowState has it, or a folder of metrics")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="the page; one that is there is replaced")] = Path(
        "report.html"
    ),
    metrics: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="of the job's metrics, such as its local_dir")
    ] = None,
    title: Annotated[str, typer.Option(help="of the page; by default it names the path")] = "",
    *,
    storage_options: StorageOptions,
) -> None:
    """Write a report of a job: one HTML file, from its root, its metrics, or both.

    Reads only. Needs matplotlib: pip install 'spark_state_ext[report]'.
    """
    # It reads roots too, which the other commands here do not.
    from spark_state_ext.cli.paths import make_absolute
    from spark_state_ext.reports.making import report as make_report

    made = make_report(make_absolute(path), out, metrics=metrics, storage_options=storage_options, title=title)
    say(f"file={made} bytes={made.stat().st_size}")
