"""The records of a query folder's epochs, ``epochs/<number>.json``; the one with the highest number is in force.

A record never changes. To begin an epoch, a process makes the record with the next number. If several processes try,
only one succeeds, provided that the file system can create a file exclusively; the others look again. A record has all
known epochs, so a reader needs only one record. The lease does not contain them, as it may be removed by hand, and is
renewed every few seconds.
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

from arrow_schemas.checksum import open_document, report_damage, seal_document
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import MissingCheckpointError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import EPOCHS_FOLDER
from spark_state_ext.timeline.epochs import Epoch, Epochs, Position, Start, begin_epoch

__all__ = ["EpochLog", "EpochRegistry", "RunStart", "decode_epochs", "encode_epochs", "read_epochs"]

_LOGGER = logging.getLogger("spark_state_ext")
_FORMAT = 1
_NAME = re.compile(r"\d{16}\.json")
# Older records are kept for slow readers.
_KEPT = 2
_ROUNDS_MAX = 20
# A run seen in this many batches is alive.
_SEEN_MIN = 3
_Key = tuple[str, str, str]
_ADVICE = (
    "Bring it back from a copy. Without it, it is unknown which files the query gave up when it went back. If it never "
    "went back, stop the query and remove the folder's records of epochs"
)


def encode_epochs(epochs: Epochs) -> bytes:
    """Return a record's bytes."""
    return seal_document({"format": _FORMAT, "epochs": [epoch.to_plain() for epoch in epochs.entries]})


def decode_epochs(data: bytes, where: str) -> Epochs:
    """Read epochs from a record's bytes."""
    with report_damage(where, "record of a query's epochs", _ADVICE):
        fields = open_document(data, where, _FORMAT, _ADVICE)
        return Epochs(tuple(Epoch.of_plain(plain) for plain in fields["epochs"]))
    raise AssertionError("unreachable: readable raises what it catches")


class EpochLog:
    """The records of one query folder."""

    def __init__(self, query_folder: Folder) -> None:
        self._query_folder = query_folder
        self._files = query_folder.child(EPOCHS_FOLDER)

    def newest(self) -> tuple[int, Epochs]:
        """Return the number of the record in force, and its epochs; 0 and no epochs if there is no record."""
        for _ in range(_ROUNDS_MAX):
            names = self._names()
            if not names:
                return 0, Epochs()
            try:
                data = self._files.get(names[-1])
            except MissingCheckpointError:
                continue  # a newer record has replaced it meanwhile
            return int(names[-1][:16]), decode_epochs(data, self._files.where(names[-1]))
        raise self.too_fast_error()

    def too_fast_error(self) -> StorageError:
        """Return the error for records that change again and again while they are read."""
        return StorageError(
            f"the records of epochs in {self._files.root} change faster than they can be read: find out what writes "
            "there"
        )

    def append(self, number: int, epochs: Epochs) -> bool:
        """Make a record; return False if another process has made the record with this number."""
        if not self._files.create(f"{number:016d}.json", encode_epochs(epochs)):
            return False
        for name in self._names():
            if int(name[:16]) <= number - _KEPT:
                self._files.as_named().remove(name)
        return True

    def _names(self) -> list[str]:
        return sorted(name for name in self._files.names() if _NAME.fullmatch(name))


def read_epochs(query_folder: Folder) -> Epochs:
    """Return the epochs of a query folder, from its newest record."""
    return EpochLog(query_folder).newest()[1]


@dataclass(frozen=True)
class RunStart:
    """A call's knowledge about its run, when it asks for its epoch.

    Parameters
    ----------
    plan_id, run_id
        See `Epoch`.
    after
        The batch before the call's, which is committed.
    pointer
        The pointer that it goes on from in this query folder; None if the bucket has no pointer there.
    claimed
        The query that the folder was claimed from, and its last batch; None if it was not claimed.
    alive
        See `Start`.
    """

    plan_id: str
    run_id: str
    after: Position
    pointer: Pointer | None
    claimed: tuple[str, int] | None = None
    alive: bool = False

    def within(self, epochs: Epochs) -> Start:
        """Return the start that `begin_epoch` needs, given the epochs so far."""
        start = Start.of(self.plan_id, self.run_id, self.after, self.pointer, epochs, self.claimed)
        return replace(start, alive=self.alive)


