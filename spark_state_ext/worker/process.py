"""Who a process is, so that others on the machine can tell whether it still lives."""

from __future__ import annotations

import functools
import os
from pathlib import Path

__all__ = ["is_alive", "is_running", "namespace", "start_of", "token"]


def start_of(pid: int) -> str:
    """Start time of a process in clock ticks since boot, so that a reused pid is not taken for the old process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def namespace() -> str:
    """Where this process's numbers of processes count: containers of one machine each have their own; empty where the
    system does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def token() -> str:
    """This process, in words that `is_alive` of another process on the same machine understands."""
    return _token(os.getpid())


@functools.lru_cache(maxsize=1)
def _token(pid: int) -> str:
    return f"{pid} {start_of(pid)}"


def is_alive(token: str) -> bool:
    """Whether the process of a token still runs."""
    pid, _, start = token.partition(" ")
    return is_running(int(pid), start)


def is_running(pid: int, start: str) -> bool:
    """Whether the process of that number and start still runs."""
    found = start_of(pid)
    # Without /proc, or where it hides other users' processes, any process of that number has to be taken for it.
    return found == start if found and start else _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
