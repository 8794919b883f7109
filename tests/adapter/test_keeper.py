"""The driver's part in the lease: renewing it while a query is idle, releasing it when the query has ended."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from spark_state_ext.errors import LiveRunError, StorageError
from spark_state_ext.folder import Folder
from spark_state_ext.lease import Clock, Lease
from spark_state_ext.lease_log import LeaseLog
from spark_state_ext.lease_record import Found, RunIdentity
from spark_state_ext.spark.keeper import Kept

_APP, _PLAN = "app-1 driver:7001", "plan"
_ME = RunIdentity(_APP, _PLAN, "query")
_UNTOLD = "t1700000000000-" + "a" * 32


def _task(folder: Folder, home: str, me: RunIdentity = _ME) -> None:
    """A task of the query takes the lease."""
    Lease(folder.child(home), me, 30_000).hold()


def _newest(folder: Folder, home: str) -> Found:
    found = LeaseLog(folder.child(home)).newest()
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path)).child("counts")


@pytest.fixture
def kept(folder: Folder) -> Kept:
    return Kept(folder, _APP, 30_000, {_PLAN})


def test_an_idle_query_keeps_its_lease(folder: Folder, kept: Kept) -> None:
    _task(folder, "query")
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        kept.poll(["query", "another query of the session"], now_s[0], 0)

    clock = Clock(lambda: now_s[0], lambda: 0.0, sleep)
    copied = Lease(folder.child("query"), replace(_ME, application="app-2", plan="other"), 30_000, clock)
    with pytest.raises(LiveRunError, match="is being written by query query of application app-1 driver:7001"):
        copied.hold()
    assert not folder.child("another query of the session").names(), "what is none of ours is left alone"


def test_what_tasks_renew_the_driver_does_not(folder: Folder, kept: Kept) -> None:
    _task(folder, "query")
    for at in range(5):
        before = _newest(folder, "query")
        LeaseLog(folder.child("query")).append(before, before.record.renewed(_ME, at, 30_000))
        kept.poll(["query"], float(at), at)
        assert _newest(folder, "query").number == before.number + 1


def test_a_query_that_has_ended_gives_its_lease_free_once(folder: Folder, kept: Kept) -> None:
    _task(folder, "query")
    kept.poll(["query"], 0.0, 0)
    kept.poll([], 1.0, 0)
    released = _newest(folder, "query")
    assert released.record.released
    kept.poll([], 2.0, 0)
    assert _newest(folder, "query") == released
    # Started again it holds the lease, idle or not.
    for at in range(3):
        kept.poll(["query"], 3.0 + at, 0)
    assert not _newest(folder, "query").record.released


def test_what_belongs_to_another_application_is_neither_renewed_nor_released(
    folder: Folder, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    _task(folder, "query", replace(_ME, application="app-2"))
    before = _newest(folder, "query")
    with caplog.at_level(logging.WARNING):
        for at in range(3):
            kept.poll(["query"], float(at), at)
    kept.poll([], 4.0, 0)
    assert _newest(folder, "query") == before
    assert [record.getMessage() for record in caplog.records] == [
        f"query query: the state at {folder.root}/query is held by {before.record.owner}"
    ], "said once, where the user looks"


def test_queries_whose_tasks_are_not_told_theirs_are_looked_after(folder: Folder, kept: Kept) -> None:
    _task(folder, _UNTOLD, replace(_ME, query=""))
    others = replace(_ME, query="", plan="planned elsewhere")
    _task(folder, _UNTOLD.replace("a", "b"), others)
    before = _newest(folder, _UNTOLD)
    for at in range(3):
        kept.poll(["query"], float(at), at)
    assert _newest(folder, _UNTOLD).number > before.number
    assert _newest(folder, _UNTOLD.replace("a", "b")).number == 1
    # Whether it was this query that ended is not known.
    kept.poll([], 60.0, 0)
    assert not _newest(folder, _UNTOLD).record.released


def test_a_root_that_the_driver_cannot_reach_is_said_once(
    folder: Folder, kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for at in range(3):
            kept.put_off(StorageError("403"), float(at))
    assert len(caplog.records) == 1
    assert "cannot be looked after by this process: 403" in caplog.records[0].getMessage()