class EpochRegistry:
    """The epochs of the runs that a process works for."""

    _MAX = 256
    # After this time the records are read again: another run may have begun an epoch, or they may have been removed.
    _TRUSTED_S = 60.0

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        # By query folder, plan and run.
        self._states: OrderedDict[_Key, _RunState] = OrderedDict()
        # For runs that another run has followed: the batches in which that was seen.
        self._followed: dict[_Key, set[int]] = {}
        self._lock = threading.Lock()

    def of(self, folders: Sequence[Folder], call: RunStart, still_ours: Callable[[], None]) -> int:
        """Return a call's epoch, after recording it in the query folder of every file system; the root comes first.

        Parameters
        ----------
        still_ours
            Raises an error if another run has the lease: a run that was replaced must not begin an epoch.
        """
        return self.ask(folders[0].identity, call, partial(_record_call, folders, still_ours))

    def ask(self, folder: str, call: RunStart, look: Callable[[RunStart], tuple[Epochs, int]]) -> int:
        """Return a call's epoch; `look` records it if needed, and returns all epochs and the call's own number."""
        key, now_s = (folder, call.plan_id, call.run_id), self._clock_s()
        with self._lock:
            state = self._states.get(key)
        if state is None or not state.goes_on(call):
            state = _RunState(*look(call), now_s)
        elif now_s >= state.looked_s + self._TRUSTED_S:
            try:
                state = _RunState(*look(call), now_s)
            except StorageError as error:
                # Go on with what is known: a run that has its epoch does not stop if a store does not answer.
                _LOGGER.warning("the records of epochs could not be read again: %s", error)
                state = replace(state, looked_s=now_s)
        if state.is_followed:
            # Late tasks are of a run's last batches, so a run that goes on from batch to batch is alive. Then the epoch
            # that followed it was begun by a late task of a run that had not begun an epoch before.
            with self._lock:
                seen = self._followed.setdefault(key, set())
                seen.add(call.after.batch)
                is_alive = len(seen) >= _SEEN_MIN and call.after.batch == max(seen)
            if is_alive and state.is_passed_by(call):
                state = _RunState(*look(replace(call, alive=True)), now_s)
        with self._lock:
            if not state.is_followed:
                self._followed.pop(key, None)
            self._states[key] = state
            self._states.move_to_end(key)
            while len(self._states) > self._MAX:
                self._followed.pop(self._states.popitem(last=False)[0], None)
        return state.number


@dataclass(frozen=True)
class _RunState:
    """A process's knowledge about a run: all epochs, the number of the run's own, and when it read them."""

    epochs: Epochs
    number: int
    looked_s: float

    @property
    def is_followed(self) -> bool:
        """True if another run has begun an epoch since."""
        newest = self.epochs.newest
        return newest is not None and newest.number > self.number

    def is_passed_by(self, call: RunStart) -> bool:
        """True if a call goes on from a later position than the newest run's start."""
        newest = self.epochs.newest
        return newest is not None and call.after.beyond(newest.after) > 0

    def goes_on(self, call: RunStart) -> bool:
        """True if no record needs to be read: a bucket's calls of one run mostly go on from each other."""
        if call.pointer is None or call.pointer.epoch == self.number:
            return True
        # The record must be read if the call's pointer says more than is known.
        return call.pointer.epoch < self.number and begin_epoch(self.epochs, call.within(self.epochs)) == (
            self.epochs,
            self.number,
        )


def _record_call(folders: Sequence[Folder], still_ours: Callable[[], None], call: RunStart) -> tuple[Epochs, int]:
    log = EpochLog(folders[0])
    for _ in range(_ROUNDS_MAX):
        number, before = log.newest()
        epochs, epoch = begin_epoch(before, call.within(before))
        if epochs != before:
            # Check this after reading the record: a run that takes the lease later makes a later record.
            still_ours()
            number += 1
            if not log.append(number, epochs):
                continue
        for other in folders[1:]:
            _copy_epochs(EpochLog(other), epochs)
        return epochs, epoch
    raise log.too_fast_error()


def _copy_epochs(log: EpochLog, epochs: Epochs) -> None:
    """Copy the epochs to another file system's query folder, which may be read without the first one."""
    number, recorded = log.newest()
    is_later = (
        recorded.newest is not None and epochs.newest is not None and recorded.newest.number > epochs.newest.number
    )
    if recorded != epochs and not is_later:
        # If another process makes this record first, it has the same content.
        log.append(number + 1, epochs)
