"""State: show, get, scan, export and diff."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from arrow_schemas.equality import group_by_key, rows_equal
from spark_state_ext.cli.exits import DONE, NO
from spark_state_ext.cli.options import (
    AtOption,
    BucketsOption,
    CheckpointOption,
    HoldOption,
    LimitOption,
    OperatorOption,
    OutputOption,
    QueryFolderOption,
    StatePath,
    StorageOptions,
    UnprovenOption,
    make_json_option,
)
from spark_state_ext.cli.output import Output, parse_columns, say, show_progress, write_record, write_rows, write_table
from spark_state_ext.cli.paths import open_folder, strip_slash
from spark_state_ext.cli.values import parse_filter, parse_key
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.opening import open_state
from spark_state_ext.reading.state import OpenState
from spark_state_ext.worker.local_folders import scratch_folder
from spark_state_ext.worker.spill import local_errors

__all__ = ["Reading", "diff", "export", "get", "scan", "show"]

_SHOWN = parse_columns(
    "path, operator, query, buckets int, unit, batch int, oldest_batch int, newest_batch int, begun_batch int, "
    "proven bool",
    columns=parse_columns("column, type, role"),
)
# Columns of a scan beside those of the schema.
_MORE = (("defined", pa.bool_()), ("key_hash", pa.uint64()), ("bucket", pa.int32()))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Which state of a path is read, and how."""

    at: AtOption = None
    checkpoint: CheckpointOption = None
    operator: OperatorOption = None
    query_folder: QueryFolderOption = None
    unproven: UnprovenOption = False
    hold: HoldOption = True
    storage_options: StorageOptions

    def open(self, path: str) -> OpenState:
        """Open the state, to be closed."""
        if self.checkpoint is not None:
            return self._open_by_spark(path, self.checkpoint)
        state = open_state(
            strip_slash(path),
            operator=self.operator,
            batch=self.at,
            query_folder=self.query_folder,
            unproven=self.unproven,
            hold=self.hold,
            storage_options=self.storage_options,
        )
        if not state.proven:
            say(
                f"unproven: files do not prove what is read of {state.unit} {state.batch}. It may have rows of an "
                "attempt that failed, and lack rows that no file has yet"
            )
        return state

    def _open_by_spark(self, path: str, checkpoint: str) -> OpenState:
        if self.unproven:
            raise UsageError("--unproven does not go with --checkpoint, by which all that is read is committed")
        if self.query_folder is not None:
            raise UsageError(
                "--query-folder does not go with --checkpoint, whose pointers name the folder: leave it out"
            )
        # Before Spark starts. Which operator is meant only its pointers say.
        if not open_folder(path, self.storage_options).names():
            raise UsageError(
                f"there is no folder {path}, or it is empty: give a root as ArrowState has it, or a query folder"
            )
        # PySpark is imported by nothing else here.
        from spark_state_ext.cli.sessions import get_session
        from spark_state_ext.spark.source.exact import open_committed

        return open_committed(
            get_session(checkpoint),
            strip_slash(path),
            checkpoint,
            operator=self.operator,
            batch=self.at,
            hold=self.hold,
            storage_options=self.storage_options,
        )


# -- show -----------------------------------------------------------------------------------------


def show(path: StatePath, *, reading: Reading, output: OutputOption = Output.TABLE) -> None:
    """Say which state there is at a path, its columns, and which batches of it can be read."""
    with reading.open(path) as state:
        record = {name: getattr(state, name) for name in _SHOWN.names if name not in ("query", "columns")}
        both = [("key", it) for it in state.key_schema] + [("state", it) for it in state.state_schema]
        record["query"] = state.query_id or None
        record["columns"] = [{"column": it.name, "type": str(it.type), "role": role} for role, it in both]
        write_record(record, _SHOWN, output)


# -- get ------------------------------------------------------------------------------------------


