"""The driver's part in the lease: renewing it while a query is idle, releasing it when the query has ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_state_ext.errors import LiveRunError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LEASE_FOLDER
from spark_state_ext.ownership.lease import Clock, Lease
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Claim, NumberedRecord, RunIdentity
from spark_state_ext.ownership.release import release_query_folder
from spark_state_ext.rescale.folders import make_rescaled_name
from spark_state_ext.spark.client import lease_keeper as keeper_module
from spark_state_ext.spark.client.lease_keeper import KeptLeases, LeaseKeeper
from tests.helpers.waiting import eventually

_APP, _PLAN = "app-1 driver:7001", "plan"
_ME = RunIdentity(_APP, _PLAN, "query")
_UNTOLD = "t1700000000000-" + "a" * 32


def _task(folder: Folder, query_folder: str, me: RunIdentity = _ME) -> None:
    """A task of the query takes the lease."""
    Lease(folder.child(query_folder), me, 30_000).hold()


def _newest(folder: Folder, query_folder: str) -> NumberedRecord:
    found = LeaseLog(folder.child(query_folder)).newest()
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path)).child("counts")


@pytest.fixture
def kept(folder: Folder) -> KeptLeases:
    return KeptLeases(folder, _APP, 30_000, {_PLAN})


def test_an_idle_query_keeps_its_lease(folder: Folder, kept: KeptLeases) -> None:
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


def test_what_tasks_renew_the_driver_does_not(folder: Folder, kept: KeptLeases) -> None:
    _task(folder, "query")
    for at in range(5):
        before = _newest(folder, "query")
        LeaseLog(folder.child("query")).append(before, before.record.renew_by(_ME, at, 30_000))
        kept.poll(["query"], float(at), at)
        assert _newest(folder, "query").number == before.number + 1


def test_a_query_that_has_ended_gives_its_lease_free_once(folder: Folder, kept: KeptLeases) -> None:
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
    folder: Folder, kept: KeptLeases, caplog: pytest.LogCaptureFixture
) -> None:
    _task(folder, "query", replace(_ME, application="app-2"))
    before = _newest(folder, "query")
    with caplog.at_level(logging.WARNING):
        for at in range(3):
            kept.poll(["query"], float(at), at)
    kept.poll([], 4.0, 0)
    assert _newest(folder, "query") == before
    assert [record.getMessage() for record in caplog.records] == [
        (
            f"query query: the lease of its state at {folder.root}/query was last renewed by {before.record.owner}. If that "
            "run has ended, this one takes the lease over in its first batch; if it goes on, this one fails"
        )
    ], "said once, where the user looks"


def test_a_folder_that_a_query_has_claimed_is_looked_after(folder: Folder, kept: KeptLeases) -> None:
    """It has another query's name; its lease tells whose it is."""
    claim = Claim("query", f"{folder.root}/query", 0)
    kept.adopted.add("old")
    for at in range(3):
        kept.poll(["query"], float(at), at)
    assert LeaseLog(folder.child("old")).newest() is None, "it waits for the claim"
    Lease(folder.child("old"), _ME, 30_000, claim=claim, claims=True).hold()
    before = _newest(folder, "old")
    for at in range(3, 6):
        kept.poll(["query", "another query of the session"], float(at), at)
    renewed = _newest(folder, "old")
    assert renewed.number > before.number
    assert not renewed.record.released
    kept.poll(["another query of the session"], 6.0, 6)
    released = _newest(folder, "old")
    assert released.record.released
    assert released.record.claim == claim
    assert not folder.child("query").names()
    # Once the claim is released, the folder is none of this query's any more.
    release_query_folder(folder.child("old"))
    _task(folder, "old", replace(_ME, query="old", plan="another plan"))
    kept.poll(["query"], 7.0, 7)
    kept.poll([], 8.0, 8)
    assert not _newest(folder, "old").record.released


