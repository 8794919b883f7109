"""Does without Spark what Spark does for an operator's buckets: packs rows, calls each bucket with its pointer, and
keeps the returned pointer.

It calls buckets like executors do (`spark.executor.call`): with local stores, leases and checkpoint files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.types import BinaryType, StructField, StructType

from arrow_schemas.labels import bucket_label
from arrow_schemas.lineage import Writer
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import DELETED
from arrow_schemas.spark_hashes import hash_keys
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.folders import local_folder
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.process_state import Shared
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.functions.ttl import Expiry
from spark_state_ext.spark.executor.call import run_bucket
from spark_state_ext.spark.executor.key_work import Times
from spark_state_ext.spark.shuffle.combine import Combiner
from spark_state_ext.spark.shuffle.pack import pack
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN, heartbeat
from spark_state_ext.testing import WAIT_S
from spark_state_ext.worker.local_folders import scratch_folder
from spark_state_ext.worker.removal import remove_tree
from spark_state_ext.worker.worker import Worker

__all__ = ["Buckets"]

_NEVER = -1
_QUERY, _RUN = "query", "run"
_POINTER = StructType([StructField("pointer", BinaryType())])
_READER = Writer("", "", -1, "")


@dataclass
class _BucketState:
    """A bucket's part of Spark's own state.

    Parameters
    ----------
    pointer
        None before the first call.
    timeout_ms
        When the bucket must be called even if it has no rows; `_NEVER` if it need not.
    """

    pointer: bytes | None = None
    timeout_ms: int = _NEVER


class Buckets:
    """The buckets of one operator over the batches of a query."""

    def __init__(self, job: Job, function: Callable[..., Any], combiner: Combiner | None = None) -> None:
        self.job = job
        self._plain = job.to_plain()
        self._function = function
        self._combiner = combiner
        self._schema = job.operator_file("").row_schema()
        self._held = [_BucketState() for _ in range(job.options.buckets)]
        self._worker = Worker()

    def batch(self, number: int, table: pa.Table | None, times: Times) -> list[pd.DataFrame]:
        """Run a batch and return its output frames."""
        if table is None:
            due = [bucket for bucket, bucket_state in enumerate(self._held) if self._is_due(bucket_state, times)]
            return [frame for bucket in due for frame in self._call(number, bucket, None, times)]
        payloads = self._pack_payloads(number, table)
        return [
            frame
            for bucket, bucket_payloads in enumerate(payloads)
            for frame in self._call(number, bucket, bucket_payloads, times)
        ]

    def state(self, times: Times) -> pa.Table:
        """Return the state after the last batch, in the order of the keys' hashes."""
        schema = self._schema
        visible = schema.without_expiry()
        fields = [field.with_nullable(True) for field in (*visible.keys, *visible.state)]
        output_schema = pa.schema([*fields, pa.field("timeout_ms", pa.int64())])
        ttl = self.job.options.ttl
        by_event_time = ttl is not None and ttl.clock == "event"
        expiry = Expiry(schema, ttl, max(times.watermark_ms, 0) if by_event_time else times.processing_ms)
        batches = []
        for bucket_state in self._held:
            for rows in self._scan_rows(bucket_state):
                live = expiry.due(rows)
                deleted = live.column(DELETED)
                if deleted.true_count:
                    live = live.filter(pc.invert(deleted))
                columns = [*visible.key_columns(live), *visible.state_columns(live), live.column("timeout_ms")]
                batches.append(pa.RecordBatch.from_arrays(columns, schema=output_schema))
        return pa.Table.from_batches(batches, output_schema).combine_chunks()

    def list_pointers(self) -> list[bytes]:
        """Return the pointers of all buckets, as Spark's state would hold them after a batch with rows."""
        return [bucket_state.pointer or b"" for bucket_state in self._held]

    def hold(self, pointers: Sequence[bytes]) -> None:
        """Continue from the pointers of another process."""
        self._held = [_BucketState(pointer) for pointer in pointers]

    def restart(self) -> None:
        """Continue like a new process on another machine: without local stores, and knowing only Spark's state."""
        self.close()
        local = Path(self.job.options.local_dir or "")
        # The folder does not exist before a bucket was called.
        if local.exists():
            remove_tree(local)
        local.mkdir()
        self._worker = Worker()

    def close(self) -> None:
        """Close the local stores once all background work has ended."""
        Shared.of(self._worker).close(WAIT_S)

    # -- a call ------------------------------------------------------------------------------------

    def _is_due(self, bucket_state: _BucketState, times: Times) -> bool:
        by_event_time = self.job.timeout_conf == GroupStateTimeout.EventTimeTimeout
        return _NEVER < bucket_state.timeout_ms < (times.watermark_ms if by_event_time else times.processing_ms)

    def _call(self, number: int, bucket: int, payloads: list[bytes] | None, times: Times) -> Iterator[pd.DataFrame]:
        """Call a bucket with its payloads, or because of its timeout."""
        bucket_state = self._held[bucket]
        state = self._make_group_state(bucket_state, times, payloads is None)
        frame = pd.DataFrame({"payload": pd.Series(payloads or [], dtype=object)})
        task = TaskInfo(_QUERY, _RUN, number, self.job.batches_retained, state_has_ids=True, stage=number)
        key = (bucket_label(bucket),)
        yield from run_bucket(self._plain, self._function, key, [frame], state, self._worker, task)
        bucket_state.pointer = bytes(state.get[0])
        bucket_state.timeout_ms = int(json.loads(state.json())["timeoutTimestamp"])

    def _make_group_state(self, bucket_state: _BucketState, times: Times, timed_out: bool) -> GroupState:
        """Return the group state that Spark would pass to the call."""
        return GroupState(
            # The type is declared as Row, which is a tuple; Spark's worker also passes a plain tuple.
            optionalValue=None if bucket_state.pointer is None else (bucket_state.pointer,),  # type: ignore[arg-type]
            batchProcessingTimeMs=times.processing_ms,
            eventTimeWatermarkMs=times.watermark_ms,
            timeoutConf=self.job.timeout_conf,
            hasTimedOut=timed_out,
            watermarkPresent=times.watermark_present,
            defined=bucket_state.pointer is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=_NEVER,
            keyAsUnsafe=b"",
            valueSchema=_POINTER,
        )

    def _pack_payloads(self, number: int, table: pa.Table) -> list[list[bytes]]:
        """Return the payloads of each bucket; the first is a heartbeat, as in every batch with rows."""
        positions = self.job.key_positions if self._combiner is None else self._combiner.key_positions
        keys = self._schema.normalise_keys([table.column(position) for position in positions])
        hashes = pa.array(hash_keys(keys).view(np.int64))
        names = [f"c{position}" for position in range(table.num_columns)]
        packed = pa.table([*table.columns, hashes], names=[*names, HASH_COLUMN])
        payloads_of = {bucket_label(bucket): [heartbeat(f"{number}")] for bucket in range(len(self._held))}
        for batch in pack(self._plain, packed.combine_chunks().to_batches(), self._combiner):
            for label, payload in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                payloads_of[label].append(payload)
        return list(payloads_of.values())

    # -- reading -----------------------------------------------------------------------------------

    def _scan_rows(self, bucket_state: _BucketState) -> Iterator[pa.RecordBatch]:
        if bucket_state.pointer is None:
            return
        job, shared = self.job, Shared.of(self._worker)
        pointer = Pointer.decode(bucket_state.pointer)
        scratch = scratch_folder(job.options.local_dir)
        folder = local_folder(job, pointer.query_folder, pointer.schema_id, pointer.bucket)
        replicas = shared.replicas.of(job, pointer.query_folder, pointer.bucket, scratch)
        store = shared.stores.at(str(folder), self._schema)
        yield from Bucket(store, replicas, pointer, _READER, CommitContext(scratch)).scan()
