"""Planning a read once, and reading one bucket in each task. Neither needs PySpark.

Planning opens the state, which places a hold, and writes down the pointer of each bucket, so that all tasks read the
same batch. The hold is left to the tasks, which renew it while they read. It is unknown which task is the last, so the
hold is not removed: it expires ten minutes after that.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import DEFINED, EXPIRES_MS, TIMEOUT_MS
from arrow_schemas.savepoint import SavedFile
from spark_state_ext.engine.job import BUILD, refuse_other_release
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.changes import CHANGE, find_changes, make_changes_schema
from spark_state_ext.reading.columns import BUCKET
from spark_state_ext.reading.exact_batch import ExactBatch, QueryOfOperator, open_exact
from spark_state_ext.reading.file_table import FILES
from spark_state_ext.reading.reader_hold import ReaderHold
from spark_state_ext.reading.state import OpenState
from spark_state_ext.reading.state_opener import open_pointers, open_state
from spark_state_ext.spark.source.options import CHANGES, METADATA, TIMEOUTS, SourceOptions

__all__ = ["Exact", "PlannedRead", "decode_exact", "plan_read", "read_part"]

_LONG, _INTEGER, _BOOLEAN, _STRING = "long", "integer", "boolean", "string"
_OF_ARROW = {pa.int32(): _INTEGER, pa.int64(): _LONG, pa.string(): _STRING}


@dataclass(frozen=True)
class PlannedRead:
    """A planned read.

    Parameters
    ----------
    schema
        Type of the table, as Spark's JSON.
    parts
        The request of each task, as JSON: one for each bucket.
    """

    schema: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Exact:
    """Committed batches of a query, as Spark reports them.

    Parameters
    ----------
    origin
        The operator and query that they belong to.
    batches
        The batch that is read; for changes the batch that they start from, and the one that is read.
    """

    origin: QueryOfOperator
    batches: tuple[ExactBatch, ...]


def decode_exact(
    origin: Mapping[str, str], ranges: Sequence[tuple[int, int, int]], rows: Sequence[Mapping[str, Any]]
) -> Exact:
    """Decode the batches and pointers that a client has read from Spark's state and sent to a task."""
    pointers: list[dict[int, Pointer]] = [{} for _ in ranges]
    for row in rows:
        pointer = Pointer.decode(row["pointer"])
        pointers[row["at"]][pointer.bucket] = pointer
    return Exact(
        QueryOfOperator(**origin),
        tuple(
            ExactBatch(*batch_range, batch_pointers)
            for batch_range, batch_pointers in zip(ranges, pointers, strict=True)
        ),
    )


def plan_read(options: SourceOptions, *, schema_only: bool = False, exact: Exact | None = None) -> PlannedRead:
    """Plan a read; if `schema_only`, return only its schema and place no hold."""
    hold = options.hold and not schema_only
    last = options.to_batch if options.table == CHANGES else options.batch
    with _open(options, last, hold, exact, -1) as after:
        schema = _make_schema(options, after)
        if schema_only:
            return PlannedRead(schema, ())
        before = None
        if options.table == CHANGES:
            # The hold of `after` covers it.
            with _open(options, options.from_batch, False, exact, 0) as before:
                if before.batch > after.batch:
                    raise UsageError(
                        f"from_batch must not come after the batch that is read: {before.batch} is after {after.batch}"
                    )
        common = _describe_read(options, after)
        buckets = sorted(after.files.pointers) if options.buckets is None else sorted(set(options.buckets))
        after.scan(buckets=buckets)  # raises if one of them does not exist
        pointers = [_describe_bucket(bucket, before, after) for bucket in buckets]
        common["hold_id"] = after.leave_hold()
        parts = tuple(json.dumps({**common, **part}) for part in pointers)
    return PlannedRead(schema, parts)


