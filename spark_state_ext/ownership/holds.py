"""Holds: for a while nothing is cleaned up below a query folder, as somebody copies from it.

A hold is a file in the query folder. Renewing it makes the file with the next number, and removes the one before; so at
every moment there is one, on stores whose rename does not replace too. Who takes a savepoint writes the hold first, and
reads the latest committed pointers then. A clean-up that looked for holds before that goes by a pointer that is no
newer, and leaves alone what newer pointers need (`docs/correctness.md`).

Whether the holder lives is judged by whether the number changes, on the clock of whoever looks: no two clocks are
compared.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from arrow_schemas.checksum import opened_document, readable, sealed_document
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.layout import HOLDS_FOLDER

__all__ = ["HOLD_FORMAT", "HOLD_MS", "Hold", "HoldRecord", "HoldWatch"]

_LOGGER = logging.getLogger("spark_state_ext")
HOLD_FORMAT = 1
# How long a hold lasts without renewal. A copy renews it each third of that.
HOLD_MS = 600_000
_NAME = re.compile(r"([0-9a-f]{32})-(\d{8})\.json")
# By the time of the file: for processes that live too short to watch it. No clock is a day wrong.
_DEAD_AFTER_S = 86_400.0
_KNOWN_MAX = 1_024
_MEND = "Remove it when nobody takes a savepoint."


@dataclass(frozen=True)
class HoldRecord:
    """What a hold says.

    Parameters
    ----------
    id
        32 hexadecimal digits, random.
    holder
        Who copies, and where to: for people.
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
        """Name of its file."""
        return _name(self.id, self.number)

    def encode(self) -> bytes:
        """The file's bytes."""
        return sealed_document({"format": HOLD_FORMAT, "id": self.id, "holder": self.holder, "lasts_ms": self.lasts_ms})

    @staticmethod
    def decode(data: bytes, number: int, where: str) -> HoldRecord:
        """Read a hold."""
        with readable(where, "hold", _MEND):
            fields = opened_document(data, where, HOLD_FORMAT, _MEND)
            return HoldRecord(str(fields["id"]), str(fields["holder"]), int(fields["lasts_ms"]), number)
        raise AssertionError("unreachable: readable raises what it catches")


class Hold:
    """A hold on a query folder, from `place` to `release`. Whoever knows its id may renew and release it."""

    def __init__(self, query_folder: Folder, hold_id: str) -> None:
        self._files = query_folder.child(HOLDS_FOLDER)
        self.id = hold_id

    @staticmethod
    def place(query_folder: Folder, holder: str, lasts_ms: int = HOLD_MS) -> Hold:
        """Make a hold. When this returns, clean-ups that begin leave everything alone."""
        record = HoldRecord(uuid.uuid4().hex, holder, lasts_ms)
        made = Hold(query_folder, record.id)
        made._files.put(record.name, record.encode())
        return made

    def renew(self) -> HoldRecord:
        """It lasts as long again; gives what it says."""
        while numbers := self._numbers():
            name = _name(self.id, max(numbers))
            try:
                record = HoldRecord.decode(self._files.get(name), max(numbers), self._files.where(name))
            except MissingCheckpointError:
                continue  # another process renewed or released it a moment ago
            renewed = replace(record, number=record.number + 1)
            # Another process may renew it at the same moment, to the same bytes: then that file stays.
            self._files.create(renewed.name, renewed.encode())
            self._files.as_named().remove(name)
            return renewed
        raise MissingCheckpointError(
            f"the hold {self.id} is gone from {self._files.root}, as it was not renewed in time: files that were to be "
            "copied may be gone too. Begin again."
        )

    def release(self) -> None:
        """It is over; nothing happens when it is already."""
        for number in self._numbers():
            self._files.as_named().remove(_name(self.id, number))

    def _numbers(self) -> list[int]:
        """Of its files: one, or two while somebody renews it."""
        matches = [_NAME.fullmatch(name) for name in self._files.names()]
        return [int(match[2]) for match in matches if match is not None and match[1] == self.id]


def _name(hold_id: str, number: int) -> str:
    return f"{hold_id}-{number:08d}.json"


class HoldWatch:
    """What a process has seen of holds; a `Worker` owns it."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic, wall_s: Callable[[], float] = time.time) -> None:
        self._clock_s = clock_s
        self._wall_s = wall_s
        # By file of a hold without its number: the record, and since when it has been the newest.
        self._seen: dict[str, tuple[HoldRecord, float]] = {}
        self._lock = threading.Lock()

    def living(self, query_folder: Folder) -> list[HoldRecord]:
        """Holds that must be respected. Those that nobody renewed for their time are removed."""
        files = query_folder.child(HOLDS_FOLDER)
        newest: dict[str, tuple[int, Entry]] = {}
        for entry in files.entries():
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                newest[match[1]] = max(newest.get(match[1], (-1, entry)), (int(match[2]), entry))
        living = []
        for hold_id, (number, entry) in sorted(newest.items()):
            record = self._looked_at(files, hold_id, number, entry)
            if record is not None:
                living.append(record)
        return living

    def _looked_at(self, files: Folder, hold_id: str, number: int, entry: Entry) -> HoldRecord | None:
        """A hold that lives; None for one that does not, which is removed."""
        key, now_s = f"{files.identity} {hold_id}", self._clock_s()
        with self._lock:
            seen = self._seen.get(key)
        if seen is None or seen[0].number != number:
            try:
                record = HoldRecord.decode(files.get(entry.name), number, files.where(entry.name))
            except MissingCheckpointError:
                # Renewed or released a moment ago; the next clean-up knows.
                return HoldRecord(hold_id, "somebody", HOLD_MS, number)
            seen = record, now_s
            with self._lock:
                self._seen[key] = seen
                while len(self._seen) > _KNOWN_MAX:
                    self._seen.pop(next(iter(self._seen)))
        record, since_s = seen
        old = entry.modified_s is not None and self._wall_s() - entry.modified_s > _DEAD_AFTER_S
        if now_s - since_s <= record.lasts_ms / 1000 and not old:
            return record
        _LOGGER.warning(
            "the hold of %s on %s was not renewed for %.0f s: it is removed", record.holder, files.root, now_s - since_s
        )
        files.as_named().remove(entry.name)
        with self._lock:
            self._seen.pop(key, None)
        return None
