"""The lease decides which run of a query may write an operator's state."""

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


def test_a_lease_shorter_than_100_ms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 100"):
        Lease(Folder(str(tmp_path)), ME, 99)


@pytest.fixture
def clock() -> Virtual:
    return Virtual()


def renew_lease(lease: Lease) -> None:
    """Hold the lease, and wait until its background renewal is done."""
    lease.hold()
    eventually(lambda: lease._renewal.over)


def make_lease(root: Path, me: RunIdentity, clock: Virtual) -> Lease:
    return Lease(Folder(str(root)), me, LEASE_MS, clock.clock)


def test_a_second_run_is_refused_while_the_first_renews(tmp_path: Path, clock: Virtual) -> None:
    first = make_lease(tmp_path, ME, clock)
    first.hold()
    clock.meanwhile = lambda: renew_lease(first)
    for _ in range(2):
        with pytest.raises(LiveRunError, match=r"is being written by query query of application application on host"):
            make_lease(tmp_path, OTHER, clock).hold()
    # The second run took nothing: the first one continues.
    renew_lease(first)
    assert newest_in(tmp_path).owner == ME


def test_a_waiting_run_logs_a_warning_once(tmp_path: Path, clock: Virtual, caplog: pytest.LogCaptureFixture) -> None:
    make_lease(tmp_path, ME, clock).hold()
    with caplog.at_level(logging.WARNING):
        make_lease(tmp_path, OTHER, clock).hold()
    warnings = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert len(warnings) == 1
    assert "application application on host" in warnings[0]
    assert "30.0 s" in warnings[0]


@pytest.mark.parametrize("off_s", [-1e5, -LEASE_S, 0.0, 2 * LEASE_S, 1e5])
def test_a_run_with_a_wrong_clock_cannot_take_a_renewed_lease(tmp_path: Path, off_s: float) -> None:
    clock = Virtual()
    first = make_lease(tmp_path, ME, clock)
    first.hold()
    clock.meanwhile = lambda: renew_lease(first)
    clock.off_s = off_s
    with pytest.raises(LiveRunError):
        make_lease(tmp_path, OTHER, clock).hold()
    assert newest_in(tmp_path).owner == ME


def test_a_silent_run_loses_its_lease_and_is_then_refused(tmp_path: Path, clock: Virtual) -> None:
    first, second = make_lease(tmp_path, ME, clock), make_lease(tmp_path, OTHER, clock)
    first.hold()
    second.hold()
    assert clock.now_s >= LEASE_S
    assert newest_in(tmp_path).owner == OTHER
    with pytest.raises(LiveRunError, match="was taken over by query query of application other application"):
        first.hold()
    assert first.state is LeaseState.LOST
    # The first run cannot return either, not even in a new process after the second run has ended.
    release_lease(tmp_path)
    with pytest.raises(LiveRunError, match="was taken over"):
        make_lease(tmp_path, ME, clock).hold()
    # A new plan of the query is another run.
    make_lease(tmp_path, replace(ME, plan="planned again"), clock).hold()


def release_lease(root: Path) -> None:
    log = LeaseLog(Folder(str(root)))
    latest = log.newest()
    assert latest is not None
    assert log.append(latest, replace(latest.record, released=True, nonce="0" * 32))


def test_the_lease_of_a_run_that_released_it_is_free_at_once(tmp_path: Path, clock: Virtual) -> None:
    make_lease(tmp_path, ME, clock).hold()
    release_lease(tmp_path)
    make_lease(tmp_path, OTHER, clock).hold()
    assert clock.now_s == 0.0
    assert newest_in(tmp_path).replaced == ()


def test_the_lease_of_a_dead_driver_on_this_host_is_free_at_once(tmp_path: Path, clock: Virtual) -> None:
    driver = subprocess.Popen(["sleep", "3600"])
    try:
        make_lease(tmp_path, local_run(driver.pid), clock).hold()
    finally:
        driver.kill()
        driver.wait()
    make_lease(tmp_path, OTHER, clock).hold()
    assert clock.now_s == 0.0


def test_the_end_of_an_executor_does_not_free_the_lease(tmp_path: Path, clock: Virtual) -> None:
    """An executor renews and ends, but its run continues: a query from a copied checkpoint is refused."""
    elsewhere = make_lease(tmp_path, replace(ME, host="other machine"), clock)
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
    clock.meanwhile = lambda: renew_lease(elsewhere)
    with pytest.raises(LiveRunError, match=f"copy the state too: copy {tmp_path} to the same place"):
        make_lease(tmp_path, OTHER, clock).hold()
    renew_lease(elsewhere)


_EXECUTOR = """
import sys
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_record import RunIdentity
Lease(Folder(sys.argv[1]), RunIdentity.here("application", "plan", "query"), 30_000).hold()
print("held")
"""


