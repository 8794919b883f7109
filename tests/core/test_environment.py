"""LMDB environments that are closed while others use them, and files that were cut short."""

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


def _put(name: bytes, value: bytes = b"value") -> Callable[[Writer], None]:
    return lambda txn: txn.put(b"records", name, value)


def _got(name: bytes) -> Callable[[Reader], bytes | None]:
    def work(txn: Reader) -> bytes | None:
        value = txn.get(b"records", name)
        return None if value is None else bytes(value)

    return work


def _shared(folder: Path) -> SharedEnvironment:
    return SharedEnvironment.at(folder, MAP_BYTES_MIN)


def test_what_is_closed_between_opening_and_use_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = _shared(tmp_path / "bucket")
    shared.write(_put(b"a"))
    real = Environment._use
    closed: list[Environment] = []

    def closed_first(self: Environment) -> Any:
        if self not in closed:
            closed.append(self)
            if len(closed) < 4:
                self.close()
        return real(self)

    monkeypatch.setattr(Environment, "_use", closed_first)
    assert shared.read(_got(b"a")) == b"value"
    assert len(closed) == 4, "three were closed, and the fourth was used"
    for use in (lambda: shared.write(_put(b"b")), lambda: shared.map_bytes, shared.check_readers):
        closed.clear()
        use()
        assert len(closed) == 4
    assert shared.read(_got(b"b")) == b"value"


def test_trying_again_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = _shared(tmp_path / "bucket")
    real = Environment._use

    def closed_first(self: Environment) -> Any:
        self.close()
        return real(self)

    monkeypatch.setattr(Environment, "_use", closed_first)
    with pytest.raises(StorageError, match="was closed while it was used; try again"):
        shared.read(_got(b"a"))


def test_work_of_a_closed_environment_is_not_begun(tmp_path: Path) -> None:
    opened = Environment.at(tmp_path / "bucket", MAP_BYTES_MIN)
    opened.close()
    opened.close()
    begun: list[Any] = []
    for use in (
        lambda: opened.read(begun.append),
        lambda: opened.write(begun.append),
        lambda: opened.map_bytes,
        opened.check_readers,
        opened.discard,
    ):
        with pytest.raises(ClosedEnvironmentError):
            use()
    assert begun == []


def test_while_a_close_waits_for_a_user_others_wait_too_and_other_folders_do_not(tmp_path: Path) -> None:
    first, second = _shared(tmp_path / "bucket"), _shared(tmp_path / "bucket")
    first.write(_put(b"a"))
    old = first.environment
    reading, go_on = threading.Event(), threading.Event()

    def long(txn: Reader) -> bytes | None:
        reading.set()
        assert go_on.wait(WAIT_S)
        return _got(b"a")(txn)

    with ThreadPoolExecutor(3) as threads:
        reader = threads.submit(first.read, long)
        assert reading.wait(WAIT_S)
        closing = threads.submit(second.close)
        eventually(lambda: old._gate._closed)
        late = threads.submit(_shared(tmp_path / "bucket").read, _got(b"a"))
        _shared(tmp_path / "another bucket").write(_put(b"b"))
        assert not any(future.done() for future in (reader, closing, late))
        go_on.set()
        assert reader.result(WAIT_S) == late.result(WAIT_S) == b"value"
        closing.result(WAIT_S)
    assert old.closed
    assert first.environment is second.environment is not old


def test_nobody_opens_what_is_being_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _shared(tmp_path / "bucket"), _shared(tmp_path / "bucket")
    first.write(_put(b"a"))
    real = local_disk.set_aside

    with ThreadPoolExecutor(1) as threads:

        def slow(folder: Path) -> None:
            late = threads.submit(second.read, _got(b"a"))
            time.sleep(0.05)
            assert not late.done()
            real(folder)
            found.append(late)

        found: list[Any] = []
        monkeypatch.setattr(environment, "set_aside", slow)
        first.discard()
        assert found[0].result(WAIT_S) is None
    assert first.environment is second.environment
    assert first.folder.exists()


_BEGUN_ANEW = """
import sys
from pathlib import Path
from spark_state_ext.store.environment import MAP_BYTES_MIN
from spark_state_ext.store.shared_environment import SharedEnvironment

shared = SharedEnvironment.at(Path(sys.argv[1]), MAP_BYTES_MIN)
shared.read(lambda txn: None)
shared.discard()
shared.write(lambda txn: txn.put(b"records", b"a", b"new"))
"""


def test_what_another_process_has_begun_anew_is_not_set_aside(tmp_path: Path) -> None:
    """Two live workers may both find a store damaged, one later than the other."""
    shared = _shared(tmp_path / "bucket")
    shared.write(_put(b"a"))
    assert not shared.is_replaced()
    subprocess.run([sys.executable, "-c", _BEGUN_ANEW, str(tmp_path / "bucket")], check=True, timeout=WAIT_S)
    assert shared.is_replaced()
    assert shared.read(_got(b"a")) == b"value", "this process still has the old one"
    shared.discard()
    assert shared.read(_got(b"a")) == b"new"
    shared.discard()
    assert shared.read(_got(b"a")) is None


