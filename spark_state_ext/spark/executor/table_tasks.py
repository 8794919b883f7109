"""Tasks that write a table as a savepoint's snapshots of buckets, and read such snapshots as rows.

They run in `mapInArrow`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.columns import combine_chunks, format_row
from arrow_schemas.equality import group_by_key
from arrow_schemas.labels import bucket_label
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.row import TIMEOUT_MS, RowSchema, normalise_array
from spark_state_ext.engine.job import refuse_other_release
from spark_state_ext.errors import CorruptFileError, StateValueError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.bucket_copy import BucketCopy
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.saved_rows import read_visible_rows
from spark_state_ext.savepoints.task_rows import make_saved_row
from spark_state_ext.savepoints.writer import write_snapshot
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN, decode, encode
from spark_state_ext.store.runs import get_hashes
from spark_state_ext.worker.local_folders import scratch_folder
from spark_state_ext.worker.spill import HashSorter

__all__ = ["pack_rows", "read_rows", "write_buckets"]

_HELD_BYTES_MAX = 64 << 20
_PACKED = pa.schema([("label", pa.int32()), ("payload", pa.binary())])


def _read_operator(plain: dict[str, Any]) -> OperatorFile:
    refuse_other_release(plain)
    return OperatorFile.decode(plain["operator_file"].encode(), "the operator of the savepoint")


def pack_rows(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pack rows of a table, which include their hash, into payloads of one bucket each."""
    bucket_map = _read_operator(plain).bucket_map
    held: list[pa.RecordBatch] = []
    held_bytes = 0
    for batch in batches:
        held.append(batch)
        held_bytes += batch.get_total_buffer_size()
        if held_bytes >= _HELD_BYTES_MAX:
            yield _pack(held, bucket_map)
            held, held_bytes = [], 0
    if held:
        yield _pack(held, bucket_map)


def _pack(held: list[pa.RecordBatch], bucket_map: BucketMap) -> pa.RecordBatch:
    table = pa.Table.from_batches(held)
    buckets = bucket_map.of(table.column(HASH_COLUMN).to_numpy().view(np.uint64))
    order = np.argsort(buckets, kind="stable")
    table, buckets = table.take(pa.array(order)).combine_chunks(), buckets[order]
    bounds = np.searchsorted(buckets, np.arange(bucket_map.buckets + 1))
    labels, payloads = [], []
    for bucket in np.flatnonzero(np.diff(bounds)).tolist():
        start, end = int(bounds[bucket]), int(bounds[bucket + 1])
        for batch in table.slice(start, end - start).to_batches():
            labels.append(bucket_label(bucket))
            payloads.append(encode(batch))
    return pa.RecordBatch.from_arrays([pa.array(labels, pa.int32()), pa.array(payloads, pa.binary())], schema=_PACKED)


def write_buckets(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the payloads of a partition as one snapshot for each bucket; yield a row for each bucket."""
    operator, scratch = _read_operator(plain), scratch_folder(None)
    # One sorter for all buckets of the task: the memory budget is the task's, and each bucket is a range of hashes.
    sorter = HashSorter(scratch, HASH_COLUMN, plain["memory_bytes_max"])
    for batch in batches:
        for payload in batch.column(1):
            for rows in decode(payload.as_py(), _refuse_spill_file):
                sorter.add(rows)
    savepoint = Folder(plain["savepoint"], plain["savepoint_options"])
    by_bucket = _split_by_bucket(_make_runs(plain, operator.row_schema(), sorter), operator.bucket_map)
    for bucket, runs in groupby(by_bucket, key=itemgetter(0)):
        yield make_saved_row(_write_bucket(plain, operator, bucket, (rows for _, rows in runs), savepoint, scratch))


def _refuse_spill_file(name: str, offset: int, length: int) -> bytes:
    raise CorruptFileError(f"a payload names the spill file {name}, but tables are packed without spill files")


def _split_by_bucket(runs: Iterable[pa.RecordBatch], bucket_map: BucketMap) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Split rows, which ascend by hash, where a bucket ends; yield the bucket and its rows."""
    for rows in runs:
        buckets = bucket_map.of(get_hashes(rows))
        borders = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(buckets)]
        for start, end in pairwise(borders):
            yield int(buckets[start]), rows.slice(start, end - start)


