"""Holds: no file below a query folder is cleaned up for a while, as a process copies from it.

A hold is a file in the query folder. Renewing it makes the file with the next number, and removes the one before. So
there is a file at every moment, even on stores whose rename does not replace. A process that takes a savepoint first
writes the hold, then reads the latest committed pointers. A clean-up that saw no hold looked before that. It keeps the
files of its own pointer and of all newer ones, and the savepoint's pointers are newer (`docs/correctness.md`).

A holder is alive if the number changes within the hold's time by the clock of the process that looks: clocks of two
machines are never compared.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from arrow_schemas.checksum import open_document, report_damage, seal_document
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.layout import HOLDS_FOLDER

__all__ = ["HOLD_FORMAT", "HOLD_MS", "Hold", "HoldRecord", "HoldWatch"]

_LOGGER = logging.getLogger("spark_state_ext")
HOLD_FORMAT = 1
# How long a hold lasts without renewal, milliseconds. A copy renews it every third of that time.
HOLD_MS = 600_000
_NAME = re.compile(r"([0-9a-f]{32})-(\d{8})\.json")
# A hold whose file is older than this is dead; for processes that live too short to watch it. No clock is a day wrong.
_DEAD_AFTER_S = 86_400.0
_KNOWN_MAX = 1_024
_ADVICE = "Remove it while no savepoint is being taken."


@dataclass(frozen=True)
class HoldRecord:
    """The content of a hold.

    Parameters
    ----------
    id
        32 hexadecimal digits, random.
    holder
        A description of what copies, and where to.
    lasts_ms
        How long it lasts without renewal.
    number
        How often it was renewed.
    """

    id: str
    holder: str
    lasts_ms: int
    number: int = 0

    @property
    def name(self) -> str:
        """The name of its file."""
        return _file_name(self.id, self.number)

    def encode(self) -> bytes:
        """Return the bytes of its file."""
        return seal_document({"format": HOLD_FORMAT, "id": self.id, "holder": self.holder, "lasts_ms": self.lasts_ms})

    @staticmethod
    def decode(data: bytes, number: int, where: str) -> HoldRecord:
        """Read a hold from its file's bytes."""
        with report_damage(where, "hold", _ADVICE):
            fields = open_document(data, where, HOLD_FORMAT, _ADVICE)
            return HoldRecord(str(fields["id"]), str(fields["holder"]), int(fields["lasts_ms"]), number)
        raise AssertionError("unreachable: readable raises what it catches")


class Hold:
    """A hold on a query folder, from `place` to `release`. Any process that knows its id may renew and release it."""

    def __init__(self, query_folder: Folder, hold_id: str) -> None:
        self._files = query_folder.child(HOLDS_FOLDER)
        self.id = hold_id

    @staticmethod
    def place(query_folder: Folder, holder: str, lasts_ms: int = HOLD_MS) -> Hold:
        """Make a hold. Clean-ups that begin after this returns delete no files."""
        record = HoldRecord(uuid.uuid4().hex, holder, lasts_ms)
        hold = Hold(query_folder, record.id)
        hold._files.put(record.name, record.encode())
        return hold

    def renew(self) -> HoldRecord:
        """Renew the hold, so that its time starts again; return its content."""
        while numbers := self._numbers():
            name = _file_name(self.id, max(numbers))
            try:
                record = HoldRecord.decode(self._files.get(name), max(numbers), self._files.where(name))
            except MissingCheckpointError:
                continue  # another process renewed or released it a moment ago
            renewed = replace(record, number=record.number + 1)
            # Another process may renew it at the same moment, with the same bytes: then that file stays.
            self._files.create(renewed.name, renewed.encode())
            self._files.as_named().remove(name)
            return renewed
        raise MissingCheckpointError(
            f"the hold {self.id} is gone from {self._files.root}, as it was not renewed in time: the files to copy may "
            "be gone too. Begin again."
        )

    def release(self) -> None:
        """Remove the hold, if it still exists."""
        for number in self._numbers():
            self._files.as_named().remove(_file_name(self.id, number))

    def _numbers(self) -> list[int]:
        """Return the numbers of its files: one, or two while it is renewed."""
        matches = [_NAME.fullmatch(name) for name in self._files.names()]
        return [int(match[2]) for match in matches if match is not None and match[1] == self.id]


def _file_name(hold_id: str, number: int) -> str:
    return f"{hold_id}-{number:08d}.json"


class HoldWatch:
    """Watches whether holds are renewed; a `Worker` owns it."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic, wall_s: Callable[[], float] = time.time) -> None:
        self._clock_s = clock_s
        self._wall_s = wall_s
        # By folder and id of a hold: its newest record, and when that was first seen.
        self._seen: dict[str, tuple[HoldRecord, float]] = {}
        self._lock = threading.Lock()

    def living(self, query_folder: Folder) -> list[HoldRecord]:
        """Return the holds that must be respected; remove holds that were not renewed in time."""
        files = query_folder.child(HOLDS_FOLDER)
        newest: dict[str, tuple[int, Entry]] = {}
        for entry in files.entries():
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                newest[match[1]] = max(newest.get(match[1], (-1, entry)), (int(match[2]), entry))
        living = []
        for hold_id, (number, entry) in sorted(newest.items()):
            record = self._check_hold(files, hold_id, number, entry)
            if record is not None:
                living.append(record)
        return living

    def _check_hold(self, files: Folder, hold_id: str, number: int, entry: Entry) -> HoldRecord | None:
        """Return a hold if it is alive; otherwise remove it, and return None."""
        key, now_s = f"{files.identity} {hold_id}", self._clock_s()
        with self._lock:
            seen = self._seen.get(key)
        if seen is None or seen[0].number != number:
            try:
                record = HoldRecord.decode(files.get(entry.name), number, files.where(entry.name))
            except MissingCheckpointError:
                # It was renewed or released a moment ago; the next clean-up will see which.
                return HoldRecord(hold_id, "somebody", HOLD_MS, number)
            seen = record, now_s
            with self._lock:
                self._seen[key] = seen
                while len(self._seen) > _KNOWN_MAX:
                    self._seen.pop(next(iter(self._seen)))
        record, since_s = seen
        is_too_old = entry.modified_s is not None and self._wall_s() - entry.modified_s > _DEAD_AFTER_S
        if now_s - since_s <= record.lasts_ms / 1000 and not is_too_old:
            return record
        _LOGGER.warning(
            "the hold of %s on %s was not renewed for %.0f s: it is removed", record.holder, files.root, now_s - since_s
        )
        files.as_named().remove(entry.name)
        with self._lock:
            self._seen.pop(key, None)
        return None
