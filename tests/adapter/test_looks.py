"""A look at what backends had confirmed, when a run first comes to a bucket."""

from __future__ import annotations

import shutil
import threading
from collections import OrderedDict

import pytest
from core_support import KEYS, Row, buffer_of
from life import Life

from arrow_schemas.pointer import Standing
from spark_state_ext.errors import LiveRunError, StorageError
from spark_state_ext.folder import Folder
from spark_state_ext.pool import DaemonPool
from spark_state_ext.spark.housekeeping import CleanUps
from spark_state_ext.spark.looks import Looks
from spark_state_ext.spark.places import Leases

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Looks, "_seen", OrderedDict())
    monkeypatch.setattr(Looks, "_beside", DaemonPool("looks"))


def _look(life: Life, run: str = "run", brought: list[str] | None = None) -> None:
    def bring_back() -> None:
        if brought is not None:
            brought.append("back")

    clean_ups = CleanUps(life.bucket(), life.places(), Leases(()), life.batches_retained, str(life.local), bring_back)
    clean_ups.look(life.pointers[-1], run)
    # One thread does it all, in order.
    Looks._beside.submit(lambda: None).result(WAIT_S)


def _remove(life: Life, name: str) -> None:
    shutil.rmtree(life.folder(name).root)


def test_a_root_that_was_removed_is_noticed_while_the_local_store_is_warm(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    life.history(5)
    brought: list[str] = []
    _look(life, brought=brought)
    assert brought == []
    assert not caplog.text
    _remove(life, "a")
    _look(life, brought=brought)
    assert brought == [], "this run has looked already"
    _look(life, "another run", brought)
    assert brought == ["back"]
    assert "cannot give back" in caplog.text
    pointer = life.batch()
    assert "somebody has deleted files from a: it gets a fresh full backup" in caplog.text
    assert pointer.standings == {"a": Standing(pointer.ref)}
    assert life.restored(pointer) == life.models[-1]


def test_the_call_that_sends_the_full_backup_does_not_look(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    """Its pointer is of before that."""
    life.history(5)
    _remove(life, "a")
    _look(life)
    old, bucket = life.pointers[-1], life.bucket()
    bucket.commit(buffer_of({KEYS[0]: Row(1)}, life.local))
    clean_ups = CleanUps(bucket, life.places(), Leases(()), life.batches_retained, str(life.local))
    caplog.clear()
    clean_ups.look(old, "another run")
    Looks._beside.submit(lambda: None).result(WAIT_S)
    assert not caplog.text


def test_of_two_backends_the_one_that_was_removed_gets_a_full_backup(life: Life) -> None:
    life.names = ("a", "b")
    life.history(5)
    _remove(life, "b")
    _look(life)
    for _ in range(3):
        life.batch()
        life.settle()
    pointer = life.batch({})
    assert pointer.standings["b"] == Standing(pointer.ref)
    assert life.restored(pointer, "b") == life.models[-1]


def test_a_backend_that_has_a_snapshot_only_lacks_nothing(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    life.history(5)
    _remove(life, "a")
    _look(life)
    pointer = life.batch()
    ref = pointer.standings["a"].through
    assert ref is not None
    life.settle()
    life.folder("a").remove(f"{ref}.delta.arrow")
    caplog.clear()
    _look(life, "another run")
    assert not caplog.text


def test_a_store_that_cannot_be_reached_is_looked_at_again(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(self: Folder, name: str) -> int:
        raise StorageError("503") from ConnectionError("away")

    life.history(5)
    _remove(life, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "size", away)
        _look(life)
    assert "cannot be told: 503" in caplog.text
    assert "deleted" not in caplog.text
    _look(life)
    life.batch()
    assert "somebody has deleted files from a" in caplog.text


def test_a_run_that_was_replaced_brings_nothing_back(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Leases) -> None:
        raise LiveRunError("another run has it")

    life.history(5)
    _remove(life, "a")
    monkeypatch.setattr(Leases, "check", lost)
    brought: list[str] = []
    _look(life, brought=brought)
    assert brought == []
    assert life.store.notes().keys() == {name for name in life.store.notes() if "lost" not in name}


def test_what_a_late_task_misses_may_have_been_deleted_rightly(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that nobody waits for any more looks for a checkpoint that is old by now."""
    life.history(5)
    old = life.pointers[-1]
    life.history(40)
    ref = old.standings["a"].through
    assert ref is not None
    life.folder("a").remove(f"{ref}.delta.arrow")
    life.pointers.append(old)
    _look(life)
    life.pointers.pop()
    life.batch()
    assert "gets a fresh full backup" not in caplog.text


def test_nobody_waits_for_a_look(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ends = threading.Event(), threading.Event()

    def hangs(self: Folder, name: str) -> int:
        began.set()
        assert ends.wait(WAIT_S)
        return 1

    life.history(5)
    monkeypatch.setattr(Folder, "size", hangs)
    clean_ups = CleanUps(life.bucket(), life.places(), Leases(()), life.batches_retained, str(life.local))
    clean_ups.look(life.pointers[-1], "run")
    assert began.wait(WAIT_S)
    monkeypatch.undo()
    life.batch()
    ends.set()
