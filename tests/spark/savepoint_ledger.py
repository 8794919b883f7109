"""A ledger of every file that is created and deleted below a folder, on a local disk and in S3, by all processes.

State and savepoints are stored on `WatchedDisk` or `WatchedS3`, which executors create by name. Both are subclasses of the real
file systems and do what these do. On a disk, the interpreter's audit events report each file that is opened for writing, linked,
renamed or removed by any code; in S3, each request that writes or deletes is noted when the server has answered. A line says
when a file changed, in which process and phase, and by which functions of this package; no function means the user.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem
from s3fs import S3FileSystem

__all__ = ["DISK", "Entry", "Ledger", "SENT", "USER", "WatchedDisk", "WatchedS3", "disk_options", "s3_options"]

DISK, S3 = "savepoint_ledger.WatchedDisk", "savepoint_ledger.WatchedS3"
CREATE, DELETE, MOVE = "create", "delete", "move"
# A request to S3 is about to be sent: if the process is killed before the answer, the file may or may not have changed.
SENT = "sent"
USER = "the user"
# The purpose of a write by the function that made it. Functions that write files of all kinds are ignored.
_ROLES = (
    ("savepoints.claims.delete_claimed_savepoint", "claim consumption"),
    ("savepoints.claims.", "claim"),
    ("ownership.holds.", "hold"),
    ("ownership.lease", "lease"),
    ("timeline.records", "epochs"),
    ("files.retention.clean_up", "clean-up"),
    ("cli.savepoint.", "savepoint command"),
    ("beginning.detachment.", "detaching"),
    ("spark.executor.savepoint_tasks.", "taking"),
    ("savepoints.writer.", "taking"),
    ("savepoints.", "start"),
    ("files.sealed_file.publish", "upload"),
)
_IGNORED = ("files.folder.", "files.publication.", "files.duplication.", "worker.")
# The watched folders of this machine, and the file of the ledger of each.
_watched: dict[str, str] = {}
_hooked = threading.Lock()
_is_hooked = False


@dataclass(frozen=True)
class Entry:
    """One change of one file.

    Parameters
    ----------
    at_s
        When, seconds since 1970: just before the change on a disk, just after it in S3.
    pid, phase
        The process, and what the test was doing.
    what, path, to
        ``"create"``, ``"delete"``, or ``"move"`` with the new path; paths have no protocol. ``"sent"``: an S3 request for
        one of these.
    by
        The calling functions of this package, the innermost first.
    """

    at_s: float
    pid: int
    phase: str
    what: str
    path: str
    to: str
    by: tuple[str, ...]

    @property
    def role(self) -> str:
        """The purpose of the change."""
        if not self.by:
            return USER
        for prefix, role in _ROLES:
            if any(name.startswith(prefix) for name in self.by):
                return role
        return self.by[0].rpartition(".")[0]

    @property
    def new_path(self) -> str:
        """The path that now exists; empty if a file was deleted."""
        return {CREATE: self.path, MOVE: self.to}.get(self.what, "")

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.path.rpartition("/")[2]


class Ledger:
    """The noted changes, and the phase that is noted with each.

    Parameters
    ----------
    path
        The ledger's file, outside the watched folder.
    below
        The watched folder: a path without a protocol.
    """

    def __init__(self, path: Path, below: str) -> None:
        self.path = path
        self.below = below
        self._phase = path.with_suffix(".phase")
        self.phase = ""
        self.path.touch()
        self.enter("-")

    def enter(self, phase: str) -> None:
        """Begin another phase."""
        self.phase = phase
        hidden = self._phase.with_suffix(".new")
        hidden.write_text(phase)
        hidden.replace(self._phase)

    def entries(self) -> list[Entry]:
        """Return all noted changes in the order of time."""
        lines = self.path.read_text().splitlines()
        entries = [Entry(**{**fields, "by": tuple(fields["by"])}) for fields in map(json.loads, lines)]
        return sorted(entries, key=lambda entry: entry.at_s)

    def deletes(self, prefix: str, *, phases: str = "") -> list[Entry]:
        """Return the deletions and moves of files below a path, but not those of temporary files."""
        return [
            entry
            for entry in self.entries()
            if entry.what in (DELETE, MOVE)
            and _is_below(entry.path, prefix)
            and not entry.name.startswith(".tmp-")
            and entry.phase.startswith(phases)
        ]

    def creates(self, prefix: str, *, phases: str = "") -> list[Entry]:
        """Return the changes that created a file below a path, but not those of temporary files."""
        return [
            entry
            for entry in self.entries()
            if _is_below(entry.new_path, prefix)
            and not entry.new_path.rpartition("/")[2].startswith(".tmp-")
            and entry.phase.startswith(phases)
        ]

    def unanswered(self, pid: int) -> set[str]:
        """Return the files of those S3 requests of a process that the server may or may not have received."""
        sent: set[str] = set()
        for entry in self.entries():
            if entry.pid == pid:
                sent = sent | {entry.path} if entry.what == SENT else sent - {entry.path}
        return sent

    def files_left(self) -> set[str]:
        """Return the files that must exist, according to the ledger alone."""
        left: set[str] = set()
        for entry in self.entries():
            if entry.what == CREATE:
                left.add(entry.path)
            elif entry.what == DELETE:
                left = {path for path in left if not _is_below(path, entry.path)}
            elif entry.what == MOVE:
                moved = {path for path in left if _is_below(path, entry.path)}
                left = (left - moved) | {entry.to + path[len(entry.path) :] for path in moved}
        return left


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix.rstrip("/") + "/")


def summarise(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Count the changes by phase, role and kind, with the times of the first and the last."""
    sums: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in entries:
        kind = DELETE if entry.what == DELETE else CREATE if entry.what == CREATE else "rename"
        new = {"phase": entry.phase, "who": entry.role, "what": kind, "files": 0, "from_s": entry.at_s}
        row = sums.setdefault((entry.phase, entry.role, kind), new)
        row["files"] += 1
        row["to_s"] = entry.at_s
    return list(sums.values())


