"""A query folder of several buckets that the engine writes batch by batch, with a model of its state in a dict."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from arrow_schemas import OperatorFile, Pointer, Writer
from arrow_schemas.labels import find_buckets
from arrow_schemas.operator import operator_file_name
from arrow_schemas.spark_hash import hash_key
from spark_state_ext import OpenState
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import LeaseRecord, RunIdentity
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import (
    SCHEMA,
    Changes,
    Key,
    Model,
    Row,
    apply_changes,
    canonicalise,
    key_columns,
    make_run,
)
from spark_state_ext.timeline.epochs import Position
from spark_state_ext.timeline.records import EpochRegistry, RunStart
from spark_state_ext.worker.spill import SpillBuffer

__all__ = ["Job", "as_model", "bucket_of", "hashed", "operator_file", "state_of"]


def operator_file(operator: str, query_id: str, buckets: int) -> OperatorFile:
    def schema(**columns: str) -> str:
        fields = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in columns.items()]
        return json.dumps({"type": "struct", "fields": fields})

    return OperatorFile(
        operator, query_id, buckets, schema(name="string", x="double"), schema(count="long", note="string")
    )


def hashed(key: Key) -> int:
    """Return Spark's hash of a key."""
    return hash_key(key_columns([key]))


def bucket_of(key: Key, buckets: int) -> int:
    return int(find_buckets(np.array([hashed(key)], np.uint64), buckets)[0])


@dataclass
class Job:
    """A job without Spark: its batches go through the engine, and each batch gets the pointers of the previous one."""

    root: Path | str
    scratch: Path
    operator: str = "counts"
    query_id: str = "query"
    buckets: int = 4
    run_id: str = "run"
    host: str = "host"
    told: bool = True
    retained: int = 2
    # Additional arguments of each call's context.
    context: Mapping[str, Any] = field(default_factory=dict)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    models: list[Model] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = Folder(str(self.root), self.storage_options)
        self.folder = folder.child(self.operator, self.query_id or "t1-" + "0" * 32)
        file = operator_file(self.operator, self.query_id, self.buckets)
        self.folder.put(operator_file_name(0), file.encode())
        self.stores = [LocalStore.at(self.scratch / f"{self.query_id}-{b}", SCHEMA) for b in range(self.buckets)]
        no_pointer = Pointer(self.operator, 0, self.buckets, 0, -1, None)
        self.pointers = [[replace(no_pointer, bucket=bucket) for bucket in range(self.buckets)]]
        self.epochs = EpochRegistry()

    def batch(self, changes: Changes, at: int | None = None) -> int:
        """Commit a batch; `at` is its number if the query goes back to an earlier batch."""
        at = len(self.pointers) - 1 if at is None else at
        del self.pointers[at + 1 :], self.models[at:]
        self.pointers.append(self.attempt(changes))
        self.models.append(apply_changes(self.models[-1] if self.models else {}, changes))
        self._release_lease()
        return at

    def _release_lease(self) -> None:
        """End the run and release its lease."""
        log, now_ms, me = LeaseLog(self.folder), int(time.time() * 1000), RunIdentity("app", self.run_id, self.query_id)
        record = log.newest(first=True)
        before = LeaseRecord(me, 0, 0) if record is None else record.record
        assert log.append(record, replace(before.renew_by(me, now_ms, 60_000), released=True))

    def attempt(self, changes: Changes) -> list[Pointer]:
        """Return the pointers of an attempt at the next batch."""
        return [self._call(bucket, changes) for bucket in range(self.buckets)]

    def _call(self, bucket: int, changes: Changes) -> Pointer:
        batch, pointer = len(self.pointers) - 1, self.pointers[-1][bucket]
        bucket_changes = {key: row for key, row in changes.items() if bucket_of(key, self.buckets) == bucket}
        buffer = SpillBuffer(self.scratch, 1 << 20)
        if bucket_changes:
            buffer.append(make_run(bucket_changes, hashed))
        writer = Writer(self.query_id, self.run_id, batch, self.host, told=self.told)
        if not self.told:
            # Without the batch, Spark's worker numbers the calls, and so each bucket has another number.
            writer = replace(writer, batch=pointer.batch + 1 + bucket)
        writer = replace(writer, epoch=self._epoch(batch, pointer))
        replicas = sole_replica(self.folder.child(str(bucket)), self.scratch, "fsspec")
        context = CommitContext(self.scratch, batches_retained=self.retained, **self.context)
        call_bucket = Bucket(self.stores[bucket], replicas, pointer, writer, context)
        committed = call_bucket.commit(buffer).pointer
        return replace(committed, batch=writer.batch)

    def _epoch(self, batch: int, pointer: Pointer) -> int:
        after = Position(self.query_id, batch - 1, pointer.heartbeats, told=self.told)
        return self.epochs.of([self.folder], RunStart(self.run_id, "", after, pointer), lambda: None)

    def close(self) -> None:
        for store in self.stores:
            store.close()


def as_model(table: pa.Table | pa.RecordBatchReader) -> Model:
    """Return rows that were read as a dict, with the column ``defined`` if they have it."""
    rows = (table if isinstance(table, pa.Table) else table.read_all()).to_pylist()
    model = {
        (canonicalise(row["name"]), canonicalise(row["x"])): Row(
            row["count"], row["note"], row["timeout_ms"], row.get("defined", True)
        )
        for row in rows
    }
    assert len(model) == len(rows), "each key must occur once"
    return model


def state_of(state: OpenState) -> Model:
    """Return the whole open state by a scan."""
    return as_model(state.scan([*state.schema.names, "defined"]))