def test_a_restart_in_the_same_application_takes_the_lease_at_once(tmp_path: Path, clock: Virtual) -> None:
    first, second = make_lease(tmp_path, ME, clock), make_lease(tmp_path, replace(ME, plan="planned again"), clock)
    first.hold()
    second.hold()
    assert clock.now_s == 0.0
    # A late task of the first plan stops no other task: one driver has only one of its plans active.
    for lease in (first, second, first, second):
        clock.now_s += 1.1 * THIRD_S
        renew_lease(lease)


def test_workers_of_one_run_share_the_lease_and_renew_it_once(tmp_path: Path, clock: Virtual) -> None:
    leases = [make_lease(tmp_path, replace(ME, query=query), clock) for query in ("query", "", "query")]
    for lease in leases:
        lease.hold()
    before = LeaseLog(Folder(str(tmp_path))).newest()
    assert before is not None
    for _ in range(10):
        clock.now_s += 1.1 * THIRD_S
        for lease in leases:
            renew_lease(lease)
    after = LeaseLog(Folder(str(tmp_path))).newest()
    assert after is not None
    assert after.number - before.number <= 14, "one of them renews the lease, and the others see that"
    assert len(list((tmp_path / "lease").iterdir())) <= 2
    assert after.record.owner.query == "query", "a worker that does not know the query keeps it in the record"


