"""Waiting for an event. Its duration never decides a test: the limit only ends a test that would hang."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from spark_state_ext.testing import WAIT_S

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


def wait_for_uploads(folder: Path) -> None:
    """Wait until no file below a folder is half written: a worker uploads the last batch's files after the query ended."""
    eventually(lambda: not any(path.name.startswith(".tmp-") for path in folder.rglob("*")))
