"""LMDB environments that are closed while others use them, and truncated files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lmdb
import pytest

from spark_state_ext.errors import ClosedEnvironmentError, StorageError
from spark_state_ext.store import LocalStore, environment, local_disk
from spark_state_ext.store.environment import MAP_BYTES_MIN, Environment
from spark_state_ext.store.shared_environment import SharedEnvironment
from spark_state_ext.store.transaction import Reader, Writer
from spark_state_ext.testing.model import SCHEMA
from tests.helpers.soak import whole
from tests.helpers.waiting import WAIT_S, eventually


def _put_value(name: bytes, value: bytes = b"value") -> Callable[[Writer], None]:
    return lambda txn: txn.put(b"records", name, value)


def _read_value(name: bytes) -> Callable[[Reader], bytes | None]:
    def work(txn: Reader) -> bytes | None:
        value = txn.get(b"records", name)
        return None if value is None else bytes(value)

    return work


def _open_shared(folder: Path) -> SharedEnvironment:
    return SharedEnvironment.at(folder, MAP_BYTES_MIN)


def test_an_environment_closed_between_opening_and_use_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = _open_shared(tmp_path / "bucket")
    shared.write(_put_value(b"a"))
    real_use = Environment._use
    closed: list[Environment] = []

    def close_first(self: Environment) -> Any:
        if self not in closed:
            closed.append(self)
            if len(closed) < 4:
                self.close()
        return real_use(self)

    monkeypatch.setattr(Environment, "_use", close_first)
    assert shared.read(_read_value(b"a")) == b"value"
    assert len(closed) == 4, "three were closed, and the fourth was used"
    for use in (lambda: shared.write(_put_value(b"b")), lambda: shared.map_bytes, shared.check_readers):
        closed.clear()
        use()
        assert len(closed) == 4
    assert shared.read(_read_value(b"b")) == b"value"


def test_an_environment_that_is_always_closed_fails_after_some_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = _open_shared(tmp_path / "bucket")
    real_use = Environment._use

    def close_first(self: Environment) -> Any:
        self.close()
        return real_use(self)

    monkeypatch.setattr(Environment, "_use", close_first)
    with pytest.raises(StorageError, match="was closed while it was used; try again"):
        shared.read(_read_value(b"a"))


def test_a_closed_environment_starts_no_work(tmp_path: Path) -> None:
    environment = Environment.at(tmp_path / "bucket", MAP_BYTES_MIN)
    environment.close()
    environment.close()
    started: list[Any] = []
    for use in (
        lambda: environment.read(started.append),
        lambda: environment.write(started.append),
        lambda: environment.map_bytes,
        environment.check_readers,
        environment.discard,
    ):
        with pytest.raises(ClosedEnvironmentError):
            use()
    assert started == []


def test_a_close_waits_for_readers_and_blocks_new_ones_of_the_same_folder_only(tmp_path: Path) -> None:
    first, second = _open_shared(tmp_path / "bucket"), _open_shared(tmp_path / "bucket")
    first.write(_put_value(b"a"))
    environment = first.environment
    reading, continue_reading = threading.Event(), threading.Event()

    def read_slowly(txn: Reader) -> bytes | None:
        reading.set()
        assert continue_reading.wait(WAIT_S)
        return _read_value(b"a")(txn)

    with ThreadPoolExecutor(3) as threads:
        early_read = threads.submit(first.read, read_slowly)
        assert reading.wait(WAIT_S)
        closing = threads.submit(second.close)
        eventually(lambda: environment._gate._closed)
        late_read = threads.submit(_open_shared(tmp_path / "bucket").read, _read_value(b"a"))
        _open_shared(tmp_path / "another bucket").write(_put_value(b"b"))
        assert not any(future.done() for future in (early_read, closing, late_read))
        continue_reading.set()
        assert early_read.result(WAIT_S) == late_read.result(WAIT_S) == b"value"
        closing.result(WAIT_S)
    assert environment.closed
    assert first.environment is second.environment is not environment


def test_a_read_waits_while_the_environment_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _open_shared(tmp_path / "bucket"), _open_shared(tmp_path / "bucket")
    first.write(_put_value(b"a"))
    set_aside = local_disk.set_aside

    with ThreadPoolExecutor(1) as threads:

        def set_aside_slowly(folder: Path) -> None:
            late_read = threads.submit(second.read, _read_value(b"a"))
            time.sleep(0.05)
            assert not late_read.done()
            set_aside(folder)
            late_reads.append(late_read)

        late_reads: list[Any] = []
        monkeypatch.setattr(environment, "set_aside", set_aside_slowly)
        first.discard()
        assert late_reads[0].result(WAIT_S) is None
    assert first.environment is second.environment
    assert first.folder.exists()


_REPLACE_SCRIPT = """
import sys
from pathlib import Path
from spark_state_ext.store.environment import MAP_BYTES_MIN
from spark_state_ext.store.shared_environment import SharedEnvironment