def _write_bucket(
    plain: dict[str, Any],
    operator: OperatorFile,
    bucket: int,
    runs: Iterator[pa.RecordBatch],
    savepoint: Folder,
    scratch: Path,
) -> BucketCopy:
    # The same in every attempt at the task, so that no attempt leaves an unknown file behind.
    text = f"{plain['id']} {operator.operator} {bucket}"
    ref = CheckpointRef(1, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
    pointer = Pointer(
        operator.operator,
        bucket,
        operator.buckets,
        operator.schema_id,
        -1,
        plain["watermark_ms"],
        lineage=(LineageEntry(ref, 0, 0),),
    )
    earliest: list[int] = []
    into = savepoint.child(operator.operator, str(bucket))
    saved = write_snapshot(pointer, operator.row_schema(), _record_timeouts(runs, earliest), into, scratch)
    saved = replace(saved, pointer=replace(saved.pointer, earliest_timeout_ms=min(earliest, default=None)))
    return BucketCopy(saved, 0, 1, saved.files[0].size_bytes)


def _record_timeouts(runs: Iterable[pa.RecordBatch], earliest: list[int]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows, and append the earliest timeout of each batch to `earliest`."""
    for rows in runs:
        earliest_ms = pc.min(rows.column(TIMEOUT_MS)).as_py()
        if earliest_ms is not None:
            earliest.append(earliest_ms)
        yield rows


def _make_runs(plain: dict[str, Any], schema: RowSchema, sorter: HashSorter) -> Iterator[pa.RecordBatch]:
    """Yield a task's rows in run order; raise a StateValueError for a duplicate key."""
    keys, has_timeout = len(schema.keys), plain["has_timeout"]
    for _, table in sorter.ranges():
        if table is None:
            continue
        columns = [combine_chunks(column) for column in table.columns]
        hashes = columns[-1].to_numpy().view(np.uint64)
        normal_keys = schema.normalise_keys(columns[:keys])
        order, starts = group_by_key(hashes, normal_keys)
        if len(starts) < len(order):
            counts = np.diff(np.append(starts, len(order)))
            at = int(order[starts[int(np.argmax(counts > 1))]])
            raise StateValueError(
                f"the table has the key {format_row([field.name for field in schema.keys], columns[:keys], at)} more "
                "than once: a key has one state. Aggregate the table by key first."
            )
        n = table.num_rows
        state = [
            normalise_array(column, field.type) if column.type != field.type else column
            for column, field in zip(columns[keys:], schema.state, strict=False)
        ]
        defined = columns[keys + len(schema.state) + has_timeout] if plain.get("has_defined", False) else None
        for column, field in zip(state, schema.state, strict=False):
            # A key with a timeout but no state has NULL in all state columns.
            present = column if defined is None else column.filter(defined)
            if not field.nullable and present.null_count:
                raise StateValueError(
                    f"column {field.name!r} of the table is NULL in {present.null_count} rows, and the state schema "
                    "declares it NOT NULL: fill it, or declare it nullable"
                )
        timeout = columns[keys + len(schema.state)].cast(pa.int64()) if has_timeout else pa.nulls(n, pa.int64())
        rows = pa.RecordBatch.from_arrays(
            [
                pa.array(hashes, pa.uint64()),
                *normal_keys,
                *state,
                timeout,
                pa.array(np.ones(n, np.bool_)) if defined is None else defined,
                pa.array(np.zeros(n, np.bool_)),
            ],
            schema=schema.arrow,
        )
        yield rows.take(pa.array(order))


def read_rows(plain: dict[str, Any], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows (keys, state and timeout) of the savepoint's buckets whose numbers are in the input."""
    savepoint, scratch = Folder(plain["savepoint"], plain["savepoint_options"]), scratch_folder(None)
    manifest = None
    for batch in batches:
        for bucket in batch.column(0).to_pylist():
            manifest = manifest or read_manifest(savepoint)
            saved = manifest.bucket(plain["operator"], bucket)
            schema = manifest.header.operators[plain["operator"]].row_schema()
            if not plain["with_defined"]:
                yield from read_visible_rows(savepoint, saved, schema, scratch)
                continue
            for rows in read_visible_rows(savepoint, saved, schema, scratch, with_defined=True):
                yield rows.rename_columns([f"c{at}" for at in range(rows.num_columns)])
