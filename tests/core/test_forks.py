"""A user's function that forks: children never touch the LMDB of the process they come of.

Each in a process of its own, as what is inherited cannot be taken back.
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
opened = store._environment.environment

def files():
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in opened.folder.glob("*.mdb")}

def kept():
    # What LMDB's lock file says of those who read: none of their pages is used again.
    return [line.split()[2] for line in opened._env.readers().splitlines()[1:]]

def child(work):
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


def run(tmp_path: Path, script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + script + _END, str(tmp_path / "bucket")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    *said, last = done.stdout.splitlines()
    assert last == "as expected"
    return said


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
def test_a_forked_child_that_uses_a_store_is_told_so(tmp_path: Path, use: str) -> None:
    (said,) = run(tmp_path, f"before = files()\nchild(lambda: {USES[use]})\nassert files() == before\n")
    assert said.startswith("ForkedProcessError: ")
    assert "os._exit" in said


_READING = """
inside, go_on = threading.Event(), threading.Event()

def long(txn):
    inside.set()
    assert go_on.wait(600)

def read_for_long():
    try:
        opened.read(long)
    except BaseException as error:
        print(repr(error))

reader = threading.Thread(target=read_for_long)
reader.start()
assert inside.wait(600)
assert kept()[0] != "-", kept()
before = files(), kept()
{fork}
assert (files(), kept()) == before, kept()
go_on.set()
reader.join()
"""

ENDS = {
    "it closes the store": "child(store.close)",
    "it closes the environment": "child(opened.close)",
    "it closes in the middle of another one's opening": (
        "with type(opened)._open_lock:\n    child(lambda: (store.close(), LocalStore.at(folder.parent / 'own', SCHEMA)))"
    ),
    "it lets go of the store": "def drop():\n    global store, opened\n    store = opened = None\n    gc.collect()\n"
    "child(drop)",
    "it ends as Python ends": "pid = os.fork()\nif not pid:\n    sys.exit()\nassert os.waitpid(pid, 0)[1] == 0",
    "it is of multiprocessing": (
        "process = multiprocessing.get_context('fork').Process(target=sum, args=([1],))\n"
        "process.start()\nprocess.join()\nassert process.exitcode == 0"
    ),
    "it forks a child of its own": "child(lambda: child(store.close))",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_forked_child_takes_nothing_from_those_who_read(tmp_path: Path, end: str) -> None:
    """Closing an environment frees its readers' slots in a file that both processes share, whoever does it."""
    said = run(tmp_path, _READING.format(fork=ENDS[end]))
    assert set(said) <= {"done"}


def test_a_forked_child_may_have_a_store_of_its_own(tmp_path: Path) -> None:
    script = """
def own():
    mine = LocalStore.at(folder.parent / "own", SCHEMA)
    mine.apply([make_run({KEYS[0]: Row(3)})], ref, None)
    assert scan(mine.view(ref)) == {KEYS[0]: Row(3)}
    mine.close()

child(own)
"""
    assert run(tmp_path, script) == ["done"]
