"""The commands that read state: show, get, scan, export and diff."""

from __future__ import annotations

import posixpath
import sys
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
from spark_state_ext.cli.exit_codes import DONE, NO
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
from spark_state_ext.reading.state import OpenState
from spark_state_ext.reading.state_opener import open_state
from spark_state_ext.worker.local_folders import scratch_folder
from spark_state_ext.worker.spill import translate_local_errors

__all__ = ["Reading", "diff", "export", "get", "scan", "show"]

_SHOW_COLUMNS = parse_columns(
    "path, operator, query, buckets int, unit, batch int, oldest_batch int, newest_batch int, begun_batch int, "
    "proven bool",
    columns=parse_columns("column, type, role"),
)
# Columns of a scan in addition to the state's schema.
_EXTRA_COLUMNS = (("defined", pa.bool_()), ("key_hash", pa.uint64()), ("bucket", pa.int32()))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The options that choose a state below a path, and how it is read."""

    at: AtOption = None
    checkpoint: CheckpointOption = None
    operator: OperatorOption = None
    query_folder: QueryFolderOption = None
    unproven: UnprovenOption = False
    hold: HoldOption = True
    storage_options: StorageOptions

    def open(self, path: str) -> OpenState:
        """Open the state; the caller closes it."""
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
                f"unproven: files do not prove that {state.unit} {state.batch} is committed. The output may contain "
                "rows of a failed attempt, and miss rows that are not in a file yet"
            )
        return state

    def say_if_newer_began(self, state: OpenState) -> None:
        """Say that a later batch has begun, if the newest batch that files prove was read."""
        if self.checkpoint is None and self.at is None and state.proven and state.begun_batch > state.batch:
            say(
                f"{state.unit} {state.batch} is the newest that files prove to be committed; {state.begun_batch} has "
                "begun. --checkpoint LOCATION reads the last committed one"
            )

    def _open_by_spark(self, path: str, checkpoint: str) -> OpenState:
        if self.unproven:
            raise UsageError(
                "give --unproven or --checkpoint, not both: with --checkpoint all that is read is committed"
            )
        if self.query_folder is not None:
            raise UsageError(
                "give --query-folder or --checkpoint, not both: the checkpoint's pointers name the query folder"
            )
        # Check the path before Spark starts; the operator is known only from the pointers.
        if not open_folder(path, self.storage_options).names():
            raise UsageError(
                f"there is no folder {path}, or it is empty: give the root that ArrowState has, or a query folder"
            )
        if sys.stderr.isatty():
            say("starting Spark to read the checkpoint")
        # Imported here, so that other commands start without PySpark.
        from spark_state_ext.cli.sessions import get_session
        from spark_state_ext.spark.source.committed_state import open_committed

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
    """Print which state is at a path, its columns, and which of its batches can be read."""
    with reading.open(path) as state:
        record = {name: getattr(state, name) for name in _SHOW_COLUMNS.names if name not in ("query", "columns")}
        columns = [("key", field) for field in state.key_schema] + [("state", field) for field in state.state_schema]
        record["query"] = state.query_id or None
        record["columns"] = [{"column": field.name, "type": str(field.type), "role": role} for role, field in columns]
        write_record(record, _SHOW_COLUMNS, output)


# -- get ------------------------------------------------------------------------------------------


def get(
    path: StatePath,
    key: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY]...", help="a word for each key column, in order")
    ] = None,
    as_json: Annotated[
        str | None, typer.Option("--json", metavar="JSON", help="the key as a JSON object, which may contain nulls")
    ] = None,
    *,
    reading: Reading,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the state of one key. Exits with 1 if the key has no state. Reads the files of one bucket.

    Write values as in JSON, without quotes: 2024-02-01, 2024-02-01T12:00:00Z, 1.10, true. Bytes are base64. Put --
    before a key that starts with a dash.
    """
    with reading.open(path) as state:
        rows = state.get(parse_key(key or (), as_json, state.key_schema))
        if rows.num_rows or output is not Output.TABLE:
            write_table(rows, output)
        if not rows.num_rows:
            say(f"no such key after {state.unit} {state.batch} of {state.path}")
        reading.say_if_newer_began(state)
        raise typer.Exit(DONE if rows.num_rows else NO)


