"""Who may write an operator's state."""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from lease_support import LEASE_MS, LEASE_S, ME, OTHER, THIRD_S, Virtual, local_run, newest_in
from test_create import folder_of

from spark_state_ext.errors import LiveRunError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import Lease, LeaseRegistry, LeaseState
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import NumberedRecord, RunIdentity
from tests.helpers.waiting import WAIT_S, eventually


def test_lease_times_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 100"):
        Lease(Folder(str(tmp_path)), ME, 99)


@pytest.fixture
def clock() -> Virtual:
    return Virtual()


def _renewed(lease: Lease) -> None:
    """Hold it, and wait for what is begun beside."""
    lease.hold()
    eventually(lambda: lease._renewal.over)


def _lease(root: Path, me: RunIdentity, clock: Virtual) -> Lease:
    return Lease(Folder(str(root)), me, LEASE_MS, clock.clock)


def test_a_second_run_is_refused_while_the_first_renews(tmp_path: Path, clock: Virtual) -> None:
    first = _lease(tmp_path, ME, clock)
    first.hold()
    clock.meanwhile = lambda: _renewed(first)
    for _ in range(2):
        with pytest.raises(LiveRunError, match=r"is being written by query query of application application on host"):
            _lease(tmp_path, OTHER, clock).hold()
    # Nothing was taken: the first goes on.
    _renewed(first)
    assert newest_in(tmp_path).owner == ME


def test_who_waits_says_so(tmp_path: Path, clock: Virtual, caplog: pytest.LogCaptureFixture) -> None:
    _lease(tmp_path, ME, clock).hold()
    with caplog.at_level(logging.WARNING):
        _lease(tmp_path, OTHER, clock).hold()
    said = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert len(said) == 1
    assert "application application on host" in said[0]
    assert "30.0 s" in said[0]


@pytest.mark.parametrize("off_s", [-1e5, -LEASE_S, 0.0, 2 * LEASE_S, 1e5])
def test_a_clock_that_is_wrong_lets_nobody_in(tmp_path: Path, off_s: float) -> None:
    """A run that renews is refused to others however late or early their clock is."""
    clock = Virtual()
    first = _lease(tmp_path, ME, clock)
    first.hold()
    clock.meanwhile = lambda: _renewed(first)
    clock.off_s = off_s
    with pytest.raises(LiveRunError):
        _lease(tmp_path, OTHER, clock).hold()
    assert newest_in(tmp_path).owner == ME


def test_a_silent_run_is_replaced_after_its_lease_and_then_refused(tmp_path: Path, clock: Virtual) -> None:
    first, second = _lease(tmp_path, ME, clock), _lease(tmp_path, OTHER, clock)
    first.hold()
    second.hold()
    assert clock.now_s >= LEASE_S
    assert newest_in(tmp_path).owner == OTHER
    with pytest.raises(LiveRunError, match="was taken over by query query of application other application"):
        first.hold()
    assert first.state is LeaseState.LOST
    # Neither does it come back, in a process that remembers nothing, when the other has ended.
    _release(tmp_path)
    with pytest.raises(LiveRunError, match="was taken over"):
        _lease(tmp_path, ME, clock).hold()
    # Started anew, it is another run.
    _lease(tmp_path, replace(ME, plan="planned again"), clock).hold()


def _release(root: Path) -> None:
    log = LeaseLog(Folder(str(root)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, released=True, nonce="0" * 32))


def test_a_run_that_said_that_it_ended_is_followed_at_once(tmp_path: Path, clock: Virtual) -> None:
    _lease(tmp_path, ME, clock).hold()
    _release(tmp_path)
    _lease(tmp_path, OTHER, clock).hold()
    assert clock.now_s == 0.0
    assert newest_in(tmp_path).replaced == ()


def test_a_driver_whose_process_is_gone_is_followed_at_once(tmp_path: Path, clock: Virtual) -> None:
    driver = subprocess.Popen(["sleep", "3600"])
    try:
        _lease(tmp_path, local_run(driver.pid), clock).hold()
    finally:
        driver.kill()
        driver.wait()
    _lease(tmp_path, OTHER, clock).hold()
    assert clock.now_s == 0.0


