"""The driver's part in the lease: it renews the lease of an idle query and releases that of an ended one."""

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
_UNNAMED = "t1700000000000-" + "a" * 32


def hold_lease(folder: Folder, query_folder: str, me: RunIdentity = _ME) -> None:
    """Take the lease as a task of the query does."""
    Lease(folder.child(query_folder), me, 30_000).hold()


def newest_record(folder: Folder, query_folder: str) -> NumberedRecord:
    record = LeaseLog(folder.child(query_folder)).newest()
    assert record is not None
    return record


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path)).child("counts")


@pytest.fixture
def kept(folder: Folder) -> KeptLeases:
    return KeptLeases(folder, _APP, 30_000, {_PLAN})


def test_the_driver_renews_the_lease_of_an_idle_query(folder: Folder, kept: KeptLeases) -> None:
    hold_lease(folder, "query")
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        kept.poll(["query", "another query of the session"], now_s[0], 0)

    clock = Clock(lambda: now_s[0], lambda: 0.0, sleep)
    copied = Lease(folder.child("query"), replace(_ME, application="app-2", plan="other"), 30_000, clock)
    with pytest.raises(LiveRunError, match="is being written by query query of application app-1 driver:7001"):
        copied.hold()
    assert not folder.child("another query of the session").names(), "queries without a lease of ours are left alone"


def test_the_driver_does_not_renew_a_lease_that_tasks_renew(folder: Folder, kept: KeptLeases) -> None:
    hold_lease(folder, "query")
    for at in range(5):
        before = newest_record(folder, "query")
        LeaseLog(folder.child("query")).append(before, before.record.renew_by(_ME, at, 30_000))
        kept.poll(["query"], float(at), at)
        assert newest_record(folder, "query").number == before.number + 1


def test_the_driver_releases_the_lease_of_an_ended_query_once(folder: Folder, kept: KeptLeases) -> None:
    hold_lease(folder, "query")
    kept.poll(["query"], 0.0, 0)
    kept.poll([], 1.0, 0)
    released = newest_record(folder, "query")
    assert released.record.released
    kept.poll([], 2.0, 0)
    assert newest_record(folder, "query") == released
    # A query that is started again holds the lease, idle or not.
    for at in range(3):
        kept.poll(["query"], 3.0 + at, 0)
    assert not newest_record(folder, "query").record.released


def test_the_lease_of_another_application_is_neither_renewed_nor_released(
    folder: Folder, kept: KeptLeases, caplog: pytest.LogCaptureFixture
) -> None:
    hold_lease(folder, "query", replace(_ME, application="app-2"))
    before = newest_record(folder, "query")
    with caplog.at_level(logging.WARNING):
        for at in range(3):
            kept.poll(["query"], float(at), at)
    kept.poll([], 4.0, 0)
    assert newest_record(folder, "query") == before
    assert [record.getMessage() for record in caplog.records] == [
        (
            f"query query: the lease of its state at {folder.root}/query was last renewed by {before.record.owner}. If that "
            "run has ended, this one takes the lease over in its first batch; if it goes on, this one fails"
        )
    ], "one warning, in the log of the driver"


def test_the_driver_keeps_the_lease_of_a_claimed_folder(folder: Folder, kept: KeptLeases) -> None:
    """The folder has another query's name, but its lease names the query that claimed it."""
    claim = Claim("query", f"{folder.root}/query", 0)
    kept.adopted.add("old")
    for at in range(3):
        kept.poll(["query"], float(at), at)
    assert LeaseLog(folder.child("old")).newest() is None, "the driver waits for the claim"
    Lease(folder.child("old"), _ME, 30_000, claim=claim, claims=True).hold()
    before = newest_record(folder, "old")
    for at in range(3, 6):
        kept.poll(["query", "another query of the session"], float(at), at)
    renewed = newest_record(folder, "old")
    assert renewed.number > before.number
    assert not renewed.record.released
    kept.poll(["another query of the session"], 6.0, 6)
    released = newest_record(folder, "old")
    assert released.record.released
    assert released.record.claim == claim
    assert not folder.child("query").names()
    # After the claim is released, the folder no longer belongs to this query.
    release_query_folder(folder.child("old"))
    hold_lease(folder, "old", replace(_ME, query="old", plan="another plan"))
    kept.poll(["query"], 7.0, 7)
    kept.poll([], 8.0, 8)
    assert not newest_record(folder, "old").record.released