shared = SharedEnvironment.at(Path(sys.argv[1]), MAP_BYTES_MIN)
shared.read(lambda txn: None)
shared.discard()
shared.write(lambda txn: txn.put(b"records", b"a", b"new"))
"""


def test_a_store_that_another_process_has_replaced_is_not_set_aside(tmp_path: Path) -> None:
    """Two live workers may both find a store damaged, one later than the other."""
    shared = _open_shared(tmp_path / "bucket")
    shared.write(_put_value(b"a"))
    assert not shared.is_replaced()
    subprocess.run([sys.executable, "-c", _REPLACE_SCRIPT, str(tmp_path / "bucket")], check=True, timeout=WAIT_S)
    assert shared.is_replaced()
    assert shared.read(_read_value(b"a")) == b"value", "this process still has the old environment open"
    shared.discard()
    assert shared.read(_read_value(b"a")) == b"new"
    shared.discard()
    assert shared.read(_read_value(b"a")) is None


def test_two_stores_of_one_folder_can_be_closed_and_used_concurrently(tmp_path: Path) -> None:
    stores = [LocalStore.at(tmp_path / "bucket", SCHEMA) for _ in range(2)]
    rounds, stop = [0, 0], threading.Event()

    def use(number: int) -> None:
        while not stop.is_set():
            stores[number].record({f"{number}": b"%d" % rounds[number]})
            assert stores[number].records()[f"{number}"] == b"%d" % rounds[number]
            assert stores[number].map_bytes >= MAP_BYTES_MIN
            rounds[number] += 1

    with ThreadPoolExecutor(2) as threads:
        users = [threads.submit(use, number) for number in range(2)]
        closes = 0

        def close_one() -> bool:
            nonlocal closes
            stores[closes % 2].close()
            closes += 1
            return min(*rounds, closes) > 200 or any(user.done() for user in users)

        try:
            eventually(close_one, 0.001)
        finally:
            stop.set()
        for user in users:
            user.result(WAIT_S)
    assert min(*rounds, closes) > 200


_TRUNCATE_SCRIPT = """
import os, sys
from pathlib import Path
from spark_state_ext.testing.model import KEYS, SCHEMA, Refs, Row, make_run, scan
from spark_state_ext.store import LocalStore
folder, part = Path(sys.argv[1]), float(sys.argv[2])
refs = Refs()
store = LocalStore.at(folder, SCHEMA)
ref = None
for version in range(1, 6):
    parent, ref = ref, refs.next(version)
    store.apply([make_run({(f"key {i}", None): Row(i, "x" * 100) for i in range(300)})], ref, parent)
