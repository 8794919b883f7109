"""A ledger of every file that is created and deleted below a folder, on a local disk and in S3, by all processes.

State and savepoints lie on `WatchedDisk` or `WatchedS3`, which executors make by name. They do what the real ones do, which
they are. On a disk the interpreter itself tells of each file that is opened for writing, linked, renamed and removed (audit
events), whoever does it; in S3 each request that writes or deletes is noted when the server has answered. A line tells when,
in which process and phase, and by which functions of this package: none means the user.
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
# A request to S3 is about to be sent: whoever is killed before the answer may have changed the file or not.
SENT = "sent"
USER = "the user"
# The innermost function that says what a write is for; files of all kinds go through `files.folder`.
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
_PASSED_OVER = ("files.folder.", "files.publication.", "files.duplication.", "worker.")
# Below which folders of this machine, and where that is written down.
_watched: dict[str, str] = {}
_hooked = threading.Lock()
_is_hooked = False


@dataclass(frozen=True)
class Entry:
    """What became of one file.

    Parameters
    ----------
    at_s
        When, seconds since 1970: before it is done on a disk, after it in S3.
    pid, phase
        In which process, and what the test was doing.
    what, path, to
        ``"create"``, ``"delete"``, or ``"move"`` with the new path; without a protocol. ``"sent"``: an S3 request for
        one of these.
    by
        Functions of this package, the innermost first.
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
        """What it was for."""
        if not self.by:
            return USER
        for prefix, role in _ROLES:
            if any(name.startswith(prefix) for name in self.by):
                return role
        return self.by[0].rpartition(".")[0]

    @property
    def made(self) -> str:
        """The path that came to be; empty where one went."""
        return {CREATE: self.path, MOVE: self.to}.get(self.what, "")

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.path.rpartition("/")[2]


class Ledger:
    """What was noted, and the phase that is noted with it.

    Parameters
    ----------
    path
        The file, outside of what is watched.
    below
        What is watched: a path without a protocol.
    """

    def __init__(self, path: Path, below: str) -> None:
        self.path = path
        self.below = below
        self._phase = path.with_suffix(".phase")
        self.phase = ""
        self.path.touch()
        self.enter("-")

    def enter(self, phase: str) -> None:
        """From now on it is another phase."""
        self.phase = phase
        hidden = self._phase.with_suffix(".new")
        hidden.write_text(phase)
        hidden.replace(self._phase)

    def entries(self) -> list[Entry]:
        """All that was noted, in the order of time."""
        lines = self.path.read_text().splitlines()
        found = [Entry(**{**fields, "by": tuple(fields["by"])}) for fields in map(json.loads, lines)]
        return sorted(found, key=lambda entry: entry.at_s)

    def deletes(self, prefix: str, *, phases: str = "") -> list[Entry]:
        """Files that went from below a path, by deleting or by moving; those of temporary names aside."""
        return [
            entry
            for entry in self.entries()
            if entry.what in (DELETE, MOVE)
            and _is_below(entry.path, prefix)
            and not entry.name.startswith(".tmp-")
            and entry.phase.startswith(phases)
        ]

    def creates(self, prefix: str, *, phases: str = "") -> list[Entry]:
        """Files that came below a path."""
        return [
            entry
            for entry in self.entries()
            if _is_below(entry.made, prefix)
            and not entry.made.rpartition("/")[2].startswith(".tmp-")
            and entry.phase.startswith(phases)
        ]

    def unanswered(self, pid: int) -> set[str]:
        """Files of S3 requests of a process of which the ledger does not know whether the server got them."""
        sent: set[str] = set()
        for entry in self.entries():
            if entry.pid == pid:
                sent = sent | {entry.path} if entry.what == SENT else sent - {entry.path}
        return sent

    def files_left(self) -> set[str]:
        """Which files must be there, going by the ledger alone."""
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


