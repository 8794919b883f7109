"""The commands metrics, skew and report: print or draw what executors recorded of their calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from spark_state_ext.cli.exit_codes import DONE, NO
from spark_state_ext.cli.options import MetricsPath, OutputOption, StorageOptions
from spark_state_ext.cli.output import Output, parse_columns, say, write_cells, write_table
from spark_state_ext.errors import UsageError
from spark_state_ext.files.printable import printable
from spark_state_ext.reports.skew import BATCHES, OperatorLoad, format_findings, measure_loads
from spark_state_ext.worker.metrics import FILE_PATTERN, by_batch, read

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "LOOK",
    "RATES",
    "build_table",
    "compute_rates",
    "metrics",
    "report",
    "skew",
    "take_look",
    "watch",
    "write_batches",
]

_EVERY_S = 2.0


def _refuse_no_metrics(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}{', it is a file' if folder.exists() else ''}")
    if next(folder.rglob(FILE_PATTERN), None) is None:
        raise UsageError(
            f"no {FILE_PATTERN} files below {folder}: give the job's local_dir, where executors write them"
        )


# -- metrics --------------------------------------------------------------------------------------


def metrics(
    folder: Annotated[Path, typer.Argument(help="folder of the files; folders below it are read too")],
    calls: Annotated[bool, typer.Option("--calls", help="print every call of every bucket")] = False,
    live: Annotated[bool, typer.Option("--watch", help="show the operators' progress until you interrupt it")] = False,
    every_s: Annotated[
        float | None, typer.Option("--every", min=0.1, metavar="SECONDS", help="with --watch: how often; by default 2")
    ] = None,
    looks: Annotated[
        int | None, typer.Option("--looks", min=1, metavar="N", help="with --watch: end after N tables")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what each batch did: sums over its buckets, from the files that executors write.

    A table has the most important columns; -o json, jsonl and arrow have all of them.

    With --watch it prints a line for each operator, with rates since the previous table, and repeats this.
    """
    if not live and (every_s is not None or looks is not None):
        raise UsageError("--every and --looks need --watch")
    if live and (calls or output is not Output.TABLE):
        raise UsageError("--watch shows a table of operators: leave out --calls and -o")
    _refuse_no_metrics(folder)
    if live:
        watch(folder, _EVERY_S if every_s is None else every_s, looks)
        return
    table = read(folder) if calls else by_batch(read(folder))
    if output is Output.TABLE:
        write_batches(table)
    else:
        write_table(table, output)


_KEYS = ("query_id", "operator")
# Sums over all calls in the folder, from which rates are computed.
_COUNTER_COLUMNS = (
    *("rows", "changed_rows", "timeouts", "uploads", "uploaded_bytes", "restored_files", "restore_gaps"),
    *("deleted_files", "upload_failures", "snapshot_failures"),
)
_TIME_COLUMNS = ("read_ms", "user_ms", "commit_ms", "wait_ms", "total_ms")
# Values of each bucket's newest call.
_STATE_COLUMNS = ("state_rows", "state_rows_min", "state_bytes")
_AGE_COLUMNS = ("oldest_inline_ms", "lease_age_ms")


def _make_schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


_OPERATOR_COLUMNS = {
    **dict.fromkeys(_KEYS, pa.string()),
    **dict.fromkeys(("batch", "ended_ms", "buckets", "job_buckets", *_STATE_COLUMNS, *_AGE_COLUMNS), pa.int64()),
}
LOOK = _make_schema(
    looked_ms=pa.int64(),
    **_OPERATOR_COLUMNS,
    calls=pa.int64(),
    **dict.fromkeys(_COUNTER_COLUMNS, pa.int64()),
    **dict.fromkeys(_TIME_COLUMNS, pa.float64()),
)
RATES = _make_schema(
    seconds=pa.float64(),
    **_OPERATOR_COLUMNS,
    calls=pa.int64(),
    **dict.fromkeys(_COUNTER_COLUMNS, pa.int64()),
    **{f"{name}_per_s": pa.float64() for name in ("calls", "rows", "changed_rows", "uploaded_bytes")},
    **{f"{name}_per_call": pa.float64() for name in _TIME_COLUMNS},
)


