"""Processes by their parents, as Linux shows them; those of other containers on this machine too."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["WAIT_S", "command_of", "descendants", "kill_tree", "wait_until"]

# Far more than anything takes on a slow machine: who waits so long waits for what does not come.
WAIT_S = 240.0


def wait_until(met: Callable[[], bool], what: str, every_s: float = 0.05, wait_s: float = WAIT_S) -> None:
    """Wait for a condition.

    Raises
    ------
    TimeoutError
        When it was not met within `wait_s`; its text is `what`.
    """
    deadline_s = time.monotonic() + wait_s
    while not met():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {wait_s:.0f} seconds: {what}")
        time.sleep(every_s)


def _parents() -> dict[int, int]:
    """The parent of each process that lives; zombies do not."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state not in "ZX":
                    found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> list[int]:
    """All processes below one, parents before their children."""
    parents = _parents()
    found = [pid]
    for above in found:
        found += [child for child, parent in parents.items() if parent == above]
    return found[1:]


def command_of(pid: int) -> str:
    """A process's command line; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill_tree(pid: int) -> None:
    """Kill a process and all below it, and return when none of them runs."""
    # Stopped first: a parent that still ran could start another child.
    for one in (pid, *descendants(pid)):
        _signal(one, signal.SIGSTOP)
    doomed = [pid, *descendants(pid)]
    for one in doomed:
        _signal(one, signal.SIGKILL)
    wait_until(lambda: not _parents().keys() & set(doomed), f"processes {doomed} end")


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
