"""The records of a query folder's epochs, ``epochs/<number>.json``, of which the one with the highest number counts.

A record is never changed. Whoever begins an epoch makes the record with the next number, and of several that try only
one succeeds, where the file system can create a file exclusively; the others look again. It has all epochs that are
known, so that who reads it needs no other. The lease does not have them: it may be removed by hand, and is renewed
every few seconds.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from arrow_schemas.checksum import opened_document, readable, sealed_document
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import MissingCheckpointError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import EPOCHS_FOLDER
from spark_state_ext.timeline.epochs import Epoch, Epochs, Position, Start, begin

__all__ = ["EpochLog", "EpochRegistry", "RunStart", "decode_epochs", "encode_epochs", "epochs_of"]

_LOGGER = logging.getLogger("spark_state_ext")
_FORMAT = 1
_NAME = re.compile(r"\d{16}\.json")
# Records that a slow reader may still be about to read.
_KEPT = 2
_ROUNDS_MAX = 20
# In so many batches a run is seen to be alive.
_SEEN_MIN = 3
_Key = tuple[str, str, str]
_MEND = (
    "Bring it back from a copy. Without it nobody can tell which files the query gave up when it went back: where it "
    "never did, stop the query and remove the folder's records of epochs"
)


def encode_epochs(epochs: Epochs) -> bytes:
    """A record's bytes."""
    return sealed_document({"format": _FORMAT, "epochs": [it.to_plain() for it in epochs.known]})


def decode_epochs(data: bytes, where: str) -> Epochs:
    """Inverse of `encode_epochs`."""
    with readable(where, "record of a query's epochs", _MEND):
        fields = opened_document(data, where, _FORMAT, _MEND)
        return Epochs(tuple(Epoch.of_plain(it) for it in fields["epochs"]))
    raise AssertionError("unreachable: readable raises what it catches")


class EpochLog:
    """The records of one query folder."""

    def __init__(self, query_folder: Folder) -> None:
        self._query_folder = query_folder
        self._files = query_folder.child(EPOCHS_FOLDER)

    def newest(self) -> tuple[int, Epochs]:
        """The record that counts, and its number; 0 and no epochs where there is none."""
        for _ in range(_ROUNDS_MAX):
            names = self._names()
            if not names:
                return 0, Epochs()
            try:
                data = self._files.get(names[-1])
            except MissingCheckpointError:
                continue  # others have gone on meanwhile
            return int(names[-1][:16]), decode_epochs(data, self._files.where(names[-1]))
        raise self.changes_too_fast()

    def changes_too_fast(self) -> StorageError:
        """What is told where others go on again and again."""
        return StorageError(
            f"the records of epochs in {self._files.root} change faster than they can be read: look who writes there"
        )

    def append(self, number: int, epochs: Epochs) -> bool:
        """Make a record; whether nobody else has made one of this number."""
        if not self._files.create(f"{number:016d}.json", encode_epochs(epochs)):
            return False
        for name in self._names():
            if int(name[:16]) <= number - _KEPT:
                self._files.as_named().remove(name)
        return True

    def _names(self) -> list[str]:
        return sorted(name for name in self._files.names() if _NAME.fullmatch(name))


def epochs_of(query_folder: Folder) -> Epochs:
    """The epochs of a query folder, as its newest record has them."""
    return EpochLog(query_folder).newest()[1]


@dataclass(frozen=True)
class RunStart:
    """What a call knows of its run when it asks for its epoch.

    Parameters
    ----------
    plan_id, run_id
        As `Epoch`.
    after
        The batch before the call's, which is committed.
    pointer
        What it goes on from in this query folder; None where it begins with something else, or with nothing.
    claimed
        The query that the folder is claimed from, and its batch then; None: it is not.
    alive
        As `Start`.
    """

    plan_id: str
    run_id: str
    after: Position
    pointer: Pointer | None
    claimed: tuple[str, int] | None = None
    alive: bool = False

    def within(self, epochs: Epochs) -> Start:
        """As `begin` takes it."""
        start = Start.of(self.plan_id, self.run_id, self.after, self.pointer, epochs, self.claimed)
        return replace(start, alive=self.alive)


