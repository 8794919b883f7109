"""Print the output of commands: data on stdout as a table, JSON or Arrow, everything else on stderr.

Data is Arrow until it is printed, so values keep their types: numbers are numbers, times are ISO 8601, bytes are base64
in JSON and Python literals in tables.
"""

from __future__ import annotations

import base64
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import chain
from typing import Any

import pyarrow as pa
import typer

from spark_state_ext.cli.exit_codes import BROKEN_PIPE
from spark_state_ext.files.printable import printable

__all__ = [
    "Output",
    "format_value",
    "parse_columns",
    "say",
    "show_progress",
    "to_json_value",
    "write_cells",
    "write_record",
    "write_records",
    "write_rows",
    "write_table",
]

_PAGE_ROWS = 1_000
# Wider than any line, so that piped output is not wrapped.
_WIDTH = 100_000


class Output(str, Enum):
    """Formats of printed data."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    ARROW = "arrow"


def say(text: str) -> None:
    """Print a line for people, on stderr."""
    print(printable(text), file=sys.stderr)


# -- values ---------------------------------------------------------------------------------------


def to_json_value(value: Any) -> Any:
    """Convert a Python value from Arrow to types that JSON has."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if isinstance(value, Mapping):
        return {str(name): to_json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    return str(value)


def format_value(value: Any) -> str:
    """Format a value for a table: on one line, with control characters escaped."""
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, (bool, int, float, Decimal, timedelta)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, bytes):
        return repr(value)
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds" if not value.microsecond else "auto")
    if isinstance(value, (list, tuple, Mapping)):
        return printable(json.dumps(to_json_value(value), ensure_ascii=False))
    return printable(str(value))


_KINDS = {
    "": pa.string(),
    "texts": pa.list_(pa.string()),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "time_s": pa.timestamp("s", "UTC"),
    "time_ms": pa.timestamp("ms", "UTC"),
}


def parse_columns(text: str, **tables: pa.Schema) -> pa.Schema:
    """Return a schema from a text such as ``"path, files int"``; the default type is text, nested tables come last."""
    named = [item.strip().partition(" ") for item in text.split(",")]
    nested = [(name, pa.list_(pa.struct(list(schema)))) for name, schema in tables.items()]
    return pa.schema([*((name, _KINDS[kind]) for name, _, kind in named), *nested])


