"""Who may write an operator's state."""

from __future__ import annotations

import json
import logging
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
from test_create import folder_of

from spark_state_ext.errors import CorruptFileError, LiveRunError, UsageError, VersionSkewError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import Clock, Lease, LeaseRegistry, LeaseState
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Decision, Found, LeaseRecord, RunIdentity, Watch, decide
from spark_state_ext.worker import process
from tests.helpers.waiting import WAIT_S, eventually

_ME = RunIdentity("application", "plan", "query", "host")
_OTHER = RunIdentity("other application", "other plan", "query", "other host")
_LEASE_MS = 30_000
_LEASE_S = _LEASE_MS / 1000
_THIRD_S = _LEASE_S / 3


def _record(owner: RunIdentity, **also: object) -> LeaseRecord:
    return replace(LeaseRecord(owner, 1_000, 500, nonce="n"), **also)  # type: ignore[arg-type]  # any field


def _found(owner: RunIdentity, number: int = 7, **also: object) -> Found:
    return Found(number, _record(owner, **also))


_WATCHED = Watch(_found(_OTHER), 10.0)


@pytest.mark.parametrize(
    ("found", "watch", "now_s", "over", "expected"),
    [
        (None, None, 0.0, False, Decision.RENEW),
        (_found(_ME), None, 0.0, False, Decision.RENEW),
        # Of one application and query, only one run is active at a time; tasks may not be told their query.
        (_found(replace(_ME, plan="earlier plan")), None, 0.0, False, Decision.RENEW),
        (_found(replace(_ME, query="")), None, 0.0, False, Decision.RENEW),
        (_found(replace(_ME, query="another query")), None, 0.0, False, Decision.WATCH),
        # Others have to be over, or silent for a whole lease on one's own clock.
        (_found(_OTHER), None, 1e9, False, Decision.WATCH),
        (_found(_OTHER), None, 0.0, True, Decision.RENEW),
        (_found(_OTHER, released=True), None, 0.0, False, Decision.RENEW),
        (_found(_OTHER), _WATCHED, 10.5, False, Decision.WATCH),
        (_found(_OTHER), _WATCHED, 10.6, False, Decision.TAKE_OVER),
        (_found(_OTHER, 8), _WATCHED, 10.6, False, Decision.LIVE),
        (_found(_OTHER, 8, released=True), _WATCHED, 10.1, False, Decision.RENEW),
        # The longer of both leases counts.
        (_found(_OTHER, lease_ms=2_000), Watch(_found(_OTHER, lease_ms=2_000), 10.0), 11.9, False, Decision.WATCH),
        (_found(_OTHER, lease_ms=2_000), Watch(_found(_OTHER, lease_ms=2_000), 10.0), 12.1, False, Decision.TAKE_OVER),
        # Who was replaced does not come back, whoever holds it now.
        (_found(_OTHER, replaced=("plan",)), None, 0.0, False, Decision.REPLACED),
        (_found(_OTHER, replaced=("plan",), released=True), None, 0.0, True, Decision.REPLACED),
    ],
)
def test_decide(found: Found | None, watch: Watch | None, now_s: float, over: bool, expected: Decision) -> None:
    assert decide(found, _ME, watch, now_s, 500, over) is expected


def test_a_job_group_is_no_part_of_a_run() -> None:
    """`foreachBatch` may set it: two drivers that did have runs of their own all the same, and one driver's restart is
    a run like the one before."""
    assert "job" not in " ".join(RunIdentity.__dataclass_fields__)
    assert not _ME.is_same_run(_OTHER)
    assert not replace(_ME, application="app-1 10.0.0.1:7001").is_same_run(
        replace(_ME, application="app-1 10.0.0.2:7001")
    )


def test_records_round_trip_and_damage_is_said() -> None:
    record = _record(_OTHER, replaced=("a", "b"), released=True)
    assert LeaseRecord.decode(record.encode(), "1.json") == record
    for damaged in (b"", b"{", b"[]", b"null", b'{"owner": {}}', b"\xff", record.encode()[:-5]):
        with pytest.raises(CorruptFileError, match=r"1\.json"):
            LeaseRecord.decode(damaged, "1.json")
    newer = record.encode().replace(b'"format": 2', b'"format": 3')
    with pytest.raises(VersionSkewError, match=r"1\.json has format 3"):
        LeaseRecord.decode(newer, "1.json")