class EpochRegistry:
    """The epochs of the runs that a process works for."""

    _MAX = 256
    # Somebody else may have begun an epoch, or removed the records.
    _TRUSTED_S = 60.0

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        # By query folder, plan and run.
        self._known: OrderedDict[_Key, _Known] = OrderedDict()
        # Of runs that another one has followed: the batches in which that was seen.
        self._followed: dict[_Key, set[int]] = {}
        self._lock = threading.Lock()

    def of(self, folders: Sequence[Folder], call: RunStart, still_ours: Callable[[], None]) -> int:
        """The epoch of a call, which is recorded in the query folder of every file system; the root comes first.

        Parameters
        ----------
        still_ours
            Raises where the lease is another run's. A run that was replaced, and does not know yet, must not begin.
        """
        return self.ask(folders[0].identity, call, partial(_recorded, folders, still_ours))

    def ask(self, folder: str, call: RunStart, look: Callable[[RunStart], tuple[Epochs, int]]) -> int:
        """As `of`; `look` has the record say what the epochs are with a call, and the call's own."""
        key, now_s = (folder, call.plan_id, call.run_id), self._clock_s()
        with self._lock:
            known = self._known.get(key)
        if known is None or not known.goes_on(call):
            known = _Known(*look(call), now_s)
        elif now_s >= known.looked_s + self._TRUSTED_S:
            try:
                known = _Known(*look(call), now_s)
            except StorageError as error:
                # What is known holds. That a store does not answer stops no run that has its epoch.
                _LOGGER.warning("the records of epochs are not looked at again: %s", error)
                known = replace(known, looked_s=now_s)
        if known.is_followed:
            # Tasks that are late are of a run's last batches. A run that goes on from batch to batch is alive: so what
            # has followed it was a late task of a run that had not begun an epoch before.
            with self._lock:
                seen = self._followed.setdefault(key, set())
                seen.add(call.after.batch)
                is_alive = len(seen) >= _SEEN_MIN and call.after.batch == max(seen)
            if is_alive and known.is_passed_by(call):
                known = _Known(*look(replace(call, alive=True)), now_s)
        with self._lock:
            if not known.is_followed:
                self._followed.pop(key, None)
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > self._MAX:
                self._followed.pop(self._known.popitem(last=False)[0], None)
        return known.number


@dataclass(frozen=True)
class _Known:
    """What a process knows of a run: the epochs, the run's own, and when it looked."""

    epochs: Epochs
    number: int
    looked_s: float

    @property
    def is_followed(self) -> bool:
        """Whether another run has begun an epoch since."""
        newest = self.epochs.newest
        return newest is not None and newest.number > self.number

    def is_passed_by(self, call: RunStart) -> bool:
        """Whether a call goes on from what is later than where the newest run began."""
        newest = self.epochs.newest
        return newest is not None and call.after.beyond(newest.after) > 0

    def goes_on(self, call: RunStart) -> bool:
        """Whether nothing needs to be looked up: a bucket's calls of one run mostly go on from each other."""
        if call.pointer is None or call.pointer.epoch == self.number:
            return True
        # Where others know more, it does.
        return call.pointer.epoch < self.number and begin(self.epochs, call.within(self.epochs)) == (
            self.epochs,
            self.number,
        )


def _recorded(folders: Sequence[Folder], still_ours: Callable[[], None], call: RunStart) -> tuple[Epochs, int]:
    log = EpochLog(folders[0])
    for _ in range(_ROUNDS_MAX):
        number, before = log.newest()
        epochs, epoch = begin(before, call.within(before))
        if epochs != before:
            # After the look at what is there: whoever takes the lease from now on makes the next record.
            still_ours()
            number += 1
            if not log.append(number, epochs):
                continue
        for other in folders[1:]:
            _copied(EpochLog(other), epochs)
        return epochs, epoch
    raise log.changes_too_fast()


def _copied(log: EpochLog, epochs: Epochs) -> None:
    """Have another file system's folder know them too: somebody may read it alone."""
    number, there = log.newest()
    is_later = there.newest is not None and epochs.newest is not None and there.newest.number > epochs.newest.number
    if there != epochs and not is_later:
        # Where somebody else makes it first, it is the same.
        log.append(number + 1, epochs)