def _build_table(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return rows as a table, with bytes of file names that are not UTF-8 escaped, because no column can hold them."""
    rows = list(rows)
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except UnicodeEncodeError:
        return pa.Table.from_pylist([_escape_non_utf8(row) for row in rows], schema=schema)


def _escape_non_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {name: _escape_non_utf8(part) for name, part in value.items()}
    return [_escape_non_utf8(part) for part in value] if isinstance(value, (list, tuple)) else value


def _to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON with control characters escaped."""
    text = json.dumps(to_json_value(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return "\n".join(line if line.isprintable() else "".join(map(_escape_in_json, line)) for line in text.split("\n"))


def _escape_in_json(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


# -- formats --------------------------------------------------------------------------------------


def write_table(table: pa.Table, output: Output) -> None:
    """Print a table."""
    write_rows(table.schema, table.to_batches(), output)


def write_records(
    rows: Iterable[Mapping[str, Any]], schema: pa.Schema, output: Output, *, if_empty: bool = True
) -> None:
    """Print rows; as a table for people, print no empty table unless `if_empty`."""
    table = _build_table(rows, schema)
    if if_empty or table.num_rows or output is not Output.TABLE:
        write_table(table, output)


def write_rows(schema: pa.Schema, batches: Iterable[pa.RecordBatch], output: Output) -> int:
    """Print rows batch by batch; return their number."""
    rows = 0
    # Read the first batch now, so that an error in it is raised before anything is printed.
    batches = iter(batches)
    first = next(batches, None)
    with _to_stdout():
        for batch in _write_batches(schema, chain([] if first is None else [first], batches), output):
            rows += batch.num_rows
        sys.stdout.flush()
    return rows


def _write_batches(schema: pa.Schema, batches: Iterable[pa.RecordBatch], output: Output) -> Iterator[pa.RecordBatch]:
    if output is Output.ARROW:
        if sys.stdout.isatty():
            raise typer.BadParameter("arrow is a stream of bytes: send it to a file or a program, not to a terminal")
        sys.stdout.flush()
        with pa.ipc.new_stream(sys.stdout.buffer, schema.remove_metadata()) as writer:
            for batch in batches:
                writer.write_batch(batch.replace_schema_metadata(None))
                yield batch
        return
    if output is Output.TABLE:
        yield from _print_pages(schema, batches)
        return
    wrote_any = False
    for batch in batches:
        for row in batch.to_pylist():
            text = _to_json(row)
            if output is Output.JSONL:
                sys.stdout.write(f"{text}\n")
            else:
                sys.stdout.write(f"{',' if wrote_any else '['}\n{text}")
            wrote_any = True
        yield batch
    if output is Output.JSON:
        sys.stdout.write("\n]\n" if wrote_any else "[]\n")


def _print_pages(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Print a table for every few batches, because a table needs all its rows to compute the width of columns."""
    pending: list[pa.RecordBatch] = []
    printed = False
    for batch in batches:
        pending.append(batch)
        if sum(pending_batch.num_rows for pending_batch in pending) >= _PAGE_ROWS:
            _print_rows(schema, pending)
            pending, printed = [], True
        yield batch
    if pending or not printed:
        _print_rows(schema, pending)


def write_record(record: Mapping[str, Any], schema: pa.Schema, output: Output) -> None:
    """Print one record."""
    (batch,) = _build_table([record], schema).to_batches()
    if output is Output.TABLE:
        with _to_stdout():
            _print_record(batch.to_pylist()[0], schema)
            sys.stdout.flush()
    elif output is Output.JSON:
        with _to_stdout():
            sys.stdout.write(_to_json(batch.to_pylist()[0], indent=1) + "\n")
            sys.stdout.flush()
    else:
        write_rows(schema, [batch], output)


def write_cells(headings: Sequence[str], right: Sequence[bool], rows: Iterable[Sequence[str]]) -> None:
    """Print a table for people from cells that are already text."""
    with _to_stdout():
        _print_cells(list(headings), list(right), map(tuple, rows))
        sys.stdout.flush()


def _print_rows(schema: pa.Schema, batches: list[pa.RecordBatch]) -> None:
    rows = [row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
    _print_cells([field.name for field in schema], [_is_number(field.type) for field in schema], rows)


def _print_record(values: Mapping[str, Any], schema: pa.Schema) -> None:
    tables = [field for field in schema if pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type)]
    lines = [(field.name, values[field.name]) for field in schema if field not in tables]
    _print_cells(None, [False, False], lines)
    for field in tables:
        inner = list(field.type.value_type)
        sys.stdout.write(f"\n{field.name}:{'' if values[field.name] else ' none'}\n")
        if values[field.name]:
            rows = [tuple(row[part.name] for part in inner) for row in values[field.name]]
            _print_cells([part.name for part in inner], [_is_number(part.type) for part in inner], rows)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _print_cells(names: list[str] | None, right: list[bool], rows: Iterable[tuple[Any, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=names is not None, header_style="bold")
    for index, is_right in enumerate(right):
        table.add_column(
            Text(format_value(names[index])) if names else "", justify="right" if is_right else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(format_value(value)) for value in row))
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if terminal else _WIDTH)
    if terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


@contextmanager
def _to_stdout() -> Iterator[None]:
    """Exit the command without an error if the reader of stdout has gone."""
    try:
        yield
    except BrokenPipeError as error:
        # Otherwise Python reports at exit that it could not flush stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from error


@contextmanager
def show_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr during long work, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda steps: bar.advance(task, steps)
