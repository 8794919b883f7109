"""What the tests of the core share: a small schema, a model of it in plain Python, and ways to break things."""

from __future__ import annotations

import contextlib
import hashlib
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from arrow_schemas import CheckpointRef, Pointer, RowSchema, Writer
from arrow_schemas.equality import HashArray
from arrow_schemas.row import DELETED, TIMEOUT_MS
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.retention import CleanUp
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.runs import hashes_of, sorted_run
from spark_state_ext.worker.spill import SpillBuffer

SCHEMA = RowSchema(
    keys=(pa.field("name", pa.string()), pa.field("x", pa.float64())),
    state=(pa.field("count", pa.int64()), pa.field("note", pa.string())),
)
WRITER = Writer("query", "run", 0, "host")

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """State of one key in the model."""

    count: int | None
    record: str | None = None
    timeout_ms: int | None = None
    defined: bool = True


Changes = Mapping[Key, "Row | None"]
Model = dict[Key, Row]
HashFunction = Callable[[Key], int]


def canonical(value: Any) -> Any:
    """A value under which Spark's notion of equal keys is Python's."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple((name, canonical(v)) for name, v in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(canonical(v) for v in value)
    return value


def good_hash(key: Key) -> int:
    """A hash without collisions in practice."""
    return int.from_bytes(hashlib.blake2b(repr(canonical(key)).encode(), digest_size=8).digest(), "big")


def three_hashes(key: Key) -> int:
    """A bad hash, whose values lie at both ends and in the middle."""
    return (0, 2**63, 2**64 - 1)[good_hash(key) % 3]


def one_hash(key: Key) -> int:
    """The worst hash."""
    return 7


HASHES: tuple[HashFunction, ...] = (good_hash, three_hashes, one_hash)


def key_hashes(keys: Sequence[Key], hashed: HashFunction) -> HashArray:
    return np.array([hashed(key) for key in keys], dtype=np.uint64)


def key_columns(keys: Sequence[Key]) -> list[pa.Array]:
    columns = [pa.array([key[i] for key in keys], field.type) for i, field in enumerate(SCHEMA.keys)]
    return SCHEMA.normalise_keys(columns)


def run_of(changes: Changes, hashed: HashFunction = good_hash) -> pa.RecordBatch:
    """Changed keys as the rows of a run; None deletes."""
    keys, rows = list(changes), list(changes.values())
    columns = [
        pa.array(key_hashes(keys, hashed), pa.uint64()),
        *key_columns(keys),
        pa.array([row.count if row else None for row in rows], pa.int64()),
        pa.array([row.record if row else None for row in rows], pa.string()),
        pa.array([row.timeout_ms if row else None for row in rows], pa.int64()),
        pa.array([row is not None and row.defined for row in rows], pa.bool_()),
        pa.array([row is None for row in rows], pa.bool_()),
    ]
    return sorted_run(pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow))


def changed(model: Model, changes: Changes) -> Model:
    """The model after some changes."""
    after = {canonical(key): row for key, row in model.items()}
    for key, row in changes.items():
        if row is None:
            after.pop(canonical(key), None)
        else:
            after[canonical(key)] = row
    return after


def model_of(batches: Iterable[pa.RecordBatch]) -> Model:
    """Rows as the model has them. Fails when a key occurs twice."""
    found: Model = {}
    for batch in batches:
        assert batch.schema.equals(SCHEMA.arrow)
        for row in batch.to_pylist():
            key = canonical((row["key.name"], row["key.x"]))
            assert key not in found, f"{key} twice"
            assert not row[DELETED]
            found[key] = Row(row["state.count"], row["state.note"], row[TIMEOUT_MS], row["defined"])
    return found


def scanned(view: View) -> Model:
    """All rows of a view; also checks that they ascend by hash."""
    batches = list(view.scan())
    hashes = np.concatenate([hashes_of(batch) for batch in batches]) if batches else np.empty(0, dtype=np.uint64)
    assert (hashes[1:] >= hashes[:-1]).all(), "a scan ascends by hash"
    assert all(batch.num_rows for batch in batches)
    return model_of(batches)


def looked_up(view: View, keys: Sequence[Key], hashed: HashFunction = good_hash) -> Model:
    """What a view says of some keys."""
    found = view.lookup(key_hashes(keys, hashed), key_columns(keys))
    rows = found.rows.to_pylist()
    index = found.index.tolist()
    model: Model = {}
    for key, at in zip(keys, index, strict=True):
        if at < 0:
            continue
        row = rows[at]
        assert canonical((row["key.name"], row["key.x"])) == canonical(key), "the row of another key"
        assert not row[DELETED]
        model[canonical(key)] = Row(row["state.count"], row["state.note"], row[TIMEOUT_MS], row["defined"])
    return model


class Refs:
    """Checkpoint ids in order, so that a failing example reads well."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, version: int) -> CheckpointRef:
        self._count += 1
        return CheckpointRef(version, f"{self._count:032x}")