def take_look(folder: Path | str, now_ms: int | None = None) -> pa.Table:
    """Read a folder of metrics: return a row for each operator, with sums over all calls and newest values."""
    now_ms = int(time.time() * 1000) if now_ms is None else now_ms
    calls = read(folder)
    calls = calls.append_column("at", pa.array(range(calls.num_rows), pa.int64()))
    sums = calls.group_by(list(_KEYS)).aggregate(
        [
            ("batch", "max"),
            ("ended_ms", "max"),
            ("bucket", "count"),
            *((name, "sum") for name in (*_COUNTER_COLUMNS, *_TIME_COLUMNS)),
        ]
    )
    newest = calls.take(calls.group_by([*_KEYS, "bucket"]).aggregate([("at", "max")]).column("at_max"))
    newest_values = newest.group_by(list(_KEYS)).aggregate(
        [
            ("bucket", "count"),
            ("job_buckets", "max"),
            *((name, "sum") for name in _STATE_COLUMNS),
            *((name, "max") for name in _AGE_COLUMNS),
        ]
    )
    sums = sums.rename_columns(
        ["calls" if name == "bucket_count" else _strip_suffix(name) for name in sums.column_names]
    )
    newest_values = newest_values.rename_columns(
        ["buckets" if name == "bucket_count" else _strip_suffix(name) for name in newest_values.column_names]
    )
    look = sums.join(newest_values, list(_KEYS), join_type="inner")
    look = look.append_column("looked_ms", pa.array([now_ms] * look.num_rows, pa.int64()))
    return look.select(LOOK.names).cast(LOOK).sort_by([(name, "ascending") for name in _KEYS])


def compute_rates(before: pa.Table, after: pa.Table) -> pa.Table:
    """Return what happened between two looks, as increases and rates."""
    old = before.select([*_KEYS, "looked_ms", "calls", *_COUNTER_COLUMNS, *_TIME_COLUMNS])
    joined = after.join(old, list(_KEYS), join_type="left outer", right_suffix="_before")
    joined = joined.sort_by([(name, "ascending") for name in _KEYS])
    has_grown = pc.greater_equal(joined["calls"], joined["calls_before"])
    columns: dict[str, Any] = {name: joined[name] for name in _OPERATOR_COLUMNS}
    passed_ms = pc.subtract(joined["looked_ms"], joined["looked_ms_before"])
    seconds = pc.divide(_null_unless(pc.greater(passed_ms, 0), passed_ms).cast(pa.float64()), 1000.0)
    columns["seconds"] = seconds
    increases = {
        name: _null_unless(has_grown, pc.subtract(joined[name], joined[f"{name}_before"]))
        for name in ("calls", *_COUNTER_COLUMNS)
    }
    columns |= increases
    for name in ("calls", "rows", "changed_rows", "uploaded_bytes"):
        columns[f"{name}_per_s"] = pc.divide(increases[name].cast(pa.float64()), seconds)
    calls = _null_unless(pc.greater(increases["calls"], 0), increases["calls"]).cast(pa.float64())
    for name in _TIME_COLUMNS:
        columns[f"{name}_per_call"] = pc.divide(
            _null_unless(has_grown, pc.subtract(joined[name], joined[f"{name}_before"])), calls
        )
    return pa.table({name: columns[name] for name in RATES.names}, schema=RATES)


def _strip_suffix(name: str) -> str:
    for suffix in ("_sum", "_max"):
        name = name.removesuffix(suffix)
    return name


