"""Who may write an operator's state."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

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
    newer = _record(_OTHER).encode().replace(b'"format": 2', b'"format": 3')
    with pytest.raises(VersionSkewError, match=r"lease\.json has format 3"):
        LeaseRecord.decode(newer, "lease.json")


def test_is_over_only_when_it_is_certain() -> None:
    here = RunIdentity.here("run", "application")
    assert not here.is_over()
    assert not replace(here, host="elsewhere", pid=2**22 - 1).is_over()
    assert replace(here, boot="another boot").is_over()
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
