"""Lazy restore with failing backends, changed or damaged files, killed processes and shared stores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lazy_bucket import (
    FIRST,
    KEYS,
    LAST,
    SCHEMA,
    SNAPSHOT_NAME,
    Later,
    Remote,
    base_suffixes,
    bucket_on,
    expected,
    lazy_files,
    looked_up,
    rows_of,
)

from arrow_schemas import CheckpointRef
from arrow_schemas.blocks import PIECE_BYTES
from benchmarks.throttled import Throttled
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.engine.bucket import Sizes
from spark_state_ext.errors import (
    CorruptStoreError,
    MissingCheckpointError,
    MissingRunError,
    StorageError,
)
from spark_state_ext.store import LocalStore
from spark_state_ext.store.lazy_file import LazyFile
from tests.helpers.waiting import WAIT_S


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote.made(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.at(tmp_path / "store", SCHEMA)


def test_delta_files_replace_a_snapshot_that_was_deleted(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    bucket = bucket_on(store, remote, tmp_path)
    bucket.read(lambda view: looked_up(view, [5], remote))
    remote.folder.remove(SNAPSHOT_NAME)
    assert bucket.read(lambda view: looked_up(view, [5], remote)) == expected([5], remote), "fetched pieces stay usable"
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    assert bucket.fetched_files == 3, "the snapshot and the two deltas that replace it"
    assert base_suffixes(store) == []
    assert {run.newest for run in store.runs()} == {FIRST, LAST}


def test_a_lookup_fails_if_all_files_were_deleted(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    bucket = bucket_on(store, remote, tmp_path)
    bucket.read(lambda view: looked_up(view, [5], remote))
    for name in remote.folder.names():
        remote.folder.remove(name)
    with pytest.raises(MissingCheckpointError, match=str(LAST)):
        bucket.read(lambda view: looked_up(view, KEYS, remote))
    assert store.runs() == []


@pytest.mark.parametrize("harm", ["damage", "cut", "another"])
def test_a_lookup_survives_a_changed_snapshot(remote: Remote, store: LocalStore, tmp_path: Path, harm: str) -> None:
    bucket = bucket_on(store, remote, tmp_path)
    bucket.read(lambda view: looked_up(view, [5], remote))
    if harm == "damage":
        data = bytearray(remote.snapshot)
        for at in range(PIECE_BYTES // 2, len(data) - (64 << 10), PIECE_BYTES):
            data[at] ^= 1
    elif harm == "cut":
        data = bytearray(remote.snapshot[: len(remote.snapshot) // 2])
    else:
        data = bytearray(Remote.made(tmp_path, chunk_rows=2_000).snapshot)
    remote.folder.put(SNAPSHOT_NAME, bytes(data))
    # The second call does not know which file the first one saw.
    for again in (bucket, bucket_on(store, remote, tmp_path)):
        assert again.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    # A snapshot with other chunks is complete in itself, and is loaded whole.
    assert base_suffixes(store) == ([".arrow"] if harm == "another" else [])


@pytest.mark.parametrize("first", ["gone", "damaged", "another", "unreachable"])
def test_the_next_backend_is_used_if_one_fails(remote: Remote, store: LocalStore, tmp_path: Path, first: str) -> None:
    other = Throttled(f"memory://{tmp_path.name}-second-{first}")
    for name in remote.folder.names():
        other.put(name, remote.folder.get(name))
    replicas = [*sole_replica(remote.folder, tmp_path), *sole_replica(other, tmp_path, "second")]
    bucket_on(store, remote, tmp_path).read(lambda view: looked_up(view, [5], remote))
    if first == "gone":
        remote.folder.remove(SNAPSHOT_NAME)
    elif first == "another":
        remote.folder.put(SNAPSHOT_NAME, Remote.made(tmp_path, chunk_rows=2_000).snapshot)
    elif first == "damaged":
        data = bytearray(remote.snapshot)
        for at in range(PIECE_BYTES // 2, len(data) - (64 << 10), PIECE_BYTES):
            data[at] ^= 1
        remote.folder.put(SNAPSHOT_NAME, bytes(data))
    else:
        remote.folder.fails_after, remote.folder.failure = 0, StorageError("it does not answer")
    bucket = bucket_on(store, remote, tmp_path, replicas=replicas)
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    assert base_suffixes(store) == [".arrow", ".lazy"], "the lazy restore continued"
    assert other.fetched_bytes


def test_a_failing_backend_does_not_undo_a_lazy_restore(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    bucket_on(store, remote, tmp_path).read(lambda view: looked_up(view, [5], remote))
    remote.folder.failure = StorageError("it does not answer")
    # The first two requests check that the file is still the same one; the others are for its pieces.
    for requests in range(5):
        remote.folder.fails_after = requests
        with pytest.raises(StorageError, match="does not answer"):
            bucket_on(store, remote, tmp_path).read(lambda view: sum(batch.num_rows for batch in view.scan()))
        assert base_suffixes(store) == [".arrow", ".lazy"]
    remote.folder.fails_after = None
    bucket = bucket_on(store, remote, tmp_path)
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    assert bucket.fetched_files == 0


def test_damage_on_the_local_disk_is_detected_and_repaired(remote: Remote, tmp_path: Path) -> None:
    for what in ("data", "marks too many", "marks cut", "index", "size of the index", "removed"):
        store = LocalStore.at(tmp_path / what, SCHEMA)
        bucket_on(store, remote, tmp_path).read(lambda view: looked_up(view, KEYS, remote))
        folder = store._environment.folder
        (base,), (marks,) = folder.glob("base-*.arrow"), folder.glob("base-*.lazy")
        (lazy,) = lazy_files(store)
        store.close()
        data, marked = bytearray(base.read_bytes()), bytearray(marks.read_bytes())
        if what == "data":
            here = np.setdiff1d(np.arange(lazy.pieces), lazy.absent())
            for piece in here.tolist():
                data[piece * PIECE_BYTES + 100] ^= 1
        elif what == "marks too many":
            marked[-lazy.pieces :] = b"\1" * lazy.pieces
        elif what == "marks cut":
            del marked[-lazy.pieces // 2 :]
        elif what == "index":
            marked[100] ^= 1
        elif what == "size of the index":
            marked[8:16] = b"\xff" * 8
        base.write_bytes(data)
        marks.write_bytes(marked)
        if what == "removed":
            base.unlink()
        store = LocalStore.at(tmp_path / what, SCHEMA)
        bucket = bucket_on(store, remote, tmp_path)
        assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote), what
        assert bucket.read(lambda view: sum(batch.num_rows for batch in view.scan())) == len(remote.keys), what
        assert bucket.fetched_files == 1, what
        store.close()


def test_filling_stops_if_the_file_was_cut_between_pieces(
    remote: Remote, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range beyond the end of the file reads as empty bytes, and these pass every checksum."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert len(slept) < 100, "filling does not end"

    monkeypatch.setattr("spark_state_ext.restore.lazy.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    bucket = bucket_on(store, remote, tmp_path)
    bucket.read(lambda view: looked_up(view, [5], remote))
    (run,) = store.runs()
    remote.folder.put(SNAPSHOT_NAME, remote.snapshot[: 3 * PIECE_BYTES])
    with pytest.raises(MissingRunError, match="cut short"):
        bucket._lazy.fill(run)
    assert base_suffixes(store) == []


def test_a_file_that_was_cut_between_pieces_drops_only_its_own_run(
    remote: Remote, store: LocalStore, tmp_path: Path
) -> None:
    bucket = bucket_on(store, remote, tmp_path)
    bucket.read(lambda view: looked_up(view, [5], remote))
    other = store.restore([rows_of([1], remote.hashed[[1]])], CheckpointRef(9, "9" * 32), None, snapshot=True)
    remote.folder.put(SNAPSHOT_NAME, remote.snapshot[: 3 * PIECE_BYTES])
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    assert {run.newest for run in store.runs()} == {FIRST, LAST, other.newest}, "the store was not rebuilt"


def test_a_run_that_filling_found_damaged_is_not_lazily_restored_again(
    remote: Remote, store: LocalStore, tmp_path: Path
) -> None:
    """Otherwise, each batch would restore it again up to the damaged piece, which lookups may never need."""
    data, (bucket, keys) = bytearray(remote.snapshot), (bucket_on(store, remote, tmp_path), [5])
    bucket.read(Sizes.of)
    (run,) = store.runs()
    data[run.file_bytes - 100] ^= 1
    remote.folder.put(SNAPSHOT_NAME, bytes(data))
    assert bucket.read(lambda view: looked_up(view, keys, remote)) == expected(keys, remote)
    with pytest.raises(MissingRunError, match="checksum"):
        bucket._lazy.fill(run)
    later = Later()
    bucket = bucket_on(store, remote, tmp_path, later=later)
    assert bucket.read(lambda view: looked_up(view, keys, remote)) == expected(keys, remote)
    assert not later.work
    assert {run.newest for run in store.runs()} == {FIRST, LAST}, "the runs come from the deltas"


class _Forgetful(dict[str, LazyFile | None]):
    """Mimics another thread that forgets each run immediately."""

    def __setitem__(self, key: str, value: LazyFile | None) -> None:
        pass


def test_a_lookup_works_while_another_thread_forgets_runs(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    store._chunks._lazy_files = _Forgetful()
    bucket = bucket_on(store, remote, tmp_path)
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    assert bucket.read(lambda view: sum(batch.num_rows for batch in view.scan())) == len(remote.keys)


def test_tombstones_of_a_lazy_run_do_not_count_as_rows(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    """A snapshot has no tombstones, but the index has a field for their number."""
    bucket_on(store, remote, tmp_path).read(Sizes.of)
    (lazy,) = lazy_files(store)
    ref = CheckpointRef(3, "3" * 32)
    run = store.lazy.ingest(replace(lazy.index, tombstones=10), ref)
    assert (run.rows, run.tombstones) == (len(remote.keys), 10)
    assert store.view(ref).rows_max == len(remote.keys) - 10


def test_a_mark_without_its_data_raises_an_error(remote: Remote, store: LocalStore, tmp_path: Path) -> None:
    """Only a crash of the machine can leave such marks, and a store is not used after one."""
    bucket_on(store, remote, tmp_path).read(Sizes.of)
    (lazy,) = lazy_files(store)
    os.pwrite(lazy._marks.fileno(), b"\1" * lazy.pieces, lazy._marks_at)
    with pytest.raises(CorruptStoreError, match="checksum"):
        lazy.lacking(np.arange(lazy.pieces))
    with pytest.raises(CorruptStoreError, match="outside"):
        lazy.lacking(np.array([lazy.pieces]))


_KILLED = """
import os, signal, sys
from pathlib import Path
from lazy_bucket import Remote, SCHEMA, bucket_on, looked_up
from spark_state_ext.store import LocalStore
from spark_state_ext.store import lazy_file

