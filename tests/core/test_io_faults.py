"""The n-th input or output operation fails, for every n: the old state stays, and the retry succeeds."""

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
from spark_state_ext.commit.cadence import SnapshotCadence
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
    """Let some operations pass and then make one fail."""

    def __init__(self) -> None:
        self.left = -1
        self.failed = ""
        # Files are read in parallel.
        self._lock = threading.Lock()

    def start(self, passing: int) -> None:
        self.left, self.failed = passing, ""

    def stop(self) -> None:
        self.left = -1

    def hit(self, operation: str) -> bool:
        """Return whether this operation must fail."""
        with self._lock:
            if self.left < 0:
                return False
            self.left -= 1
            if self.left < 0:
                self.failed = operation
                return True
            return False


class FaultyFileSystem:
    """A file system of which each call can fail: before it does anything, or afterwards, as if the answer were lost."""

    def __init__(self, real: Any, countdown: Countdown, after: bool) -> None:
        self._real = real
        self._countdown = countdown
        self._after = after

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._real, name)
        if not callable(attribute):
            return attribute

        def call_or_fail(*args: Any, **kwargs: Any) -> Any:
            failing = self._countdown.hit(name)
            if failing and not self._after:
                raise OSError(errno.EIO, f"{name} fails on purpose")
            result = attribute(*args, **kwargs)
            if failing:
                raise OSError(errno.EIO, f"the answer of {name} is lost on purpose")
            return result

        return call_or_fail


def _count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fail: Callable[[], None]) -> None:
    call_real = getattr(owner, name)

    def count_and_call(*args: Any, **kwargs: Any) -> Any:
        fail()
        return call_real(*args, **kwargs)

    monkeypatch.setattr(owner, name, count_and_call)


class Scene:
    """A root and a local store with some history; each n gets a new scene."""

    def __init__(self, folder: Path, disk: bool) -> None:
        self.root = folder / "root" if disk else None
        self.files = Folder(str(self.root) if self.root else f"memory://{folder.name}-{id(self)}").child("3")
        self.local = folder / "local"
        self.local.mkdir(parents=True)
        self.store = LocalStore.at(self.local / "store", SCHEMA, chunk_rows=3)
        self.pointer: Pointer = first_pointer()
        self.model: Model = {}
        for number in range(5):
            changes: Changes = {KEYS[number]: Row(number), KEYS[number + 3]: Row(-number, "x" * number)}
            self.pointer = committed(self.store, self.files, self.pointer, changes, self.local)
            self.model = apply_changes(self.model, changes)

    def lose_store(self) -> None:
        self.store.close()
        shutil.rmtree(self.local / "store")
        self.store = LocalStore.at(self.local / "store", SCHEMA, chunk_rows=3)


@pytest.fixture
def countdown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Countdown]:
    """Count LMDB transactions, renames and syncs; the test wraps file systems itself."""
    countdown = Countdown()

    def fail_lmdb() -> None:
        if countdown.hit("lmdb"):
            raise StorageError("a transaction fails on purpose")

    def fail_os() -> None:
        if countdown.hit("os"):
            raise OSError(errno.EIO, "fails on purpose")

    _count_calls(monkeypatch, Environment, "write", fail_lmdb)
    _count_calls(monkeypatch, Environment, "read", fail_lmdb)
    _count_calls(monkeypatch, os, "replace", fail_os)
    _count_calls(monkeypatch, os, "fsync", fail_os)
    yield countdown
    countdown.stop()


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
def test_a_call_that_fails_at_any_operation_keeps_the_old_state_and_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, countdown: Countdown, scenario: str, disk: bool, after: bool
) -> None:
    # Read files one after another, so that the n-th operation is always the same one.
    monkeypatch.setattr(loading_module, "_PARALLEL_MAX", 1)
    cadence = SnapshotCadence(5, 5) if scenario == "snapshot" else SnapshotCadence()
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
        bucket = bucket_on(scene.store, faulty, scene.pointer, scene.local, cadence)
        expected = apply_changes(scene.model, _CHANGES)
        countdown.start(n)
        try:
            assert bucket.read(scan) == scene.model
            new = bucket.commit(buffer_of(_CHANGES, scene.local)).pointer
        except StorageError:
            new = None
        countdown.stop()
        # In any case, the old pointer leads to the old state, here and on a new machine.
        fresh = LocalStore.at(scene.local / "fresh", SCHEMA)
        for store in (scene.store, fresh):
            assert state_at(store, scene.files, scene.pointer, scene.local) == scene.model
            if new is not None:
                assert state_at(store, scene.files, new, scene.local) == expected
        for name, data in before.items():
            assert scene.files.get(name) == data
        retried = committed(scene.store, scene.files, scene.pointer, _CHANGES, scene.local, cadence)
        for store in (scene.store, fresh):
            assert state_at(store, scene.files, retried, scene.local) == expected
        assert not [path for path in scene.local.iterdir() if path.is_file()], "temporary files were left"
        scene.store.close()
        fresh.close()
        if not countdown.failed:
            break
        failures.append(countdown.failed)
    else:
        pytest.fail(f"the call still fails after {_FAULTS_MAX} faults")
    assert new is not None
    if scenario == "snapshot":
        assert len(new.lineage) == 1
    # Each kind of operation has failed.
    assert "lmdb" in failures
    assert set(failures) & ({"open", "put_file"} if disk else {"pipe_file", "put_file"})
    if disk:
        assert "os" in failures
    if scenario == "restore and commit":
        assert {"info", "cat_file"} <= set(failures)
