"""Open files: local stores leave some to others, and an error names the limit.

Where a limit is met, in a process of its own.
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

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="what a process has open, as Linux tells it")

_BEGIN = """
import os, resource, socket, sys, threading
from pathlib import Path
from spark_state_ext.testing.model import KEYS, SCHEMA, Refs, Row, make_run, scan
from spark_state_ext.errors import StateError, StorageError, TooManyOpenFilesError
from spark_state_ext.store import LocalStore
from spark_state_ext.worker import descriptors
from spark_state_ext.store.environment import Environment

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
ref = Refs().next(1)

def limited(to=limit):
    resource.setrlimit(resource.RLIMIT_NOFILE, (to, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def opened():
    return len(os.listdir("/proc/self/fd")) - 1

def written(number):
    store = LocalStore.at(folder / str(number), SCHEMA)
    store.apply([make_run({KEYS[0]: Row(number)})], ref, None)
    return store

def right(store, number):
    return scan(store.view(ref)) == {KEYS[0]: Row(number)}

def hog(leave=0):
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
        [sys.executable, "-c", _BEGIN + script + "\nprint('as expected')", str(tmp_path / "stores"), str(limit)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.endswith("as expected\n")
    return done.stdout


def _files_below(folder: Path) -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            count += os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/")
    return count


def test_a_store_has_as_many_files_as_are_counted(tmp_path: Path) -> None:
    store = LocalStore.at(tmp_path / "bucket", SCHEMA)
    assert _files_below(tmp_path) == descriptors.FILES_OF_A_STORE
    store.record({"a": b"b"})
    store.runs()
    assert _files_below(tmp_path) == descriptors.FILES_OF_A_STORE
    store.close()
    assert _files_below(tmp_path) == 0


def test_stores_have_three_quarters_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, stores in ((16, 8), (256, 48), (1024, 192), (4096, 768), (1 << 30, 1024)):
        monkeypatch.setattr(descriptors, "open_files_max", lambda limit=limit: limit)
        assert descriptors.stores_max() == stores


_MANY = """
limited()
before = opened()
stores = [written(number) for number in range(60)]
for _ in range(2):
    for number, store in enumerate(stores):
        assert right(store, number)
        store.record({"a": b"b"})
        assert opened() - before <= 3 * limit // 4, opened() - before
        assert len(Environment._environments) <= descriptors.stores_max()
assert len(Environment._environments) == descriptors.stores_max() == 24
"""


def test_of_many_stores_those_used_last_stay_open(tmp_path: Path) -> None:
    run(tmp_path, 128, _MANY)


_IN_USE = """
limited()
first = written(0)
environment = first._environment.environment
inside, go_on = threading.Event(), threading.Event()

def long(txn):
    inside.set()
    assert go_on.wait(600)

reader = threading.Thread(target=lambda: first._environment.read(long))
reader.start()
assert inside.wait(600)
others = [written(number) for number in range(1, 60)]
assert not environment.closed
go_on.set()
reader.join()
assert all(right(store, number) for number, store in enumerate([first, *others]))
assert environment.closed, "when its turn came"
"""


def test_a_store_in_use_stays_open(tmp_path: Path) -> None:
    run(tmp_path, 128, _IN_USE)


_SIDE_BY_SIDE = """
limited()
stores = [written(number) for number in range(60)]
failed = []

def use(thread):
    try:
        for round in range(3):
            for number in range(thread, 60, 4):
                stores[number].record({str(round): b"b"})
                assert right(stores[number], number)
    except BaseException as error:
        failed.append(error)

threads = [threading.Thread(target=use, args=(thread,)) for thread in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed, failed
"""


def test_threads_that_open_more_than_there_may_be(tmp_path: Path) -> None:
    run(tmp_path, 128, _SIDE_BY_SIDE)


_OTHERS = """
first, second = written(1), written(2)
limited()
held = hog()
assert right(second, 2)
third = LocalStore.at(folder / "3", SCHEMA)
assert first._environment._environment.closed, "as it was not in use"
assert third.runs() == []
held += hog()
inside, go_on = threading.Event(), threading.Event()

def nested(txn):
    # Nothing that could be closed: the only one is in use.
    LocalStore.at(folder / "4", SCHEMA)

for close in (first, second):
    close.close()
held += hog()
try:
    third._environment.read(nested)
    sys.exit("no error")
except TooManyOpenFilesError as error:
    print(error)
    assert isinstance(error, StorageError)
# Nothing was harmed, and it works again when there are files.
for some in held[:20]:
    some.close()
assert right(first, 1) and right(second, 2) and third.runs() == []
"""


def test_what_others_hold_is_said_with_the_limit(tmp_path: Path) -> None:
    said = run(tmp_path, 128, _OTHERS).splitlines()[0]
    assert said.startswith(f"the local store {tmp_path}/stores/4/")
    assert "too many open files. Its limit (ulimit -n) is 128, and it has 4 of 1 local stores, " in said
    assert " sockets, " in said
    assert "Raise the limit" in said


_FIRST = """
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.spill import translate_local_errors
from spark_state_ext.store.local_disk import storage_error
from spark_state_ext.worker import boot
from spark_state_ext.worker.boot import boot_id
written(1).close()
(name,) = os.listdir(folder / "1")

boot._boot_id.cache_clear()
root = Folder(str(folder / "root"))
root.put("a", b"a")
limited(64)
held = hog()
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
assert os.listdir(folder / "1") == [name], "the store is that of this boot"
assert right(LocalStore.at(folder / "1", SCHEMA), 1)
"""


def test_the_boot_is_not_another_one_as_its_file_cannot_be_opened(tmp_path: Path) -> None:
    """A store in a folder of another name is taken for one of an earlier boot, and removed."""
    run(tmp_path, 64, _FIRST)
