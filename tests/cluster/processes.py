"""Find and kill processes by their parents, including those of containers on this machine, as Linux shows them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["WAIT_S", "command_of", "descendants", "kill_tree", "wait_until"]

# Far more than any step takes on a slow machine: after this time, the event will not come.
WAIT_S = 240.0


def wait_until(met: Callable[[], bool], what: str, every_s: float = 0.05, wait_s: float = WAIT_S) -> None:
    """Wait for a condition.

    Raises
    ------
    TimeoutError
        If the condition was not met within `wait_s`; its text is `what`.
    """
    deadline_s = time.monotonic() + wait_s
    while not met():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {wait_s:.0f} seconds: {what}")
        time.sleep(every_s)


def read_parents() -> dict[int, int]:
    """Return the parent of each process that lives; zombies do not live."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state not in "ZX":
                    parents[int(entry.name)] = int(parent)
    return parents


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process, parents before their children."""
    parents = read_parents()
    pids = [pid]
    for above in pids:
        pids += [child for child, parent in parents.items() if parent == above]
    return pids[1:]


def command_of(pid: int) -> str:
    """Return a process's command line, or an empty text if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill_tree(pid: int) -> None:
    """Kill a process and all of its descendants, and return once all of them have ended."""
    # Stop them first: a running parent could start another child.
    for process in (pid, *descendants(pid)):
        send_signal(process, signal.SIGSTOP)
    doomed = [pid, *descendants(pid)]
    for process in doomed:
        send_signal(process, signal.SIGKILL)
    wait_until(lambda: not read_parents().keys() & set(doomed), f"processes {doomed} end")


def send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
