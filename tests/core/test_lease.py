"""Who may write an operator's state."""

from __future__ import annotations

import os
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

from spark_state_ext import lease as lease_module
from spark_state_ext import process
from spark_state_ext.errors import CorruptFileError, LiveRunError, UsageError, VersionSkewError
from spark_state_ext.folder import Folder
from spark_state_ext.lease import TAKE, WAIT, Lease, LeaseRecord, RunIdentity, verdict

_ME = RunIdentity("run", "application", "host", "boot", 10, "100")
_OTHER = RunIdentity("other run", "other application", "other host", "boot", 11, "101")


def _record(owner: RunIdentity, renewed_ms: int = 1_000) -> LeaseRecord:
    return LeaseRecord(owner, renewed_ms)


@pytest.mark.parametrize(
    ("found", "now_ms", "over", "expected"),
    [
        (None, 1_000, False, TAKE),
        (_record(_ME), 1_000, False, TAKE),
        (_record(replace(_OTHER, run_id="run")), 1_000, False, TAKE),
        (_record(replace(_OTHER, application_id="application")), 1_000, False, TAKE),
        (_record(_OTHER), 1_000, True, TAKE),
        (_record(_OTHER), 1_000, False, WAIT),
        (_record(_OTHER), 1_500, False, WAIT),
        (_record(_OTHER), 1_501, False, TAKE),
        # A clock that is behind the owner's proves nothing.
        (_record(_OTHER), 0, False, WAIT),
    ],
)
def test_verdict(found: LeaseRecord | None, now_ms: int, over: bool, expected: str) -> None:
    assert verdict(found, _ME, now_ms, 500, over) == expected


def test_records_round_trip_and_damage_is_said() -> None:
    assert LeaseRecord.decode(_record(_OTHER).encode(), "lease.json") == _record(_OTHER)
    for damaged in (b"", b"{", b"[]", b"null", b'{"owner": {}}', b"\xff", _record(_OTHER).encode()[:-5]):
        with pytest.raises(CorruptFileError, match=r"lease\.json"):
            LeaseRecord.decode(damaged, "lease.json")
    newer = _record(_OTHER).encode().replace(b'"format": 3', b'"format": 4')
    with pytest.raises(VersionSkewError, match=r"lease\.json has format 4"):
        LeaseRecord.decode(newer, "lease.json")


def test_records_of_formats_1_and_2() -> None:
    owner = '{"run_id": "other run", "application_id": "other application", "host": "other host", "boot": "boot", "pid": 11, '
    fields = f'"owner": {owner}"pid_start": "101"}}, "renewed_ms": 1000'
    for record in (
        f'{{"format": 1, {fields}}}',
        f'{{"format": 2, {fields}, "replaced": [], "checksum": "62bbf1c05b1435e283630921eb389ed2"}}',
    ):
        assert LeaseRecord.decode(record.encode(), "lease.json") == _record(_OTHER)


