"""The LMDB store: the contract of local stores, and what is specific to LMDB."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from core_support import small_disk
from local_store_contract import LocalStoreContract

from arrow_schemas import CheckpointRef, RowSchema
from arrow_schemas.equality import HashArray
from arrow_schemas.row import DELETED, KEY_HASH
from spark_state_ext.errors import CorruptStoreError, StorageError, StoreFullError
from spark_state_ext.store import LocalStore, environment, local
from spark_state_ext.store import view as view_module
from spark_state_ext.store.environment import Environment
from spark_state_ext.store.pending_run import PendingRun
from spark_state_ext.store.runs import get_hashes, split_batches
from spark_state_ext.testing.model import KEYS, SCHEMA, Row, apply_changes, make_run, scan
from tests.helpers.waiting import WAIT_S


def make_numbered_run(hashes: HashArray, version: int) -> pa.RecordBatch:
    """Return a run of distinct keys."""
    at = np.arange(len(hashes))
    columns = {
        "key.name": pc.binary_join_element_wise(f"version {version} row ", pa.array(at).cast(pa.string()), ""),
        "key.x": pa.array(at.astype(np.float64)),
        "state.count": pa.array(at),
        DELETED: pa.array(np.zeros(len(at), dtype=np.bool_)),
        "defined": pa.array(np.ones(len(at), dtype=np.bool_)),
        KEY_HASH: pa.array(hashes),
    }
    return pa.RecordBatch.from_arrays(
        [columns.get(field.name, pa.nulls(len(at), field.type)) for field in SCHEMA.arrow], schema=SCHEMA.arrow
    )


def test_split_batches_frees_the_batches_that_it_has_joined() -> None:
    def make_batches() -> Iterator[pa.RecordBatch]:
        for _ in range(20):
            yield pa.record_batch({"x": pc.add(pa.array(np.arange(50_000)), 1)})  # allocated by Arrow, not by NumPy

    before = pa.total_allocated_bytes()
    for batch in split_batches(make_batches(), 200_000):
        held_bytes = pa.total_allocated_bytes() - before
        assert batch.num_rows == 200_000
        assert held_bytes < 1.5 * batch.nbytes, "the batch, and at most its last part"


class TestLocalStore(LocalStoreContract):
    @staticmethod
    def open(folder: Path, **options: Any) -> LocalStore:
        schema: RowSchema = options.pop("schema", SCHEMA)
        return LocalStore.at(folder, schema, **options)

    def data_file(self) -> Path:
        (path,) = self.folder.glob("*/data.mdb")
        return path

    def test_a_store_of_another_boot_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only a crash of the machine can damage files with sync=False, so files of another boot are not used."""
        store = self.store()
        self.chain(store, 3)
        old_folder = self.data_file().parent
        store.close()
        monkeypatch.setattr(environment, "boot_id", lambda: "another-boot")
        again = self.store()
        assert again.runs() == []
        assert not old_folder.exists()
        refs, models = self.chain(again, 2)
        assert scan(again.view(refs[1])) == models[1]

    @pytest.mark.parametrize("damage", ["zeros", "garbage", "truncated", "empty", "other version"])
    def test_a_damaged_file_is_replaced_by_a_new_store(self, damage: str) -> None:
        store = self.store()
        self.chain(store, 3)
        store.close()
        path = self.data_file()
        data = path.read_bytes()
        pages = os.sysconf("SC_PAGE_SIZE")
        path.write_bytes(
            {
                "zeros": b"\0" * len(data),
                "garbage": b"\xa5" * len(data),
                "truncated": data[: pages + 100],
                "empty": b"",
                "other version": data[:20] + b"\x63" + data[21 : pages + 20] + b"\x63" + data[pages + 21 :],
            }[damage]
        )
        again = self.store()
        assert again.runs() == []
        refs, models = self.chain(again, 3)
        assert scan(again.view(refs[2])) == models[2]
        assert [p.name for p in self.folder.iterdir()] == [path.parent.name], "the damaged file was removed"

    def test_a_damaged_chunk_raises_an_error_and_a_rebuild_repairs_the_store(self) -> None:
        store = self.store()
        ref = self.add(store, None, {(f"key {i}", None): Row(i, "needle in the hay") for i in range(500)})
        store.close()
        path = self.data_file()
        data = path.read_bytes()
        assert b"needle" in data
        path.write_bytes(data.replace(b"needle", b"noodle"))
        again = self.store()
        with pytest.raises(CorruptStoreError):
            scan(again.view(ref))
        again.rebuild()
        assert again.runs() == []
        ref = self.add(again, None, {KEYS[0]: Row(1)})
        assert scan(again.view(ref)) == apply_changes({}, {KEYS[0]: Row(1)})

    def test_a_damaged_manifest_raises_an_error(self) -> None:
        store = self.store()
        ref = self.add(store, None, {KEYS[0]: Row(1)})
        store._environment.write(lambda txn: txn.put(b"runs", b"run/" + b"0" * 32, b"{nonsense"))
        with pytest.raises(CorruptStoreError):
            store.view(ref)

    @pytest.mark.parametrize("table", [b"runs", b"pins", b"records"])
    def test_each_changed_bit_of_an_entry_is_detected(self, table: bytes) -> None:
        """A smaller hash_max would hide rows, and a smaller number of tombstones would bring deleted rows back."""
        store = self.store()
        ref = self.add(store, None, {KEYS[0]: Row(1)})
        ref = self.add(store, ref, {KEYS[1]: Row(2)})
        pin = store.pin(store.view(ref), 60)
        store.record({"a": b"1"})
        (key, value), *_ = store._environment.read(lambda txn: [(k, bytes(v)) for k, v in txn.items(table)])

        def put(value: bytes) -> None:
            store._environment.write(lambda txn: txn.put(table, key, value))

        for at in range(len(value)):
            harmed = bytearray(value)
            harmed[at] ^= 1 << at % 8
            put(bytes(harmed))
            if table == b"runs":
                with pytest.raises(CorruptStoreError, match="differs from its checksum"):
                    store.view(ref)
            elif table == b"pins":
                with pytest.raises(CorruptStoreError, match="differs from its checksum"):
                    store.renew(pin, 60)
            else:
                assert store.records() == {}
        put(value)
        assert scan(store.view(ref)) == {KEYS[0]: Row(1), KEYS[1]: Row(2)}
        assert store.records() == {"a": b"1"}
        store.renew(pin, 60)

    @pytest.mark.parametrize("buckets", [1, 64])
    def test_a_scan_of_large_chunks_needs_little_memory(self, buckets: int) -> None:
        store = self.store()
        ref: CheckpointRef | None = None
        rows = 100_000
        for version in range(1, 4):
            # A bucket has a part of all hashes; this is the last bucket.
            hashes = np.random.default_rng(version).integers(2**64 - 2**64 // buckets, 2**64, rows, dtype=np.uint64)
            parent, ref = ref, self.refs.next(version)
            store.apply([make_numbered_run(np.sort(hashes), version)], ref, parent)
        view = store.view(ref)
        assert all(len(run.chunks) == 1 for run in view.runs)
        before = pa.total_allocated_bytes()
        last, seen = np.uint64(0), 0
        for batch in view.scan():
            # The generator holds one part, and the batch made of it.
            assert pa.total_allocated_bytes() - before < 3 * view_module._SCAN_BYTES < view.size_bytes
            hashes = get_hashes(batch)
            assert hashes[0] >= last
            assert (hashes[1:] >= hashes[:-1]).all()
            last, seen = hashes[-1], seen + len(hashes)
        assert seen == 3 * rows

    def test_pruning_removes_abandoned_chunks_and_keeps_live_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = self.store(chunk_rows=1)
        ref = self.add(store, None, {KEYS[0]: Row(1)})

        def flush(count: int, age_s: float) -> None:
            for i in range(count):
                pending = PendingRun(f"{int(age_s):08x}{i:024x}")
                pending.waiting.append((0, pa.py_buffer(b"chunk"), b"crc "))
                with monkeypatch.context() as patched:
                    now = time.time()
                    patched.setattr(time, "time", lambda now=now: now - age_s)
                    store._environment.write(pending.put_waiting)

        flush(40, 4000.0)
        flush(3, 10.0)
        store.prune(ref)
        waiting = store._environment.read(lambda txn: [key for key, _ in txn.items(b"runs", b"new/")])
        chunks = store._environment.read(lambda txn: sum(1 for _ in txn.items(b"chunks")))
        # Each chunk has an entry for its checksums.
        assert (len(waiting), chunks) == (3, 2 * 4)

    def test_a_writer_whose_chunks_were_pruned_as_abandoned_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "_TRANSACTION_BYTES", 1)
        store = self.store(chunk_rows=1)
        ref = self.add(store, None, {KEYS[0]: Row(1)})

        def yield_slowly() -> Any:
            yield make_run({KEYS[0]: Row(1)})
            yield make_run({KEYS[1]: Row(1)})
            monkeypatch.setattr(local, "_ABANDONED_AFTER_S", -1.0)
            store.prune(ref)

        with pytest.raises(StorageError, match="abandoned"):
            store.apply(yield_slowly(), self.refs.next(2), ref)
        assert [run.newest for run in store.runs()] == [ref]

    def test_growing_the_map_waits_for_readers_of_the_process(self) -> None:
        """Resizing the map during a transaction would crash the process."""
        store = self.store()
        (ref,), (model,) = self.chain(store, 1)
        stop = threading.Event()
        failures: list[BaseException] = []

        def keep_reading() -> None:
            try:
                while not stop.is_set():
                    assert scan(store.view(ref)) == model
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=keep_reading) for _ in range(2)]
        for thread in threads:
            thread.start()
        before = store.map_bytes
        rows = {(f"key {i}", None): Row(i, "x" * 1000) for i in range(1000)}
        batch = make_run(rows)
        for _ in range(12):
            store.apply([batch], self.refs.next(2), ref)
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert store.map_bytes > 4 * before

    def test_a_store_below_a_file_cannot_be_opened(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises((StorageError, OSError)):
            self.store(tmp_path / "file" / "bucket")

    def test_an_address_space_limit_raises_store_full_error(self) -> None:
        """spark.executor.pyspark.memory limits the address space, so the map may be unable to grow."""
        script = """
import resource, sys
from pathlib import Path
import numpy as np
from spark_state_ext.testing.model import SCHEMA, make_run, Row, scan, KEYS
from arrow_schemas import CheckpointRef
from spark_state_ext.errors import StoreFullError
from spark_state_ext.store import LocalStore
store = LocalStore.at(Path(sys.argv[1]), SCHEMA)
first = CheckpointRef(1, "1" * 32)
store.apply([make_run({KEYS[0]: Row(1)})], first, None)
batch = make_run({(str(i), None): Row(i, "x" * 100) for i in range(50_000)})
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
parent = first
try:
    for version in range(2, 100):
        ref = CheckpointRef(version, f"{version:032x}")
        store.apply([batch], ref, parent)
        parent = ref
except StoreFullError as error:
    assert "spark.executor.pyspark.memory" in str(error), error
    pass
else:
    sys.exit("the limit was never met")
# The process can continue with its stored runs.
again = LocalStore.at(Path(sys.argv[1]), SCHEMA)
assert len(scan(again.view(first))) == 1
assert again.has(parent)
print("as expected")
"""
        done = subprocess.run(
            [sys.executable, "-c", script, str(self.folder)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.stdout.strip() == "as expected", done.stderr[-3000:]

    def test_a_full_disk_raises_an_error_and_keeps_the_store(self, tmp_path: Path) -> None:
        with small_disk(tmp_path) as disk:
            store = self.store(disk / "bucket")
            (ref,), (model,) = self.chain(store, 1)
            batch = make_run({(f"key {i}", None): Row(i, "x" * 1000) for i in range(3_000)})
            with pytest.raises(StoreFullError, match="full"):
                for _ in range(10):
                    store.apply([batch], self.refs.next(2), ref)
            assert scan(store.view(ref)) == model
            after = self.add(store, ref, {KEYS[0]: Row(7)})
            assert scan(store.view(after)) == apply_changes(model, {KEYS[0]: Row(7)})
            store.close()

    def test_a_disk_without_room_for_a_new_store_raises_an_error(self, tmp_path: Path) -> None:
        """LMDB would write its lock file through a memory map, and the operating system would kill the process."""
        with small_disk(tmp_path) as disk:
            with (disk / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
                while fill.write(bytes(4096)):
                    pass
            with pytest.raises(StoreFullError, match="full"):
                self.store(disk / "bucket")
            (disk / "fill").unlink()
            store = self.store(disk / "bucket")
            self.chain(store, 1)
            store.close()

    def test_two_stores_of_one_folder_share_an_environment(self) -> None:
        first, second = self.store(), self.store()
        assert first._environment.environment is second._environment.environment
        assert Environment._environments[first._environment.folder] is first._environment.environment
