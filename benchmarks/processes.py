"""Processor time, memory and I/O of processes, read from ``/proc``; Linux only."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryWatch", "Peak", "cpu_seconds", "descendants", "io_bytes", "supported", "written_bytes"]

_PROC = Path("/proc")


def supported() -> bool:
    """Return whether this system has Linux's ``/proc``."""
    return (_PROC / "self" / "stat").exists()


def descendants(pid: int) -> list[int]:
    """Return the process ids of a process's living children, their children and so on."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            fields = _read_stat(int(folder.name))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    result: list[int] = []
    unvisited = [pid]
    while unvisited:
        own_children = children.get(unvisited.pop(), [])
        result += own_children
        unvisited += own_children
    return result


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the processor time of a process's descendants so far, in seconds by program (``java``, ``python``).

    The time of an ended descendant counts as its parent's if the parent is a living descendant and has waited for it.
    """
    ticks: dict[str, int] = {}
    for child in descendants(pid):
        fields = _read_stat(child)
        program = _read_program(child)
        if fields is not None and program is not None:
            ticks[program] = ticks.get(program, 0) + sum(int(value) for value in fields[11:15])
    return {program: count / os.sysconf("SC_CLK_TCK") for program, count in ticks.items()}


def io_bytes(pid: int, program: str) -> dict[int, tuple[int, int]]:
    """Return the bytes that a process's living descendants have read and written so far, by process id.

    Calls of ``read`` and ``write`` count (``rchar``, ``wchar``), on files, pipes and sockets alike; access to
    memory-mapped pages does not.

    Parameters
    ----------
    pid
        The process.
    program
        Count only descendants that run this program, such as ``python``.
    """
    result: dict[int, tuple[int, int]] = {}
    for child in descendants(pid):
        if _read_program(child) == program and (fields := _read_io(child)) is not None:
            result[child] = int(fields["rchar"]), int(fields["wchar"])
    return result


def written_bytes(pid: int) -> int:
    """Return the bytes that a process's living descendants have written so far.

    Calls of ``write`` count (``wchar``), on files, pipes and sockets alike; changes of memory-mapped pages do not.
    """
    total = 0
    for child in descendants(pid):
        fields = _read_io(child)
        if fields is not None:
            total += int(fields["wchar"])
    return total


@dataclass
class Peak:
    """The most memory that a process had.

    Parameters
    ----------
    command
        The process's command line.
    rss_bytes
        Resident memory, mapped files included. The kernel keeps the maximum, so it is exact up to the last sample.
    anonymous_bytes
        Resident memory that belongs to no file: the largest sample.
    """

    command: str
    rss_bytes: int
    anonymous_bytes: int


class MemoryWatch:
    """Watches the memory of this process's descendants; a context manager.

    Parameters
    ----------
    every_s
        Seconds between two samples.
    """

    def __init__(self, every_s: float = 0.1) -> None:
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peaks: dict[int, Peak] = {}

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self._sample()

    def _sample(self) -> None:
        for pid in descendants(os.getpid()):
            try:
                status = dict(line.split(":", 1) for line in (_PROC / str(pid) / "status").read_text().splitlines())
                command = (
                    (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
            except (FileNotFoundError, ProcessLookupError):
                continue  # the process has ended
            if "VmHWM" not in status:
                continue  # the process is ending
            peak = self.peaks.setdefault(pid, Peak(command, 0, 0))
            peak.command = command
            peak.rss_bytes = max(peak.rss_bytes, _parse_kib(status["VmHWM"]))
            peak.anonymous_bytes = max(peak.anonymous_bytes, _parse_kib(status["RssAnon"]))


def _read_program(pid: int) -> str | None:
    """Return the program that a process runs, without its version; None if the process has ended."""
    try:
        # A thread may rename its process, but not the file that the process runs.
        return (_PROC / str(pid) / "exe").readlink().name.rstrip(".0123456789")
    except OSError:
        return None


def _read_io(pid: int) -> dict[str, str] | None:
    """Return the values in ``/proc/<pid>/io`` by name; None if the process has ended."""
    try:
        return dict(line.split(": ") for line in (_PROC / str(pid) / "io").read_text().splitlines())
    except (OSError, ValueError):
        return None


def _parse_kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _read_stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/<pid>/stat`` from the third (state) on; None if the process has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, which may have spaces and parentheses itself.
    return text[text.rindex(")") + 2 :].split()