def test_a_folder_that_was_claimed_in_an_earlier_run_is_looked_after(folder: Folder, kept: KeptLeases) -> None:
    """The program of a restart may say no more where the query began."""
    claim = Claim("query", f"{folder.root}/query", 0)
    for name, its in (("old", claim), ("other", Claim("else", f"{folder.root}/else", 0))):
        Lease(folder.child(name), _ME, 30_000, claim=its, claims=True).hold()
    before = {name: _newest(folder, name).number for name in ("old", "other")}
    for at in range(4):
        kept.poll(["query", "another query of the session"], float(at), at)
    assert _newest(folder, "old").number > before["old"]
    assert _newest(folder, "other").number == before["other"]
    kept.poll([], 6.0, 6)
    assert _newest(folder, "old").record.released
    assert not _newest(folder, "other").record.released


def test_a_folder_that_was_claimed_from_a_query_is_not_its_to_renew(folder: Folder, kept: KeptLeases) -> None:
    _task(folder, "query")
    kept.poll(["query"], 0.0, 0)
    kept.poll([], 1.0, 0)
    claim = Claim("new query", folder.child("new query").root, 0)
    Lease(folder.child("query"), replace(_ME, query="new query"), 30_000, claim=claim, claims=True).hold()
    claimed = _newest(folder, "query")
    # The old query is started again, in the same application: it is about to be refused, and ends.
    for at in range(3):
        kept.poll(["query"], 20.0 + at, 0)
    kept.poll([], 30.0, 0)
    assert _newest(folder, "query") == claimed


_RESCALES = "c" * 32
_MOVED = make_rescaled_name("query", _RESCALES)


def _renewals(folder: Folder, kept: KeptLeases, query: str = "query") -> dict[str, bool]:
    """Which leases the driver renews while a query is idle."""
    before = {name: _newest(folder, name).number for name in folder.names()}
    now_ms = int(time.time() * 1000)
    for at in range(3):
        kept.poll([query], now_ms / 1000 + at, now_ms + at)
    return {name: _newest(folder, name).number > number for name, number in before.items()}


def test_a_query_that_was_rescaled_keeps_the_lease_of_the_folder_that_it_goes_on_in(
    folder: Folder, kept: KeptLeases
) -> None:
    """Its first batch holds the old folder's too. That one must age: else nobody would remove the folder."""
    me = replace(_ME, plan=_RESCALES)
    kept.plans.add(_RESCALES)
    kept.rescaling.add(_RESCALES)
    _task(folder, "query", me)
    assert _renewals(folder, kept) == {"query": True}, "it has had no batch with data yet"
    _task(folder, _MOVED, me)
    # A later call of that batch may renew the old one last.
    before = _newest(folder, "query")
    LeaseLog(folder.child("query")).append(before, before.record.renew_by(me, int(time.time() * 1000) + 60_000, 30_000))
    assert _renewals(folder, kept) == {"query": False, _MOVED: True}
    kept.poll([], 0.0, 0)
    assert _newest(folder, "query").record.released
    assert _newest(folder, _MOVED).record.released


def test_a_query_that_was_rescaled_in_an_earlier_run_is_looked_after(folder: Folder, kept: KeptLeases) -> None:
    _task(folder, "query", replace(_ME, application="app-1 before", plan=_RESCALES))
    _task(folder, _MOVED)
    assert _renewals(folder, kept) == {"query": False, _MOVED: True}
    # And where the folder is called after a query that this one had claimed its first folder from.
    claimed = make_rescaled_name("old", _RESCALES)
    _task(folder, claimed, replace(_ME, query="new"))
    assert _renewals(folder, KeptLeases(folder, _APP, 30_000, {_PLAN}), "new")[claimed]


def test_a_query_that_went_back_to_before_it_was_rescaled_keeps_the_old_folder(
    folder: Folder, kept: KeptLeases
) -> None:
    _task(folder, _MOVED, replace(_ME, plan=_RESCALES))
    time.sleep(0.002)
    _task(folder, "query", replace(_ME, plan="planned later"))
    assert _renewals(folder, kept) == {"query": True, _MOVED: False}


