"""What tests of the lease share: two runs, a clock that stands, and records."""

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
    """A run whose driver is this process, as in local mode."""
    pid = os.getpid() if pid is None else pid
    here = replace(ME, host=os.uname().nodename, pid=pid, pid_start=process.get_start_ticks(pid))
    from spark_state_ext.worker.boot import boot_id

    return replace(here, boot=boot_id(), pid_namespace=process.get_pid_namespace())


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


def newest_in(root: Path) -> LeaseRecord:
    found = LeaseLog(Folder(str(root))).newest()
    assert found is not None
    return found.record