# -- scan -----------------------------------------------------------------------------------------


def scan(
    path: StatePath,
    columns: Annotated[str | None, typer.Option(metavar="NAMES", help="columns to print, separated by commas")] = None,
    filter_text: Annotated[
        str | None, typer.Option("--filter", metavar="TEXT", help="such as: count > 10 and name in ('ann', 'bob')")
    ] = None,
    limit: LimitOption = None,
    bucket: BucketsOption = None,
    *,
    reading: Reading,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print keys with their state, bucket by bucket, in the order of the keys' hashes.

    In addition to the key and state columns it prints defined (false if the key has only a timeout), key_hash and
    bucket.
    """
    with reading.open(path) as state:
        filter_schema = pa.schema([*state.schema, *(pa.field(name, kind) for name, kind in _EXTRA_COLUMNS)])
        condition = None if filter_text is None else parse_filter(filter_text, filter_schema)
        reader = state.scan(_split_names(columns), filter=condition, buckets=bucket)
        rows = write_rows(reader.schema, reader if limit is None else _limit_rows(reader, limit), output)
        say(f"rows={rows} {state.unit}={state.batch}")
        reading.say_if_newer_began(state)


def _split_names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _limit_rows(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the first rows, without reading further batches."""
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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it exists")] = False,
    *,
    reading: Reading,
    to_options: Annotated[dict[str, Any], make_json_option("the file")],
) -> None:
    """Write all keys with their state to a Parquet file or an Arrow IPC file.

    The file appears only when it is complete.
    """
    with reading.open(path) as state:
        with show_progress("exporting", state.buckets) as advance:
            rows = _write_file(state.schema, _scan_buckets(state, advance), to, to_options, overwrite)
        say(f"rows={rows} {state.unit}={state.batch} file={to}")
        reading.say_if_newer_began(state)


def _scan_buckets(state: OpenState, advance: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    for bucket in range(state.buckets):
        yield from state.scan(buckets=[bucket])
        advance(1)


# Endings of the files that can be written.
_ENDINGS = (".parquet", ".arrow")


def _write_file(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], to: str, storage_options: Mapping[str, Any], overwrite: bool
) -> int:
    """Write rows to a file, batch by batch; return their number."""
    ending = posixpath.splitext(to)[1]
    if ending not in _ENDINGS:
        raise UsageError(f"the file's name must end in {' or '.join(_ENDINGS)}, which chooses the format, not {to!r}")
    parent, name = posixpath.split(to)
    target = Folder(parent or ".", storage_options)
    if not overwrite and target.exists(name):
        raise UsageError(f"the file {target.where(name)} exists already: --overwrite replaces it")
    scratch = scratch_folder(None)
    with translate_local_errors(scratch), tempfile.TemporaryDirectory(prefix="export-", dir=scratch) as folder:
        path = Path(folder) / name
        rows = 0
        with _open_writer(path, schema, ending) as writer:
            for batch in batches:
                writer.write_batch(batch)
                rows += batch.num_rows
        target.put_file(name, path)
        return rows
    raise AssertionError("unreachable: local_errors raises what it catches")


def _open_writer(path: Path, schema: pa.Schema, ending: str) -> AbstractContextManager[Any]:
    if ending == ".arrow":
        file_writer: AbstractContextManager[Any] = pa.ipc.new_file(str(path), schema)
        return file_writer
    import pyarrow.parquet as pq

    writer: AbstractContextManager[Any] = pq.ParquetWriter(str(path), schema)
    return writer


# -- diff -----------------------------------------------------------------------------------------