scratch, seed = Path(sys.argv[1]), int(sys.argv[2])
remote = Remote.made(scratch)
store = LocalStore.at(scratch / "store", SCHEMA)
real, writes = lazy_file._write, 0

def dying(file, data, at):
    # Dies in the middle of a write: of data before its marks, or of the marks.
    global writes
    writes += 1
    if writes == seed:
        real(file, data[: len(data) // 2], at)
        os.kill(os.getpid(), signal.SIGKILL)
    real(file, data, at)

lazy_file._write = dying
bucket_on(store, remote, scratch).read(lambda view: looked_up(view, [5, 9_000, 11_000], remote))
print("done")
"""


@pytest.mark.parametrize("write", [1, 2, 5, 6])
def test_another_process_continues_after_a_kill_in_a_write(remote: Remote, tmp_path: Path, write: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(write)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    bucket = bucket_on(store, remote, tmp_path)
    assert bucket.read(lambda view: looked_up(view, KEYS, remote)) == expected(KEYS, remote)
    assert bucket.fetched_files == 0, "it continues what the other process has begun"
    assert bucket.read(lambda view: sum(batch.num_rows for batch in view.scan())) == len(remote.keys)
    store.close()


_SHARING = """
import sys
from pathlib import Path
from lazy_bucket import Remote, SCHEMA, bucket_on, looked_up, values_of
from spark_state_ext.store import LocalStore

scratch, seed = Path(sys.argv[1]), int(sys.argv[2])
(scratch / str(seed)).mkdir()
remote = Remote.made(scratch / str(seed))
store = LocalStore.at(scratch / "store", SCHEMA)
bucket = bucket_on(store, remote, scratch)
for at in range(seed, 12_000, 1_201):
    keys = list(range(at, at + 3))
    rows = bucket.read(lambda view: looked_up(view, keys, remote))
    assert rows == {key: values_of(key) for key in keys if key < 12_000}, at
assert bucket.read(lambda view: sum(batch.num_rows for batch in view.scan())) == 12_000
print(len(store.runs()), bucket.fetched_files)
"""


def test_processes_share_the_pieces_that_each_has_fetched(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _SHARING, str(tmp_path), str(seed)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 7, 100)
    ]
    outputs = [child.communicate(timeout=WAIT_S) for child in children]
    assert [out.split()[:1] for out, _ in outputs] == [["1"]] * 3, outputs
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    assert base_suffixes(store) == [".arrow"], "one run, without files of the other processes"
    store.close()
