"""What is planned once, and what each task reads: partitions are buckets. Neither part needs PySpark.

The plan opens the state, which places a hold, and writes down the pointer of each bucket: so all tasks read the same
batch. The hold is left to the tasks, which renew it while they read; nobody knows which of them is the last, so it ends
by itself, ten minutes after that.
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
from spark_state_ext.reading.changes import CHANGE, changes_of_bucket, changes_schema
from spark_state_ext.reading.exact import ExactBatch, Told, open_exact
from spark_state_ext.reading.holding import ReaderHold
from spark_state_ext.reading.opening import open_pointers, open_state
from spark_state_ext.reading.shown import BUCKET
from spark_state_ext.reading.state import OpenState
from spark_state_ext.reading.table_of_files import FILES
from spark_state_ext.spark.source.options import CHANGES, METADATA, TIMEOUTS, SourceOptions

__all__ = ["Exact", "Planned", "exact_of", "planned", "read_part"]

_LONG, _INTEGER, _BOOLEAN, _STRING = "long", "integer", "boolean", "string"
_OF_ARROW = {pa.int32(): _INTEGER, pa.int64(): _LONG, pa.string(): _STRING}


@dataclass(frozen=True)
class Planned:
    """A read that is planned.

    Parameters
    ----------
    schema
        Spark's JSON of the table's type.
    parts
        What each task is told, as JSON: one for each bucket.
    """

    schema: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Exact:
    """Committed batches, and what Spark told of them.

    Parameters
    ----------
    told
        Whose they are.
    batches
        The one that is read, or first the one that changes are told from.
    """

    told: Told
    batches: tuple[ExactBatch, ...]


def exact_of(
    told: Mapping[str, str], ranges: Sequence[tuple[int, int, int]], rows: Sequence[Mapping[str, Any]]
) -> Exact:
    """What a client has read of Spark's state, as a task gets it."""
    pointers: list[dict[int, Pointer]] = [{} for _ in ranges]
    for row in rows:
        pointer = Pointer.decode(row["pointer"])
        pointers[row["at"]][pointer.bucket] = pointer
    return Exact(Told(**told), tuple(ExactBatch(*it, made) for it, made in zip(ranges, pointers, strict=True)))


def planned(options: SourceOptions, *, described: bool = False, exact: Exact | None = None) -> Planned:
    """Plan a read."""
    hold = options.hold and not described
    last = options.to_batch if options.table == CHANGES else options.batch
    with _opened(options, last, hold, exact, -1) as after:
        schema = _schema(options, after)
        if described:
            return Planned(schema, ())
        before = None
        if options.table == CHANGES:
            # Under the hold of the other.
            with _opened(options, options.from_batch, False, exact, 0) as before:
                if before.batch > after.batch:
                    raise UsageError(
                        f"from_batch must not come after the batch that is read: {before.batch} is after {after.batch}"
                    )
        told = _told(options, after)
        buckets = sorted(after.files.pointers) if options.buckets is None else sorted(set(options.buckets))
        after.scan(buckets=buckets)  # says which of them there are not
        pointers = [_bucket(bucket, before, after) for bucket in buckets]
        told["hold_id"] = after.leave_hold()
        parts = tuple(json.dumps({**told, **it}) for it in pointers)
    return Planned(schema, parts)