def test_the_driver_keeps_the_lease_of_a_folder_claimed_in_an_earlier_run(folder: Folder, kept: KeptLeases) -> None:
    """A restarted program may no longer name the snapshot from which the query began."""
    claim = Claim("query", f"{folder.root}/query", 0)
    for name, owner_claim in (("old", claim), ("other", Claim("else", f"{folder.root}/else", 0))):
        Lease(folder.child(name), _ME, 30_000, claim=owner_claim, claims=True).hold()
    before = {name: newest_record(folder, name).number for name in ("old", "other")}
    for at in range(4):
        kept.poll(["query", "another query of the session"], float(at), at)
    assert newest_record(folder, "old").number > before["old"]
    assert newest_record(folder, "other").number == before["other"]
    kept.poll([], 6.0, 6)
    assert newest_record(folder, "old").record.released
    assert not newest_record(folder, "other").record.released


def test_the_lease_of_a_folder_claimed_by_another_query_is_not_renewed(folder: Folder, kept: KeptLeases) -> None:
    hold_lease(folder, "query")
    kept.poll(["query"], 0.0, 0)
    kept.poll([], 1.0, 0)
    claim = Claim("new query", folder.child("new query").root, 0)
    Lease(folder.child("query"), replace(_ME, query="new query"), 30_000, claim=claim, claims=True).hold()
    claimed = newest_record(folder, "query")
    # The old query starts again in the same application; it will be refused and end.
    for at in range(3):
        kept.poll(["query"], 20.0 + at, 0)
    kept.poll([], 30.0, 0)
    assert newest_record(folder, "query") == claimed


_RESCALES = "c" * 32
_RESCALED = make_rescaled_name("query", _RESCALES)


def poll_renewals(folder: Folder, kept: KeptLeases, query: str = "query") -> dict[str, bool]:
    """Return for each query folder whether the driver renews its lease while a query is idle."""
    before = {name: newest_record(folder, name).number for name in folder.names()}
    now_ms = int(time.time() * 1000)
    for at in range(3):
        kept.poll([query], now_ms / 1000 + at, now_ms + at)
    return {name: newest_record(folder, name).number > number for name, number in before.items()}


def test_a_rescaled_query_keeps_only_the_lease_of_its_new_folder(folder: Folder, kept: KeptLeases) -> None:
    """The first batch also holds the old folder's lease. It must expire, or the old folder would never be removed."""
    me = replace(_ME, plan=_RESCALES)
    kept.plans.add(_RESCALES)
    kept.rescaling.add(_RESCALES)
    hold_lease(folder, "query", me)
    assert poll_renewals(folder, kept) == {"query": True}, "no batch with data has run yet"
    hold_lease(folder, _RESCALED, me)
    # A later call of that batch may be the last to renew the old lease.
    before = newest_record(folder, "query")
    LeaseLog(folder.child("query")).append(before, before.record.renew_by(me, int(time.time() * 1000) + 60_000, 30_000))
    assert poll_renewals(folder, kept) == {"query": False, _RESCALED: True}
    kept.poll([], 0.0, 0)
    assert newest_record(folder, "query").record.released
    assert newest_record(folder, _RESCALED).record.released


def test_the_driver_keeps_the_lease_of_a_query_rescaled_in_an_earlier_run(folder: Folder, kept: KeptLeases) -> None:
    hold_lease(folder, "query", replace(_ME, application="app-1 before", plan=_RESCALES))
    hold_lease(folder, _RESCALED)
    assert poll_renewals(folder, kept) == {"query": False, _RESCALED: True}
    # The folder may also be named for another query, whose folder this query claimed.
    claimed = make_rescaled_name("old", _RESCALES)
    hold_lease(folder, claimed, replace(_ME, query="new"))
    assert poll_renewals(folder, KeptLeases(folder, _APP, 30_000, {_PLAN}), "new")[claimed]


def test_a_query_rolled_back_to_before_its_rescaling_keeps_the_lease_of_the_old_folder(
    folder: Folder, kept: KeptLeases
) -> None:
    hold_lease(folder, _RESCALED, replace(_ME, plan=_RESCALES))
    time.sleep(0.002)
    hold_lease(folder, "query", replace(_ME, plan="planned later"))
    assert poll_renewals(folder, kept) == {"query": True, _RESCALED: False}


def test_the_driver_keeps_the_lease_of_a_query_whose_tasks_do_not_know_its_id(folder: Folder, kept: KeptLeases) -> None:
    hold_lease(folder, _UNNAMED, replace(_ME, query=""))
    other_plan = replace(_ME, query="", plan="planned elsewhere")
    hold_lease(folder, _UNNAMED.replace("a", "b"), other_plan)
    before = newest_record(folder, _UNNAMED)
    for at in range(3):
        kept.poll(["query"], float(at), at)
    assert newest_record(folder, _UNNAMED).number > before.number
    assert newest_record(folder, _UNNAMED.replace("a", "b")).number == 1
    # The driver cannot know that this query has ended.
    kept.poll([], 60.0, 0)
    assert not newest_record(folder, _UNNAMED).record.released


