"""Two runs, a clock that only tests move, and records, which the tests of the lease share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import Clock
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import LeaseRecord, NumberedRecord, RunIdentity
from spark_state_ext.worker import process

ME = RunIdentity("application", "plan", "query", "host")
OTHER = RunIdentity("other application", "other plan", "query", "other host")
LEASE_MS = 30_000
LEASE_S = LEASE_MS / 1000
THIRD_S = LEASE_S / 3


def record_of(owner: RunIdentity, **also: Any) -> LeaseRecord:
    return replace(LeaseRecord(owner, 1_000, 500, nonce="n"), **also)


def found_of(owner: RunIdentity, number: int = 7, **also: Any) -> NumberedRecord:
    return NumberedRecord(number, record_of(owner, **also))


def local_run(pid: int | None = None) -> RunIdentity:
    """Return a run whose driver is this process, as in local mode."""
    pid = os.getpid() if pid is None else pid
    here = replace(ME, host=os.uname().nodename, pid=pid, pid_start=process.get_start_ticks(pid))
    from spark_state_ext.worker.boot import boot_id

    return replace(here, boot=boot_id(), pid_namespace=process.get_pid_namespace())


class Virtual:
    """A clock that moves only when a test or a sleep moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        # Called after each sleep, for example to act as another run.
        self.meanwhile: Callable[[], object] = lambda: None
        # Error of this machine's wall clock in seconds.
        self.off_s = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, lambda: 1e6 + self.now_s + self.off_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.meanwhile()


def newest_in(root: Path) -> LeaseRecord:
    record = LeaseLog(Folder(str(root))).newest()
    assert record is not None
    return record.record
