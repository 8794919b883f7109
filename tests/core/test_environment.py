"""LMDB environments that are closed while others use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from core_support import SCHEMA

from spark_state_ext.errors import StorageError
from spark_state_ext.store import LocalStore, environment
from spark_state_ext.store.environment import (
    MAP_BYTES_MIN,
    ClosedEnvironmentError,
    Environment,
    Reader,
    SharedEnvironment,
    Writing,
)

WAIT_S = 30.0


def _put(name: bytes, value: bytes = b"value") -> Callable[[Writing], None]:
    return lambda txn: txn.put(b"notes", name, value)


def _got(name: bytes) -> Callable[[Reader], bytes | None]:
    def work(txn: Reader) -> bytes | None:
        value = txn.get(b"notes", name)
        return None if value is None else bytes(value)

    return work


def _shared(folder: Path) -> SharedEnvironment:
    return SharedEnvironment(folder, MAP_BYTES_MIN)


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_what_is_closed_between_opening_and_use_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = _shared(tmp_path / "bucket")
    shared.write(_put(b"a"))
    real = Environment._used
    closed: list[Environment] = []

    def closed_first(self: Environment) -> Any:
        if self not in closed:
            closed.append(self)
            if len(closed) < 4:
                self.close()
        return real(self)

    monkeypatch.setattr(Environment, "_used", closed_first)
    assert shared.read(_got(b"a")) == b"value"
    assert len(closed) == 4, "three were closed, and the fourth was used"
    for use in (lambda: shared.write(_put(b"b")), lambda: shared.map_bytes, shared.check_readers):
        closed.clear()
        use()
        assert len(closed) == 4
    assert shared.read(_got(b"b")) == b"value"


def test_trying_again_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = _shared(tmp_path / "bucket")
    real = Environment._used

    def closed_first(self: Environment) -> Any:
        self.close()
        return real(self)

    monkeypatch.setattr(Environment, "_used", closed_first)
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
    old = first.opened
    reading, go_on = threading.Event(), threading.Event()

    def long(txn: Reader) -> bytes | None:
        reading.set()
        assert go_on.wait(WAIT_S)
        return _got(b"a")(txn)

    with ThreadPoolExecutor(3) as threads:
        reader = threads.submit(first.read, long)
        assert reading.wait(WAIT_S)
        closing = threads.submit(second.close)
        _until(lambda: old._gate._closed)
        late = threads.submit(_shared(tmp_path / "bucket").read, _got(b"a"))
        _shared(tmp_path / "another bucket").write(_put(b"b"))
        assert not any(future.done() for future in (reader, closing, late))
        go_on.set()
        assert reader.result(WAIT_S) == late.result(WAIT_S) == b"value"
        closing.result(WAIT_S)
    assert old.closed
    assert first.opened is second.opened is not old


def test_nobody_opens_what_is_being_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _shared(tmp_path / "bucket"), _shared(tmp_path / "bucket")
    first.write(_put(b"a"))
    real = environment.set_aside

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
    assert first.opened is second.opened
    assert first.folder.exists()


def test_closing_and_using_at_once(tmp_path: Path) -> None:
    stores = [LocalStore(tmp_path / "bucket", SCHEMA) for _ in range(2)]
    stop_s = time.monotonic() + 1.0
    rounds = [0, 0]

    def use(number: int) -> None:
        while time.monotonic() < stop_s:
            stores[number].note({f"{number}": b"%d" % rounds[number]})
            assert stores[number].notes()[f"{number}"] == b"%d" % rounds[number]
            assert stores[number].map_bytes >= MAP_BYTES_MIN
            rounds[number] += 1

    with ThreadPoolExecutor(2) as threads:
        users = [threads.submit(use, number) for number in range(2)]
        closed = 0
        while time.monotonic() < stop_s:
            stores[closed % 2].close()
            closed += 1
            time.sleep(0.001)
        for user in users:
            user.result(WAIT_S)
    assert min(*rounds, closed) > 10
