"""A reader's hold: while it lasts, clean-up deletes no files that are read."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from spark_state_ext.errors import CannotHoldError, MissingCheckpointError, StateError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.holds import HOLD_MS, Hold
from spark_state_ext.worker.host import host_name

__all__ = ["ReaderHold"]

_LOGGER = logging.getLogger("spark_state_ext")
_RENEWALS_A_TERM = 3


class ReaderHold:
    """A hold that is renewed in the background until it is released or garbage-collected."""

    def __init__(
        self,
        query_folder: Folder,
        lasts_ms: int = HOLD_MS,
        clock_s: Callable[[], float] = time.monotonic,
        *,
        joined: str | None = None,
    ) -> None:
        self._clock_s = clock_s
        self._term_s = lasts_ms / 1000
        self._renewed_s = clock_s()
        self._lost: StateError | None = None
        self._lock = threading.Lock()
        if joined is not None:
            self._hold = Hold(query_folder, joined)
            self._hold.renew()
        else:
            self._hold = _place_hold(query_folder, lasts_ms)
        self._ended = threading.Event()
        self._release = weakref.finalize(self, _end_hold, self._hold, self._ended, os.getpid(), joined is None)
        every_s = self._term_s / _RENEWALS_A_TERM
        me = weakref.ref(self)
        threading.Thread(target=_renew_until_ended, args=(me, self._ended, every_s), name="hold", daemon=True).start()

    @property
    def id(self) -> str:
        """Id of the hold."""
        return self._hold.id

    def check(self) -> None:
        """Raise if the hold is lost; renew it if that is due."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self._clock_s() - self._renewed_s < self._term_s / _RENEWALS_A_TERM:
                return
            try:
                self._hold.renew()
                self._renewed_s = self._clock_s()
            except MissingCheckpointError as error:
                self._lost = error
                raise

    def release(self) -> None:
        """Release the hold, so that clean-up may go on; a second call does nothing."""
        self._release()

    def leave(self) -> str:
        """Stop renewing the hold and return its id: another process renews it, or it expires."""
        self._release.detach()
        self._ended.set()
        return self.id


def _place_hold(query_folder: Folder, lasts_ms: int) -> Hold:
    try:
        holder = f"a reader, process {os.getpid()} on {host_name()}"
        return Hold.place(query_folder, holder, lasts_ms)
    except StorageError as error:
        raise CannotHoldError(
            f"no hold can be written to {query_folder.root}, so the query's clean-up may delete files while they "
            f"are read: {error}. Allow writes to holds/ there, or open with hold=False: then a read may fail with "
            "MissingCheckpointError."
        ) from error


def _end_hold(hold: Hold, ended: threading.Event, pid: int, is_mine: bool) -> None:
    ended.set()
    # A forked process has a copy of this object, but must not remove the reader's record.
    if is_mine and os.getpid() == pid:
        hold.release()


def _renew_until_ended(reader: weakref.ref[ReaderHold], ended: threading.Event, every_s: float) -> None:
    while not ended.wait(every_s):
        reader_hold = reader()
        if reader_hold is None:
            return
        try:
            reader_hold.check()
        except MissingCheckpointError:
            return  # the next read raises it
        except StateError as error:
            _LOGGER.warning("a reader's hold was not renewed: %s; trying again", error)
        del reader_hold
