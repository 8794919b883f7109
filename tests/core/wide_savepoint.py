"""A native savepoint of rows of many types with a time to live: it has snapshots, deltas and tombstones."""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from core_support import WRITER

from arrow_schemas import BucketMap, OperatorFile, Pointer, RowSchema
from arrow_schemas.savepoint import NATIVE, SavepointHeader, SavepointManifest
from arrow_schemas.spark_hashes import hash_keys
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.bucket_copy import save_bucket
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.saved_rows import read_saved_rows
from spark_state_ext.savepoints.writer import write_manifest
from spark_state_ext.store import LocalStore
from spark_state_ext.store.runs import sort_by_hash
from spark_state_ext.worker.spill import SpillBuffer

__all__ = ["KEYS", "OPERATOR", "WIDE", "WideSavepoint", "rows_of", "wide_rows", "wide_savepoint"]


def make_struct(**columns: Any) -> dict[str, Any]:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns.items()]
    return {"type": "struct", "fields": fields}


def make_array(element: Any) -> dict[str, Any]:
    return {"type": "array", "elementType": element, "containsNull": True}


_STATE = make_struct(
    flag="boolean",
    small="short",
    ratio="float",
    amount="decimal(38,2)",
    day="date",
    at="timestamp",
    data="binary",
    tags=make_array("string"),
    counts={"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": True},
    parts=make_array(
        make_struct(
            name="string", of={"type": "map", "keyType": "long", "valueType": "double", "valueContainsNull": True}
        )
    ),
)
OPERATOR = OperatorFile(
    "wide", "query", 1, json.dumps(make_struct(name="string", n="long")), json.dumps(_STATE)
).with_expiry()
WIDE = OPERATOR.row_schema()
KEYS: list[tuple[str | None, int | None]] = [(name, n) for name in ("a", "", "ü" * 20, None) for n in (0, 1, -5, None)]


def make_values(key: tuple[Any, ...], version: int) -> list[Any]:
    """Return values of the state's columns, some of them NULL or empty."""
    chance = random.Random(f"{key} {version}")

    def maybe_null(value: Any) -> Any:
        return None if chance.random() < 0.2 else value

    def make_text() -> str:
        return "é" * chance.randrange(4)

    return [
        maybe_null(chance.random() < 0.5),
        maybe_null(chance.randrange(-9, 9)),
        maybe_null(chance.choice([float("nan"), -0.0, 0.0, 1.5])),
        maybe_null(Decimal(chance.randrange(-(10**30), 10**30)).scaleb(-2)),
        maybe_null(date(2024, 2, chance.randrange(1, 28))),
        maybe_null(datetime.fromtimestamp(chance.randrange(10**9), timezone.utc)),
        maybe_null(chance.randbytes(chance.randrange(5))),
        maybe_null([maybe_null(make_text()) for _ in range(chance.randrange(3))]),
        maybe_null([(f"k{at}", maybe_null(at)) for at in range(chance.randrange(3))]),
        maybe_null(
            [
                maybe_null({"name": maybe_null(make_text()), "of": maybe_null([(1, maybe_null(0.5))])})
                for _ in range(chance.randrange(3))
            ]
        ),
        maybe_null(10_000 + version),
    ]


def wide_rows(keys: list[tuple[Any, ...]], version: int, removed: bool = False) -> pa.RecordBatch:
    """Return rows of a run, whose values depend only on the key and the version."""
    names = [pa.array([key[at] for key in keys], field.type) for at, field in enumerate(WIDE.keys)]
    columns = WIDE.normalise_keys(names)
    values = [make_values(key, version) for key in keys]
    timeouts = [None if removed or hash(key) % 3 == 0 else 5_000 * version for key in range(len(keys))]
    arrays = [
        pa.array(hash_keys(columns), pa.uint64()),
        *columns,
        *(
            pa.array([None if removed else of_key[at] for of_key in values], field.type)
            for at, field in enumerate(WIDE.state)
        ),
        pa.array(timeouts, pa.int64()),
        pa.array([not removed] * len(keys)),
        pa.array([removed] * len(keys)),
    ]
    return sort_by_hash(pa.RecordBatch.from_arrays(arrays, schema=WIDE.arrow))


@dataclass(frozen=True)
class WideSavepoint:
    """A savepoint and its rows."""

    folder: Folder
    rows: list[str]


def rows_of(savepoint: Folder, operator: str, schema: RowSchema, scratch: Path) -> list[str]:
    """Return all rows as sorted texts, and check that each bucket has only its own rows."""
    rows = []
    manifest = read_manifest(savepoint)
    bucket_map = manifest.header.operators[operator].bucket_map
    for bucket in manifest.buckets:
        if bucket.operator != operator:
            continue
        for batch in read_saved_rows(
            savepoint.child(operator, str(bucket.bucket)), bucket.pointer, bucket.files, schema, scratch
        ):
            hashes = batch.column(0).to_numpy().astype(np.uint64)
            assert set(bucket_map.of(hashes).tolist()) <= {bucket.bucket}
            rows += [repr(row) for row in batch.to_pylist()]
    return sorted(rows)


def wide_savepoint(folder: Path, bucket_map: BucketMap) -> WideSavepoint:
    """Write a savepoint of three batches, of which the last one removes some keys."""
    job, savepoint = Folder(str(folder / "job")), Folder(str(folder / "savepoint"))
    operator = OPERATOR.with_map(bucket_map)
    batches = [wide_rows(list(KEYS), 1), wide_rows(KEYS[:9], 2), wide_rows(KEYS[3:6], 3, removed=True)]
    buckets = []
    for bucket in range(bucket_map.buckets):
        no_pointer = Pointer("wide", bucket, bucket_map.buckets, 0, -1, None)
        files = job.child(str(bucket))
        pointer = commit_batches(files, no_pointer, bucket_map, batches, folder)
        target = savepoint.child("wide", str(bucket))
        replicas = sole_replica(files, folder, "fsspec")
        buckets.append(save_bucket(pointer, replicas, target, NATIVE, WIDE, folder).saved)
    header = SavepointHeader("77" * 16, NATIVE, 1_700_000_000_000, {"wide": operator}, "0.1.0", "query", 2, 42_000)
    write_manifest(savepoint, SavepointManifest(header, tuple(buckets)))
    last: dict[tuple[Any, ...], str] = {}
    for batch in batches:
        for row in batch.to_pylist():
            key = (row["key.name"], row["key.n"])
            last.pop(key, None)
            if not row["deleted"]:
                last[key] = repr(row)
    return WideSavepoint(savepoint, sorted(last.values()))


def commit_batches(
    files: Folder, pointer: Pointer, bucket_map: BucketMap, batches: list[pa.RecordBatch], scratch: Path
) -> Pointer:
    local = scratch / f"local-{pointer.bucket}"
    with closing(LocalStore.at(local, WIDE)) as store:
        for at, batch in enumerate(batches):
            hashes = batch.column(0).to_numpy().astype(np.uint64)
            bucket_rows = batch.filter(pa.array(bucket_map.of(hashes) == pointer.bucket))
            buffer = SpillBuffer(scratch, 1 << 20)
            if bucket_rows.num_rows:
                buffer.append(bucket_rows)
            writer = replace(WRITER, batch=at)
            bucket = Bucket(store, sole_replica(files, scratch, "fsspec"), pointer, writer, CommitContext(scratch))
            pointer = replace(bucket.commit(buffer).pointer, batch=at)
    return pointer