def test_a_process_of_another_user_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide them (hidepid), and lives on all the same."""
    here = RunIdentity.here("run", "application")
    monkeypatch.setattr(process, "start_of", lambda pid: "")
    assert not here.is_over()
    assert replace(here, pid=2**22 - 1).is_over()


def test_is_over_only_when_it_is_certain() -> None:
    here = RunIdentity.here("run", "application")
    assert not here.is_over()
    assert not replace(here, host="elsewhere", pid=2**22 - 1).is_over()
    # A machine of the same name, as clones of one image have, or this one before it was restarted.
    assert not replace(here, boot="another boot", pid=2**22 - 1).is_over()
    # A container with the machine's own name; a lease of an older release, which does not tell.
    assert not replace(here, pid_namespace="pid:[1]", pid=2**22 - 1).is_over()
    assert not replace(here, pid_namespace="", pid=2**22 - 1).is_over()
    # Nobody has that number.
    assert replace(here, pid=2**22 - 1).is_over()
    # The pid is in use again, by another process.
    assert replace(here, pid_start=str(int(here.pid_start) - 1)).is_over()
    # Not known (no /proc): then nobody is declared over.
    assert not replace(here, pid=2**22 - 1, pid_start="").is_over()


def test_lease_times_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 100"):
        Lease(Folder(str(tmp_path)), _ME, 99)


_HOLDER = """
import os, sys, time
from spark_state_ext.folder import Folder
from spark_state_ext.errors import LiveRunError
from spark_state_ext.lease import Lease, RunIdentity
root, lease_ms, renews = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "renews"
worker = os.fork()
if worker == 0:
    # As Spark's workers: the child of a daemon that lives as long as the run.
    daemon = os.getppid()
    lease = Lease(Folder(root), RunIdentity.here("first run", "first application"), lease_ms)
    lease.hold()
    print("held", flush=True)
    while os.getppid() == daemon:
        if renews or os.path.exists(root + "/go on"):
            try:
                lease.hold()
            except LiveRunError as error:
                print("refused", error, flush=True)
                os._exit(0)
        time.sleep(0.02)
    os._exit(0)
os.waitpid(worker, 0)
"""


@contextmanager
def _first_run(root: Path, lease_ms: int, renews: bool) -> Iterator[subprocess.Popen[str]]:
    """Another run, in processes of its own, that holds the lease."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(root), str(lease_ms), "renews" if renews else "silent"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _second(root: Path, lease_ms: int, run: str = "second run", application: str = "second application") -> Lease:
    return Lease(Folder(str(root)), RunIdentity.here(run, application), lease_ms)


def test_a_second_run_is_refused_while_the_first_renews(tmp_path: Path) -> None:
    with _first_run(tmp_path, 600, renews=True):
        for _ in range(2):
            with pytest.raises(LiveRunError, match="first run"):
                _second(tmp_path, 600).hold()
        # Nothing was taken: the first goes on.
        assert b"first run" in Folder(str(tmp_path)).get("lease.json")


def test_a_silent_run_is_replaced_after_its_lease_and_then_refused(tmp_path: Path) -> None:
    with _first_run(tmp_path, 700, renews=False) as first:
        started = time.monotonic()
        second = _second(tmp_path, 700)
        second.hold()
        assert time.monotonic() - started < 5
        record = LeaseRecord.decode(Folder(str(tmp_path)).get("lease.json"), "lease.json")
        assert record.owner.run_id == "second run"
        (tmp_path / "go on").touch()
        assert first.stdout is not None
        told = first.stdout.readline()
        assert told.startswith("refused")
        assert "second run" in told
        second.hold()


def test_a_run_whose_process_is_gone_is_replaced_at_once(tmp_path: Path) -> None:
    with _first_run(tmp_path, 60_000, renews=False) as first:
        first.kill()
        first.wait()
        started = time.monotonic()
        _second(tmp_path, 60_000).hold()
        assert time.monotonic() - started < 5


def test_a_restart_in_the_same_application_does_not_wait(tmp_path: Path) -> None:
    with _first_run(tmp_path, 60_000, renews=True) as first:
        started = time.monotonic()
        second = _second(tmp_path, 300, application="first application")
        second.hold()
        assert time.monotonic() - started < 5
        assert first.stdout is not None
        # The first renews after a third of its lease, and learns of it then; this test does not wait so long.
        assert b"second run" in Folder(str(tmp_path)).get("lease.json")


def test_workers_of_one_run_share_the_lease(tmp_path: Path) -> None:
    leases = [_second(tmp_path, 300) for _ in range(3)]
    for _ in range(3):
        for lease in leases:
            lease.hold()
        time.sleep(0.15)


def test_a_hold_that_is_not_due_costs_nothing(tmp_path: Path) -> None:
    lease = _second(tmp_path, 60_000)
    lease.hold()
    (tmp_path / "lease.json").unlink()
    lease.hold()
    assert not (tmp_path / "lease.json").exists()


