"""What processes use, read from ``/proc``: Linux only."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryWatch", "Peak", "cpu_seconds", "descendants", "io_bytes", "supported", "written_bytes"]

_PROC = Path("/proc")


def supported() -> bool:
    """Whether this system tells."""
    return (_PROC / "self" / "stat").exists()


def descendants(pid: int) -> list[int]:
    """Children, their children and so on."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            fields = _stat(int(folder.name))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def cpu_seconds(pid: int) -> dict[str, float]:
    """Processor time of a process's descendants so far, by program (``java``, ``python``).

    Of descendants that have ended, those that were waited for are counted.
    """
    ticks: dict[str, int] = {}
    for child in descendants(pid):
        fields = _stat(child)
        program = _program(child)
        if fields is not None and program is not None:
            ticks[program] = ticks.get(program, 0) + sum(int(value) for value in fields[11:15])
    return {program: count / os.sysconf("SC_CLK_TCK") for program, count in ticks.items()}


def io_bytes(pid: int, program: str) -> dict[int, tuple[int, int]]:
    """Bytes that a process's living descendants have read and written so far, by process.

    Counted where they are read and written (``rchar``, ``wchar``), files and pipes alike: pages of maps are not in it.

    Parameters
    ----------
    pid
        The process.
    program
        What its descendants run that count, such as ``python``.
    """
    found: dict[int, tuple[int, int]] = {}
    for child in descendants(pid):
        if _program(child) == program and (fields := _io(child)) is not None:
            found[child] = int(fields["rchar"]), int(fields["wchar"])
    return found


def written_bytes(pid: int) -> int:
    """Bytes that a process's living descendants have written to files so far.

    Counted where they are written (``wchar``): pages that a map of a file makes dirty are not in it.
    """
    total = 0
    for child in descendants(pid):
        fields = _io(child)
        if fields is not None:
            total += int(fields["wchar"])
    return total


@dataclass
class Peak:
    """Most memory that a process had.

    Parameters
    ----------
    command
        Its command line.
    rss_bytes
        Resident memory, mapped files included; kept by the kernel, so exact up to the last look.
    anonymous_bytes
        Resident memory that is no file's; the most that any look saw.
    """

    command: str
    rss_bytes: int
    anonymous_bytes: int


class MemoryWatch:
    """Watches this process's descendants; a context manager.

    Parameters
    ----------
    every_s
        Seconds between two looks.
    """

    def __init__(self, every_s: float = 0.1) -> None:
        self._every_s = every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peaks: dict[int, Peak] = {}

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        for pid in descendants(os.getpid()):
            try:
                status = dict(line.split(":", 1) for line in (_PROC / str(pid) / "status").read_text().splitlines())
                command = (
                    (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if "VmHWM" not in status:
                continue  # it is ending
            peak = self.peaks.setdefault(pid, Peak(command, 0, 0))
            peak.command = command
            peak.rss_bytes = max(peak.rss_bytes, _kib(status["VmHWM"]))
            peak.anonymous_bytes = max(peak.anonymous_bytes, _kib(status["RssAnon"]))


def _program(pid: int) -> str | None:
    """What a process runs, without its version; None when it has ended."""
    try:
        # Threads may rename a process; the file it runs stays.
        return (_PROC / str(pid) / "exe").readlink().name.rstrip(".0123456789")
    except OSError:
        return None


def _io(pid: int) -> dict[str, str] | None:
    """``/proc/<pid>/io``; None when the process has ended."""
    try:
        return dict(line.split(": ") for line in (_PROC / str(pid) / "io").read_text().splitlines())
    except (OSError, ValueError):
        return None


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/<pid>/stat`` from the third on: state, parent, …; None when the process has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command, in parentheses, may hold spaces and parentheses.
    return text[text.rindex(")") + 2 :].split()