def diff(
    path: StatePath,
    other: Annotated[
        str | None, typer.Argument(metavar="[OTHER]", help="the later state; by default another batch of PATH")
    ] = None,
    at: Annotated[int | None, typer.Option("--at", metavar="BATCH", help="batch of PATH to compare")] = None,
    other_at: Annotated[
        int | None, typer.Option("--other-at", metavar="BATCH", help="batch of OTHER, or the later batch of PATH")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="NAMES", help="state columns to compare, separated by commas; by default all")
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
    """Print the keys whose state differs, with the state before and after. Exits with 1 if there are any.

    Without OTHER it compares two batches of one state: by default the newest and the one before it. --other-at is the
    later one, and --at the earlier one.
    """
    if other is not None and checkpoint is not None:
        raise UsageError("give OTHER or --checkpoint, not both: --checkpoint compares two batches of one state")
    reading = Reading(
        at=other_at,
        checkpoint=checkpoint,
        operator=operator,
        unproven=unproven,
        hold=hold,
        storage_options=storage_options,
    )
    with ExitStack() as states:
        later = states.enter_context(reading.open(other or path))
        earlier_batch = _previous_batch(later) if other is None and at is None else at
        earlier = states.enter_context(replace(reading, at=earlier_batch).open(path))
        comparison = _compare_states(earlier, later, _split_names(columns))
        # Read one row more than is printed, to know whether there are more.
        differences = comparison.differences if limit is None else _limit_rows(comparison.differences, limit + 1)
        rows, more = _write_differences(comparison.schema, differences, limit, output)
        for names, state in ((comparison.only_first, earlier), (comparison.only_second, later)):
            if names:
                say(f"only in {state.path}, or of another type there: {', '.join(names)}")
        summary = f"differences={rows}" + (" (there are more: --limit)" if more else "")
        say(f"{summary} between batch {earlier.batch} of {earlier.path} and batch {later.batch} of {later.path}")
        raise typer.Exit(NO if rows or more or comparison.only_first or comparison.only_second else DONE)


def _previous_batch(state: OpenState) -> int:
    if state.batch <= state.oldest_batch:
        raise UsageError(
            f"only one batch of {state.path} can be read, {state.unit} {state.batch}, and no earlier one to compare it "
            "with. Name another state, or wait for the next batch"
        )
    return state.batch - 1


def _write_differences(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], limit: int | None, output: Output
) -> tuple[int, bool]:
    """Print at most `limit` rows; return how many were printed, and whether there are more."""
    row_count = 0

    def count_batches() -> Iterator[pa.RecordBatch]:
        nonlocal row_count
        for batch in batches:
            left = batch.num_rows if limit is None else max(limit - row_count, 0)
            row_count += batch.num_rows
            yield batch.slice(0, left)

    rows = write_rows(schema, count_batches(), output)
    return rows, row_count > rows


_ADDED, _REMOVED, _CHANGED = "added", "removed", "changed"
_HASH, _TIMEOUT, _DEFINED = "key_hash", "timeout_ms", "defined"


@dataclass(frozen=True)
class _Comparison:
    """The differences of two states."""

    # Columns of the differences: ``change``, the key columns, ``before`` and ``after``.
    schema: pa.Schema
    # State columns that are in one state only or have different types; they are not compared.
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    # The rows, in the order of the keys' hashes.
    differences: Iterator[pa.RecordBatch]


