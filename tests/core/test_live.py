"""Queryable state: the state of a running job, asked for by another process at random, and compared with a model."""

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


def started(folder: Path, batches: float = float("inf")) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, live_job.__file__, str(folder), str(batches)], env=_environment())


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parent.parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the job, in the place of the one before, which is killed."""
    jobs: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        for process in jobs:
            process.kill()
            process.wait()
        jobs.append(started(tmp_path))
        return jobs[-1]

    yield start
    for process in jobs:
        process.kill()
        process.wait()


def opened(folder: Path) -> LiveState:
    """As soon as a call has told of it."""
    found: list[LiveState] = []

    def is_there() -> bool:
        with contextlib.suppress(StateGoneError):
            found.append(open_live(str(folder / "local"), OPERATOR))
            found[-1].get(0)
        return bool(found)

    eventually(is_there, 0.05)
    return found[-1]


def values(found: LiveRows) -> dict[int, tuple[int, int]]:
    rows = found.rows.to_pylist()
    assert len({row["k"] for row in rows}) == len(rows)
    return {row["k"]: (row["n"], row["last"]) for row in rows}


def bucket_of(key: int) -> int:
    return int(find_buckets(hash_keys([pa.array([key], pa.int64())]), BUCKETS)[0])


def test_what_is_asked_for_at_random_is_what_was_committed(
    running: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """While the job writes, merges, drops, loses its stores, is killed and started again."""
    chosen, asks = random.Random(11), examples(300, 10_000)
    process = running()
    newest: dict[int, int] = {}
    seen: set[int] = set()
    with opened(tmp_path) as live:
        for number in range(asks):
            if number % (asks // 4) == asks // 8:
                # Somewhere within what it does.
                process = running()
            if number % 6 == 0:
                # However fast it is, the job comes so far meanwhile that its stores are merged, and lost.
                eventually(lambda: is_later(live, max(seen, default=-1)))
            assert process.poll() is None
            key = chosen.randrange(KEYS)
            try:
                found = next(live.scan([bucket_of(key)])) if number % 5 == 0 else live.get(key)
            except StateGoneError:  # its stores are lost, and not restored yet
                continue
            expected = {k: v for k, v in state_after(found.batch).items() if bucket_of(k) == found.bucket}
            if number % 5:
                expected = {k: v for k, v in expected.items() if k == key}
            assert values(found) == expected
            assert found.bucket == bucket_of(key)
            # What is told never goes back, also where the job was killed and goes on.
            assert found.batch >= newest.get(found.bucket, -1)
            newest[found.bucket] = found.batch
            seen.add(found.batch)
    assert len(seen) > asks // 30


def is_later(live: LiveState, batch: int) -> bool:
    """Whether the job has come further than that batch."""
    with contextlib.suppress(StateGoneError):
        return any(live.get(key).batch > batch for key in range(KEYS))
    return False


def test_asking_leaves_no_reader_behind(running: Callable[[], subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """The job's own table of readers has nobody in it that holds pages, and nobody at all once it is closed."""
    process = running()
    live = opened(tmp_path)
    eventually(lambda: live.buckets() == list(range(BUCKETS)))
    process.kill()
    process.wait()
    for _ in range(20):
        for bucket in range(BUCKETS):
            next(live.scan([bucket]))
    stores = [next((tmp_path / "local").glob(f"*/*/*/s0/{bucket}/{boot_id()}")) for bucket in range(BUCKETS)]
    # Readers' slots are LMDB's own business, so nothing public shows them.
    held = [live._open_store(bucket).store._environment._env for bucket in range(BUCKETS)]  # type: ignore[attr-defined]
    mine = str(os.getpid())
    for environment in held:
        lines = [line.split() for line in environment.readers().splitlines()[1:]]
        # A slot may stay with the thread, and then holds no transaction.
        assert [line[2] for line in lines if line and line[0] == mine] in ([], ["-"])
    live.close()
    for folder in stores:
        with lmdb.open(str(folder), max_dbs=5, readonly=True) as environment:
            assert mine not in environment.readers()
    with pytest.raises(UsageError, match="was closed"):
        live.get(1)