def get(
    path: StatePath,
    key: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="a word for each key column, in their order")
    ] = None,
    as_json: Annotated[
        str | None, typer.Option("--json", metavar="JSON", help="the key as an object, which may have nulls")
    ] = None,
    *,
    reading: Reading,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the state of one key, or exit with 1 where it has none. Reads the files of one bucket.

    Values are written as JSON has them, without the quotes: 2024-02-01, 2024-02-01T12:00:00Z, 1.10, true. Bytes are
    base64. Before a word that begins with a dash write --.
    """
    with reading.open(path) as state:
        found = state.get(parse_key(key or (), as_json, state.key_schema))
        if found.num_rows or output is not Output.TABLE:
            write_table(found, output)
        if not found.num_rows:
            say(f"no such key after {state.unit} {state.batch} of {state.path}")
        raise typer.Exit(DONE if found.num_rows else NO)


# -- scan -----------------------------------------------------------------------------------------


def scan(
    path: StatePath,
    columns: Annotated[str | None, typer.Option(metavar="NAMES", help="separated by commas")] = None,
    filter_text: Annotated[
        str | None, typer.Option("--filter", metavar="TEXT", help="as in: count > 10 and name in ('ann', 'bob')")
    ] = None,
    limit: LimitOption = None,
    bucket: BucketsOption = None,
    *,
    reading: Reading,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print keys with their state, bucket by bucket, in the order of the keys' hashes.

    Beside the key and state columns there are defined (false: the key has only a timeout), key_hash and bucket.
    """
    with reading.open(path) as state:
        known = pa.schema([*state.schema, *(pa.field(name, kind) for name, kind in _MORE)])
        condition = None if filter_text is None else parse_filter(filter_text, known)
        reader = state.scan(_names(columns), filter=condition, buckets=bucket)
        rows = write_rows(reader.schema, reader if limit is None else _limited(reader, limit), output)
        say(f"rows={rows} {state.unit}={state.batch}")


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _limited(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The first rows; no more batches are read than these need."""
    if not rows:
        return
    for batch in batches:
        yield batch.slice(0, rows)
        rows -= batch.num_rows
        if rows <= 0:
            return


# -- export ---------------------------------------------------------------------------------------


def export(
    path: StatePath,
    to: Annotated[str, typer.Argument(metavar="FILE", help="a path or URL that ends in .parquet or .arrow")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="also where the file is there")] = False,
    *,
    reading: Reading,
    to_options: Annotated[dict[str, Any], make_json_option("the file")],
) -> None:
    """Write all keys with their state to a file: Parquet, or an Arrow IPC file.

    The file appears when it is whole.
    """
    with reading.open(path) as state:
        with show_progress("exporting", state.buckets) as advance:
            rows = _exported(state.schema, _batches(state, advance), to, to_options, overwrite)
        say(f"rows={rows} {state.unit}={state.batch} file={to}")


def _batches(state: OpenState, advance: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    for bucket in range(state.buckets):
        yield from state.scan(buckets=[bucket])
        advance(1)


# Endings of files, and what writes them.
_FORMS = (".parquet", ".arrow")


def _exported(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], to: str, storage_options: Mapping[str, Any], overwrite: bool
) -> int:
    """Write rows to a file, batch by batch; how many there were."""
    ending = posixpath.splitext(to)[1]
    if ending not in _FORMS:
        raise UsageError(f"the name of the file says in which format: it must end in {' or '.join(_FORMS)}, not {to!r}")
    above, name = posixpath.split(to)
    target = Folder(above or ".", storage_options)
    if not overwrite and target.exists(name):
        raise UsageError(f"there is a file {target.where(name)} already: --overwrite replaces it")
    scratch = scratch_folder(None)
    with local_errors(scratch), tempfile.TemporaryDirectory(prefix="export-", dir=scratch) as folder:
        path = Path(folder) / name
        rows = 0
        with _writer(path, schema, ending) as writer:
            for batch in batches:
                writer.write_batch(batch)
                rows += batch.num_rows
        target.put_file(name, path)
        return rows
    raise AssertionError("unreachable: local_errors raises what it catches")


def _writer(path: Path, schema: pa.Schema, ending: str) -> AbstractContextManager[Any]:
    if ending == ".arrow":
        made: AbstractContextManager[Any] = pa.ipc.new_file(str(path), schema)
        return made
    import pyarrow.parquet as pq

    writer: AbstractContextManager[Any] = pq.ParquetWriter(str(path), schema)
    return writer


# -- diff -----------------------------------------------------------------------------------------


def diff(
    path: StatePath,
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="the later state; by default another batch of PATH")
    ] = None,
    at: Annotated[int | None, typer.Option("--at", metavar="BATCH", help="of PATH, after which batch")] = None,
    other_at: Annotated[
        int | None, typer.Option("--other-at", metavar="BATCH", help="of OTHER, or the later batch of PATH")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="NAMES", help="compare these state columns only; separated by commas")
    ] = None,
    limit: LimitOption = None,
    checkpoint: CheckpointOption = None,
    operator: OperatorOption = None,
    unproven: UnprovenOption = False,
    hold: HoldOption = True,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the keys whose state differs, with what it was before and is after; exits with 1 if there are any.

    Without OTHER two batches of one state are compared: by default the newest and the one before it. --other-at is the
    later one, and --at the earlier one.
    """
    if other is not None and checkpoint is not None:
        raise UsageError("--checkpoint goes with two batches of one state: leave it out, or leave OTHER out")
    reading = Reading(
        at=other_at,
        checkpoint=checkpoint,
        operator=operator,
        unproven=unproven,
        hold=hold,
        storage_options=storage_options,
    )
    with ExitStack() as states:
        second = states.enter_context(reading.open(other or path))
        before = _batch_before(second) if other is None and at is None else at
        first = states.enter_context(replace(reading, at=before).open(path))
        found = _compared(first, second, _names(columns))
        # One more than is printed says whether there are more.
        differences = found.differences if limit is None else _limited(found.differences, limit + 1)
        rows, more = _write_differences(found.schema, differences, limit, output)
        for only, where in ((found.only_first, first), (found.only_second, second)):
            if only:
                say(f"only in {where.path}, or of another type there: {', '.join(only)}")
        said = f"differences={rows}" + (" (there are more: --limit)" if more else "")
        say(f"{said} between batch {first.batch} of {first.path} and batch {second.batch} of {second.path}")
        raise typer.Exit(NO if rows or more or found.only_first or found.only_second else DONE)


def _batch_before(state: OpenState) -> int:
    if state.batch <= state.oldest_batch:
        raise UsageError(
            f"{state.path} has one batch that can be read, {state.unit} {state.batch}: there is none before it to "
            "compare it with. Name another state, or wait for the next batch"
        )
    return state.batch - 1


def _write_differences(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], limit: int | None, output: Output
) -> tuple[int, bool]:
    """Print at most so many rows; gives how many there were, and whether there are more."""
    seen = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal seen
        for batch in batches:
            left = batch.num_rows if limit is None else max(limit - seen, 0)
            seen += batch.num_rows
            yield batch.slice(0, left)

    rows = write_rows(schema, counted(), output)
    return rows, seen > rows


