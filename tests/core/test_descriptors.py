"""Open files: local stores leave some of the limit for other uses, and an error names the limit.

Tests that reach a limit run in a separate process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import SCHEMA
from spark_state_ext.worker import descriptors
from tests.helpers.waiting import WAIT_S

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="needs /proc/self/fd, where Linux lists open files"
)

_SETUP = """
import os, resource, socket, sys, threading
from pathlib import Path
from spark_state_ext.testing.model import KEYS, SCHEMA, Refs, Row, make_run, scan
from spark_state_ext.errors import StateError, StorageError, TooManyOpenFilesError
from spark_state_ext.store import LocalStore
from spark_state_ext.worker import descriptors
from spark_state_ext.store.environment import Environment

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
ref = Refs().next(1)

def set_limit(to=limit):
    resource.setrlimit(resource.RLIMIT_NOFILE, (to, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def count_open():
    return len(os.listdir("/proc/self/fd")) - 1

def write_store(number):
    store = LocalStore.at(folder / str(number), SCHEMA)
    store.apply([make_run({KEYS[0]: Row(number)})], ref, None)
    return store

def is_right(store, number):
    return scan(store.view(ref)) == {KEYS[0]: Row(number)}

def open_all(leave=0):
    held = []
    while True:
        try:
            held.append(socket.socket())
        except OSError:
            for _ in range(leave):
                held.pop().close()
            return held
"""


def run(tmp_path: Path, limit: int, script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _SETUP + script + "\nprint('as expected')", str(tmp_path / "stores"), str(limit)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.endswith("as expected\n")
    return done.stdout


def _count_files_below(folder: Path) -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            count += os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/")
    return count


def test_an_open_store_has_the_expected_number_of_files(tmp_path: Path) -> None:
    store = LocalStore.at(tmp_path / "bucket", SCHEMA)
    assert _count_files_below(tmp_path) == descriptors.FILES_OF_A_STORE
    store.record({"a": b"b"})
    store.runs()
    assert _count_files_below(tmp_path) == descriptors.FILES_OF_A_STORE
    store.close()
    assert _count_files_below(tmp_path) == 0


def test_stores_may_use_three_quarters_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, stores in ((16, 8), (256, 48), (1024, 192), (4096, 768), (1 << 30, 1024)):
        monkeypatch.setattr(descriptors, "open_files_max", lambda limit=limit: limit)
        assert descriptors.stores_max() == stores


_MANY_STORES = """
set_limit()
before = count_open()
stores = [write_store(number) for number in range(60)]
for _ in range(2):
    for number, store in enumerate(stores):
        assert is_right(store, number)
        store.record({"a": b"b"})
        assert count_open() - before <= 3 * limit // 4, count_open() - before
        assert len(Environment._environments) <= descriptors.stores_max()
assert len(Environment._environments) == descriptors.stores_max() == 24
"""


def test_the_number_of_open_stores_is_limited(tmp_path: Path) -> None:
    run(tmp_path, 128, _MANY_STORES)


_IN_USE = """
set_limit()
first = write_store(0)
environment = first._environment.environment
inside, go_on = threading.Event(), threading.Event()

def long(txn):
    inside.set()
    assert go_on.wait(600)

reader = threading.Thread(target=lambda: first._environment.read(long))
reader.start()
assert inside.wait(600)
others = [write_store(number) for number in range(1, 60)]
assert not environment.closed
go_on.set()
reader.join()
assert all(is_right(store, number) for number, store in enumerate([first, *others]))
assert environment.closed, "it is closed after its last use"
"""


def test_a_store_in_use_stays_open(tmp_path: Path) -> None:
    run(tmp_path, 128, _IN_USE)


_SIDE_BY_SIDE = """
set_limit()
stores = [write_store(number) for number in range(60)]
errors = []

def use(thread):
    try:
        for round in range(3):
            for number in range(thread, 60, 4):
                stores[number].record({str(round): b"b"})
                assert is_right(stores[number], number)
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=use, args=(thread,)) for thread in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
"""


def test_threads_may_use_more_stores_than_can_be_open(tmp_path: Path) -> None:
    run(tmp_path, 128, _SIDE_BY_SIDE)


_NO_DESCRIPTORS = """
first, second = write_store(1), write_store(2)
set_limit()
held = open_all()
assert is_right(second, 2)
third = LocalStore.at(folder / "3", SCHEMA)
assert first._environment._environment.closed, "it was not in use"
assert third.runs() == []
held += open_all()
inside, go_on = threading.Event(), threading.Event()

def nested(txn):
    # No store can be closed, because the only open one is in use.
    LocalStore.at(folder / "4", SCHEMA)

for close in (first, second):
    close.close()
held += open_all()
try:
    third._environment.read(nested)
    sys.exit("no error")
except TooManyOpenFilesError as error:
    print(error)
    assert isinstance(error, StorageError)
# The stores are intact, and work again once descriptors are available.
for some in held[:20]:
    some.close()
assert is_right(first, 1) and is_right(second, 2) and third.runs() == []
"""


def test_an_error_about_open_files_names_the_limit_and_what_is_open(tmp_path: Path) -> None:
    message = run(tmp_path, 128, _NO_DESCRIPTORS).splitlines()[0]
    assert message.startswith(f"the local store {tmp_path}/stores/4/")
    assert "too many open files. Its limit (ulimit -n) is 128, and it has 4 of 1 local stores, " in message
    assert " sockets, " in message
    assert "Raise the limit" in message


_BOOT = """
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.spill import translate_local_errors
from spark_state_ext.store.local_disk import storage_error
from spark_state_ext.worker import boot
from spark_state_ext.worker.boot import boot_id
write_store(1).close()
(name,) = os.listdir(folder / "1")

boot._boot_id.cache_clear()
root = Folder(str(folder / "root"))
root.put("a", b"a")
set_limit(64)
held = open_all()
for work in (boot_id, lambda: LocalStore.at(folder / "1", SCHEMA), lambda: open_in(folder), lambda: root.put("a", b"b")):
    def open_in(folder):
        with translate_local_errors(folder):
            open(folder / "file", "wb")
    try:
        work()
        sys.exit("no error")
    except TooManyOpenFilesError as error:
        assert "is 64, and it has" in str(error), error
for some in held:
    some.close()
assert os.listdir(folder / "1") == [name], "the store still belongs to this boot"
assert is_right(LocalStore.at(folder / "1", SCHEMA), 1)
"""


def test_an_unreadable_boot_id_is_an_error_and_the_store_is_kept(tmp_path: Path) -> None:
    """Otherwise the store would seem to belong to an earlier boot, and would be removed."""
    run(tmp_path, 64, _BOOT)
