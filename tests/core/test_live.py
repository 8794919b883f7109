"""Queryable state: a process reads the state of another, running job, and compares it with a model."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import live_job
import lmdb
import pyarrow as pa
import pytest
from core_support import small_disk
from live_job import BUCKETS, KEYS, OPERATOR, job, state_after

from arrow_schemas.labels import find_buckets
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.spark_hashes import hash_keys
from spark_state_ext import Ttl, open_live
from spark_state_ext.errors import CorruptStoreError, StateGoneError, UsageError
from spark_state_ext.reading import live as live_module
from spark_state_ext.reading.live import LiveRows, LiveState
from spark_state_ext.spark.executor.key_work import Times
from spark_state_ext.store.committed_record import CommittedRecord, read_committed, write_committed
from spark_state_ext.store.read_only import ReadOnlyEnvironment
from spark_state_ext.testing.buckets import Buckets
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.process import get_pid_namespace
from tests.helpers.soak import examples
from tests.helpers.waiting import eventually


def start_job(folder: Path, batches: float = float("inf")) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, live_job.__file__, str(folder), str(batches)], env=make_environment())


def make_environment() -> dict[str, str]:
    root = str(Path(__file__).parent.parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture
def restart_job(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start the job, after killing the previous one."""
    jobs: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        for process in jobs:
            process.kill()
            process.wait()
        jobs.append(start_job(tmp_path))
        return jobs[-1]

    yield start
    for process in jobs:
        process.kill()
        process.wait()


def open_when_ready(folder: Path) -> LiveState:
    """Open the state as soon as a call has recorded a committed checkpoint."""
    states: list[LiveState] = []

    def try_open() -> bool:
        with contextlib.suppress(StateGoneError):
            states.append(open_live(str(folder / "local"), OPERATOR))
            states[-1].get(0)
        return bool(states)

    eventually(try_open, 0.05)
    return states[-1]


def values(live_rows: LiveRows) -> dict[int, tuple[int, int]]:
    rows = live_rows.rows.to_pylist()
    assert len({row["k"] for row in rows}) == len(rows)
    return {row["k"]: (row["n"], row["last"]) for row in rows}


def bucket_of(key: int) -> int:
    return int(find_buckets(hash_keys([pa.array([key], pa.int64())]), BUCKETS)[0])