_ADDED, _REMOVED, _CHANGED = "added", "removed", "changed"
_HASH, _TIMEOUT, _DEFINED = "key_hash", "timeout_ms", "defined"


@dataclass(frozen=True)
class _Compared:
    """How two states are compared."""

    # Of the differences: ``change``, the key columns, and ``before`` and ``after``.
    schema: pa.Schema
    # State columns that only one has, or that have different types: they are not compared.
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    # The differences, in the order of the keys' hashes.
    differences: Iterator[pa.RecordBatch]


def _compared(first: OpenState, second: OpenState, columns: Sequence[str] | None = None) -> _Compared:
    """Compare two states by key."""
    keys = [field.name for field in first.key_schema]
    if not first.key_schema.equals(second.key_schema):
        raise UsageError(
            f"keys with the columns {_described(first.key_schema)} and with {_described(second.key_schema)} cannot be "
            "compared"
        )
    if first.bucket_map != second.bucket_map and not (first.bucket_map.one_state and second.bucket_map.one_state):
        raise UsageError(
            f"{first.bucket_map} and {second.bucket_map} cannot be compared: in one of them a key has a state for each "
            "stream"
        )
    here, there = set(map(_named_type, first.state_schema)), set(map(_named_type, second.state_schema))
    both = [field.with_nullable(True) for field in first.state_schema if _named_type(field) in there]
    both.append(pa.field(_TIMEOUT, pa.int64()))
    values = pa.struct(both if columns is None else _named_fields(both, columns))
    schema = pa.schema([("change", pa.string()), *first.key_schema, ("before", values), ("after", values)])
    names = [*keys, *(field.name for field in values), _DEFINED, _HASH]

    def differences() -> Iterator[pa.RecordBatch]:
        # By one bucket map, a key is in the same bucket of both.
        same = first.bucket_map == second.bucket_map
        for buckets in [[n] for n in range(first.buckets)] if same else [None]:
            tables = [it.scan(names, buckets=buckets).read_all() for it in (first, second)]
            yield from _differing(tables, keys, schema)

    only_first, only_second = (
        tuple(name for name, _ in sorted(only) if columns is None) for only in (here - there, there - here)
    )
    return _Compared(schema, only_first, only_second, differences())