def _compare_states(first: OpenState, second: OpenState, columns: Sequence[str] | None = None) -> _Comparison:
    """Compare two states by key."""
    keys = [field.name for field in first.key_schema]
    if not first.key_schema.equals(second.key_schema):
        raise UsageError(
            f"states with different key columns cannot be compared: {_describe(first.key_schema)} and "
            f"{_describe(second.key_schema)}"
        )
    if first.bucket_map != second.bucket_map and not (first.bucket_map.one_state and second.bucket_map.one_state):
        raise UsageError(
            f"{first.bucket_map} and {second.bucket_map} cannot be compared: in one of them a key has a separate state "
            "for each stream"
        )
    first_types, second_types = (
        set(map(_name_and_type, first.state_schema)),
        set(map(_name_and_type, second.state_schema)),
    )
    shared = [field.with_nullable(True) for field in first.state_schema if _name_and_type(field) in second_types]
    shared.append(pa.field(_TIMEOUT, pa.int64()))
    values = pa.struct(shared if columns is None else _select_fields(shared, columns))
    schema = pa.schema([("change", pa.string()), *first.key_schema, ("before", values), ("after", values)])
    names = [*keys, *(field.name for field in values), _DEFINED, _HASH]

    def differences() -> Iterator[pa.RecordBatch]:
        # With the same bucket map, a key is in the same bucket of both states.
        same = first.bucket_map == second.bucket_map
        for buckets in [[n] for n in range(first.buckets)] if same else [None]:
            tables = [state.scan(names, buckets=buckets).read_all() for state in (first, second)]
            yield from _find_differences(tables, keys, schema)

    only_first, only_second = (
        tuple(name for name, _ in sorted(only) if columns is None)
        for only in (first_types - second_types, second_types - first_types)
    )
    return _Comparison(schema, only_first, only_second, differences())


def _select_fields(fields: Sequence[pa.Field], names: Sequence[str]) -> list[pa.Field]:
    by_name = {field.name: field for field in fields}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UsageError(f"column {unknown[0]!r} is not in both states; these are: {', '.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(names)]


def _name_and_type(field: pa.Field) -> tuple[str, str]:
    return field.name, str(field.type)


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _find_differences(tables: Sequence[pa.Table], keys: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    rows = pa.concat_tables(tables).combine_chunks()
    if not rows.num_rows:
        return
    columns = {name: _combine_chunks(rows.column(name)) for name in rows.column_names}
    order, starts = group_by_key(columns[_HASH].to_numpy(), [columns[name] for name in keys])
    sizes = np.diff(np.append(starts, len(order)))
    firsts = order[starts]
    in_both = sizes == 2
    # The two rows of a key are in order: before, then after.
    seconds = np.where(in_both, order[np.minimum(starts + 1, len(order) - 1)], firsts)
    is_before = firsts < tables[0].num_rows
    value_names = [field.name for field in schema.field("before").type]
    differs = ~in_both
    differs |= ~_compare_rows([columns[name] for name in (*value_names, _DEFINED)], firsts, seconds)
    if not differs.any():
        return
    change = np.where(in_both, _CHANGED, np.where(is_before, _REMOVED, _ADDED))[differs]
    at_first, at_second = pa.array(firsts[differs]), pa.array(seconds[differs])
    struct = schema.field("before").type
    values = [
        pa.StructArray.from_arrays(
            [columns[name].take(positions) for name in value_names],
            fields=list(struct),
            mask=pa.array(change == missing),
        )
        for positions, missing in ((at_first, _ADDED), (at_second, _REMOVED))
    ]
    key_columns = [columns[name].take(at_first) for name in keys]
    yield pa.RecordBatch.from_arrays(
        [pa.array(change.astype(object), pa.string()), *key_columns, *values], schema=schema
    )


def _compare_rows(columns: Sequence[pa.Array], left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Compare rows at two lists of positions; maps, which Arrow cannot compare, by their pairs in order."""
    at, to = pa.array(left), pa.array(right)
    plain = [column for column in columns if not _contains_map(column.type)]
    equal = rows_equal([column.take(at) for column in plain], [column.take(to) for column in plain])
    for column in columns:
        if _contains_map(column.type):
            values = column.to_pylist()
            equal &= np.fromiter(
                (values[a] == values[b] for a, b in zip(left, right, strict=True)), np.bool_, len(left)
            )
    return equal


def _contains_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    if pa.types.is_list(kind):
        return _contains_map(kind.value_type)
    return bool(pa.types.is_struct(kind)) and any(_contains_map(field.type) for field in kind)


def _combine_chunks(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