def test_an_unreachable_root_is_logged_once(folder: Folder, kept: KeptLeases, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for at in range(3):
            kept.postpone(StorageError("403"), float(at))
    assert len(caplog.records) == 1
    assert f"could not renew or release the leases below {folder.root}: 403" in caplog.records[0].getMessage()


def damage_lease(folder: Folder, query_folder: str) -> None:
    lease = folder.child(query_folder).child(LEASE_FOLDER)
    for name in lease.names():
        lease.put(name, b"damaged")


def test_a_damaged_lease_does_not_stop_the_renewal_and_release_of_others(
    folder: Folder, kept: KeptLeases, caplog: pytest.LogCaptureFixture
) -> None:
    query_folders = ["query-1", "query-2", "query-3"]
    for query_folder in query_folders:
        hold_lease(folder, query_folder)
    kept.poll(query_folders, 0.0, 0)
    damage_lease(folder, "query-2")
    for at in range(1, 4):
        kept.poll(query_folders, float(at), at)
    assert [newest_record(folder, query_folder).number for query_folder in ("query-1", "query-3")] == [4, 4]
    kept.poll([], 4.0, 4)
    assert all(newest_record(folder, query_folder).record.released for query_folder in ("query-1", "query-3"))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "query-2" in warnings[0]


class Session:
    """A session whose list of active queries fails while `fails` is set."""

    def __init__(self) -> None:
        self.fails = False
        self.requests = 0

    @property
    def streams(self) -> SimpleNamespace:
        self.requests += 1
        if self.fails:
            raise ConnectionError("UNAVAILABLE: one request failed")
        return SimpleNamespace(active=[SimpleNamespace(id="query")])


@pytest.fixture
def keeper() -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper()
    yield keeper
    keeper.stop()


def test_the_keeper_asks_a_session_again_that_failed_for_a_moment(folder: Folder, keeper: LeaseKeeper) -> None:
    hold_lease(folder, "query")
    session = Session()
    session.fails = True
    keeper.keep(session, [folder], _APP, _PLAN, 300)
    eventually(lambda: session.requests > 2)
    session.fails = False
    eventually(lambda: newest_record(folder, "query").number > 2)


def test_the_keeper_stops_with_a_warning_if_a_session_fails_for_long(
    folder: Folder, keeper: LeaseKeeper, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session()
    session.fails = True
    keeper.keep(session, [folder], _APP, _PLAN, 300)
    eventually(lambda: session.requests > 2)
    assert keeper._thread is not None
    monkeypatch.setattr("spark_state_ext.spark.client.lease_keeper._LOST_S", 0.0)
    eventually(lambda: keeper._thread is None)
    assert session.requests > 2
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "no longer renews the leases" in record.getMessage()


def test_a_root_that_hangs_does_not_stop_the_renewal_in_another(
    folder: Folder, keeper: LeaseKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Folder(str(tmp_path / "hangs")).child("counts")
    hold_lease(folder, "query")
    end, newest = threading.Event(), LeaseLog.newest

    def hang(self: LeaseLog) -> NumberedRecord | None:
        if self.root.startswith(hanging.root):
            end.wait()
        return newest(self)

    monkeypatch.setattr(LeaseLog, "newest", hang)
    session = Session()
    try:
        keeper.keep(session, [hanging, folder], _APP, _PLAN, 300)
        eventually(lambda: newest_record(folder, "query").number > 2)
        assert not end.is_set()
    finally:
        end.set()


def test_a_request_that_never_returns_does_not_stop_the_renewal(
    folder: Folder, keeper: LeaseKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "_SELDOM_S", 0.3)
    hold_lease(folder, "query")
    end, newest, remaining = threading.Event(), LeaseLog.newest, [2]

    def hang(self: LeaseLog) -> NumberedRecord | None:
        if remaining[0]:
            remaining[0] -= 1
            end.wait()
        return newest(self)

    monkeypatch.setattr(LeaseLog, "newest", hang)

    def is_renewed() -> bool:
        record = newest(LeaseLog(folder.child("query")))
        return record is not None and record.number > 2

    session = Session()
    try:
        keeper.keep(session, [folder], _APP, _PLAN, 300)
        eventually(lambda: remaining == [0])
        eventually(is_renewed)
    finally:
        end.set()