def _named_fields(fields: Sequence[pa.Field], names: Sequence[str]) -> list[pa.Field]:
    by_name = {field.name: field for field in fields}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UsageError(f"there is no column {unknown[0]!r} to compare in both states; there are {', '.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(names)]


def _named_type(field: pa.Field) -> tuple[str, str]:
    return field.name, str(field.type)


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _differing(tables: Sequence[pa.Table], keys: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    rows = pa.concat_tables(tables).combine_chunks()
    if not rows.num_rows:
        return
    columns = {name: _whole(rows.column(name)) for name in rows.column_names}
    order, starts = group_by_key(columns[_HASH].to_numpy(), [columns[name] for name in keys])
    sizes = np.diff(np.append(starts, len(order)))
    firsts = order[starts]
    twice = sizes == 2
    # Rows of a key are in their order: before, and after.
    seconds = np.where(twice, order[np.minimum(starts + 1, len(order) - 1)], firsts)
    is_before = firsts < tables[0].num_rows
    value_names = [field.name for field in schema.field("before").type]
    differs = ~twice
    differs |= ~_equal([columns[name] for name in (*value_names, _DEFINED)], firsts, seconds)
    if not differs.any():
        return
    change = np.where(twice, _CHANGED, np.where(is_before, _REMOVED, _ADDED))[differs]
    at_first, at_second = pa.array(firsts[differs]), pa.array(seconds[differs])
    struct = schema.field("before").type
    made = [
        pa.StructArray.from_arrays(
            [columns[name].take(at) for name in value_names], fields=list(struct), mask=pa.array(change == missing)
        )
        for at, missing in ((at_first, _ADDED), (at_second, _REMOVED))
    ]
    key_columns = [columns[name].take(at_first) for name in keys]
    yield pa.RecordBatch.from_arrays([pa.array(change.astype(object), pa.string()), *key_columns, *made], schema=schema)


def _equal(columns: Sequence[pa.Array], left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Row by row, whether values are equal; maps, which Arrow does not compare, by their pairs in order."""
    at, to = pa.array(left), pa.array(right)
    plain = [column for column in columns if not _has_map(column.type)]
    equal = rows_equal([it.take(at) for it in plain], [it.take(to) for it in plain])
    for column in columns:
        if _has_map(column.type):
            values = column.to_pylist()
            equal &= np.fromiter(
                (values[a] == values[b] for a, b in zip(left, right, strict=True)), np.bool_, len(left)
            )
    return equal


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    if pa.types.is_list(kind):
        return _has_map(kind.value_type)
    return bool(pa.types.is_struct(kind)) and any(_has_map(field.type) for field in kind)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