def read_part(part: str, storage_options: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    """The rows of one bucket."""
    told = json.loads(part)
    refuse_other_release(told)
    folder = Folder(told["folder"], storage_options)
    hold = ReaderHold(folder, joined=told["hold_id"]) if told["hold_id"] else None
    operator = OperatorFile.decode(told["operator_file"].encode(), "the operator file of the plan")
    bucket = told["bucket"]

    def at(which: str, batch: int) -> OpenState:
        pointer = Pointer.decode(base64.b64decode(told[which]))
        saved = {bucket: [SavedFile(**file) for file in told["saved"]]}
        return open_pointers(folder, operator, {bucket: pointer}, batch, hold=hold, saved=saved)

    after = at("pointer", told["batch"])
    if told["table"] == CHANGES:
        batches: Any = changes_of_bucket(at("before", told["batch"]), after, bucket)
        fields = changes_schema(after)
    elif told["table"] == METADATA:
        batches, fields = after.lineage([bucket]).to_batches(), FILES
    elif told["table"] == TIMEOUTS:
        reader = after.timeouts([bucket])
        batches, fields = reader, reader.schema
    else:
        reader = after.scan(told["columns"], buckets=[bucket])
        batches, fields = reader, reader.schema
    # Spark's columns may all be NULL.
    nullable = pa.schema([field.with_nullable(True) for field in fields])
    for batch in batches:
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays(batch.columns, schema=nullable)


def _opened(options: SourceOptions, batch: int | None, hold: bool, exact: Exact | None, at: int) -> OpenState:
    if exact is not None:
        found = exact.batches[at]
        return open_exact(options.path, exact.told, lambda: found, hold=hold, storage_options=options.storage_options)
    return open_state(
        options.path,
        operator=options.operator,
        batch=batch,
        query_folder=options.query_folder,
        unproven=options.unproven,
        hold=hold,
        storage_options=options.storage_options,
    )


def _told(options: SourceOptions, state: OpenState) -> dict[str, Any]:
    return {
        "package_version": BUILD,
        "folder": state.path,
        "operator_file": state.files.operator.encode().decode(),
        "table": options.table,
        "columns": options.columns,
        "batch": state.batch,
    }


def _bucket(bucket: int, before: OpenState | None, after: OpenState) -> dict[str, Any]:
    saved = [asdict(file) for file in after.files.saved.get(bucket, ())]
    told = {"bucket": bucket, "pointer": _encoded(after.files.pointers[bucket]), "saved": saved}
    return told if before is None else {**told, "before": _encoded(before.files.pointers[bucket])}


def _encoded(pointer: Pointer) -> str:
    return base64.b64encode(pointer.encode()).decode()


def _schema(options: SourceOptions, state: OpenState) -> str:
    """Spark's JSON of the type of the table that is read."""
    if options.table == METADATA:
        return _struct({field.name: _OF_ARROW[field.type] for field in FILES})
    types = _types(state)
    keys = state.key_schema.names
    if options.table == TIMEOUTS:
        return _struct({name: types[name] for name in (*keys, TIMEOUT_MS)})
    if options.table == CHANGES:
        changes_schema(state)
        return _struct({**{name: types[name] for name in state.schema.names}, CHANGE: _STRING})
    if options.columns is None:
        return _struct({name: types[name] for name in state.schema.names})
    unknown = [name for name in options.columns if name not in types]
    if unknown:
        raise UsageError(f"there is no column {unknown[0]!r}: there are {', '.join(types)}")
    return _struct({name: types[name] for name in options.columns})


def _types(state: OpenState) -> dict[str, Any]:
    """Spark's JSON of the type of each column; all but the hash, for which Spark has no type."""
    operator = state.files.operator
    fields = [*json.loads(operator.key_schema)["fields"], *json.loads(operator.state_schema)["fields"]]
    shown = [field for field in fields if field["name"] != EXPIRES_MS]
    names = [*state.key_schema.names, *state.state_schema.names]
    types = {name: field["type"] for name, field in zip(names, shown, strict=True)}
    types |= {TIMEOUT_MS: _LONG, DEFINED: _BOOLEAN, BUCKET: _INTEGER}
    return {**types, EXPIRES_MS: _LONG} if len(shown) < len(fields) else types


def _struct(types: Mapping[str, Any]) -> str:
    fields = [{"name": name, "type": it, "nullable": True, "metadata": {}} for name, it in types.items()]
    return json.dumps({"type": "struct", "fields": fields})
