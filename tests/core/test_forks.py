"""A user's function that forks: child processes never touch the LMDB environments of their parent.

Each test runs in a separate process, because what children inherit cannot be undone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import WAIT_S

_BEGIN = """
import gc, hashlib, multiprocessing, os, sys, threading
from pathlib import Path
from spark_state_ext.testing.model import KEYS, SCHEMA, Refs, Row, make_run, scan
from spark_state_ext.errors import StateError
from spark_state_ext.store import LocalStore

folder, refs = Path(sys.argv[1]), Refs()
store = LocalStore.at(folder, SCHEMA)
ref = refs.next(1)
store.apply([make_run({KEYS[0]: Row(1)})], ref, None)
environment = store._environment.environment

def hash_files():
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in environment.folder.glob("*.mdb")}

def list_readers():
    # The readers in LMDB's lock file: the pages that they read are not reused.
    return [line.split()[2] for line in environment._env.readers().splitlines()[1:]]

def run_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(1, b"done\\n")
        except StateError as error:
            os.write(1, f"{type(error).__name__}: {error}\\n".encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""

_END = """
assert scan(store.view(ref)) == {KEYS[0]: Row(1)}
after = refs.next(2)
store.apply([make_run({KEYS[0]: Row(2)})], after, ref)
assert scan(store.view(after)) == {KEYS[0]: Row(2)}
store.close()
print("as expected")
"""


def run_script(tmp_path: Path, script: str) -> list[str]:
    process = subprocess.run(
        [sys.executable, "-c", _BEGIN + script + _END, str(tmp_path / "bucket")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr[-3000:]
    *lines, last = process.stdout.splitlines()
    assert last == "as expected"
    return lines


USES = {
    "read": "store.runs()",
    "write": "store.record({'child': b'1'})",
    "a run": "store.apply([make_run({KEYS[0]: Row(9)})], refs.next(9), None)",
    "size": "store.map_bytes",
    "prune": "store.prune(ref)",
    "rebuild": "store.rebuild()",
    "open": "LocalStore.at(folder, SCHEMA)",
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_child_that_uses_its_parents_store_gets_an_error(tmp_path: Path, use: str) -> None:
    (line,) = run_script(
        tmp_path, f"before = hash_files()\nrun_child(lambda: {USES[use]})\nassert hash_files() == before\n"
    )
    assert line.startswith("ForkedProcessError: ")
    assert "os._exit" in line


_READING = """
reading, end_read = threading.Event(), threading.Event()

def wait_for_end(txn):
    reading.set()
    assert end_read.wait(600)

def read_for_long():
    try:
        environment.read(wait_for_end)
    except BaseException as error:
        print(repr(error))

reader = threading.Thread(target=read_for_long)
reader.start()
assert reading.wait(600)
assert list_readers()[0] != "-", list_readers()
before = hash_files(), list_readers()
{fork}
assert (hash_files(), list_readers()) == before, list_readers()
end_read.set()
reader.join()
"""

ENDS = {
    "it closes the store": "run_child(store.close)",
    "it closes the environment": "run_child(environment.close)",
    "it closes while another store is being opened": (
        "with type(environment)._open_lock:\n    run_child(lambda: (store.close(), LocalStore.at(folder.parent / 'own', SCHEMA)))"
    ),
    "it drops the store": "def drop():\n    global store, environment\n    store = environment = None\n    gc.collect()\n"
    "run_child(drop)",
    "it ends with sys.exit": "pid = os.fork()\nif not pid:\n    sys.exit()\nassert os.waitpid(pid, 0)[1] == 0",
    "it is a process of multiprocessing": (
        "process = multiprocessing.get_context('fork').Process(target=sum, args=([1],))\n"
        "process.start()\nprocess.join()\nassert process.exitcode == 0"
    ),
    "it forks its own child": "run_child(lambda: run_child(store.close))",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_forked_child_does_not_disturb_readers_of_its_parent(tmp_path: Path, end: str) -> None:
    """Closing an environment in either process would free its readers' slots in a file that both processes share."""
    lines = run_script(tmp_path, _READING.format(fork=ENDS[end]))
    assert set(lines) <= {"done"}


def test_a_forked_child_can_use_its_own_store(tmp_path: Path) -> None:
    script = """
def use_own_store():
    own = LocalStore.at(folder.parent / "own", SCHEMA)
    own.apply([make_run({KEYS[0]: Row(3)})], ref, None)
    assert scan(own.view(ref)) == {KEYS[0]: Row(3)}
    own.close()

run_child(use_own_store)
"""
    assert run_script(tmp_path, script) == ["done"]
