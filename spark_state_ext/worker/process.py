"""Identity of a process, by which other processes on the machine can check whether it is still running."""

from __future__ import annotations

import functools
import os
from pathlib import Path

__all__ = ["is_alive", "is_running", "get_pid_namespace", "get_start_ticks", "get_process_token"]


def get_start_ticks(pid: int) -> str:
    """Return a process's start time in clock ticks since boot, which distinguishes processes with a reused pid."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def get_pid_namespace() -> str:
    """Return the PID namespace of this process, in which process ids are valid; empty if the system has none.

    Each container of a machine has a separate PID namespace.
    """
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def get_process_token() -> str:
    """Return a token of this process for `is_alive` in another process on the same machine."""
    return _token(os.getpid())


@functools.lru_cache(maxsize=1)
def _token(pid: int) -> str:
    return f"{pid} {get_start_ticks(pid)}"


def is_alive(token: str) -> bool:
    """True if the process of a token is still running."""
    pid, _, start = token.partition(" ")
    return is_running(int(pid), start)


def is_running(pid: int, start: str) -> bool:
    """True if the process with this pid and start time is still running."""
    current = get_start_ticks(pid)
    # Without /proc, or if it hides other users' processes, any process with this pid has to count as the same.
    return current == start if current and start else _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
