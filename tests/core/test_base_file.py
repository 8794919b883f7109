"""A large snapshot is ingested unchanged: its file is copied next to the environment and becomes a run."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from core_support import WRITER

from arrow_schemas import CheckpointRef, LineageEntry, LineageHeader, Pointer, RowSchema
from arrow_schemas.blocks import BLOCK_BYTES
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptFileError
from spark_state_ext.files import checkpoint as checkpoint_module
from spark_state_ext.files.checkpoint import write_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.runs import sort_by_hash
from spark_state_ext.worker.spill import SpillBuffer

SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))
WIDER = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()), pa.field("m", pa.string())))
ROWS = 600_000
REF, PARENT = CheckpointRef(7, "7" * 32), CheckpointRef(6, "6" * 32)
POINTER = Pointer("counts", 3, 8, 0, 6, None, lineage=(LineageEntry(REF, 1, 6),), parent=PARENT, rows=ROWS)


def rows_of(keys: np.ndarray, values: np.ndarray, deleted: bool = False) -> pa.RecordBatch:
    n = len(keys)
    return sort_by_hash(
        pa.RecordBatch.from_arrays(
            [
                pa.array(keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)),
                pa.array(keys),
                pa.array(values),
                pa.array(np.where(keys % 10 == 0, keys, 0), mask=keys % 10 != 0),
                pa.array(np.full(n, not deleted)),
                pa.array(np.full(n, deleted)),
            ],
            schema=SCHEMA.arrow,
        )
    )


@pytest.fixture(params=["disk", "objects"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """Return a bucket's folder with one snapshot."""
    root = str(tmp_path / "root") if request.param == "disk" else f"memory://{tmp_path.name}-{id(request)}"
    return with_snapshot(Folder(root).child("3"), tmp_path)


def with_snapshot(folder: Folder, tmp_path: Path) -> Folder:
    """Write one snapshot to a bucket's folder, and return the folder."""
    keys = np.arange(ROWS)
    header = LineageHeader(SNAPSHOT, "counts", 3, REF, PARENT, (PARENT,), 0, WRITER, "0.1.0")
    path = tmp_path / "snapshot"
    with path.open("wb") as file:
        write_checkpoint(file, header, SCHEMA, [rows_of(keys, keys * 2)])
    assert path.stat().st_size > 3 * BLOCK_BYTES
    folder.put_file(file_name(REF, SNAPSHOT), path)
    path.unlink()
    return folder


def bucket_on(store: LocalStore, files: Folder, pointer: Pointer, scratch: Path) -> Bucket:
    return Bucket(store, sole_replica(files, scratch), pointer, WRITER, CommitContext(scratch))


def values_at(view: View, keys: np.ndarray) -> list[int | None]:
    matches = view.lookup(keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), [pa.array(keys)])
    values = matches.rows.column("state.n").to_pylist()
    return [None if at < 0 else values[at] for at in matches.index.tolist()]


def files_beside(store: LocalStore) -> list[str]:
    paths = store._environment.folder.glob("*-*")
    # `test_compared` tests the marks of verified blocks.
    return sorted(path.name.split("-")[0] for path in paths if path.suffix != ".compared")


KEYS = np.array([0, 5, 10, ROWS - 1, ROWS + 5])


def test_a_large_snapshot_is_copied_once_and_read_from_its_file(files: Folder, tmp_path: Path) -> None:
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    bucket = bucket_on(store, files, POINTER, tmp_path)
    assert bucket.read(lambda view: values_at(view, KEYS)) == [0, 10, 20, 2 * (ROWS - 1), None]
    assert files_beside(store) == ["base"]
    (run,) = store.runs()
    assert run.file_bytes > 3 * BLOCK_BYTES
    assert run.rows == ROWS
    assert bucket.read(lambda view: view.expired(1_000).num_rows) == 100
    assert sum(batch.num_rows for batch in bucket.read(lambda view: list(view.scan()))) == ROWS
    # The next load finds the file on the local disk.
    again = bucket_on(store, files, POINTER, tmp_path)
    assert again.read(lambda view: view.rows_max) == ROWS
    assert again.fetched_files == 0
    store.close()
    # A later process maps the same file.
    later = LocalStore.at(tmp_path / "store", SCHEMA)
    assert bucket_on(later, files, POINTER, tmp_path).read(lambda view: values_at(view, KEYS))[1] == 10
    later.close()


def test_commits_override_an_ingested_snapshot_and_pruning_removes_its_file(files: Folder, tmp_path: Path) -> None:
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    pointer = POINTER
    for i in range(3):
        bucket = bucket_on(store, files, pointer, tmp_path)
        rows = SpillBuffer(tmp_path, 1 << 30)
        keys = np.arange(ROWS) if i == 1 else np.array([5])
        rows.append(rows_of(keys, keys * 100 + i, deleted=i == 2))
        pointer = replace(bucket.commit(rows).pointer, batch=pointer.batch + 1)
    assert bucket_on(store, files, pointer, tmp_path).read(lambda view: values_at(view, KEYS))[:3] == [1, None, 1001]
    old_view = store.view(REF)
    # Merge everything into one run; the next prune drops the runs that it replaces.
    compacted = store._add(
        store.view(pointer.ref).scan(), pointer.lineage[-1].ref, REF, None, base=True, check=lambda txn: None
    )
    next_ref = CheckpointRef(pointer.version + 1, "9" * 32)
    store.apply([rows_of(np.array([1]), np.array([1]))], next_ref, pointer.ref)
    assert store.prune(next_ref) >= 1
    assert files_beside(store) == []
    assert compacted.key in {run.key for run in store.runs()}
    assert bucket_on(store, files, pointer, tmp_path).read(lambda view: values_at(view, KEYS))[:3] == [1, None, 1001]
    assert old_view.rows_max == ROWS
    store.close()


