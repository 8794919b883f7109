"""Strategies, buckets and faults that the tests of the core share, in addition to the model of the store's contract."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from arrow_schemas import Pointer, Writer
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.retention import CleanUp
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import (
    ALL_KEYS,
    KEYS,
    Changes,
    HashFunction,
    Key,
    Model,
    Row,
    canonicalise,
    good_hash,
    look_up,
    make_run,
    scan,
)
from spark_state_ext.worker.spill import SpillBuffer

__all__ = [
    "WRITER",
    "rows",
    "change_sets",
    "first_pointer",
    "buffer_of",
    "bucket_on",
    "clean_up_at",
    "committed",
    "state_at",
    "small_disk",
]

WRITER = Writer("query", "run", 0, "host")
_CADENCE = SnapshotCadence()


def rows() -> st.SearchStrategy[Row]:
    return st.builds(
        Row,
        count=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        record=st.one_of(st.none(), st.text(max_size=3)),
        timeout_ms=st.one_of(st.none(), st.integers(1, 30)),
        defined=st.booleans(),
    )


def change_sets(max_size: int = 12) -> st.SearchStrategy[dict[Key, Row | None]]:
    """Return a strategy for changes of distinct keys, some of them deletions."""
    return st.lists(
        st.tuples(st.sampled_from(ALL_KEYS), st.one_of(st.none(), rows(), rows())),
        min_size=1,
        max_size=max_size,
        unique_by=lambda change: canonicalise(change[0]),
    ).map(dict)


# -- buckets --------------------------------------------------------------------------------------


def first_pointer(bucket: int = 3) -> Pointer:
    return Pointer(operator="counts", bucket=bucket, buckets=8, schema_id=0, batch=-1, watermark_ms=None)


def buffer_of(changes: Changes, scratch: Path, hashed: HashFunction = good_hash) -> SpillBuffer:
    buffer = SpillBuffer(scratch, 1 << 20)
    if changes:
        buffer.append(make_run(changes, hashed))
    return buffer


def clean_up_at(
    pointer: Pointer, retained: int, still_ours: Callable[[], None] = lambda: None, deletes_max: int | None = None
) -> CleanUp:
    """Return the request of a clean-up in a backend that has all of a pointer's state."""
    assert pointer.ref is not None, "the pointer must have a state"
    return CleanUp(pointer, pointer.ref, retained, still_ours, deletes_max)


def bucket_on(
    store: LocalStore, files: Folder, pointer: Pointer, scratch: Path, cadence: SnapshotCadence = _CADENCE
) -> Bucket:
    return Bucket(store, sole_replica(files, scratch), pointer, WRITER, CommitContext(scratch, cadence=cadence))


def committed(
    store: LocalStore,
    files: Folder,
    pointer: Pointer,
    changes: Changes,
    scratch: Path,
    cadence: SnapshotCadence = _CADENCE,
) -> Pointer:
    """Commit one call that changes some keys, and return the new pointer."""
    return bucket_on(store, files, pointer, scratch, cadence).commit(buffer_of(changes, scratch)).pointer


def state_at(store: LocalStore, files: Folder, pointer: Pointer, scratch: Path) -> Model:
    """Return the state at a pointer by a scan, after a comparison with lookups of every key."""
    bucket = bucket_on(store, files, pointer, scratch)
    state = bucket.read(scan)
    assert bucket.read(lambda view: look_up(view, KEYS)) == dict(state.items())
    assert len(state) <= pointer.rows
    return state


@contextlib.contextmanager
def small_disk(parent: Path) -> Iterator[Path]:
    """Mount a file system of 6 MiB that a test can fill."""
    folder = parent / "small"
    folder.mkdir()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        pytest.skip(f"mounting a small tmpfs to fill needs privileges this user lacks: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