# -- one job, batch by batch: in a thread's place another process would have ----------------------


class Asked:
    """A job whose calls are made here, and whose stores are closed while they are asked for: LMDB opens none twice."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        (folder / "local").mkdir()
        made = job(folder)
        self.job = replace(made, options=replace(made.options, **options))
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
        """The bucket's folder."""
        return next((self.folder / "local").glob(f"*/*/*/s0/{bucket}"))


def test_what_a_batch_wrote_is_seen_once_a_later_one_was_handed_it(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    with pytest.raises(StateGoneError, match="no local store of operator 'asked-for'"):
        asked.live()
    for batch in range(6):
        asked.batch()
        with pytest.raises(StateGoneError, match=r"operator 'askedfor' in .*, which has stores of asked-for: no task"):
            open_live(str(tmp_path / "local"), "askedfor")
        with asked.live() as live:
            assert live.buckets() == list(range(BUCKETS))
            assert live.query_folder == "query"
            found = {key: row for rows in live.scan() for key, row in values(rows).items()}
            assert found == state_after(batch - 1)
            assert {rows.batch for rows in live.scan()} == {batch - 1}
            for key in range(KEYS):
                one = live.get(key)
                assert (one.batch, one.bucket) == (batch - 1, bucket_of(key))
                assert one.rows.column_names == ["k", "n", "last", "timeout_ms"]
                assert values(one) == {k: v for k, v in state_after(batch - 1).items() if k == key}
                assert one.age_ms >= 0
            assert values(live.get((3,))) == values(live.get({"k": 3})) == values(live.get(3))
            with pytest.raises(UsageError, match="not a value of the key column 'k'"):
                live.get("three")


def test_by_root_and_query_folder(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.batch()
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


def test_a_store_that_is_gone_or_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "_PATIENCE_S", 0.1)
    assert started(tmp_path, 2).wait() == 0
    with opened(tmp_path) as live:
        expected = values(next(live.scan([0])))
        (gone,) = (tmp_path / "local").glob("*/*/*/s0/0")
        shutil.rmtree(gone)
        with pytest.raises(StateGoneError, match=r"bucket 0 .* has no local store on this host"):
            next(live.scan([0]))
        assert live.buckets() == list(range(1, BUCKETS))
        assert next(live.scan([1])).batch == 0
        # Somebody works on it again: it is restored from the pointer that its next call is handed.
        assert started(tmp_path, 1).wait() == 0
        found = next(live.scan([0]))
        assert found.batch == 1
        assert values(found) == {k: v for k, v in state_after(1).items() if bucket_of(k) == 0} != expected
        (gone / boot_id() / "committed").unlink()
        with pytest.raises(StateGoneError, match="no call has recorded what is committed"):
            next(live.scan([0]))


def test_a_store_that_lacks_what_is_committed_is_being_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_PATIENCE_S", 0.1)
    asked = Asked(tmp_path)
    asked.batch()
    record = read_committed(asked.store(0))
    assert record is not None
    path = asked.store(0) / boot_id() / "committed"
    path.write_bytes(replace(record, ref=CheckpointRef(9, "0" * 32)).encode())
    with asked.live() as live:
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
        assert next(live.scan([0])).batch == record.batch, "the refused store was closed, and is opened anew"


def test_a_store_of_another_container_is_not_opened(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.batch()
    for bucket in range(BUCKETS):
        record = read_committed(asked.store(bucket))
        assert record is not None
        path = asked.store(bucket) / boot_id() / "committed"
        path.write_bytes(replace(record, namespace="pid:[1]").encode())
    for lock in asked.store(0).parent.rglob("lock.mdb"):
        lock.unlink()
    with asked.live() as live:
        with pytest.raises(UsageError, match="another container"):
            live.get(1)
        with pytest.raises(UsageError, match="another container"):
            next(live.scan([0]))
    # LMDB makes one where it opens an environment.
    assert not list(asked.store(0).parent.rglob("lock.mdb"))


def test_a_full_disk_is_told_once_and_not_filled_further(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    operator = Asked(tmp_path).job.operator_file("query")
    with small_disk(tmp_path) as disk:
        folder = disk / "bucket" / boot_id()
        folder.mkdir(parents=True)
        with (disk / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
            while True:
                fill.write(b"x" * 4096)
        for batch in range(3):
            write_committed(disk / "bucket", CommittedRecord(None, batch, 1, "", ""), operator)
        assert not list(folder.iterdir())
        assert [it.getMessage() for it in caplog.records] == [
            f"other processes cannot read the state in {disk / 'bucket'}: No space left on device"
        ]
        (disk / "fill").unlink()
        write_committed(disk / "bucket", CommittedRecord(None, 4, 1, "", ""), operator)
        assert sorted(it.name for it in folder.iterdir()) == ["committed", "operator.json"]


def test_what_has_expired_is_not_seen(tmp_path: Path) -> None:
    asked = Asked(tmp_path, ttl=Ttl(1_500))
    for batch in range(4):
        asked.batch(now_ms=1_000 * batch)
    with asked.live() as live:
        found = {key: row for rows in live.scan() for key, row in values(rows).items()}
    # By the clock of batch 3, which was handed what batch 2 left: what was written at 2 s lives.
    assert found
    assert {last for _, last in found.values()} == {2}
    assert found.keys() == {key for key in live_job.keys_of(2) if not live_job.is_removed(key, 2)}


def test_a_store_is_not_asked_by_the_process_that_works_on_it(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.buckets.batch(0, live_job.rows_of(0), Times(0, -1, False))
    try:
        with asked.live() as live, pytest.raises(UsageError, match="read it from another process"):
            live.get(1)
    finally:
        asked.buckets.close()
    with asked.live() as live, asked.live() as another:
        assert live.get(1).batch == -1
        with pytest.raises(UsageError, match="share one LiveState"):
            for bucket in range(BUCKETS):
                next(another.scan([bucket]))


def test_threads_may_ask_at_once(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    for _ in range(4):
        asked.batch()
    failed: list[BaseException] = []

    def ask(seed: int) -> None:
        try:
            for key in random.Random(seed).choices(range(KEYS), k=50):
                assert values(live.get(key)) == {k: v for k, v in state_after(2).items() if k == key}
        except BaseException as error:
            failed.append(error)

    with asked.live() as live:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.batch()
    environment = ReadOnlyEnvironment.of(asked.store(0))
    changes: list[Callable[[], object]] = [environment.check_readers, environment.discard]
    changes.append(lambda: environment.write(lambda txn: None))
    for change in changes:
        with pytest.raises(UsageError, match="open for reading only"):
            change()
    environment.close()
    with asked.live() as live:
        live.get(1)
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "local").rglob("*") if path.name != "lock.mdb"}
        list(live.scan())
    assert before == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "local").rglob("*") if path.name != "lock.mdb"
    }


def test_a_late_attempt_does_not_take_back_what_was_told(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.batch()
    folder, operator = asked.store(0), asked.job.operator_file("query")

    def told(batch: int, plan: str) -> int | None:
        record = CommittedRecord(CheckpointRef(1, "a" * 32), batch, 5, plan, get_pid_namespace())
        write_committed(folder, record, operator)
        found = read_committed(folder)
        return None if found is None else found.batch

    assert told(7, "plan one") == 7
    assert told(6, "plan one") == 7
    # Another run may have gone back to an earlier batch.
    assert told(3, "plan two") == 3
    (folder / boot_id() / "committed").write_bytes(b"damaged")
    assert told(4, "plan two") == 4
    write_committed(tmp_path / "gone", CommittedRecord(None, 1, 1, "", ""), operator)
    assert read_committed(tmp_path / "gone") is None