def test_many_workers_hold_the_lease_at_once(tmp_path: Path) -> None:
    clock = Virtual()
    leases = [make_lease(tmp_path, ME, clock) for _ in range(24)]
    threads = [threading.Thread(target=lease.hold) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert {lease.state for lease in leases} == {LeaseState.HELD}


def test_only_one_of_two_concurrent_runs_gets_the_lease(tmp_path: Path) -> None:
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


def test_a_hold_before_the_next_renewal_writes_nothing(tmp_path: Path, clock: Virtual) -> None:
    lease = make_lease(tmp_path, ME, clock)
    lease.hold()
    before = sorted((tmp_path / "lease").iterdir())
    clock.now_s += 0.9 * THIRD_S
    renew_lease(lease)
    assert sorted((tmp_path / "lease").iterdir()) == before


def test_the_age_of_a_lease_is_the_time_since_it_was_last_held(tmp_path: Path, clock: Virtual) -> None:
    lease = make_lease(tmp_path, ME, clock)
    assert lease.age_s == math.inf
    lease.hold()
    assert lease.age_s == 0
    clock.now_s += THIRD_S / 2
    lease.hold()
    assert lease.age_s == THIRD_S / 2


def test_a_process_has_one_lease_object_for_each_run(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    registry = LeaseRegistry()
    first = registry.of(files, ME, 1_000)
    assert registry.of(files, ME, 1_000) is first
    assert registry.of(files, replace(ME, query=""), 1_000) is first, "whether tasks know their query or not"
    second = registry.of(files, replace(ME, plan="planned again"), 1_000)
    assert second is not first
    assert registry.of(files.child("other"), ME, 1_000) is not first
    # Background work of the previous run must not renew the lease.
    first.hold()
    renewed = newest_in(tmp_path)
    first._renew_at_s = 0.0
    renew_lease(first)
    assert newest_in(tmp_path) == renewed


def test_background_work_checks_the_lease_and_never_renews_it(tmp_path: Path, clock: Virtual) -> None:
    """The clean-up of a run that has ended must neither block the next run nor continue after it began."""
    old = make_lease(tmp_path, ME, clock)
    old.hold()
    record = newest_in(tmp_path)
    for _ in range(10):
        clock.now_s += THIRD_S
        old.check()
    assert newest_in(tmp_path) == record
    make_lease(tmp_path, OTHER, clock).hold()
    with pytest.raises(LiveRunError, match=r"was taken over by .* in the background is not done"):
        old.check()


class Slow(Folder):
    """A store that calls a function before each listing, and another one before it next creates a file."""

    before_each_list: Callable[[], object] = staticmethod(lambda: None)
    before_create: Callable[[], object] | None = None
    listings = 0

    def child(self, *names: str) -> Folder:
        folder = super().child(*names)
        folder.__class__ = Slow
        vars(folder)["outer"] = self
        return folder

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
    """Blocks its caller until `go_on` is set."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go_on.wait(WAIT_S)


def start_hanging_renewal(lease: Lease, files: Slow, clock: Virtual) -> Hang:
    clock.now_s += 1.1 * THIRD_S
    files.before_create = hang = Hang()
    lease.hold()
    assert hang.begun.wait(WAIT_S)
    return hang


def test_a_replaced_run_stops_even_while_its_renewal_hangs(tmp_path: Path, clock: Virtual) -> None:
    files = Slow(str(tmp_path))
    first, second = Lease(files, ME, LEASE_MS, clock.clock), make_lease(tmp_path, OTHER, clock)
    first.hold()
    hang = start_hanging_renewal(first, files, clock)
    second.hold()
    # The first run reads the lease while its renewal hangs.
    with pytest.raises(LiveRunError, match=r"was taken over by .* other application"):
        first.hold()
    # Its late write changes nothing.
    hang.go_on.set()
    eventually(lambda: first._renewal.over)
    assert newest_in(tmp_path).owner == OTHER
    second.check()
    clock.now_s += 1.1 * THIRD_S
    renew_lease(second)
    assert second.state is LeaseState.HELD


@pytest.mark.parametrize("requests", [2, 9])
def test_hanging_requests_stop_neither_renewals_nor_checks(tmp_path: Path, requests: int) -> None:
    """Another thread repeats a renewal or a check that has taken as long as the lease lasts."""
    never, hung = threading.Event(), [requests]
    first = Lease(Folder(str(tmp_path)), RunIdentity("one", "plan of one"), 100)
    first.hold()
    newest = first._log.newest

    def read_or_hang(*, first: bool = False) -> NumberedRecord | None:
        if hung[0]:
            hung[0] -= 1
            assert never.wait(WAIT_S)
        return newest()

    first._log.newest = read_or_hang  # type: ignore[method-assign]  # mimics a store that does not answer
    number = newest()
    assert number is not None

    def renew_twice() -> bool:
        first.hold()
        latest = newest()
        return latest is not None and latest.number >= number.number + 2

    eventually(renew_twice, 0.02)
    assert hung == [0]
    hung[0] = 2
    second = Lease(Folder(str(tmp_path)), RunIdentity("two", "plan of two"), 100)

    def take_lease() -> bool:
        try:
            second.hold()
        except LiveRunError:
            return False  # a renewal of the first run was still under way
        return True

    eventually(take_lease)
    with pytest.raises(LiveRunError, match="was taken over by"):
        eventually(first.hold, 0.02)
    never.set()
    eventually(lambda: first._pool.threads_max == 2)


def test_a_late_write_under_a_removed_number_changes_nothing(tmp_path: Path, clock: Virtual) -> None:
    """Old records are removed, so a late write can get through under the number of one of them."""
    files = Slow(str(tmp_path))
    first, second = Lease(files, ME, LEASE_MS, clock.clock), make_lease(tmp_path, OTHER, clock)
    first.hold()
    hang = start_hanging_renewal(first, files, clock)
    second.hold()
    for _ in range(5):
        clock.now_s += 1.1 * THIRD_S
        renew_lease(second)
    hang.go_on.set()
    eventually(lambda: first._renewal.over)
    assert newest_in(tmp_path).owner == OTHER
    with pytest.raises(LiveRunError):
        first.hold()


def test_slow_writes_do_not_lose_the_lease(tmp_path: Path, clock: Virtual) -> None:
    files = Slow(str(tmp_path))
    lease = Lease(files, ME, LEASE_MS, clock.clock)

    def slow() -> None:
        clock.now_s += 2 * LEASE_S

    for _ in range(3):
        files.before_create = slow
        renew_lease(lease)
    # The next renewal is due at once, because the record is already old.
    written = newest_in(tmp_path)
    renew_lease(lease)
    assert newest_in(tmp_path).renewed_ms > written.renewed_ms


def test_a_store_that_does_not_answer_delays_no_call(tmp_path: Path, clock: Virtual) -> None:
    files = Slow(str(tmp_path))
    lease = Lease(files, ME, 100, clock.clock)
    lease.hold()
    asked = files.listings
    clock.now_s += 1.0
    files.before_each_list = hang = Hang()
    for _ in range(5):
        lease.hold()
    assert hang.begun.wait(WAIT_S)
    assert files.listings <= asked + 2, "one check and one renewal, not one request for each call"
    # A late answer still counts.
    log = LeaseLog(Folder(str(tmp_path)))
    latest = log.newest()
    assert latest is not None
    assert log.append(latest, latest.record.take_over(OTHER, 0, 100))
    hang.go_on.set()
    eventually(lambda: lease.state is LeaseState.LOST)
    with pytest.raises(LiveRunError, match="was taken over by"):
        lease.hold()


def test_a_hanging_store_does_not_block_renewals_on_other_stores(tmp_path: Path, clock: Virtual) -> None:
    hanging = Slow(str(tmp_path / "hanging"))
    first, second = Lease(hanging, ME, LEASE_MS, clock.clock), make_lease(tmp_path / "well", ME, clock)
    first.hold()
    second.hold()
    before = newest_in(tmp_path / "well").renewed_ms
    hang = start_hanging_renewal(first, hanging, clock)
    renew_lease(second)
    assert newest_in(tmp_path / "well").renewed_ms > before
    hang.go_on.set()
    eventually(lambda: first._renewal.over)


def test_a_run_takes_its_lease_again_after_the_files_were_removed(tmp_path: Path, clock: Virtual) -> None:
    lease = make_lease(tmp_path / "home", ME, clock)
    lease.hold()
    for file in (tmp_path / "home" / "lease").iterdir():
        file.unlink()
    clock.now_s += 1.1 * THIRD_S
    renew_lease(lease)
    assert newest_in(tmp_path / "home").owner == ME


def test_renewals_continue_after_a_thread_could_not_start(
    tmp_path: Path, clock: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = make_lease(tmp_path, ME, clock)
    lease.hold()
    before = newest_in(tmp_path).renewed_ms
    clock.now_s += 1.1 * THIRD_S

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        lease.hold()
    clock.now_s += THIRD_S
    renew_lease(lease)
    assert newest_in(tmp_path).renewed_ms > before


class Unsure(Folder):
    """A store that cannot create files exclusively."""

    def child(self, *names: str) -> Folder:
        folder = super().child(*names)
        folder.__class__ = Unsure
        return folder

    @property
    def creates_exclusively(self) -> bool:
        return False


def test_runs_agree_on_the_holder_without_exclusive_creates(tmp_path: Path, clock: Virtual) -> None:
    """If two records have the same number, the one that replaced the other's writer counts."""
    files = Unsure(str(tmp_path))
    first, second = (Lease(files, me, LEASE_MS, clock.clock) for me in (ME, OTHER))
    first.hold()
    late = LeaseLog(files).newest()
    assert late is not None
    second.hold()
    # A renewal that the first run sent before it was replaced arrives late.
    again = late.record.renew_by(ME, 0, LEASE_MS)
    files.child("lease").put(f"{late.number + 1:016d}-{again.nonce}.json", again.encode())
    clock.now_s += 1.1 * THIRD_S
    renew_lease(second)
    assert second.state is LeaseState.HELD
    with pytest.raises(LiveRunError):
        first.hold()


@contextmanager
def renew_in_background(lease: Lease, every_s: float) -> Iterator[None]:
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
    # The second run would watch for longer than any renewal takes on a slow machine.
    first, second = Lease(files, ME, 6_000), Lease(files, OTHER, int(1000 * WAIT_S))
    first.hold()
    with renew_in_background(first, 0.05), pytest.raises(LiveRunError, match="is being written by"):
        second.hold()
    eventually(lambda: first._renewal.over)
    assert first.state is LeaseState.HELD
    # Each renewal keeps the previous record for current readers, so a record always exists.
    assert len(files.child("lease").names()) == 2


def test_folders_of_the_same_name_on_two_stores_have_separate_leases(tmp_path: Path) -> None:
    options = {"implementation": "fsspec.implementations.dirfs.DirFileSystem", "fs": LocalFileSystem(auto_mkdir=True)}
    folders = [Folder("store://bucket/op", {**options, "path": str(tmp_path / name)}) for name in ("east", "west")]
    registry = LeaseRegistry()
    for folder in folders:
        registry.of(folder, ME, 10_000).hold()
    assert all(list((tmp_path / name / "bucket" / "op" / "lease").iterdir()) for name in ("east", "west"))


def test_each_process_reports_once_that_the_query_folder_was_removed(
    tmp_path: Path, clock: Virtual, caplog: pytest.LogCaptureFixture
) -> None:
    """A process also reports it if another one has already created the lease again."""
    first, second = make_lease(tmp_path, ME, clock), make_lease(tmp_path, ME, clock)
    for _ in range(4):
        renew_lease(first)
        renew_lease(second)
        clock.now_s += 1.1 * THIRD_S
    assert (first.times_removed, second.times_removed) == (0, 0)
    shutil.rmtree(tmp_path / "lease")
    for _ in range(2):
        renew_lease(first)
        renew_lease(second)
        clock.now_s += 1.1 * THIRD_S
    assert (first.times_removed, second.times_removed) == (1, 1)
    assert f"{tmp_path}, or the lease in it, was removed under a running query" in caplog.text
    assert first.state is second.state is LeaseState.HELD


def test_a_call_after_a_long_pause_reports_that_the_query_folder_was_removed(tmp_path: Path, clock: Virtual) -> None:
    lease = make_lease(tmp_path, ME, clock)
    lease.hold()
    shutil.rmtree(tmp_path / "lease")
    clock.now_s += 2.1 * THIRD_S
    lease.hold()
    assert lease.times_removed == 1
    eventually(lambda: lease._renewal.over)
