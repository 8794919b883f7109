"""A bucket for lazy restores, whose snapshot is in a remote store and has many chunks and values of every kind."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from core_support import WRITER

from arrow_schemas import CheckpointRef, LineageEntry, LineageHeader, Pointer, RowSchema
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name
from arrow_schemas.row import TIMEOUT_MS
from benchmarks.throttled import Throttled
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.replication import Replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import StateError
from spark_state_ext.files import checkpoint
from spark_state_ext.files.checkpoint import write_checkpoint
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.lazy_file import LazyFile, LazyOptions, PieceSource
from spark_state_ext.store.runs import sort_by_hash
from spark_state_ext.worker.background import Work

__all__ = [
    "FIRST",
    "KEYS",
    "LAST",
    "SCHEMA",
    "SNAPSHOT_NAME",
    "Later",
    "Remote",
    "are_rows_of",
    "base_suffixes",
    "bucket_on",
    "expected",
    "lazy_files",
    "looked_up",
    "rows_of",
    "values_of",
]

SCHEMA = RowSchema(
    (pa.field("k", pa.int64()),),
    (
        pa.field("n", pa.int64()),
        pa.field("note", pa.string()),
        pa.field("raw", pa.binary()),
        pa.field("tags", pa.list_(pa.field("element", pa.int64()))),
        pa.field("flag", pa.bool_()),
    ),
)
FIRST, LAST = CheckpointRef(1, "1" * 32), CheckpointRef(2, "2" * 32)
SNAPSHOT_NAME = file_name(LAST, SNAPSHOT)
# Some adjacent and some distant keys, keys at both ends, and one key that the state does not have.
KEYS = [0, 1, 2, 3, 4_000, 4_001, 11_998, 11_999, 12_000, 77]
KeyArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]


class Later:
    """A runner that runs its work only when `run` is called."""

    def __init__(self) -> None:
        self.work: dict[str, Work] = {}

    def submit(self, name: str, work: Work) -> bool:
        self.work[name] = work
        return True

    def busy(self, name: str) -> bool:
        return name in self.work

    def run(self) -> None:
        """Run the waiting work and ignore its errors, as the background does."""
        while self.work:
            with contextlib.suppress(StateError):
                self.work.popitem()[1]()


def hashes_of(keys: KeyArray) -> HashArray:
    """Return hashes of which every four keys share one."""
    spread: HashArray = (keys // 4).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return spread


def cluster_hashes(keys: KeyArray) -> HashArray:
    """Return hashes of a bad hash function: most of them are close together, and a few are far away."""
    near: HashArray = (keys // 4).astype(np.uint64) + np.uint64(1) << np.where(keys % 1_000 < 4, 44, 3).astype(
        np.uint64
    )
    return near


def values_of(key: int) -> tuple[int, str | None, bytes, list[int], bool]:
    """Return the state of a key."""
    note = None if key % 7 == 0 else f"{key:x}" * (50 if key % 11 else 3_000)
    return key * 3, note, b"%d" % key, list(range(key % 4)), key % 2 == 0


def rows_of(keys: Sequence[int] | KeyArray, hashed: HashArray, timeouts: bool = False) -> pa.RecordBatch:
    """Return rows in the order of a run."""
    columns = list(zip(*(values_of(int(key)) for key in keys), strict=True))
    n = len(keys)
    return sort_by_hash(
        pa.RecordBatch.from_arrays(
            [
                pa.array(hashed),
                pa.array(np.asarray(keys)),
                *(pa.array(column, kind.type) for column, kind in zip(columns, SCHEMA.state, strict=True)),
                pa.array(np.asarray(keys), mask=np.asarray(keys) % 10 != 0) if timeouts else pa.nulls(n, pa.int64()),
                pa.array(np.ones(n, dtype=np.bool_)),
                pa.array(np.zeros(n, dtype=np.bool_)),
            ],
            schema=SCHEMA.arrow,
        )
    )


def are_rows_of(batch: pa.RecordBatch, keys: Sequence[int]) -> bool:
    """Return whether the rows are the complete rows of these keys, of which every tenth has a timeout."""
    states = {
        row["key.k"]: (tuple(row[f"state.{column.name}"] for column in SCHEMA.state), row[TIMEOUT_MS])
        for row in batch.to_pylist()
    }
    return states == {key: (values_of(key), key if key % 10 == 0 else None) for key in keys}


@dataclass
class Remote:
    """A bucket's remote folder: a first delta with all rows, an empty second one, and a snapshot of the second.

    Parameters
    ----------
    folder
        The folder.
    hashed
        Hashes of the keys.
    keys
        All keys.
    """

    folder: Throttled
    hashed: HashArray
    keys: KeyArray
    snapshot: bytes = b""
    pointer: Pointer = field(
        default_factory=lambda: Pointer(
            "counts", 3, 8, 0, 1, None, lineage=(LineageEntry(LAST, 1, 2),), parent=FIRST, rows=1
        )
    )

    @staticmethod
    def made(
        scratch: Path, *, timeouts: bool = False, bad_hashes: bool = False, form: int = 0, chunk_rows: int = 3_001
    ) -> Remote:
        keys = np.arange(12_000, dtype=np.int64)
        hashed = cluster_hashes(keys) if bad_hashes else hashes_of(keys)
        remote = Remote(Throttled(f"memory://lazy-{uuid.uuid4().hex}/3"), hashed, keys)
        all_rows = rows_of(keys, hashed, timeouts)
        for ref, parent, kind, batches in (
            (FIRST, None, DELTA, [all_rows]),
            (LAST, FIRST, DELTA, []),
            (LAST, FIRST, SNAPSHOT, [all_rows]),
        ):
            lineage = () if parent is None else (parent,)
            header = LineageHeader(
                kind, "counts", 3, ref, parent, lineage, 0, WRITER, "0.1.0", form if kind == SNAPSHOT else 0
            )
            path = scratch / "made"
            with pytest.MonkeyPatch.context() as patch, path.open("wb") as file:
                patch.setattr(checkpoint, "CHUNK_ROWS", chunk_rows)
                write_checkpoint(file, header, SCHEMA, batches)
            remote.folder.put_file(file_name(ref, kind), path)
            if kind == SNAPSHOT:
                remote.snapshot = path.read_bytes()
            path.unlink()
        return remote


def bucket_on(
    store: LocalStore,
    remote: Remote,
    scratch: Path,
    *,
    later: Later | None = None,
    lazily: bool = True,
    replicas: Sequence[Replica] | None = None,
    pointer: Pointer | None = None,
    peers: PieceSource | None = None,
    while_waiting: Callable[[], None] = lambda: None,
) -> Bucket:
    """Return the bucket in a call."""
    lazy = LazyOptions(1, 1 << 40, later or Later(), peers) if lazily else None
    context = CommitContext(scratch, lazy=lazy, while_waiting=while_waiting)
    call_replicas = sole_replica(remote.folder, scratch) if replicas is None else replicas
    return Bucket(store, call_replicas, pointer or remote.pointer, WRITER, context)


def looked_up(view: View, keys: Sequence[int], remote: Remote) -> dict[int, tuple[object, ...]]:
    """Return the states of those keys that have one."""
    key_array = np.array(keys, dtype=np.int64)
    known = np.searchsorted(remote.keys, np.minimum(key_array, remote.keys[-1]))
    hashed = np.where(
        key_array <= remote.keys[-1], remote.hashed[known], np.uint64(2**64 - 1) - key_array.astype(np.uint64)
    )
    lookup = view.lookup(hashed, [pa.array(key_array)])
    rows = lookup.rows.to_pylist()
    return {
        key: tuple(rows[at][f"state.{column.name}"] for column in SCHEMA.state)
        for key, at in zip(keys, lookup.index.tolist(), strict=True)
        if at >= 0
    }


def expected(keys: list[int], remote: Remote) -> dict[int, tuple[object, ...]]:
    """Return the expected result of a lookup."""
    return {key: values_of(key) for key in keys if key < len(remote.keys)}


def base_suffixes(store: LocalStore) -> list[str]:
    """Return the suffixes of the files of the store's large runs."""
    suffixes = {path.suffix for path in store._environment.folder.glob("base-*")}
    # `test_compared` tests the marks of compared files.
    return sorted(suffixes - {".compared"})


def lazy_files(store: LocalStore) -> list[LazyFile]:
    """Return the files of runs that are not yet complete."""
    return [lazy for run in store.runs() if (lazy := store.lazy.file(run)) is not None]