_OLD_OWNER = (
    '{"run_id": "old run", "application_id": "old application", "host": "old host", "boot": "boot", "pid": 11, '
)
_OLD_FIELDS = f'"owner": {_OLD_OWNER}"pid_start": "101"}}, "renewed_ms": 1000'


def _old_lease(run: str = "other run", renewed_ms: int = 1000) -> str:
    """A file of format 1, as the releases write it that know no other."""
    owner: dict[str, object] = {"run_id": run, "application_id": "other application", "host": "other host"}
    owner |= {"boot": "boot", "pid": 11, "pid_start": "101"}
    return json.dumps({"format": 1, "owner": owner, "renewed_ms": renewed_ms, "replaced": ["one", "two"]})


@pytest.mark.parametrize("records", [0, 1, 3])
def test_a_lease_of_format_1_is_watched_like_any_other(tmp_path: Path, records: int) -> None:
    clock, files = Virtual(), Folder(str(tmp_path))
    log = LeaseLog(files)
    for number in range(records):
        assert log.append(log.newest(), _record(_OTHER, nonce=str(number), released=True))
    (tmp_path / "lease.json").write_text(_old_lease())
    found = LeaseLog(files).newest(first=True)
    assert found is not None
    assert found.number == records
    assert (found.record.owner.application, found.record.owner.plan) == ("other application", "other run")
    Lease(files, _ME, _LEASE_MS, clock.clock).hold()
    assert clock.now_s >= _LEASE_S, "it has watched first"
    assert _newest(tmp_path).replaced == ("one", "two", "other run")
    assert not (tmp_path / "lease.json").exists()


def test_a_run_that_lives_and_knows_format_1_only_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text(_old_lease())

    clock = Virtual()
    clock.meanwhile = lambda: (tmp_path / "lease.json").write_text(_old_lease(renewed_ms=int(clock.now_s * 1000)))
    with pytest.raises(LiveRunError, match="is being written by application other application on other host"):
        Lease(Folder(str(tmp_path)), _ME, _LEASE_MS, clock.clock).hold()


def test_a_lease_in_both_formats(tmp_path: Path) -> None:
    clock, files = Virtual(), Folder(str(tmp_path))
    lease = Lease(files, _ME, _LEASE_MS, clock.clock, format_1_too=True)
    lease.hold()
    clock.now_s += _LEASE_S / 2
    lease.hold()
    eventually(lambda: '"record": 2' in (tmp_path / "lease.json").read_text())
    old = json.loads((tmp_path / "lease.json").read_text())
    assert (old["format"], old["owner"]["run_id"], old["record"]) == (1, _ME.plan, 2)
    # Another run sees the records, and not what repeats them.
    found = LeaseLog(files).newest(first=True)
    assert found is not None
    assert found.record.owner == _ME
    # A release that knows format 1 only has taken it over: it writes what it knows, and this run stops.
    (tmp_path / "lease.json").write_text(_old_lease())
    clock.now_s += _LEASE_S
    with pytest.raises(LiveRunError, match="was taken over by application other application"):
        lease.check()
    # And its late tasks do not get it back.
    (tmp_path / "lease.json").write_text(_old_lease().replace("two", _ME.plan))
    with pytest.raises(LiveRunError):
        Lease(files, _ME, _LEASE_MS, clock.clock, format_1_too=True).hold()


def test_who_ends_says_so_in_format_1_too(tmp_path: Path) -> None:
    log = LeaseLog(Folder(str(tmp_path)))
    assert log.append(None, _record(_ME, released=True, format_1_too=True))
    assert json.loads((tmp_path / "lease.json").read_text())["renewed_ms"] == 0