def read_part(part: str, storage_options: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    """Read the rows of one bucket."""
    plan = json.loads(part)
    refuse_other_release(plan)
    folder = Folder(plan["folder"], storage_options)
    hold = ReaderHold(folder, joined=plan["hold_id"]) if plan["hold_id"] else None
    operator = OperatorFile.decode(plan["operator_file"].encode(), "the operator file of the plan")
    bucket = plan["bucket"]

    def open_at(which: str, batch: int) -> OpenState:
        pointer = Pointer.decode(base64.b64decode(plan[which]))
        saved = {bucket: [SavedFile(**file) for file in plan["saved"]]}
        return open_pointers(folder, operator, {bucket: pointer}, batch, hold=hold, saved=saved)

    after = open_at("pointer", plan["batch"])
    if plan["table"] == CHANGES:
        batches: Any = find_changes(open_at("before", plan["batch"]), after, bucket)
        fields = make_changes_schema(after)
    elif plan["table"] == METADATA:
        batches, fields = after.lineage([bucket]).to_batches(), FILES
    elif plan["table"] == TIMEOUTS:
        reader = after.timeouts([bucket])
        batches, fields = reader, reader.schema
    else:
        reader = after.scan(plan["columns"], buckets=[bucket])
        batches, fields = reader, reader.schema
    # In Spark all columns may be NULL.
    nullable = pa.schema([field.with_nullable(True) for field in fields])
    for batch in batches:
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays(batch.columns, schema=nullable)


def _open(options: SourceOptions, batch: int | None, hold: bool, exact: Exact | None, position: int) -> OpenState:
    if exact is not None:
        exact_batch = exact.batches[position]
        return open_exact(
            options.path, exact.origin, lambda: exact_batch, hold=hold, storage_options=options.storage_options
        )
    return open_state(
        options.path,
        operator=options.operator,
        batch=batch,
        query_folder=options.query_folder,
        unproven=options.unproven,
        hold=hold,
        storage_options=options.storage_options,
    )


def _describe_read(options: SourceOptions, state: OpenState) -> dict[str, Any]:
    return {
        "package_version": BUILD,
        "folder": state.path,
        "operator_file": state.files.operator.encode().decode(),
        "table": options.table,
        "columns": options.columns,
        "batch": state.batch,
    }


def _describe_bucket(bucket: int, before: OpenState | None, after: OpenState) -> dict[str, Any]:
    saved = [asdict(file) for file in after.files.saved.get(bucket, ())]
    description = {"bucket": bucket, "pointer": _encode(after.files.pointers[bucket]), "saved": saved}
    return description if before is None else {**description, "before": _encode(before.files.pointers[bucket])}


def _encode(pointer: Pointer) -> str:
    return base64.b64encode(pointer.encode()).decode()


def _make_schema(options: SourceOptions, state: OpenState) -> str:
    """Return the type of the table that is read, as Spark's JSON."""
    if options.table == METADATA:
        return _encode_struct({field.name: _OF_ARROW[field.type] for field in FILES})
    types = _list_column_types(state)
    keys = state.key_schema.names
    if options.table == TIMEOUTS:
        return _encode_struct({name: types[name] for name in (*keys, TIMEOUT_MS)})
    if options.table == CHANGES:
        make_changes_schema(state)
        return _encode_struct({**{name: types[name] for name in state.schema.names}, CHANGE: _STRING})
    if options.columns is None:
        return _encode_struct({name: types[name] for name in state.schema.names})
    unknown = [name for name in options.columns if name not in types]
    if unknown:
        raise UsageError(f"there is no column {unknown[0]!r}, only {', '.join(types)}")
    return _encode_struct({name: types[name] for name in options.columns})


def _list_column_types(state: OpenState) -> dict[str, Any]:
    """Return the type of each column as Spark's JSON, without the hash, for which Spark has no type."""
    operator = state.files.operator
    fields = [*json.loads(operator.key_schema)["fields"], *json.loads(operator.state_schema)["fields"]]
    visible = [field for field in fields if field["name"] != EXPIRES_MS]
    names = [*state.key_schema.names, *state.state_schema.names]
    types = {name: field["type"] for name, field in zip(names, visible, strict=True)}
    types |= {TIMEOUT_MS: _LONG, DEFINED: _BOOLEAN, BUCKET: _INTEGER}
    return {**types, EXPIRES_MS: _LONG} if len(visible) < len(fields) else types


def _encode_struct(types: Mapping[str, Any]) -> str:
    fields = [{"name": name, "type": data_type, "nullable": True, "metadata": {}} for name, data_type in types.items()]
    return json.dumps({"type": "struct", "fields": fields})