def test_closing_and_using_at_once(tmp_path: Path) -> None:
    stores = [LocalStore.at(tmp_path / "bucket", SCHEMA) for _ in range(2)]
    rounds, over = [0, 0], threading.Event()

    def use(number: int) -> None:
        while not over.is_set():
            stores[number].record({f"{number}": b"%d" % rounds[number]})
            assert stores[number].records()[f"{number}"] == b"%d" % rounds[number]
            assert stores[number].map_bytes >= MAP_BYTES_MIN
            rounds[number] += 1

    with ThreadPoolExecutor(2) as threads:
        users = [threads.submit(use, number) for number in range(2)]
        closed = 0

        def often() -> bool:
            nonlocal closed
            stores[closed % 2].close()
            closed += 1
            return min(*rounds, closed) > 200 or any(user.done() for user in users)

        try:
            eventually(often, 0.001)
        finally:
            over.set()
        for user in users:
            user.result(WAIT_S)
    assert min(*rounds, closed) > 200


_CUT_SHORT = """
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
assert again.runs() == [], "set aside"
ref = refs.next(1)
again.apply([make_run({KEYS[0]: Row(1)})], ref, None)
assert scan(again.view(ref)) == {KEYS[0]: Row(1)}
assert len(list(folder.iterdir())) == 1, "nothing is left behind"
print("as expected")
"""


@pytest.mark.parametrize("part", whole([0.0, 0.5, 0.999], [0.25, 0.9]))
def test_a_file_that_was_cut_short_is_set_aside(tmp_path: Path, part: float) -> None:
    """In a process of its own, which a fault would end."""
    done = subprocess.run(
        [sys.executable, "-c", _CUT_SHORT, str(tmp_path / "bucket"), str(part)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "as expected"), done.stderr[-3000:]


def _is_whole(opened: Environment) -> bool:
    return (opened.folder / "data.mdb").stat().st_size >= opened._least_length()


def test_new_and_grown_environments_are_whole(tmp_path: Path) -> None:
    shared = _shared(tmp_path / "bucket")
    assert _is_whole(shared.environment)
    shared.close()
    for number in range(6):
        shared.write(_put(b"%d" % number, b"x" * (MAP_BYTES_MIN // 2)))
        assert _is_whole(shared.environment)
        shared.close()
    assert shared.map_bytes > 2 * MAP_BYTES_MIN
    assert all(shared.read(_got(b"%d" % number)) for number in range(6))
    # Larger than asked for, as it is in the file.
    assert _shared(tmp_path / "bucket").read(_got(b"5"))


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

    # Pages to use again, but no many in a row.
    shared.write(put_many)
    for _ in range(2):
        shared.write(delete_some)
    shared.write(put_and_delete)


def test_pages_that_were_free_before_they_were_written_are_no_damage(tmp_path: Path) -> None:
    shared = _shared(tmp_path / "bucket")
    _leave_free_pages_at_the_end(shared)
    assert _is_whole(shared.environment)
    shared.close()
    assert shared.read(_got(b"0001")) == b"x" * 1500


@pytest.mark.parametrize("failure", ["an error", "a full map"])
def test_a_write_that_fails_lets_go_of_others_that_wait(tmp_path: Path, failure: str) -> None:
    shared = SharedEnvironment.at(tmp_path / "bucket", MAP_BYTES_MIN)
    inside, tries, failed = threading.Event(), [0], []

    def full(txn: Writer) -> None:
        tries[0] += 1
        inside.set()
        time.sleep(0.3)  # until the others wait
        if failure == "an error":
            raise KeyError("no")
        txn.put(b"records", b"large", bytes(2 * MAP_BYTES_MIN))

    def first() -> None:
        try:
            shared.write(full)
        except KeyError as error:
            failed.append(error)

    def other(name: bytes) -> None:
        inside.wait(WAIT_S)
        shared.write(_put(name))

    # Daemons: where they wait for each other, no end of the process shall wait for them.
    threads = [threading.Thread(target=first, daemon=True)]
    threads += [threading.Thread(target=other, args=(name,), daemon=True) for name in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert len(failed) == (failure == "an error")
    assert (tries[0] == 1) == (failure == "an error")
    assert shared.read(_got(b"a")) == shared.read(_got(b"b")) == b"value"
    large = shared.read(_got(b"large"))
    assert (large is None) == (failure == "an error")
    shared.close()


def test_a_file_that_its_writer_is_about_to_lengthen_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = _shared(tmp_path / "bucket")
    with monkeypatch.context() as patched:
        patched.setattr(Environment, "_lengthen", lambda self: None)
        _leave_free_pages_at_the_end(shared)
    assert not _is_whole(shared.environment)
    length, path = shared.environment._least_length(), shared.folder / "data.mdb"
    shared.close()
    monkeypatch.setattr(time, "sleep", lambda seconds: os.truncate(path, length))
    assert shared.read(_got(b"0001")) == b"x" * 1500


def test_a_map_that_grows_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, between LMDB's two looks at the file."""
    real, failures = lmdb.open, iter([True, True, False])

    def opened(*args: Any, **kwargs: Any) -> Any:
        if next(failures):
            raise lmdb.MapResizedError("mdb_txn_begin")
        return real(*args, **kwargs)

    monkeypatch.setattr(lmdb, "open", opened)
    shared = _shared(tmp_path / "bucket")
    monkeypatch.undo()
    shared.write(_put(b"a"))
    assert shared.read(_got(b"a")) == b"value"
    shared.close()
    monkeypatch.setattr(lmdb, "open", lambda *args, **kwargs: (_ for _ in ()).throw(lmdb.MapResizedError("again")))
    with pytest.raises(StorageError, match="again"):
        _shared(tmp_path / "bucket")


_GROWS = """
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


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space as Linux has them")
def test_what_another_process_has_grown_beyond_the_address_space_is_read_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "ingests.py"
    script.write_text(_GROWS)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "bucket"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "b'1'\nb'1'\n104857600"), done.stderr[-3000:]