def test_queries_whose_tasks_are_not_told_theirs_are_looked_after(folder: Folder, kept: KeptLeases) -> None:
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
    folder: Folder, kept: KeptLeases, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for at in range(3):
            kept.postpone(StorageError("403"), float(at))
    assert len(caplog.records) == 1
    assert f"could not renew or release the leases below {folder.root}: 403" in caplog.records[0].getMessage()


def _damage(folder: Folder, query_folder: str) -> None:
    lease = folder.child(query_folder).child(LEASE_FOLDER)
    for name in lease.names():
        lease.put(name, b"damaged")


def test_a_damaged_lease_keeps_no_other_one_from_being_renewed_and_released(
    folder: Folder, kept: KeptLeases, caplog: pytest.LogCaptureFixture
) -> None:
    query_folders = ["query-1", "query-2", "query-3"]
    for query_folder in query_folders:
        _task(folder, query_folder)
    kept.poll(query_folders, 0.0, 0)
    _damage(folder, "query-2")
    for at in range(1, 4):
        kept.poll(query_folders, float(at), at)
    assert [_newest(folder, query_folder).number for query_folder in ("query-1", "query-3")] == [4, 4]
    kept.poll([], 4.0, 4)
    assert all(_newest(folder, query_folder).record.released for query_folder in ("query-1", "query-3"))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert "query-2" in said[0]


class _Session:
    """Its list of active queries fails when told to."""

    def __init__(self) -> None:
        self.fails = False
        self.asked = 0

    @property
    def streams(self) -> SimpleNamespace:
        self.asked += 1
        if self.fails:
            raise ConnectionError("UNAVAILABLE: one request failed")
        return SimpleNamespace(active=[SimpleNamespace(id="query")])


@pytest.fixture
def keeper() -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper()
    yield keeper
    keeper.stop()


def test_a_session_that_fails_for_a_moment_is_asked_again(folder: Folder, keeper: LeaseKeeper) -> None:
    _task(folder, "query")
    session = _Session()
    session.fails = True
    keeper.keep(session, [folder], _APP, _PLAN, 300)
    eventually(lambda: session.asked > 2)
    session.fails = False
    eventually(lambda: _newest(folder, "query").number > 2)


def test_a_session_that_fails_for_long_is_given_up_and_that_is_said(
    folder: Folder, keeper: LeaseKeeper, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = _Session()
    session.fails = True
    keeper.keep(session, [folder], _APP, _PLAN, 300)
    eventually(lambda: session.asked > 2)
    assert keeper._thread is not None
    monkeypatch.setattr("spark_state_ext.spark.client.lease_keeper._LOST_S", 0.0)
    eventually(lambda: keeper._thread is None)
    assert session.asked > 2
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "no longer renews the leases" in record.getMessage()


def test_a_store_that_hangs_keeps_no_other_one_from_being_asked(
    folder: Folder, keeper: LeaseKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = Folder(str(tmp_path / "hangs")).child("counts")
    _task(folder, "query")
    never, newest = threading.Event(), LeaseLog.newest

    def silent(self: LeaseLog) -> NumberedRecord | None:
        if self.root.startswith(hangs.root):
            never.wait()
        return newest(self)

    monkeypatch.setattr(LeaseLog, "newest", silent)
    session = _Session()
    try:
        keeper.keep(session, [hangs, folder], _APP, _PLAN, 300)
        eventually(lambda: _newest(folder, "query").number > 2)
        assert not never.is_set()
    finally:
        never.set()


def test_a_request_that_never_returns_does_not_end_renewing(
    folder: Folder, keeper: LeaseKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "_SELDOM_S", 0.3)
    _task(folder, "query")
    never, newest, hung = threading.Event(), LeaseLog.newest, [2]

    def silent(self: LeaseLog) -> NumberedRecord | None:
        if hung[0]:
            hung[0] -= 1
            never.wait()
        return newest(self)

    monkeypatch.setattr(LeaseLog, "newest", silent)

    def renewed() -> bool:
        found = newest(LeaseLog(folder.child("query")))
        return found is not None and found.number > 2

    session = _Session()
    try:
        keeper.keep(session, [folder], _APP, _PLAN, 300)
        eventually(lambda: hung == [0])
        eventually(renewed)
    finally:
        never.set()