def test_one_lease_object_a_process_and_run(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    first = Lease.of(files, "run 1", "application", 1_000)
    assert Lease.of(files, "run 1", "application", 1_000) is first
    second = Lease.of(files, "run 2", "application", 1_000)
    assert second is not first
    assert Lease.of(files, "run 1", "application", 1_000) is not first, "only the current run is remembered"
    other = Lease.of(files.child("other"), "run 2", "application", 1_000)
    assert Lease.of(files, "run 1", "application", 1_000) is not other


def test_a_replaced_run_stays_replaced_whatever_its_workers_remember(tmp_path: Path) -> None:
    """New workers remember nothing; without the record two runs would take it in turn for ever."""
    files = Folder(str(tmp_path))
    first, second = replace(_ME, run_id="first"), replace(_OTHER, run_id="second")
    Lease(files, first, 100).hold()
    time.sleep(0.2)
    Lease(files, second, 100).hold()
    time.sleep(0.2)
    with pytest.raises(LiveRunError, match="has lost the state"):
        Lease(files, first, 100).hold()
    Lease(files, second, 100).hold()
    # Where a plan stands in for the run, it may come back.
    Lease(files, first, 100, once=False).hold()


def test_a_late_task_of_an_old_run_does_not_stop_the_new_one(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    Lease(files, replace(_ME, run_id="old"), 10_000).hold()
    live = Lease(files, replace(_ME, run_id="new"), 10_000)
    live.hold()
    with pytest.raises(LiveRunError):
        Lease(files, replace(_ME, run_id="old"), 10_000).hold()
    live._check_at_s = 0.0
    live.hold()


def test_background_work_sees_that_the_lease_is_lost_and_never_renews_it(tmp_path: Path) -> None:
    """Clean-up of a run that has ended must neither keep the next one out nor go on beside it."""
    files = Folder(str(tmp_path))
    old = Lease(files, replace(_ME, run_id="old"), 300)
    old.hold()
    record = files.get("lease.json")
    deadline_s = time.monotonic() + 0.6
    while time.monotonic() < deadline_s:
        old.check()
    assert files.get("lease.json") == record
    Lease(files, replace(_ME, run_id="new"), 300).hold()
    time.sleep(0.15)
    with pytest.raises(LiveRunError, match=r"run old has lost .* to run new .* in the background is not done"):
        old.check()


_WAIT_S = 30.0
_LEASE_MS = 30_000
_LEASE_S = _LEASE_MS / 1000


class Clock:
    """In place of the module `time`: it stands until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease_module, "time", clock)
    return clock


class Slow(Folder):
    """A store with something to do before a file is read, and before and after one is written; once each."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.gets = 0
        self.before_get: Callable[[], object] | None = None
        self.before_put: Callable[[], object] | None = None
        self.after_put: Callable[[], object] | None = None

    def get(self, name: str) -> bytes:
        self.gets += 1
        work, self.before_get = self.before_get, None
        if work is not None:
            work()
        return super().get(name)

    def put(self, name: str, data: bytes | memoryview) -> None:
        work, self.before_put = self.before_put, None
        if work is not None:
            work()
        super().put(name, data)
        work, self.after_put = self.after_put, None
        if work is not None:
            work()


class Hang:
    """Something that hangs until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go_on.wait(_WAIT_S)


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def _renewed(lease: Lease) -> None:
    """Hold it, and wait for what is begun beside."""
    lease.hold()
    _until(lambda: not lease._renewing)


def _on_file(root: Path) -> LeaseRecord:
    return LeaseRecord.decode(Folder(str(root)).get("lease.json"), "lease.json")


def _hanging_renewal(lease: Lease, files: Slow, clock: Clock) -> Hang:
    clock.now_s += 0.4 * _LEASE_S
    files.before_put = hang = Hang()
    lease.hold()
    assert hang.begun.wait(_WAIT_S)
    return hang


def test_a_run_that_was_replaced_stops_while_its_renewal_hangs(tmp_path: Path, clock: Clock) -> None:
    files = Slow(tmp_path)
    first, second = Lease(files, _ME, _LEASE_MS), Lease(Folder(str(tmp_path)), _OTHER, _LEASE_MS)
    first.hold()
    hang = _hanging_renewal(first, files, clock)
    clock.now_s += 1.1 * _LEASE_S
    asked = files.gets
    for _ in range(3):
        first.hold()
    assert files.gets == asked + 1, "it looks, and not at every call"
    second.hold()
    clock.now_s += 0.4 * _LEASE_S
    with pytest.raises(LiveRunError, match=r"run run has lost .* to run other run"):
        first.hold()
    # And when the PUT arrives after all: the one that it was sent by is not the owner, the other one still is.
    hang.go_on.set()
    _until(lambda: not first._renewing)
    assert _on_file(tmp_path) == replace(_on_file(tmp_path), owner=_ME, replaced=())
    clock.now_s += 0.4 * _LEASE_S
    for look in (first.hold, first.hold, first.check):
        with pytest.raises(LiveRunError, match=r"run run has lost .* to run other run"):
            look()
    second.check()
    _renewed(second)
    _renewed(second)
    assert _on_file(tmp_path).owner == _OTHER
    assert _on_file(tmp_path).replaced == ("run",)
    with pytest.raises(LiveRunError):
        Lease(files, _ME, _LEASE_MS).hold()


def test_every_worker_of_a_run_knows_whom_it_replaced(tmp_path: Path, clock: Clock) -> None:
    """Not only the one that took the lease over: the others learn it when they renew."""
    files = Folder(str(tmp_path))
    Lease(files, _ME, _LEASE_MS).hold()
    late = files.get("lease.json")
    clock.now_s += 1.1 * _LEASE_S
    taker, other = Lease(files, _OTHER, _LEASE_MS), Lease(files, _OTHER, _LEASE_MS)
    taker.hold()
    other.hold()
    files.put("lease.json", late)
    clock.now_s += 0.4 * _LEASE_S
    _renewed(other)
    other.hold()
    assert (_on_file(tmp_path).owner, _on_file(tmp_path).replaced) == (_OTHER, ("run",))


def test_a_run_looks_after_a_put_that_took_longer_than_its_lease(tmp_path: Path, clock: Clock) -> None:
    files = Slow(tmp_path)
    first, second = Lease(files, _ME, _LEASE_MS), Lease(Folder(str(tmp_path)), _OTHER, _LEASE_MS)

    def taken_over() -> None:
        clock.now_s += 1.5 * _LEASE_S
        second.hold()

    def written_again() -> None:
        assert _on_file(tmp_path).owner == _ME, "the late write"
        clock.now_s += 0.4 * _LEASE_S
        _renewed(second)

    first.hold()
    clock.now_s += 0.4 * _LEASE_S
    files.before_put, files.after_put = taken_over, written_again
    _renewed(first)
    with pytest.raises(LiveRunError, match=r"run run has lost .* to run other run"):
        first.hold()
    assert _on_file(tmp_path).owner == _OTHER


def test_a_run_that_begins_with_a_put_that_took_long_looks_too(tmp_path: Path, clock: Clock) -> None:
    files, third = Slow(tmp_path), replace(_OTHER, run_id="third")
    Lease(files, _ME, _LEASE_MS).hold()
    clock.now_s += 1.1 * _LEASE_S

    def taken_over() -> None:
        clock.now_s += 1.5 * _LEASE_S
        Lease(Folder(str(tmp_path)), third, _LEASE_MS).hold()

    taken = LeaseRecord(third, int((clock.now_s + 1.5 * _LEASE_S) * 1000), ("run",))
    files.before_put, files.after_put = taken_over, lambda: Folder.put(files, "lease.json", taken.encode())
    second = Lease(files, _OTHER, _LEASE_MS)
    for _ in range(2):
        with pytest.raises(LiveRunError, match=r"run other run has lost .* to run third"):
            second.hold()


def test_a_slow_store_alone_stops_nobody(tmp_path: Path, clock: Clock) -> None:
    files = Slow(tmp_path)
    lease = Lease(files, _ME, _LEASE_MS)

    def slow() -> None:
        clock.now_s += 2 * _LEASE_S

    for _ in range(3):
        files.before_put = slow
        _renewed(lease)
    # It is due again at once, as the record is old.
    written = _on_file(tmp_path)
    _renewed(lease)
    assert _on_file(tmp_path).renewed_ms > written.renewed_ms
    assert _on_file(tmp_path).owner == _ME


def test_a_store_that_does_not_answer_holds_up_no_call_for_long(tmp_path: Path, clock: Clock) -> None:
    files = Slow(tmp_path)
    lease = Lease(files, _ME, 100)
    lease.hold()
    clock.now_s += 1.0
    files.before_get = hang = Hang()
    lease.hold()
    assert hang.begun.wait(_WAIT_S)
    renewing = Hang()
    files.before_put = renewing
    clock.now_s += 1.0
    lease.hold()
    lease.hold()
    # What it hears at last counts.
    Folder.put(files, "lease.json", LeaseRecord(_OTHER, 0, ("run",)).encode())
    hang.go_on.set()
    _until(lambda: lease._successor is not None)
    renewing.go_on.set()
    with pytest.raises(LiveRunError, match="to run other run"):
        lease.hold()


def test_a_store_that_hangs_does_not_keep_other_leases_from_being_renewed(tmp_path: Path, clock: Clock) -> None:
    hanging, well = Slow(tmp_path / "hanging"), Slow(tmp_path / "well")
    first, second = Lease(hanging, _ME, _LEASE_MS), Lease(well, _ME, _LEASE_MS)
    first.hold()
    second.hold()
    before = _on_file(tmp_path / "well").renewed_ms
    hang = _hanging_renewal(first, hanging, clock)
    _renewed(second)
    assert _on_file(tmp_path / "well").renewed_ms > before
    hang.go_on.set()


def test_a_run_that_came_back_knowing_its_successor_is_no_late_write(tmp_path: Path, clock: Clock) -> None:
    """Where a plan stands in for the run, the one it had been replaced by stops."""
    files = Folder(str(tmp_path))
    Lease(files, _ME, _LEASE_MS, once=False).hold()
    clock.now_s += 1.1 * _LEASE_S
    second = Lease(files, _OTHER, _LEASE_MS, once=False)
    second.hold()
    clock.now_s += 1.1 * _LEASE_S
    Lease(files, _ME, _LEASE_MS, once=False).hold()
    with pytest.raises(LiveRunError, match=r"run other run has lost .* to run run"):
        second.hold()
    # It may come back as well, in the same process too: what it saw once is not kept.
    (tmp_path / "lease.json").unlink()
    _renewed(second)
    assert _on_file(tmp_path).owner == _OTHER


def test_no_thread_for_a_renewal_is_no_end_of_renewing(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = _second(tmp_path, _LEASE_MS)
    lease.hold()
    before = _on_file(tmp_path).renewed_ms
    clock.now_s += 0.4 * _LEASE_S

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        lease.hold()
    clock.now_s += 0.2 * _LEASE_S
    _renewed(lease)
    assert _on_file(tmp_path).renewed_ms > before


def test_two_stores_with_a_folder_of_one_name_have_a_lease_each(tmp_path: Path) -> None:
    made = {"implementation": "fsspec.implementations.dirfs.DirFileSystem", "fs": LocalFileSystem(auto_mkdir=True)}
    folders = [Folder("store://bucket/op", {**made, "path": str(tmp_path / name)}) for name in ("east", "west")]
    for folder in folders:
        Lease.of(folder, "run", "app", 10_000).hold()
    assert all((tmp_path / name / "bucket" / "op" / "lease.json").exists() for name in ("east", "west"))