def test_a_process_that_ends_is_not_a_run_that_ends(tmp_path: Path, clock: Virtual) -> None:
    """An executor renews and is killed; the run goes on elsewhere, and a copied checkpoint gets nothing."""
    elsewhere = _lease(tmp_path, replace(ME, host="other machine"), clock)
    elsewhere.hold()
    clock.now_s += 1.1 * THIRD_S
    executor = subprocess.run(
        [sys.executable, "-c", _EXECUTOR, str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert executor.stdout == "held\n"
    clock.meanwhile = lambda: _renewed(elsewhere)
    with pytest.raises(LiveRunError, match=f"copy the state too: copy {tmp_path} to the same place"):
        _lease(tmp_path, OTHER, clock).hold()
    _renewed(elsewhere)


_EXECUTOR = """
import sys
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_record import RunIdentity
Lease(Folder(sys.argv[1]), RunIdentity.here("application", "plan", "query"), 30_000).hold()
print("held")
"""


def test_a_restart_in_the_same_application_does_not_wait(tmp_path: Path, clock: Virtual) -> None:
    first, second = _lease(tmp_path, ME, clock), _lease(tmp_path, replace(ME, plan="planned again"), clock)
    first.hold()
    second.hold()
    assert clock.now_s == 0.0
    # A late task of the first stops nobody: it is of one driver, which has one of them active only.
    for lease in (first, second, first, second):
        clock.now_s += 1.1 * THIRD_S
        _renewed(lease)


def test_workers_of_one_run_share_the_lease_and_write_seldom(tmp_path: Path, clock: Virtual) -> None:
    leases = [_lease(tmp_path, replace(ME, query=query), clock) for query in ("query", "", "query")]
    for lease in leases:
        lease.hold()
    before = LeaseLog(Folder(str(tmp_path))).newest()
    assert before is not None
    for _ in range(10):
        clock.now_s += 1.1 * THIRD_S
        for lease in leases:
            _renewed(lease)
    after = LeaseLog(Folder(str(tmp_path))).newest()
    assert after is not None
    assert after.number - before.number <= 14, "one of them renews it, and the others see that"
    assert len(list((tmp_path / "lease").iterdir())) <= 2
    assert after.record.owner.query == "query", "those that are not told it forget nothing"


def test_many_workers_that_begin_at_once_do_not_queue(tmp_path: Path) -> None:
    clock = Virtual()
    leases = [_lease(tmp_path, ME, clock) for _ in range(24)]
    threads = [threading.Thread(target=lease.hold) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert {lease.state for lease in leases} == {LeaseState.HELD}


def test_of_two_runs_that_begin_at_once_one_gets_it(tmp_path: Path) -> None:
    for round_ in range(3):
        leases = [Lease(Folder(str(tmp_path / str(round_))), me, 3_000) for me in (ME, OTHER)]
        refused: list[Lease] = []
        begin = threading.Barrier(2)

        def run(lease: Lease, refused: list[Lease] = refused, begin: threading.Barrier = begin) -> None:
            begin.wait(WAIT_S)
            try:
                while not refused:
                    lease.hold()
                    time.sleep(0.005)
            except LiveRunError:
                refused.append(lease)

        threads = [threading.Thread(target=run, args=(lease,)) for lease in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(refused) == 1
        other = next(lease for lease in leases if lease is not refused[0])
        other.check()


def test_a_hold_that_is_not_due_costs_nothing(tmp_path: Path, clock: Virtual) -> None:
    lease = _lease(tmp_path, ME, clock)
    lease.hold()
    before = sorted((tmp_path / "lease").iterdir())
    clock.now_s += 0.9 * THIRD_S
    _renewed(lease)
    assert sorted((tmp_path / "lease").iterdir()) == before


def test_a_lease_tells_how_long_ago_it_was_known_to_be_held(tmp_path: Path, clock: Virtual) -> None:
    lease = _lease(tmp_path, ME, clock)
    assert lease.age_s == math.inf
    lease.hold()
    assert lease.age_s == 0
    clock.now_s += THIRD_S / 2
    lease.hold()
    assert lease.age_s == THIRD_S / 2


def test_one_lease_object_a_process_and_run(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    registry = LeaseRegistry()
    first = registry.of(files, ME, 1_000)
    assert registry.of(files, ME, 1_000) is first
    assert registry.of(files, replace(ME, query=""), 1_000) is first, "whether tasks are told their query or not"
    second = registry.of(files, replace(ME, plan="planned again"), 1_000)
    assert second is not first
    assert registry.of(files.child("other"), ME, 1_000) is not first
    # Work of the run before, which is still under way, must not renew the lease for it.
    first.hold()
    renewed = newest_in(tmp_path)
    first._renew_at_s = 0.0
    _renewed(first)
    assert newest_in(tmp_path) == renewed


def test_background_work_sees_that_the_lease_is_lost_and_never_renews_it(tmp_path: Path, clock: Virtual) -> None:
    """Clean-up of a run that has ended must neither keep the next one out nor go on beside it."""
    old = _lease(tmp_path, ME, clock)
    old.hold()
    record = newest_in(tmp_path)
    for _ in range(10):
        clock.now_s += THIRD_S
        old.check()
    assert newest_in(tmp_path) == record
    _lease(tmp_path, OTHER, clock).hold()
    with pytest.raises(LiveRunError, match=r"was taken over by .* in the background is not done"):
        old.check()


class Slow(Folder):
    """A store with something to do before each listing, and once before a file is made."""

    before_each_list: Callable[[], object] = staticmethod(lambda: None)
    before_create: Callable[[], object] | None = None
    listings = 0

    def child(self, *names: str) -> Folder:
        made = super().child(*names)
        made.__class__ = Slow
        vars(made)["outer"] = self
        return made

    def names(self) -> list[str]:
        outer = vars(self).get("outer", self)
        outer.listings += 1
        outer.before_each_list()
        return super().names()

    def create(self, name: str, data: bytes) -> bool:
        outer = vars(self).get("outer", self)
        work, outer.before_create = outer.before_create, None
        if work is not None:
            work()
        return super().create(name, data)


class Hang:
    """Something that hangs until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go_on.wait(WAIT_S)


def _hanging_renewal(lease: Lease, files: Slow, clock: Virtual) -> Hang:
    clock.now_s += 1.1 * THIRD_S
    files.before_create = hang = Hang()
    lease.hold()
    assert hang.begun.wait(WAIT_S)
    return hang


def test_a_run_that_was_replaced_stops_while_its_renewal_hangs(tmp_path: Path, clock: Virtual) -> None:
    files = Slow(str(tmp_path))
    first, second = Lease(files, ME, LEASE_MS, clock.clock), _lease(tmp_path, OTHER, clock)
    first.hold()
    hang = _hanging_renewal(first, files, clock)
    second.hold()
    # It looks while its renewal hangs, and learns of it.
    with pytest.raises(LiveRunError, match=r"was taken over by .* other application"):
        first.hold()
    # And when its write arrives after all, nothing is changed by it.
    hang.go_on.set()
    eventually(lambda: first._renewal.over)
    assert newest_in(tmp_path).owner == OTHER
    second.check()
    clock.now_s += 1.1 * THIRD_S
    _renewed(second)
    assert second.state is LeaseState.HELD


@pytest.mark.parametrize("requests", [2, 9])
def test_requests_that_never_return_end_neither_renewing_nor_noticing(tmp_path: Path, requests: int) -> None:
    """Renewals and looks: each is begun anew by another thread when it has taken as long as the lease lasts."""
    never, hung = threading.Event(), [requests]
    first = Lease(Folder(str(tmp_path)), RunIdentity("one", "plan of one"), 100)
    first.hold()
    newest = first._log.newest

    def hangs(*, first: bool = False) -> NumberedRecord | None:
        if hung[0]:
            hung[0] -= 1
            assert never.wait(WAIT_S)
        return newest()

    first._log.newest = hangs  # type: ignore[method-assign]  # as a store that is silent does
    number = newest()
    assert number is not None

    def renewed_twice() -> bool:
        first.hold()
        found = newest()
        return found is not None and found.number >= number.number + 2

    eventually(renewed_twice, 0.02)
    assert hung == [0]
    hung[0] = 2
    second = Lease(Folder(str(tmp_path)), RunIdentity("two", "plan of two"), 100)

    def taken() -> bool:
        try:
            second.hold()
        except LiveRunError:
            return False  # a renewal of the first one was still on its way
        return True

    eventually(taken)
    with pytest.raises(LiveRunError, match="was taken over by"):
        eventually(first.hold, 0.02)
    never.set()
    eventually(lambda: first._pool.threads_max == 2)


def test_a_write_that_arrives_when_its_number_is_free_again_changes_nothing(tmp_path: Path, clock: Virtual) -> None:
    """Numbers that are long past are removed: a late write under one of them must not count."""
    files = Slow(str(tmp_path))
    first, second = Lease(files, ME, LEASE_MS, clock.clock), _lease(tmp_path, OTHER, clock)
    first.hold()
    hang = _hanging_renewal(first, files, clock)
    second.hold()
    for _ in range(5):
        clock.now_s += 1.1 * THIRD_S
        _renewed(second)
    hang.go_on.set()
    eventually(lambda: first._renewal.over)
    assert newest_in(tmp_path).owner == OTHER
    with pytest.raises(LiveRunError):
        first.hold()


def test_a_slow_store_alone_stops_nobody(tmp_path: Path, clock: Virtual) -> None:
    files = Slow(str(tmp_path))
    lease = Lease(files, ME, LEASE_MS, clock.clock)

    def slow() -> None:
        clock.now_s += 2 * LEASE_S

    for _ in range(3):
        files.before_create = slow
        _renewed(lease)
    # It is due again at once, as the record is old.
    written = newest_in(tmp_path)
    _renewed(lease)
    assert newest_in(tmp_path).renewed_ms > written.renewed_ms


def test_a_store_that_does_not_answer_holds_up_no_call_for_long(tmp_path: Path, clock: Virtual) -> None:
    files = Slow(str(tmp_path))
    lease = Lease(files, ME, 100, clock.clock)
    lease.hold()
    asked = files.listings
    clock.now_s += 1.0
    files.before_each_list = hang = Hang()
    for _ in range(5):
        lease.hold()
    assert hang.begun.wait(WAIT_S)
    assert files.listings <= asked + 2, "one that looks and one that renews, and none for each call"
    # What it hears at last counts.
    log = LeaseLog(Folder(str(tmp_path)))
    found = log.newest()
    assert found is not None
    assert log.append(found, found.record.take_over(OTHER, 0, 100))
    hang.go_on.set()
    eventually(lambda: lease.state is LeaseState.LOST)
    with pytest.raises(LiveRunError, match="was taken over by"):
        lease.hold()


def test_a_store_that_hangs_does_not_keep_other_leases_from_being_renewed(tmp_path: Path, clock: Virtual) -> None:
    hanging = Slow(str(tmp_path / "hanging"))
    first, second = Lease(hanging, ME, LEASE_MS, clock.clock), _lease(tmp_path / "well", ME, clock)
    first.hold()
    second.hold()
    before = newest_in(tmp_path / "well").renewed_ms
    hang = _hanging_renewal(first, hanging, clock)
    _renewed(second)
    assert newest_in(tmp_path / "well").renewed_ms > before
    hang.go_on.set()
    eventually(lambda: first._renewal.over)


def test_a_folder_that_was_removed_is_taken_again(tmp_path: Path, clock: Virtual) -> None:
    lease = _lease(tmp_path / "home", ME, clock)
    lease.hold()
    for file in (tmp_path / "home" / "lease").iterdir():
        file.unlink()
    clock.now_s += 1.1 * THIRD_S
    _renewed(lease)
    assert newest_in(tmp_path / "home").owner == ME


def test_no_thread_for_a_renewal_is_no_end_of_renewing(
    tmp_path: Path, clock: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = _lease(tmp_path, ME, clock)
    lease.hold()
    before = newest_in(tmp_path).renewed_ms
    clock.now_s += 1.1 * THIRD_S

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        lease.hold()
    clock.now_s += THIRD_S
    _renewed(lease)
    assert newest_in(tmp_path).renewed_ms > before


class Unsure(Folder):
    """A store on which a file cannot be made exclusively."""

    def child(self, *names: str) -> Folder:
        made = super().child(*names)
        made.__class__ = Unsure
        return made

    @property
    def creates_exclusively(self) -> bool:
        return False


def test_where_nothing_is_exclusive_all_agree_on_who_holds_it(tmp_path: Path, clock: Virtual) -> None:
    """Two records of one number: the one that knows of having replaced the other's writer counts."""
    files = Unsure(str(tmp_path))
    first, second = (Lease(files, me, LEASE_MS, clock.clock) for me in (ME, OTHER))
    first.hold()
    late = LeaseLog(files).newest()
    assert late is not None
    second.hold()
    # What the first sent before it was replaced arrives late.
    again = late.record.renew_by(ME, 0, LEASE_MS)
    files.child("lease").put(f"{late.number + 1:016d}-{again.nonce}.json", again.encode())
    clock.now_s += 1.1 * THIRD_S
    _renewed(second)
    assert second.state is LeaseState.HELD
    with pytest.raises(LiveRunError):
        first.hold()


@contextmanager
def _renewing(lease: Lease, every_s: float) -> Iterator[None]:
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(every_s):
            lease.hold()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)


@pytest.mark.parametrize("kind", ["path", "memory", "s3", "azure", "obstore", "smb", "webhdfs"])
def test_a_second_run_is_refused_on_real_clocks_and_stores(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    files = folder_of(kind, request, tmp_path)
    first, second = (Lease(files, me, 6_000) for me in (ME, OTHER))
    first.hold()
    with _renewing(first, 0.05), pytest.raises(LiveRunError, match="is being written by"):
        second.hold()
    assert first.state is LeaseState.HELD
    # Each renewal leaves the one before for those who are just reading it, and at no time is there none.
    assert len(files.child("lease").names()) == 2


def test_two_stores_with_a_folder_of_one_name_have_a_lease_each(tmp_path: Path) -> None:
    made = {"implementation": "fsspec.implementations.dirfs.DirFileSystem", "fs": LocalFileSystem(auto_mkdir=True)}
    folders = [Folder("store://bucket/op", {**made, "path": str(tmp_path / name)}) for name in ("east", "west")]
    registry = LeaseRegistry()
    for folder in folders:
        registry.of(folder, ME, 10_000).hold()
    assert all(list((tmp_path / name / "bucket" / "op" / "lease").iterdir()) for name in ("east", "west"))


def test_a_query_folder_that_is_removed_under_a_running_query_is_noticed_when_the_lease_is_renewed(
    tmp_path: Path, clock: Virtual, caplog: pytest.LogCaptureFixture
) -> None:
    """By each process of the run once, also where another one has begun the lease anew before."""
    first, second = _lease(tmp_path, ME, clock), _lease(tmp_path, ME, clock)
    for _ in range(4):
        _renewed(first)
        _renewed(second)
        clock.now_s += 1.1 * THIRD_S
    assert (first.times_removed, second.times_removed) == (0, 0)
    shutil.rmtree(tmp_path / "lease")
    for _ in range(2):
        _renewed(first)
        _renewed(second)
        clock.now_s += 1.1 * THIRD_S
    assert (first.times_removed, second.times_removed) == (1, 1)
    assert f"{tmp_path}, or the lease in it, was removed under a running query" in caplog.text
    assert first.state is second.state is LeaseState.HELD


def test_a_call_after_a_long_pause_notices_itself_that_the_query_folder_was_removed(
    tmp_path: Path, clock: Virtual
) -> None:
    lease = _lease(tmp_path, ME, clock)
    lease.hold()
    shutil.rmtree(tmp_path / "lease")
    clock.now_s += 2.1 * THIRD_S
    lease.hold()
    assert lease.times_removed == 1
    eventually(lambda: lease._renewal.over)