def summed(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Who did how many of one thing in which phase, and from when to when."""
    sums: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in entries:
        kind = DELETE if entry.what == DELETE else CREATE if entry.what == CREATE else "rename"
        new = {"phase": entry.phase, "who": entry.role, "what": kind, "files": 0, "from_s": entry.at_s}
        found = sums.setdefault((entry.phase, entry.role, kind), new)
        found["files"] += 1
        found["to_s"] = entry.at_s
    return list(sums.values())


def disk_options(ledger: Ledger) -> dict[str, Any]:
    """Storage options of a folder on this machine."""
    return {"implementation": DISK, "log": str(ledger.path), "below": ledger.below}


def s3_options(ledger: Ledger, options: dict[str, Any]) -> dict[str, Any]:
    """Storage options of a folder in S3."""
    return {
        **options,
        "implementation": S3,
        "log": str(ledger.path),
        "below": ledger.below,
        "use_listings_cache": False,
    }


class WatchedDisk(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A local disk, with a ledger.

    Parameters
    ----------
    log
        The ledger's file.
    below
        What is watched.
    """

    def __init__(self, log: str, below: str, **options: Any) -> None:
        super().__init__(**options)
        _watch(below, log)


class WatchedS3(S3FileSystem):  # type: ignore[misc] # s3fs has no types
    """S3, with a ledger; parameters as `WatchedDisk`."""

    def __init__(self, log: str, below: str, **options: Any) -> None:
        super().__init__(**options)
        self._ledger_log, self._ledger_below = log, below

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> Any:
        """One PUT."""
        self._note(SENT, path)
        answer = sync(self.loop, self._pipe_file, path, value, **kwargs)
        self._note(CREATE, path)
        return answer

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> Any:
        """One PUT, or several, of a file."""
        self._note(SENT, rpath)
        answer = sync(self.loop, self._put_file, lpath, rpath, **kwargs)
        self._note(CREATE, rpath)
        return answer

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> Any:
        """A copy by the store."""
        self._note(SENT, path2)
        answer = sync(self.loop, self._cp_file, path1, path2, **kwargs)
        self._note(CREATE, path2)
        return answer

    def rm_file(self, path: str, **kwargs: Any) -> Any:
        """One DELETE."""
        self._note(SENT, path)
        answer = sync(self.loop, self._rm_file, path, **kwargs)
        self._note(DELETE, path)
        return answer

    def rm(self, path: str, recursive: bool = False, **kwargs: Any) -> Any:
        """Many of them."""
        doomed = self.find(path) if recursive else [path]
        for one in doomed:
            self._note(SENT, one)
        answer = sync(self.loop, self._rm, path, recursive=recursive, **kwargs)
        for one in doomed:
            self._note(DELETE, one)
        return answer

    def _note(self, what: str, path: str) -> None:
        path = self._strip_protocol(path)
        if _is_below(path, self._ledger_below):
            _write(self._ledger_log, what, path)


def _watch(below: str, log: str) -> None:
    """From now on this process notes what becomes of files below a folder of this machine."""
    global _is_hooked
    with _hooked:
        _watched[below] = log
        if not _is_hooked:
            _is_hooked = True
            sys.addaudithook(_hook)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    # There are very many events, and most are none of ours.
    if event == "open":
        path, _, flags = args
        if isinstance(flags, int) and flags & os.O_CREAT and not isinstance(path, int):
            log, found = _place(path)
            if log and not os.path.lexists(found):
                _write(log, CREATE, found)
    elif event == "os.remove":
        log, found = _place(args[0], args[1])
        if log and os.path.lexists(found):
            _write(log, DELETE, found)
    elif event == "os.link":
        log, found = _place(args[1])
        if log and not os.path.lexists(found) and os.path.lexists(os.fsdecode(args[0])):
            _write(log, CREATE, found)
    elif event == "os.rename":
        log, found = _place(args[0])
        if log and os.path.lexists(found):
            _write(log, MOVE, found, os.path.abspath(os.fsdecode(args[1])))


def _place(path: Any, folder: int = -1) -> tuple[str, str]:
    """The log and the whole path of a file; no log where it is not watched."""
    found = os.fsdecode(path)
    if folder >= 0:
        found = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), found)
    found = os.path.abspath(found)
    return next((log for below, log in list(_watched.items()) if _is_below(found, below)), ""), found


def _write(log: str, what: str, path: str, to: str = "") -> None:
    by: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("spark_state_ext."):
            name = f"{module.removeprefix('spark_state_ext.')}.{frame.f_code.co_name}"
            if not name.startswith(_PASSED_OVER):
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
        # One write of a short line: lines of several processes do not mix.
        file.write(json.dumps(line) + "\n")