def disk_options(ledger: Ledger) -> dict[str, Any]:
    """Return the storage options of a watched folder on this machine."""
    return {"implementation": DISK, "log": str(ledger.path), "below": ledger.below}


def s3_options(ledger: Ledger, options: dict[str, Any]) -> dict[str, Any]:
    """Return the storage options of a watched folder in S3."""
    return {
        **options,
        "implementation": S3,
        "log": str(ledger.path),
        "below": ledger.below,
        "use_listings_cache": False,
    }


class WatchedDisk(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A local disk whose changes are noted in a ledger.

    Parameters
    ----------
    log
        The ledger's file.
    below
        The watched folder.
    """

    def __init__(self, log: str, below: str, **options: Any) -> None:
        super().__init__(**options)
        _watch(below, log)


class WatchedS3(S3FileSystem):  # type: ignore[misc] # s3fs has no types
    """An S3 file system whose changes are noted in a ledger; the parameters are those of `WatchedDisk`."""

    def __init__(self, log: str, below: str, **options: Any) -> None:
        super().__init__(**options)
        self._ledger_log, self._ledger_below = log, below

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> Any:
        """Write an object with one PUT."""
        self._note(SENT, path)
        answer = sync(self.loop, self._pipe_file, path, value, **kwargs)
        self._note(CREATE, path)
        return answer

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> Any:
        """Upload a file with one PUT or several."""
        self._note(SENT, rpath)
        answer = sync(self.loop, self._put_file, lpath, rpath, **kwargs)
        self._note(CREATE, rpath)
        return answer

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> Any:
        """Have the store copy an object."""
        self._note(SENT, path2)
        answer = sync(self.loop, self._cp_file, path1, path2, **kwargs)
        self._note(CREATE, path2)
        return answer

    def rm_file(self, path: str, **kwargs: Any) -> Any:
        """Delete an object with one DELETE."""
        self._note(SENT, path)
        answer = sync(self.loop, self._rm_file, path, **kwargs)
        self._note(DELETE, path)
        return answer

    def rm(self, path: str, recursive: bool = False, **kwargs: Any) -> Any:
        """Delete an object, or all objects below a path."""
        paths = self.find(path) if recursive else [path]
        for deleted in paths:
            self._note(SENT, deleted)
        answer = sync(self.loop, self._rm, path, recursive=recursive, **kwargs)
        for deleted in paths:
            self._note(DELETE, deleted)
        return answer

    def _note(self, what: str, path: str) -> None:
        path = self._strip_protocol(path)
        if _is_below(path, self._ledger_below):
            _write(self._ledger_log, what, path)


def _watch(below: str, log: str) -> None:
    """Have this process note all changes of files below a folder of this machine from now on."""
    global _is_hooked
    with _hooked:
        _watched[below] = log
        if not _is_hooked:
            _is_hooked = True
            sys.addaudithook(_hook)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    # There are very many events, and most do not concern watched files.
    if event == "open":
        path, _, flags = args
        if isinstance(flags, int) and flags & os.O_CREAT and not isinstance(path, int):
            log, full_path = _find_ledger(path)
            if log and not os.path.lexists(full_path):
                _write(log, CREATE, full_path)
    elif event == "os.remove":
        log, full_path = _find_ledger(args[0], args[1])
        if log and os.path.lexists(full_path):
            _write(log, DELETE, full_path)
    elif event == "os.link":
        log, full_path = _find_ledger(args[1])
        if log and not os.path.lexists(full_path) and os.path.lexists(os.fsdecode(args[0])):
            _write(log, CREATE, full_path)
    elif event == "os.rename":
        log, full_path = _find_ledger(args[0])
        if log and os.path.lexists(full_path):
            _write(log, MOVE, full_path, os.path.abspath(os.fsdecode(args[1])))


def _find_ledger(path: Any, folder: int = -1) -> tuple[str, str]:
    """Return the ledger and the full path of a file; the ledger is empty if the file is not watched."""
    full_path = os.fsdecode(path)
    if folder >= 0:
        full_path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), full_path)
    full_path = os.path.abspath(full_path)
    return next((log for below, log in list(_watched.items()) if _is_below(full_path, below)), ""), full_path


def _write(log: str, what: str, path: str, to: str = "") -> None:
    by: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("spark_state_ext."):
            name = f"{module.removeprefix('spark_state_ext.')}.{frame.f_code.co_name}"
            if not name.startswith(_IGNORED):
                by.append(name)
        frame = frame.f_back
    phase = Path(log).with_suffix(".phase").read_text()
    line = {
        "at_s": time.time(),
        "pid": os.getpid(),
        "phase": phase,
        "what": what,
        "path": path,
        "to": to,
        "by": by[:10],
    }
    with open(log, "a") as file:
        # A short line is one write, so that lines of several processes do not mix.
        file.write(json.dumps(line) + "\n")