KEYS: list[Key] = [
    (name, x) for name in ("a", "b", "ü", "", None) for x in (0.0, 1.5, float("inf"), float("nan"), None)
]
# Equal to one of KEYS, and different bytes.
OTHER_SPELLINGS: list[Key] = [("a", -0.0), ("b", -float("nan")), (None, -0.0)]
ALL_KEYS = [*KEYS, *OTHER_SPELLINGS]


def rows() -> st.SearchStrategy[Row]:
    return st.builds(
        Row,
        count=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        record=st.one_of(st.none(), st.text(max_size=3)),
        timeout_ms=st.one_of(st.none(), st.integers(1, 30)),
        defined=st.booleans(),
    )


def change_sets(max_size: int = 12) -> st.SearchStrategy[dict[Key, Row | None]]:
    """Changes of distinct keys, deletions among them."""
    return st.lists(
        st.tuples(st.sampled_from(ALL_KEYS), st.one_of(st.none(), rows(), rows())),
        min_size=1,
        max_size=max_size,
        unique_by=lambda change: canonical(change[0]),
    ).map(dict)


def expired_in(model: Model, now_ms: int) -> Model:
    return {key: row for key, row in model.items() if row.timeout_ms is not None and row.timeout_ms < now_ms}


# -- buckets --------------------------------------------------------------------------------------


def first_pointer(bucket: int = 3) -> Pointer:
    return Pointer(operator="counts", bucket=bucket, buckets=8, schema_id=0, batch=-1, watermark_ms=None)


def buffer_of(changes: Changes, scratch: Path, hashed: HashFunction = good_hash) -> SpillBuffer:
    buffer = SpillBuffer(scratch, 1 << 20)
    if changes:
        buffer.append(run_of(changes, hashed))
    return buffer


def clean_up_at(
    pointer: Pointer, retained: int, still_ours: Callable[[], None] = lambda: None, deletes_max: int | None = None
) -> CleanUp:
    """What a clean-up goes by where all of a pointer's state is."""
    assert pointer.ref is not None, "there is a state"
    return CleanUp(pointer, pointer.ref, retained, still_ours, deletes_max)


def bucket_on(store: LocalStore, files: Folder, pointer: Pointer, scratch: Path) -> Bucket:
    return Bucket(store, sole_replica(files, scratch), pointer, WRITER, CommitContext(scratch))


def committed(store: LocalStore, files: Folder, pointer: Pointer, changes: Changes, scratch: Path) -> Pointer:
    """One call that changes some keys; returns the new pointer."""
    return bucket_on(store, files, pointer, scratch).commit(buffer_of(changes, scratch)).pointer


def state_at(store: LocalStore, files: Folder, pointer: Pointer, scratch: Path) -> Model:
    """The state at a pointer, by scan, checked against lookups of every key."""
    bucket = bucket_on(store, files, pointer, scratch)
    state = bucket.read(scanned)
    assert bucket.read(lambda view: looked_up(view, KEYS)) == dict(state.items())
    assert len(state) <= pointer.rows
    return state


@contextlib.contextmanager
def small_disk(parent: Path) -> Iterator[Path]:
    """A real file system of 6 MiB, to be filled."""
    folder = parent / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs to fill needs privileges this user lacks: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