def test_a_process_of_another_user_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide them (hidepid), and lives on all the same."""
    here = _local()
    monkeypatch.setattr(process, "start_of", lambda pid: "")
    assert not here.is_over()
    assert replace(here, pid=2**22 - 1).is_over()


def _local(pid: int | None = None) -> RunIdentity:
    """A run whose driver is this process, as in local mode."""
    pid = os.getpid() if pid is None else pid
    here = replace(_ME, host=os.uname().nodename, pid=pid, pid_start=process.start_of(pid))
    from spark_state_ext.worker.boot import boot_id

    return replace(here, boot=boot_id(), pid_namespace=process.namespace())


def test_is_over_only_when_it_is_certain() -> None:
    here = _local()
    assert not here.is_over()
    assert not replace(here, host="elsewhere", pid=2**22 - 1).is_over()
    # A machine of the same name, as clones of one image have, or this one before it was restarted.
    assert not replace(here, boot="another boot", pid=2**22 - 1).is_over()
    # A container with the machine's own name.
    assert not replace(here, pid_namespace="pid:[1]", pid=2**22 - 1).is_over()
    assert not replace(here, pid_namespace="", pid=2**22 - 1).is_over()
    # Nobody has that number.
    assert replace(here, pid=2**22 - 1).is_over()
    # The pid is in use again, by another process.
    assert replace(here, pid_start=str(int(here.pid_start) - 1)).is_over()
    # Not known (no /proc): then nobody is declared over.
    assert not replace(here, pid=2**22 - 1, pid_start="").is_over()


def test_only_in_local_mode_a_process_is_looked_for() -> None:
    """On a cluster the process above a worker is an executor; that it ends is not the end of the run."""
    on_cluster = RunIdentity.here("application", "plan", "query")
    assert (on_cluster.pid, on_cluster.pid_start) == (0, "")
    assert not on_cluster.is_over()
    # There is no JVM above this test either.
    assert RunIdentity.here("application", "plan", local=True).pid == 0


def test_lease_times_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 100"):
        Lease(Folder(str(tmp_path)), _ME, 99)


class Virtual:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        # What happens while somebody sleeps, at most so many seconds later.
        self.meanwhile: Callable[[], object] = lambda: None
        # How far this machine's wall clock is off.
        self.off_s = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, lambda: 1e6 + self.now_s + self.off_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.meanwhile()


@pytest.fixture
def clock() -> Virtual:
    return Virtual()


def _newest(root: Path) -> LeaseRecord:
    found = LeaseLog(Folder(str(root))).newest()
    assert found is not None
    return found.record


def _renewed(lease: Lease) -> None:
    """Hold it, and wait for what is begun beside."""
    lease.hold()
    eventually(lambda: lease._renewing.over)


def _lease(root: Path, me: RunIdentity, clock: Virtual) -> Lease:
    return Lease(Folder(str(root)), me, _LEASE_MS, clock.clock)


def test_a_second_run_is_refused_while_the_first_renews(tmp_path: Path, clock: Virtual) -> None:
    first = _lease(tmp_path, _ME, clock)
    first.hold()
    clock.meanwhile = lambda: _renewed(first)
    for _ in range(2):
        with pytest.raises(LiveRunError, match=r"is being written by query query of application application on host"):
            _lease(tmp_path, _OTHER, clock).hold()
    # Nothing was taken: the first goes on.
    _renewed(first)
    assert _newest(tmp_path).owner == _ME


def test_who_waits_says_so(tmp_path: Path, clock: Virtual, caplog: pytest.LogCaptureFixture) -> None:
    _lease(tmp_path, _ME, clock).hold()
    with caplog.at_level(logging.WARNING):
        _lease(tmp_path, _OTHER, clock).hold()
    said = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert len(said) == 1
    assert "application application on host" in said[0]
    assert "30.0 s" in said[0]


@pytest.mark.parametrize("off_s", [-1e5, -_LEASE_S, 0.0, 2 * _LEASE_S, 1e5])
def test_a_clock_that_is_wrong_lets_nobody_in(tmp_path: Path, off_s: float) -> None:
    """A run that renews is refused to others however late or early their clock is."""
    clock = Virtual()
    first = _lease(tmp_path, _ME, clock)
    first.hold()
    clock.meanwhile = lambda: _renewed(first)
    clock.off_s = off_s
    with pytest.raises(LiveRunError):
        _lease(tmp_path, _OTHER, clock).hold()
    assert _newest(tmp_path).owner == _ME


def test_a_silent_run_is_replaced_after_its_lease_and_then_refused(tmp_path: Path, clock: Virtual) -> None:
    first, second = _lease(tmp_path, _ME, clock), _lease(tmp_path, _OTHER, clock)
    first.hold()
    second.hold()
    assert clock.now_s >= _LEASE_S
    assert _newest(tmp_path).owner == _OTHER
    with pytest.raises(LiveRunError, match="was taken over by query query of application other application"):
        first.hold()
    assert first.state is LeaseState.LOST
    # Neither does it come back, in a process that remembers nothing, when the other has ended.
    _release(tmp_path)
    with pytest.raises(LiveRunError, match="was taken over"):
        _lease(tmp_path, _ME, clock).hold()
    # Started anew, it is another run.
    _lease(tmp_path, replace(_ME, plan="planned again"), clock).hold()


def _release(root: Path) -> None:
    log = LeaseLog(Folder(str(root)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, released=True, nonce="0" * 32))


def test_a_run_that_said_that_it_ended_is_followed_at_once(tmp_path: Path, clock: Virtual) -> None:
    _lease(tmp_path, _ME, clock).hold()
    _release(tmp_path)
    _lease(tmp_path, _OTHER, clock).hold()
    assert clock.now_s == 0.0
    assert _newest(tmp_path).replaced == ()


def test_a_driver_whose_process_is_gone_is_followed_at_once(tmp_path: Path, clock: Virtual) -> None:
    driver = subprocess.Popen(["sleep", "3600"])
    try:
        _lease(tmp_path, _local(driver.pid), clock).hold()
    finally:
        driver.kill()
        driver.wait()
    _lease(tmp_path, _OTHER, clock).hold()
    assert clock.now_s == 0.0


def test_a_process_that_ends_is_not_a_run_that_ends(tmp_path: Path, clock: Virtual) -> None:
    """An executor renews and is killed; the run goes on elsewhere, and a copied checkpoint gets nothing."""
    elsewhere = _lease(tmp_path, replace(_ME, host="other machine"), clock)
    elsewhere.hold()
    clock.now_s += 1.1 * _THIRD_S
    executor = subprocess.run(
        [sys.executable, "-c", _EXECUTOR, str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert executor.stdout == "held\n"
    clock.meanwhile = lambda: _renewed(elsewhere)
    with pytest.raises(LiveRunError, match=f"needs a copy of the state too: copy {tmp_path} to the same place"):
        _lease(tmp_path, _OTHER, clock).hold()
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
    first, second = _lease(tmp_path, _ME, clock), _lease(tmp_path, replace(_ME, plan="planned again"), clock)
    first.hold()
    second.hold()
    assert clock.now_s == 0.0
    # A late task of the first stops nobody: it is of one driver, which has one of them active only.
    for lease in (first, second, first, second):
        clock.now_s += 1.1 * _THIRD_S
        _renewed(lease)


def test_workers_of_one_run_share_the_lease_and_write_seldom(tmp_path: Path, clock: Virtual) -> None:
    leases = [_lease(tmp_path, replace(_ME, query=query), clock) for query in ("query", "", "query")]
    for lease in leases:
        lease.hold()
    before = LeaseLog(Folder(str(tmp_path))).newest()
    assert before is not None
    for _ in range(10):
        clock.now_s += 1.1 * _THIRD_S
        for lease in leases:
            _renewed(lease)
    after = LeaseLog(Folder(str(tmp_path))).newest()
    assert after is not None
    assert after.number - before.number <= 14, "one of them renews it, and the others see that"
    assert len(list((tmp_path / "lease").iterdir())) <= 2
    assert after.record.owner.query == "query", "those that are not told it forget nothing"


def test_many_workers_that_begin_at_once_do_not_queue(tmp_path: Path) -> None:
    clock = Virtual()
    leases = [_lease(tmp_path, _ME, clock) for _ in range(24)]
    threads = [threading.Thread(target=lease.hold) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert {lease.state for lease in leases} == {LeaseState.HELD}


def test_of_two_runs_that_begin_at_once_one_gets_it(tmp_path: Path) -> None:
    for round_ in range(3):
        leases = [Lease(Folder(str(tmp_path / str(round_))), me, 3_000) for me in (_ME, _OTHER)]
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
    lease = _lease(tmp_path, _ME, clock)
    lease.hold()
    before = sorted((tmp_path / "lease").iterdir())
    clock.now_s += 0.9 * _THIRD_S
    _renewed(lease)
    assert sorted((tmp_path / "lease").iterdir()) == before


def test_one_lease_object_a_process_and_run(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    registry = LeaseRegistry()
    first = registry.of(files, _ME, 1_000)
    assert registry.of(files, _ME, 1_000) is first
    assert registry.of(files, replace(_ME, query=""), 1_000) is first, "whether tasks are told their query or not"
    second = registry.of(files, replace(_ME, plan="planned again"), 1_000)
    assert second is not first
    assert registry.of(files.child("other"), _ME, 1_000) is not first
    # Work of the run before, which is still under way, must not renew the lease for it.
    first.hold()
    renewed = _newest(tmp_path)
    first._renew_at_s = 0.0
    _renewed(first)
    assert _newest(tmp_path) == renewed


def test_background_work_sees_that_the_lease_is_lost_and_never_renews_it(tmp_path: Path, clock: Virtual) -> None:
    """Clean-up of a run that has ended must neither keep the next one out nor go on beside it."""
    old = _lease(tmp_path, _ME, clock)
    old.hold()
    record = _newest(tmp_path)
    for _ in range(10):
        clock.now_s += _THIRD_S
        old.check()
    assert _newest(tmp_path) == record
    _lease(tmp_path, _OTHER, clock).hold()
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
    clock.now_s += 1.1 * _THIRD_S
    files.before_create = hang = Hang()
    lease.hold()
    assert hang.begun.wait(WAIT_S)
    return hang


def test_a_run_that_was_replaced_stops_while_its_renewal_hangs(tmp_path: Path, clock: Virtual) -> None:
    files = Slow(str(tmp_path))
    first, second = Lease(files, _ME, _LEASE_MS, clock.clock), _lease(tmp_path, _OTHER, clock)
    first.hold()
    hang = _hanging_renewal(first, files, clock)
    second.hold()
    # It looks while its renewal hangs, and learns of it.
    with pytest.raises(LiveRunError, match=r"was taken over by .* other application"):
        first.hold()
    # And when its write arrives after all, nothing is changed by it.
    hang.go_on.set()
    eventually(lambda: first._renewing.over)
    assert _newest(tmp_path).owner == _OTHER
    second.check()
    clock.now_s += 1.1 * _THIRD_S
    _renewed(second)
    assert second.state is LeaseState.HELD


@pytest.mark.parametrize("requests", [2, 9])
def test_requests_that_never_return_end_neither_renewing_nor_noticing(tmp_path: Path, requests: int) -> None:
    """Renewals and looks: each is begun anew by another thread when it has taken as long as the lease lasts."""
    never, hung = threading.Event(), [requests]
    first = Lease(Folder(str(tmp_path)), RunIdentity("one", "plan of one"), 100)
    first.hold()
    newest = first._log.newest

    def hangs(*, first: bool = False) -> Found | None:
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
    eventually(lambda: first._beside.threads_max == 2)


def test_a_write_that_arrives_when_its_number_is_free_again_changes_nothing(tmp_path: Path, clock: Virtual) -> None:
    """Numbers that are long past are removed: a late write under one of them must not count."""
    files = Slow(str(tmp_path))
    first, second = Lease(files, _ME, _LEASE_MS, clock.clock), _lease(tmp_path, _OTHER, clock)
    first.hold()
    hang = _hanging_renewal(first, files, clock)
    second.hold()
    for _ in range(5):
        clock.now_s += 1.1 * _THIRD_S
        _renewed(second)
    hang.go_on.set()
    eventually(lambda: first._renewing.over)
    assert _newest(tmp_path).owner == _OTHER
    with pytest.raises(LiveRunError):
        first.hold()


def test_a_slow_store_alone_stops_nobody(tmp_path: Path, clock: Virtual) -> None:
    files = Slow(str(tmp_path))
    lease = Lease(files, _ME, _LEASE_MS, clock.clock)

    def slow() -> None:
        clock.now_s += 2 * _LEASE_S

    for _ in range(3):
        files.before_create = slow
        _renewed(lease)
    # It is due again at once, as the record is old.
    written = _newest(tmp_path)
    _renewed(lease)
    assert _newest(tmp_path).renewed_ms > written.renewed_ms


def test_a_store_that_does_not_answer_holds_up_no_call_for_long(tmp_path: Path, clock: Virtual) -> None:
    files = Slow(str(tmp_path))
    lease = Lease(files, _ME, 100, clock.clock)
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
    assert log.append(found, found.record.taken_over(_OTHER, 0, 100))
    hang.go_on.set()
    eventually(lambda: lease.state is LeaseState.LOST)
    with pytest.raises(LiveRunError, match="was taken over by"):
        lease.hold()


def test_a_store_that_hangs_does_not_keep_other_leases_from_being_renewed(tmp_path: Path, clock: Virtual) -> None:
    hanging = Slow(str(tmp_path / "hanging"))
    first, second = Lease(hanging, _ME, _LEASE_MS, clock.clock), _lease(tmp_path / "well", _ME, clock)
    first.hold()
    second.hold()
    before = _newest(tmp_path / "well").renewed_ms
    hang = _hanging_renewal(first, hanging, clock)
    _renewed(second)
    assert _newest(tmp_path / "well").renewed_ms > before
    hang.go_on.set()
    eventually(lambda: first._renewing.over)


def test_a_folder_that_was_removed_is_taken_again(tmp_path: Path, clock: Virtual) -> None:
    lease = _lease(tmp_path / "home", _ME, clock)
    lease.hold()
    for file in (tmp_path / "home" / "lease").iterdir():
        file.unlink()
    clock.now_s += 1.1 * _THIRD_S
    _renewed(lease)
    assert _newest(tmp_path / "home").owner == _ME


def test_no_thread_for_a_renewal_is_no_end_of_renewing(
    tmp_path: Path, clock: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = _lease(tmp_path, _ME, clock)
    lease.hold()
    before = _newest(tmp_path).renewed_ms
    clock.now_s += 1.1 * _THIRD_S

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        lease.hold()
    clock.now_s += _THIRD_S
    _renewed(lease)
    assert _newest(tmp_path).renewed_ms > before


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
    first, second = (Lease(files, me, _LEASE_MS, clock.clock) for me in (_ME, _OTHER))
    first.hold()
    late = LeaseLog(files).newest()
    assert late is not None
    second.hold()
    # What the first sent before it was replaced arrives late.
    again = late.record.renewed(_ME, 0, _LEASE_MS)
    files.child("lease").put(f"{late.number + 1:016d}-{again.nonce}.json", again.encode())
    clock.now_s += 1.1 * _THIRD_S
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
    first, second = (Lease(files, me, 6_000) for me in (_ME, _OTHER))
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
        registry.of(folder, _ME, 10_000).hold()
    assert all(list((tmp_path / name / "bucket" / "op" / "lease").iterdir()) for name in ("east", "west"))


def test_a_query_folder_that_is_removed_under_a_running_query_is_noticed_when_the_lease_is_renewed(
    tmp_path: Path, clock: Virtual, caplog: pytest.LogCaptureFixture
) -> None:
    """By each process of the run once, also where another one has begun the lease anew before."""
    first, second = _lease(tmp_path, _ME, clock), _lease(tmp_path, _ME, clock)
    for _ in range(4):
        _renewed(first)
        _renewed(second)
        clock.now_s += 1.1 * _THIRD_S
    assert (first.times_removed, second.times_removed) == (0, 0)
    shutil.rmtree(tmp_path / "lease")
    for _ in range(2):
        _renewed(first)
        _renewed(second)
        clock.now_s += 1.1 * _THIRD_S
    assert (first.times_removed, second.times_removed) == (1, 1)
    assert f"somebody has removed {tmp_path}, or the lease in it, under a running query" in caplog.text
    assert first.state is second.state is LeaseState.HELD


def test_a_call_after_a_long_pause_notices_itself_that_the_query_folder_was_removed(
    tmp_path: Path, clock: Virtual
) -> None:
    lease = _lease(tmp_path, _ME, clock)
    lease.hold()
    shutil.rmtree(tmp_path / "lease")
    clock.now_s += 2.1 * _THIRD_S
    lease.hold()
    assert lease.times_removed == 1
    eventually(lambda: lease._renewing.over)
