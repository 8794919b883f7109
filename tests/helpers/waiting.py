"""Waiting for an event. Its duration never decides a test: the limit only ends a test that would hang."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from spark_state_ext.commit.ledger import RUNNING, UploadRecord
from spark_state_ext.store.environment import Environment
from spark_state_ext.store.records import read_all
from spark_state_ext.testing import WAIT_S
from spark_state_ext.worker import process

__all__ = ["WAIT_S", "eventually", "is_running", "removed", "wait_for_uploads"]


def eventually(holds: Callable[[], object], every_s: float = 0.01) -> None:
    """Return as soon as a condition holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"the condition does not hold after {WAIT_S:.0f} s"
        time.sleep(every_s)


def is_running(pid: int) -> bool:
    """Return whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def removed(folder: Path) -> None:
    """Remove the folder of an ended query, although this process may still be writing the release of its lease."""

    def remove_again() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    eventually(remove_again)


def wait_for_uploads(folder: Path, local_dir: Path) -> None:
    """Wait until all files below a folder are uploaded: a worker uploads the last batch's files after the query ended.

    Before a batch ends, its local stores have records of its uploads, which say whether the worker is still at it.
    """

    def is_under_way(value: bytes) -> bool:
        record = UploadRecord.decode(value)
        return record is not None and record.state == RUNNING and process.is_alive(record.owner)

    def are_over() -> bool:
        for bucket_folder in {path.parents[1] for path in local_dir.rglob("data.mdb")}:
            environment = Environment.at(bucket_folder, 1 << 20)
            try:
                if any(map(is_under_way, environment.read(read_all).values())):
                    return False
            finally:
                environment.close()
        return not any(path.name.startswith(".tmp-") for path in folder.rglob("*"))

    eventually(are_over)
