"""The n-th input or output fails, for every n: the old state stays, and the retry succeeds."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_support import bucket_on, buffer_of, committed, first_pointer, state_at

from arrow_schemas import Pointer
from spark_state_ext.commit import cadence
from spark_state_ext.errors import StorageError
from spark_state_ext.files import sealed_file as sealed_module
from spark_state_ext.files.folder import Folder
from spark_state_ext.restore import loader as loading_module
from spark_state_ext.store import LocalStore
from spark_state_ext.store.environment import Environment
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Model, Row, apply_changes, scan

_CHANGES: Changes = {KEYS[0]: Row(100), KEYS[1]: None, KEYS[20]: Row(5, "new", 9)}
_FAULTS_MAX = 200


class Countdown:
    """Lets some operations pass and then fails one."""

    def __init__(self) -> None:
        self.left = -1
        self.failed = ""
        # Files are read side by side.
        self._lock = threading.Lock()

    def start(self, passing: int) -> None:
        self.left, self.failed = passing, ""

    def stop(self) -> None:
        self.left = -1

    def hit(self, operation: str) -> bool:
        """Whether this operation is the one to fail."""
        with self._lock:
            if self.left < 0:
                return False
            self.left -= 1
            if self.left < 0:
                self.failed = operation
                return True
            return False


class FaultyFileSystem:
    """A file system of which each call can fail: before anything was done, or after, as when an answer is lost."""

    def __init__(self, real: Any, countdown: Countdown, after: bool) -> None:
        self._real = real
        self._countdown = countdown
        self._after = after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            failing = self._countdown.hit(name)
            if failing and not self._after:
                raise OSError(errno.EIO, f"{name} fails on purpose")
            result = found(*args, **kwargs)
            if failing:
                raise OSError(errno.EIO, f"the answer of {name} is lost on purpose")
            return result

        return call


def _count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fail: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        fail()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


class Scene:
    """A root and a local store with some history, made anew for every n."""

    def __init__(self, folder: Path, disk: bool) -> None:
        self.root = folder / "root" if disk else None
        self.files = Folder(str(self.root) if self.root else f"memory://{folder.name}-{id(self)}").child("3")
        self.local = folder / "local"
        self.local.mkdir(parents=True)
        self.store = LocalStore.at(self.local / "store", SCHEMA, chunk_rows=3)
        self.pointer: Pointer = first_pointer()
        self.model: Model = {}
        for i in range(5):
            changes: Changes = {KEYS[i]: Row(i), KEYS[i + 3]: Row(-i, "x" * i)}
            self.pointer = committed(self.store, self.files, self.pointer, changes, self.local)
            self.model = apply_changes(self.model, changes)

    def lose_store(self) -> None:
        self.store.close()
        shutil.rmtree(self.local / "store")
        self.store = LocalStore.at(self.local / "store", SCHEMA, chunk_rows=3)


@pytest.fixture
def countdown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Countdown]:
    """Counts LMDB transactions, renames and syncs; file systems are wrapped by the test."""
    made = Countdown()

    def fail_lmdb() -> None:
        if made.hit("lmdb"):
            raise StorageError("a transaction fails on purpose")

    def fail_os() -> None:
        if made.hit("os"):
            raise OSError(errno.EIO, "fails on purpose")

    _count_calls(monkeypatch, Environment, "write", fail_lmdb)
    _count_calls(monkeypatch, Environment, "read", fail_lmdb)
    _count_calls(monkeypatch, os, "replace", fail_os)
    _count_calls(monkeypatch, os, "fsync", fail_os)
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("scenario", "disk", "after"),
    [
        ("commit", True, False),
        ("commit", False, True),
        ("restore and commit", True, True),
        ("restore and commit", False, False),
        ("snapshot", True, False),
        ("snapshot", False, True),
        ("large", True, True),
        ("large", False, False),
    ],
)
def test_every_fault_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, countdown: Countdown, scenario: str, disk: bool, after: bool
) -> None:
    # One file after the other, so that the n-th operation is the same one every time.
    monkeypatch.setattr(loading_module, "_PARALLEL_MAX", 1)
    if scenario == "snapshot":
        monkeypatch.setattr(cadence, "DELTAS_MIN", 5)
        monkeypatch.setattr(cadence, "DELTAS_MAX", 5)
    if scenario == "large":
        monkeypatch.setattr(sealed_module, "MEMORY_BYTES_MAX", 1)
    failures: list[str] = []
    for n in range(_FAULTS_MAX):
        scene = Scene(tmp_path / str(n), disk)
        if scenario == "restore and commit":
            scene.lose_store()
        before = {name: scene.files.get(name) for name in scene.files.names()}
        faulty = scene.files.child()
        faulty._fs = FaultyFileSystem(scene.files._fs, countdown, after)
        bucket = bucket_on(scene.store, faulty, scene.pointer, scene.local)
        expected = apply_changes(scene.model, _CHANGES)
        countdown.start(n)
        try:
            assert bucket.read(scan) == scene.model
            new = bucket.commit(buffer_of(_CHANGES, scene.local)).pointer
        except StorageError:
            new = None
        countdown.stop()
        # Whatever happened, the old pointer gives the old state, here and on a fresh machine.
        fresh = LocalStore.at(scene.local / "fresh", SCHEMA)
        for store in (scene.store, fresh):
            assert state_at(store, scene.files, scene.pointer, scene.local) == scene.model
            if new is not None:
                assert state_at(store, scene.files, new, scene.local) == expected
        for name, data in before.items():
            assert scene.files.get(name) == data
        retried = committed(scene.store, scene.files, scene.pointer, _CHANGES, scene.local)
        for store in (scene.store, fresh):
            assert state_at(store, scene.files, retried, scene.local) == expected
        assert not [p for p in scene.local.iterdir() if p.is_file()], "temporary files are gone"
        scene.store.close()
        fresh.close()
        if not countdown.failed:
            break
        failures.append(countdown.failed)
    else:
        pytest.fail(f"{_FAULTS_MAX} faults and no end")
    assert new is not None
    if scenario == "snapshot":
        assert len(new.lineage) == 1
    # Every kind of operation was made to fail.
    assert "lmdb" in failures
    assert set(failures) & ({"open", "put_file"} if disk else {"pipe_file", "put_file"})
    if disk:
        assert "os" in failures
    if scenario == "restore and commit":
        assert {"info", "cat_file"} <= set(failures)