def test_random_reads_return_committed_state(
    restart_job: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """The job writes, compacts and drops runs, loses its stores, and is killed and restarted meanwhile."""
    chosen, asks = random.Random(11), examples(100, 10_000)
    process = restart_job()
    newest: dict[int, int] = {}
    seen: set[int] = set()
    with open_when_ready(tmp_path) as live:
        for number in range(asks):
            if number % (asks // 4) == asks // 8:
                # Kill the job at an arbitrary moment.
                process = restart_job()
            if number % 6 == 0:
                # Let the job proceed, so that its stores are compacted and lost in between.
                eventually(lambda: is_later(live, max(seen, default=-1)))
            assert process.poll() is None
            key = chosen.randrange(KEYS)
            try:
                live_rows = next(live.scan([bucket_of(key)])) if number % 5 == 0 else live.get(key)
            except StateGoneError:  # its stores were lost and are not restored yet
                continue
            expected = {k: v for k, v in state_after(live_rows.batch).items() if bucket_of(k) == live_rows.bucket}
            if number % 5:
                expected = {k: v for k, v in expected.items() if k == key}
            assert values(live_rows) == expected
            assert live_rows.bucket == bucket_of(key)
            # Batches never go back, not even when the job was killed and continues.
            assert live_rows.batch >= newest.get(live_rows.bucket, -1)
            newest[live_rows.bucket] = live_rows.batch
            seen.add(live_rows.batch)
    assert len(seen) > asks // 30


def is_later(live: LiveState, batch: int) -> bool:
    """Return whether the job has committed a later batch."""
    with contextlib.suppress(StateGoneError):
        return any(live.get(key).batch > batch for key in range(KEYS))
    return False


def test_reads_leave_no_readers_in_the_jobs_stores(
    restart_job: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """No reader holds pages after a read, and none is left in the job's reader table after close()."""
    process = restart_job()
    live = open_when_ready(tmp_path)
    eventually(lambda: live.buckets() == list(range(BUCKETS)))
    process.kill()
    process.wait()
    for _ in range(20):
        for bucket in range(BUCKETS):
            next(live.scan([bucket]))
    stores = [next((tmp_path / "local").glob(f"*/*/*/s0/{bucket}/{boot_id()}")) for bucket in range(BUCKETS)]
    # LMDB's reader table has no public interface.
    held = [live._open_store(bucket).store._environment._env for bucket in range(BUCKETS)]  # type: ignore[attr-defined]
    mine = str(os.getpid())
    for environment in held:
        lines = [line.split() for line in environment.readers().splitlines()[1:]]
        # A slot may stay with the thread, but then without a transaction.
        assert [line[2] for line in lines if line and line[0] == mine] in ([], ["-"])
    live.close()
    for folder in stores:
        with lmdb.open(str(folder), max_dbs=5, readonly=True) as environment:
            assert mine not in environment.readers()
    with pytest.raises(UsageError, match="was closed"):
        live.get(1)


# -- one job, batch by batch, within this process -------------------------------------------------


class LocalJob:
    """A job whose calls are made in this process. Its stores are closed before reads: LMDB cannot open them twice."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        (folder / "local").mkdir()
        started_job = job(folder)
        self.job = replace(started_job, options=replace(started_job.options, **options))
        self.buckets = Buckets(self.job, live_job.counted)
        self.batches = 0

    def batch(self, now_ms: int = 0) -> None:
        pointers = self.buckets.list_pointers()
        if self.batches:
            self.buckets = Buckets(self.job, live_job.counted)
            self.buckets.hold(pointers)
        self.buckets.batch(self.batches, live_job.rows_of(self.batches), Times(now_ms, -1, False))
        self.buckets.close()
        self.batches += 1

    def live(self) -> LiveState:
        return open_live(str(self.folder / "local"), OPERATOR)

    def store(self, bucket: int) -> Path:
        """The folder of the bucket's local store."""
        return next((self.folder / "local").glob(f"*/*/*/s0/{bucket}"))


def test_a_batch_becomes_visible_when_the_next_one_receives_its_pointer(tmp_path: Path) -> None:
    local_job = LocalJob(tmp_path)
    with pytest.raises(StateGoneError, match="no local store of operator 'asked-for'"):
        local_job.live()
    for batch in range(6):
        local_job.batch()
        with pytest.raises(StateGoneError, match=r"operator 'askedfor' in .*, which has stores of asked-for: no task"):
            open_live(str(tmp_path / "local"), "askedfor")
        with local_job.live() as live:
            assert live.buckets() == list(range(BUCKETS))
            assert live.query_folder == "query"
            rows_by_key = {key: row for rows in live.scan() for key, row in values(rows).items()}
            assert rows_by_key == state_after(batch - 1)
            assert {rows.batch for rows in live.scan()} == {batch - 1}
            for key in range(KEYS):
                live_rows = live.get(key)
                assert (live_rows.batch, live_rows.bucket) == (batch - 1, bucket_of(key))
                assert live_rows.rows.column_names == ["k", "n", "last", "timeout_ms"]
                assert values(live_rows) == {k: v for k, v in state_after(batch - 1).items() if k == key}
                assert live_rows.age_ms >= 0
            assert values(live.get((3,))) == values(live.get({"k": 3})) == values(live.get(3))
            with pytest.raises(UsageError, match="not a value of the key column 'k'"):
                live.get("three")


def test_state_is_found_by_root_and_query_folder(tmp_path: Path) -> None:
    local_job = LocalJob(tmp_path)
    local_job.batch()
    local = str(tmp_path / "local")
    for named in ({"root": str(tmp_path / "root")}, {"query_folder": "query"}):
        with open_live(local, OPERATOR, **named) as live:
            assert live.buckets() == list(range(BUCKETS))
    for wrong in ({"root": "/elsewhere"}, {"query_folder": "another"}, {"operator": "for"}):
        with pytest.raises(StateGoneError):
            open_live(**{"local_dir": local, "operator": OPERATOR, **wrong})
    with pytest.raises(StateGoneError):
        open_live(str(tmp_path / "nowhere"), OPERATOR)
    assert not (tmp_path / "nowhere").exists()


def test_a_read_fails_while_a_store_is_gone_and_succeeds_after_its_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_PATIENCE_S", 0.1)
    assert start_job(tmp_path, 2).wait() == 0
    with open_when_ready(tmp_path) as live:
        expected = values(next(live.scan([0])))
        (gone,) = (tmp_path / "local").glob("*/*/*/s0/0")
        shutil.rmtree(gone)
        with pytest.raises(StateGoneError, match=r"bucket 0 .* has no local store on this host"):
            next(live.scan([0]))
        assert live.buckets() == list(range(1, BUCKETS))
        assert next(live.scan([1])).batch == 0
        # Another job restores the store from the pointer that its next call receives.
        assert start_job(tmp_path, 1).wait() == 0
        live_rows = next(live.scan([0]))
        assert live_rows.batch == 1
        assert values(live_rows) == {k: v for k, v in state_after(1).items() if bucket_of(k) == 0} != expected
        (gone / boot_id() / "committed").unlink()
        with pytest.raises(StateGoneError, match="no call has recorded what is committed"):
            next(live.scan([0]))


def test_a_store_without_the_committed_state_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "_PATIENCE_S", 0.1)
    local_job = LocalJob(tmp_path)
    local_job.batch()
    record = read_committed(local_job.store(0))
    assert record is not None
    path = local_job.store(0) / boot_id() / "committed"
    path.write_bytes(replace(record, ref=CheckpointRef(9, "0" * 32)).encode())
    with local_job.live() as live:
        with pytest.raises(StateGoneError, match="does not have the committed state"):
            next(live.scan([0]))
        path.write_bytes(b"\0" * 512)
        with pytest.raises(CorruptStoreError, match="differs from its checksum"):
            next(live.scan([0]))
        body = json.dumps({"later": 1}).encode().ljust(508)
        path.write_bytes(zlib.crc32(body).to_bytes(4, "little") + body)
        with pytest.raises(CorruptStoreError, match="was not written by this release"):
            next(live.scan([0]))
        path.write_bytes(replace(record, namespace="pid:[1]").encode())
        with pytest.raises(UsageError, match="another container"):
            next(live.scan([0]))
        path.write_bytes(record.encode())
        assert next(live.scan([0])).batch == record.batch, "the refused store was closed, and is opened again"


def test_a_store_of_another_container_is_not_opened(tmp_path: Path) -> None:
    local_job = LocalJob(tmp_path)
    local_job.batch()
    for bucket in range(BUCKETS):
        record = read_committed(local_job.store(bucket))
        assert record is not None
        path = local_job.store(bucket) / boot_id() / "committed"
        path.write_bytes(replace(record, namespace="pid:[1]").encode())
    for lock in local_job.store(0).parent.rglob("lock.mdb"):
        lock.unlink()
    with local_job.live() as live:
        with pytest.raises(UsageError, match="another container"):
            live.get(1)
        with pytest.raises(UsageError, match="another container"):
            next(live.scan([0]))
    # LMDB creates a lock file when it opens an environment.
    assert not list(local_job.store(0).parent.rglob("lock.mdb"))


def test_a_full_disk_is_logged_once_and_not_filled_further(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    operator = LocalJob(tmp_path).job.operator_file("query")
    with small_disk(tmp_path) as disk:
        folder = disk / "bucket" / boot_id()
        folder.mkdir(parents=True)
        with (disk / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
            while True:
                fill.write(b"x" * 4096)
        for batch in range(3):
            write_committed(disk / "bucket", CommittedRecord(None, batch, 1, "", ""), operator)
        assert not list(folder.iterdir())
        assert [log_record.getMessage() for log_record in caplog.records] == [
            f"other processes cannot read the state in {disk / 'bucket'}: No space left on device"
        ]
        (disk / "fill").unlink()
        write_committed(disk / "bucket", CommittedRecord(None, 4, 1, "", ""), operator)
        assert sorted(path.name for path in folder.iterdir()) == ["committed", "operator.json"]


def test_expired_rows_are_not_returned(tmp_path: Path) -> None:
    local_job = LocalJob(tmp_path, ttl=Ttl(1_500))
    for batch in range(4):
        local_job.batch(now_ms=1_000 * batch)
    with local_job.live() as live:
        rows_by_key = {key: row for rows in live.scan() for key, row in values(rows).items()}
    # Batch 3 received the state of batch 2: by its clock, only rows that were written at 2 s live.
    assert rows_by_key
    assert {last for _, last in rows_by_key.values()} == {2}
    assert rows_by_key.keys() == {key for key in live_job.keys_of(2) if not live_job.is_removed(key, 2)}


def test_a_process_cannot_read_the_stores_that_it_writes(tmp_path: Path) -> None:
    local_job = LocalJob(tmp_path)
    local_job.buckets.batch(0, live_job.rows_of(0), Times(0, -1, False))
    try:
        with local_job.live() as live, pytest.raises(UsageError, match="read it from another process"):
            live.get(1)
    finally:
        local_job.buckets.close()
    with local_job.live() as live, local_job.live() as another:
        assert live.get(1).batch == -1
        with pytest.raises(UsageError, match="share one LiveState"):
            for bucket in range(BUCKETS):
                next(another.scan([bucket]))


def test_threads_can_read_at_the_same_time(tmp_path: Path) -> None:
    local_job = LocalJob(tmp_path)
    for _ in range(4):
        local_job.batch()
    failures: list[BaseException] = []

    def read_keys(seed: int) -> None:
        try:
            for key in random.Random(seed).choices(range(KEYS), k=50):
                assert values(live.get(key)) == {k: v for k, v in state_after(2).items() if k == key}
        except BaseException as error:
            failures.append(error)

    with local_job.live() as live:
        threads = [threading.Thread(target=read_keys, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    local_job = LocalJob(tmp_path)
    local_job.batch()
    environment = ReadOnlyEnvironment.of(local_job.store(0))
    changes: list[Callable[[], object]] = [environment.check_readers, environment.discard]
    changes.append(lambda: environment.write(lambda txn: None))
    for change in changes:
        with pytest.raises(UsageError, match="open for reading only"):
            change()
    environment.close()
    with local_job.live() as live:
        live.get(1)
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "local").rglob("*") if path.name != "lock.mdb"}
        list(live.scan())
    assert before == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "local").rglob("*") if path.name != "lock.mdb"
    }


def test_a_late_attempt_does_not_lower_the_committed_batch(tmp_path: Path) -> None:
    local_job = LocalJob(tmp_path)
    local_job.batch()
    folder, operator = local_job.store(0), local_job.job.operator_file("query")

    def write_and_read_batch(batch: int, plan: str) -> int | None:
        new = CommittedRecord(CheckpointRef(1, "a" * 32), batch, 5, plan, get_pid_namespace())
        write_committed(folder, new, operator)
        record = read_committed(folder)
        return None if record is None else record.batch

    assert write_and_read_batch(7, "plan one") == 7
    assert write_and_read_batch(6, "plan one") == 7
    # Another run may have restarted from an earlier batch.
    assert write_and_read_batch(3, "plan two") == 3
    (folder / boot_id() / "committed").write_bytes(b"damaged")
    assert write_and_read_batch(4, "plan two") == 4
    write_committed(tmp_path / "gone", CommittedRecord(None, 1, 1, "", ""), operator)
    assert read_committed(tmp_path / "gone") is None