@pytest.mark.parametrize("harm", ["damage", "truncate", "remove"])
def test_a_damaged_local_snapshot_file_is_fetched_again(files: Folder, tmp_path: Path, harm: str) -> None:
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    assert bucket_on(store, files, POINTER, tmp_path).read(lambda view: view.rows_max) == ROWS
    path = next(store._environment.folder.glob("base-*.arrow"))
    store.close()
    data = bytearray(path.read_bytes())
    if harm == "damage":
        data[len(data) // 2] ^= 1
    else:
        del data[len(data) // 2 :]
    if harm == "remove":  # as cleaners of temporary folders do with old files
        path.unlink()
    else:
        path.write_bytes(data)
    later = LocalStore.at(tmp_path / "store", SCHEMA)
    bucket = bucket_on(later, files, POINTER, tmp_path)
    assert bucket.read(lambda view: sum(batch.num_rows for batch in view.scan())) == ROWS
    assert bucket.fetched_files == 1, "the store was rebuilt"
    later.close()


def test_a_damaged_snapshot_is_refused_and_its_copy_is_deleted(files: Folder, tmp_path: Path) -> None:
    name = file_name(REF, SNAPSHOT)
    data = bytearray(files.get(name))
    data[len(data) // 2] ^= 1
    files.put(name, bytes(data))
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    with pytest.raises(CorruptFileError, match="fails its checksum"):
        bucket_on(store, files, POINTER, tmp_path).read(lambda view: view.rows_max)
    assert files_beside(store) == []
    store.close()


def test_a_snapshot_of_an_older_schema_is_loaded_into_the_environment(files: Folder, tmp_path: Path) -> None:
    store = LocalStore.at(tmp_path / "store", WIDER)
    bucket = bucket_on(store, files, POINTER, tmp_path)
    assert bucket.read(lambda view: values_at(view, KEYS))[:2] == [0, 10]
    assert files_beside(store) == []
    store.close()


_INGEST_SCRIPT = """
import os, sys
from pathlib import Path
from test_base_file import POINTER, SCHEMA, bucket_on
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore, local
from spark_state_ext.store.shared_environment import SharedEnvironment

folder, root, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
store = LocalStore.at(folder, SCHEMA)

def stop(*args):
    print("stopped", flush=True)
    sys.stdin.read()

if when == "copied":
    local.file_path = stop
else:  # renamed, but not yet in the manifest
    SharedEnvironment.write = stop
bucket_on(store, Folder(root).child("3"), POINTER, folder.parent).read(lambda view: view.rows_max)
"""


@pytest.mark.parametrize("files", ["disk"], indirect=True)
@pytest.mark.parametrize(("when", "file"), [("copied", "incoming"), ("renamed", "base")])
def test_the_file_of_a_killed_ingest_is_removed_when_the_store_is_opened_again(
    files: Folder, tmp_path: Path, when: str, file: str
) -> None:
    """The file of a process that is still alive is kept."""
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    process = subprocess.Popen(
        [sys.executable, "-c", _INGEST_SCRIPT, tmp_path / "store", tmp_path / "root", when],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        assert files_beside(store) == [file]
        assert LocalStore.at(tmp_path / "store", SCHEMA).runs() == []
        assert files_beside(store) == [file], "its process is alive"
    finally:
        process.kill()
        process.wait()
    assert LocalStore.at(tmp_path / "store", SCHEMA).runs() == []
    assert files_beside(store) == []
    assert bucket_on(store, files, POINTER, tmp_path).read(lambda view: view.rows_max) == ROWS
    assert LocalStore.at(tmp_path / "store", SCHEMA).runs() == store.runs()
    assert files_beside(store) == ["base"], "it is in the manifest"
    store.close()


@pytest.mark.parametrize("files", ["disk"], indirect=True)
def test_old_unused_files_are_removed_on_a_disk_without_locks(
    files: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    folder = store._environment.folder
    for name in ("base-0123", "incoming-4567", "incoming-young"):
        (folder / name).write_bytes(b"x")
    long_ago_s = time.time() - 7_200
    for name in ("base-0123", "incoming-4567"):
        os.utime(folder / name, (long_ago_s, long_ago_s))
    assert bucket_on(store, files, POINTER, tmp_path).read(lambda view: view.rows_max) == ROWS
    assert files_beside(store) == ["base", "incoming"]
    store.close()


def test_small_snapshots_are_loaded_into_the_environment(
    files: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "_INGESTED_BYTES_MIN", 1 << 40)
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    assert bucket_on(store, files, POINTER, tmp_path).read(lambda view: values_at(view, KEYS))[1] == 10
    assert files_beside(store) == []
    assert store.runs()[0].file_bytes == 0
    store.close()


def test_any_arrow_reader_opens_a_snapshot_file(files: Folder, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    files.get_file(file_name(REF, SNAPSHOT), path)
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.num_rows == ROWS
    assert file_name(REF, DELTA) not in files.names()