store.close()
(file,) = folder.glob("*/data.mdb")
os.truncate(file, max(round(file.stat().st_size * part), 2 * os.sysconf("SC_PAGE_SIZE")))
again = LocalStore.at(folder, SCHEMA)
assert again.runs() == [], "the file was not set aside"
ref = refs.next(1)
again.apply([make_run({KEYS[0]: Row(1)})], ref, None)
assert scan(again.view(ref)) == {KEYS[0]: Row(1)}
assert len(list(folder.iterdir())) == 1, "a file was left behind"
print("as expected")
"""


@pytest.mark.parametrize("part", whole([0.0, 0.5, 0.999], [0.25, 0.9]))
def test_a_truncated_file_is_set_aside(tmp_path: Path, part: float) -> None:
    """The test runs it in a separate process because a bus error would end that process."""
    process = subprocess.run(
        [sys.executable, "-c", _TRUNCATE_SCRIPT, str(tmp_path / "bucket"), str(part)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (process.returncode, process.stdout.strip()) == (0, "as expected"), process.stderr[-3000:]


def _is_whole(environment: Environment) -> bool:
    return (environment.folder / "data.mdb").stat().st_size >= environment._least_length()


def test_new_and_grown_environments_are_whole(tmp_path: Path) -> None:
    shared = _open_shared(tmp_path / "bucket")
    assert _is_whole(shared.environment)
    shared.close()
    for number in range(6):
        shared.write(_put_value(b"%d" % number, b"x" * (MAP_BYTES_MIN // 2)))
        assert _is_whole(shared.environment)
        shared.close()
    assert shared.map_bytes > 2 * MAP_BYTES_MIN
    assert all(shared.read(_read_value(b"%d" % number)) for number in range(6))
    # The map is as large as the file says, which is more than was requested.
    assert _open_shared(tmp_path / "bucket").read(_read_value(b"5"))


def _leave_free_pages_at_the_end(shared: SharedEnvironment) -> None:
    def put_and_delete(txn: Writer) -> None:
        txn.put(b"records", b"large", b"x" * 300_000)
        txn.delete(b"records", b"large")

    def put_many(txn: Writer) -> None:
        for number in range(300):
            txn.put(b"records", b"%04d" % number, b"x" * 1500)

    def delete_some(txn: Writer) -> None:
        for number in range(0, 300, 7):
            txn.delete(b"records", b"%04d" % number)

    # Leave pages that can be reused, but not many in a row.
    shared.write(put_many)
    for _ in range(2):
        shared.write(delete_some)
    shared.write(put_and_delete)


def test_pages_that_were_freed_before_they_were_written_are_not_damage(tmp_path: Path) -> None:
    shared = _open_shared(tmp_path / "bucket")
    _leave_free_pages_at_the_end(shared)
    assert _is_whole(shared.environment)
    shared.close()
    assert shared.read(_read_value(b"0001")) == b"x" * 1500


@pytest.mark.parametrize("failure", ["an error", "a full map"])
def test_a_failed_or_repeated_write_does_not_block_waiting_writers(tmp_path: Path, failure: str) -> None:
    shared = SharedEnvironment.at(tmp_path / "bucket", MAP_BYTES_MIN)
    started, tries, errors = threading.Event(), [0], []

    def fill_map(txn: Writer) -> None:
        tries[0] += 1
        started.set()
        time.sleep(0.3)  # time for the other threads to begin to wait
        if failure == "an error":
            raise KeyError("no")
        txn.put(b"records", b"large", bytes(2 * MAP_BYTES_MIN))

    def write_first() -> None:
        try:
            shared.write(fill_map)
        except KeyError as error:
            errors.append(error)

    def write_other(name: bytes) -> None:
        started.wait(WAIT_S)
        shared.write(_put_value(name))

    # The threads are daemons so that a deadlock between them does not keep the process from ending.
    threads = [threading.Thread(target=write_first, daemon=True)]
    threads += [threading.Thread(target=write_other, args=(name,), daemon=True) for name in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert len(errors) == (failure == "an error")
    assert (tries[0] == 1) == (failure == "an error")
    assert shared.read(_read_value(b"a")) == shared.read(_read_value(b"b")) == b"value"
    large = shared.read(_read_value(b"large"))
    assert (large is None) == (failure == "an error")
    shared.close()


def test_a_file_that_its_writer_is_about_to_lengthen_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = _open_shared(tmp_path / "bucket")
    with monkeypatch.context() as patched:
        patched.setattr(Environment, "_lengthen", lambda self: None)
        _leave_free_pages_at_the_end(shared)
    assert not _is_whole(shared.environment)
    length, path = shared.environment._least_length(), shared.folder / "data.mdb"
    shared.close()
    monkeypatch.setattr(time, "sleep", lambda seconds: os.truncate(path, length))
    assert shared.read(_read_value(b"0001")) == b"x" * 1500


def test_opening_a_map_that_grows_is_tried_again_and_gives_up_after_some_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may grow it between LMDB's two reads of the file's size."""
    real_open, failures = lmdb.open, iter([True, True, False])

    def open_after_failures(*args: Any, **kwargs: Any) -> Any:
        if next(failures):
            raise lmdb.MapResizedError("mdb_txn_begin")
        return real_open(*args, **kwargs)

    monkeypatch.setattr(lmdb, "open", open_after_failures)
    shared = _open_shared(tmp_path / "bucket")
    monkeypatch.undo()
    shared.write(_put_value(b"a"))
    assert shared.read(_read_value(b"a")) == b"value"
    shared.close()
    monkeypatch.setattr(lmdb, "open", lambda *args, **kwargs: (_ for _ in ()).throw(lmdb.MapResizedError("again")))
    with pytest.raises(StorageError, match="again"):
        _open_shared(tmp_path / "bucket")


_GROW_SCRIPT = """
import resource, subprocess, sys
from pathlib import Path
from spark_state_ext.errors import StoreFullError
from spark_state_ext.store.shared_environment import SharedEnvironment
folder, grows = Path(sys.argv[1]), len(sys.argv) > 2
shared = SharedEnvironment.at(folder, 1 << 20)
if grows:
    shared.write(lambda txn: txn.put(b"records", b"large", bytes(80 << 20)), need_bytes=2 << 30)
    sys.exit()
shared.write(lambda txn: txn.put(b"records", b"a", b"1"))
subprocess.run([sys.executable, __file__, str(folder), "grows"], check=True)
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
print(shared.read(lambda txn: bytes(txn.get(b"records", b"a"))))
try:
    shared.write(lambda txn: txn.put(b"records", b"larger", bytes(100 << 20)), need_bytes=2 << 30)
    sys.exit("the limit was never met")
except StoreFullError as error:
    assert "spark.executor.pyspark.memory" in str(error), error
print(shared.read(lambda txn: bytes(txn.get(b"records", b"a"))))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
shared.write(lambda txn: txn.put(b"records", b"larger", bytes(100 << 20)), need_bytes=2 << 30)
print(shared.read(lambda txn: len(txn.get(b"records", b"larger"))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limit of the address space")
def test_a_store_grown_beyond_the_address_space_limit_stays_readable(tmp_path: Path) -> None:
    script = tmp_path / "grow.py"
    script.write_text(_GROW_SCRIPT)
    process = subprocess.run(
        [sys.executable, script, tmp_path / "bucket"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (process.returncode, process.stdout.strip()) == (0, "b'1'\nb'1'\n104857600"), process.stderr[-3000:]