def _null_unless(condition: pa.ChunkedArray, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values, or NULL where the condition is false or NULL."""
    return pc.if_else(condition, values, pa.scalar(None, values.type))


# -- for a terminal --------------------------------------------------------------------------------


def _format_number(value: float | None) -> str:
    if value is None:
        return "–"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.1f}{letter}"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.1f}"


def _format_bytes(value: float | None) -> str:
    if value is None:
        return "–"
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _format_ms(value_ms: float | None) -> str:
    if value_ms is None:
        return "–"
    return f"{value_ms:.1f} ms" if value_ms < 1000 else f"{value_ms / 1000:.1f} s"


_LEFT_ALIGNED = ("operator", "query")
# Heading, column, and how its values are written.
_LIVE_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("operator", "operator", str),
    ("query", "query_id", lambda value: str(value)[:8]),
    ("batch", "batch", str),
    ("buckets", "job_buckets", str),
    ("state", "state_bytes", _format_bytes),
    ("keys ≤", "state_rows", _format_number),
    ("rows/s", "rows_per_s", _format_number),
    ("calls/s", "calls_per_s", _format_number),
    ("commit", "commit_ms_per_call", _format_ms),
    ("wait", "wait_ms_per_call", _format_ms),
    ("restore", "read_ms_per_call", _format_ms),
    ("function", "user_ms_per_call", _format_ms),
    ("sent/s", "uploaded_bytes_per_s", _format_bytes),
    ("deleted", "deleted_files", _format_number),
    ("lease age", "lease_age_ms", _format_ms),
    ("lag", "oldest_inline_ms", _format_ms),
    ("failed", "failed", _format_number),
)


def build_table(rates: pa.Table) -> Table:
    """Build a table for a terminal; times are averages per call."""
    from rich.table import Table
    from rich.text import Text

    failed = pc.add(rates["upload_failures"], rates["snapshot_failures"])
    table = Table(title="spark_state_ext", box=None, pad_edge=False)
    for heading, _, _ in _LIVE_COLUMNS:
        table.add_column(heading, justify="left" if heading in _LEFT_ALIGNED else "right", no_wrap=True)
    for row in rates.append_column("failed", failed).to_pylist():
        # Names are chosen by the user, so print them without interpreting markup.
        table.add_row(*(Text(printable(format_cell(row[name]))) for _, name, format_cell in _LIVE_COLUMNS))
    return table


# The same for a row of one batch (sums over its buckets) or of one call.
_BATCH_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("operator", "operator", str),
    ("query", "query_id", lambda value: str(value)[:8]),
    ("batch", "batch", str),
    ("bucket", "bucket", str),
    ("buckets", "buckets", str),
    ("ended (UTC)", "ended_ms", lambda ms: f"{datetime.fromtimestamp(ms / 1000, timezone.utc):%Y-%m-%d %H:%M:%S}"),
    ("rows", "rows", _format_number),
    ("changed", "changed_rows", _format_number),
    ("timeouts", "timeouts", _format_number),
    ("keys ≤", "state_rows", _format_number),
    ("state", "state_bytes", _format_bytes),
    ("total", "total_ms", _format_ms),
    ("restore", "read_ms", _format_ms),
    ("function", "user_ms", _format_ms),
    ("commit", "commit_ms", _format_ms),
    ("wait", "wait_ms", _format_ms),
    ("sent", "uploaded_bytes", _format_bytes),
    ("failed", "failed", _format_number),
)


def write_batches(table: pa.Table) -> None:
    """Print batches or calls as a table for people, with units and only the most important columns."""
    table = table.append_column("failed", pc.add(table["upload_failures"], table["snapshot_failures"]))
    columns = [column for column in _BATCH_COLUMNS if column[1] in table.column_names]
    write_cells(
        [heading for heading, _, _ in columns],
        [heading not in _LEFT_ALIGNED for heading, _, _ in columns],
        ([format_cell(row[name]) for _, name, format_cell in columns] for row in table.to_pylist()),
    )


def watch(
    folder: Path | str,
    every_s: float = 2.0,
    looks: int | None = None,
    console: Console | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Show a table of operators, and update it until it is interrupted or has shown `looks` tables."""
    from rich.live import Live

    before = take_look(folder)
    with Live(build_table(compute_rates(before, before)), console=console, auto_refresh=False) as live:
        look_count = 1
        while looks is None or look_count < looks:
            pause(every_s)
            after = take_look(folder)
            live.update(build_table(compute_rates(before, after)), refresh=True)
            before, look_count = after, look_count + 1


# -- skew -----------------------------------------------------------------------------------------

_LOAD_COLUMNS = parse_columns(
    "operator, query_id, bucket int, calls int, rows int, changed_rows int, top_key_rows int, state_rows int, "
    "state_bytes int, call_ms float, finding"
)


def skew(
    folder: MetricsPath,
    batches: Annotated[int, typer.Option(min=1, metavar="N", help="sum over the last N batches")] = BATCHES,
    cores: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="cores of the job; by default the number of workers seen")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print rows, state and time of each bucket over the last batches, and which bucket is too heavy and what to do.

    Exits with 1 if something must be changed.
    """
    _refuse_no_metrics(folder)
    loads = measure_loads(read(folder), batches, cores)
    write_table(
        pa.concat_tables([_build_load_rows(load) for load in loads]) if loads else _LOAD_COLUMNS.empty_table(), output
    )
    for load in loads:
        say(
            f"operator={load.operator} query={load.query_id} batches={load.batches} buckets={load.job_buckets} "
            f"skew_rows={load.skew.rows:.2f} skew_state={load.skew.state_bytes:.2f} skew_time={load.skew.call_ms:.2f}"
        )
        for line in format_findings(load.findings):
            say(line)
    raise typer.Exit(DONE if all(load.is_even for load in loads) else NO)


def _build_load_rows(load: OperatorLoad) -> pa.Table:
    labels = {"operator": load.operator, "query_id": load.query_id}
    values = [
        pa.repeat(labels[name], load.buckets.num_rows) if name in labels else load.buckets[name]
        for name in _LOAD_COLUMNS.names
    ]
    return pa.table(values, names=_LOAD_COLUMNS.names).cast(_LOAD_COLUMNS)


# -- report ---------------------------------------------------------------------------------------


def report(
    path: Annotated[str, typer.Argument(help="the root that ArrowState has, or a folder of metrics")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="file to write; an existing one is replaced")] = Path(
        "report.html"
    ),
    metrics: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder of the job's metrics, such as its local_dir")
    ] = None,
    title: Annotated[str, typer.Option(help="title of the page; by default it names the path")] = "",
    *,
    storage_options: StorageOptions,
) -> None:
    """Write a report about a job: one HTML file, from its root, its metrics, or both.

    Changes nothing. Needs matplotlib: pip install 'spark_state_ext[report]'.
    """
    # Imported here, because only this command reads roots.
    from spark_state_ext.cli.paths import make_absolute
    from spark_state_ext.reports.report_file import report as make_report

    page = make_report(make_absolute(path), out, metrics=metrics, storage_options=storage_options, title=title)
    say(f"file={page} bytes={page.stat().st_size}")
