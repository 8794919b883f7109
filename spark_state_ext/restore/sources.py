"""Where a restore gets files from: the pointer itself first, then each backend in the order asked for.

A file has the same name everywhere, and wherever it comes from it is checked the same, so a lineage may be put
together from several backends. What a backend lacks or gives damaged is asked of the next one; where the job prefers
it, or it had confirmed that it has the file, that is an error to be told. A backend that fails is asked once; after
that only for what no other one has. One that gives neither an answer nor an error for long is not asked again.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import Pointer, ReplicationStatus
from spark_state_ext.backends import Checkpoint
from spark_state_ext.backends.replication import Restorable, is_complete, taken_over
from spark_state_ext.errors import (
    CorruptError,
    InterruptedRestoreError,
    MissingCheckpointError,
    StateError,
    StorageError,
    StoreFullError,
)
from spark_state_ext.files.folder import Duplicable, Folder, Readable
from spark_state_ext.files.readable import Answering, Making
from spark_state_ext.files.sealed import SealedFile, SealedFiles
from spark_state_ext.worker.threads import DaemonPool

if TYPE_CHECKING:
    from spark_state_ext.files.checkpoint import CheckpointFile

__all__ = ["Sources", "restore_order"]

_LOGGER = logging.getLogger("spark_state_ext")
# While others wait whether a backend answers the first of them, they look so often whether that is still wanted.
_LOOK_S = 0.5
T = TypeVar("T")


class _Answering:
    """Files of a backend; says so as soon as it answers."""

    def __init__(self, files: Readable, answered: Callable[[], None]) -> None:
        self._files = files
        self._answered = answered
        if isinstance(files, Answering):
            files.tell(answered)

    def where(self, name: str) -> str:
        return self._files.where(name)

    def size(self, name: str) -> int:
        return self._noticed(lambda: self._files.size(name))

    def get(self, name: str) -> bytes:
        return self._noticed(lambda: self._files.get(name))

    def get_range(self, name: str, start: int, end: int) -> bytes:
        return self._noticed(lambda: self._files.get_range(name, start, end))

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        self.size(name)  # so that nothing is written for a reader that nobody waits for any more
        self._files.get_file(name, local_path)

    def open_local(self, name: str) -> pa.NativeFile | None:
        found = self._files.open_local(name)
        if found is not None:
            self._answered()
        return found

    def duplicate_to(self, target: Folder, name: str) -> bool:
        files = self._files
        return isinstance(files, Duplicable) and self._noticed(lambda: files.duplicate_to(target, name))

    def make(self, name: str, keep: Path) -> CheckpointFile | None:
        return self._files.make(name, keep) if isinstance(self._files, Making) else None

    def _noticed(self, work: Callable[[], T]) -> T:
        found = work()
        self._answered()
        return found


class _Unopened:
    """The files of a backend that could not even be asked for them."""

    def __init__(self, name: str, why: StorageError) -> None:
        self._name = name
        self._why = why

    def where(self, name: str) -> str:
        return f"{name} in {self._name}"

    def size(self, name: str) -> int:
        raise self._error(name)

    def get(self, name: str) -> bytes:
        raise self._error(name)

    def get_range(self, name: str, start: int, end: int) -> bytes:
        raise self._error(name)

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        raise self._error(name)

    def open_local(self, name: str) -> pa.NativeFile | None:
        raise self._error(name)

    def _error(self, name: str) -> StorageError:
        error = StorageError(f"{self.where(name)} cannot be read: {self._why}")
        error.__cause__ = self._why
        return error


class _Source:
    """One backend, as far as it is known whether it answers."""

    def __init__(self, name: str, files: Readable, status: ReplicationStatus | None, silent_s: float) -> None:
        self.name = name
        self.files = files
        self.status = status
        self._silent_s = silent_s
        self._silent: StorageError | None = None
        self._lock = threading.Lock()
        # Why it was given up; None while it was not.
        self.away: StorageError | None = None
        self._first = threading.Lock()
        self._known = threading.Event()

    def promised(self, ref: CheckpointRef, kind: str) -> bool:
        """Whether the backend has confirmed this file, and clean-up cannot have removed it since."""
        it = self.status
        return kind == DELTA and it is not None and is_complete(it) and ref == it.through

    def is_away(self, raise_if_closed: Callable[[], None]) -> bool:
        """Whether it does not answer. One thread finds out; the others wait for that."""
        if not self._known.is_set() and not self._first.acquire(blocking=False):
            while not self._known.wait(_LOOK_S):
                raise_if_closed()
        return self.away is not None

    def read(self, work: Callable[[Readable], T], raise_if_closed: Callable[[], None], in_thread: bool) -> T:
        """Run `work` on its files; in this thread though it is not known whether it answers, where that is asked."""
        try:
            if self._silent is not None:
                raise self._silent
            return work(self.files) if in_thread or self._known.is_set() else self._first_read(work, raise_if_closed)
        except StorageError as error:
            if not isinstance(error, StoreFullError):  # that is of the local disk
                self.away = error
            raise
        finally:
            self._known.set()

    def _first_read(self, work: Callable[[Readable], T], raise_if_closed: Callable[[], None]) -> T:
        """Run `work` in a thread that is left alone when the backend gives neither an answer nor an error."""
        given_up = threading.Event()
        pool = DaemonPool("first read")
        future: Future[T] = pool.submit(work, _Answering(self.files, lambda: self._answered(given_up)))
        until_s = time.monotonic() + self._silent_s
        try:
            while not wait([future], min(_LOOK_S, max(until_s - time.monotonic(), 0.01))).done:
                if self._is_awaited(until_s, given_up, raise_if_closed):
                    break
            return future.result()
        finally:
            pool.close()

    def _is_awaited(self, until_s: float, given_up: threading.Event, raise_if_closed: Callable[[], None]) -> bool:
        """Whether the backend has answered, so that its reader may write files, and ends when it is told to."""
        with self._lock:
            if self._silent is None and not self._known.is_set() and time.monotonic() >= until_s:
                self._silent = StorageError(
                    f"the backend {self.name} has neither answered nor failed for {self._silent_s:.1f} s "
                    "(commit_timeout_ms and a tenth). Look at its store, then start the query again"
                )
            try:
                if self._silent is not None:
                    raise self._silent
                if not self._known.is_set():
                    raise_if_closed()
            except StateError:
                given_up.set()
                raise
            return self._known.is_set()

    def _answered(self, given_up: threading.Event) -> None:
        with self._lock:
            if given_up.is_set():
                raise InterruptedRestoreError(f"the backend {self.name} answered too late")
            self._known.set()

    def not_asked(self, name: str) -> StorageError:
        """The error for a file that it was not asked for any more."""
        error = StorageError(f"{self.files.where(name)} was not asked for, as the backend did not answer: {self.away}")
        error.__cause__ = self.away
        return error


def restore_order(replicas: Sequence[Restorable], pointer: Pointer, restore_from: str | None) -> list[Restorable]:
    """Backends in the order in which a restore asks them: the preferred one, then those that hold everything."""

    def rank(replica: Restorable) -> tuple[bool, bool]:
        return not is_complete(pointer.replication.get(replica.name)), replica.name != restore_from

    return sorted(replicas, key=rank)


class Sources:
    """The files of a bucket, wherever they are."""

    def __init__(
        self,
        replicas: Sequence[Restorable],
        pointer: Pointer,
        preferred: str | None = None,
        silent_s: float = math.inf,
        *,
        in_thread: bool = False,
    ) -> None:
        self._silent_s = silent_s
        self.in_thread = in_thread
        self._inline = SealedFiles((SealedFile.of(it.name, it.data) for it in pointer.inline), "in Spark's state")
        self._replicas = list(replicas)
        self._sources: list[_Source] | None = None
        self._pointer = pointer
        # Old pointers do not name backends; the root holds what they stand for.
        self._replication = taken_over(pointer, replicas).replication
        self._preferred = preferred
        self._told: set[str] = set()
        self._unreached: list[StorageError] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # By backend: files that it should have given, and another one gave; and why it did not.
        self._gaps: dict[str, dict[str, StateError]] = {}
        # How many of these there were in all.
        self.gaps = 0
        if preferred is not None and not is_complete(self._replication.get(preferred)):
            self._tell(preferred, f"it does not have the whole state at checkpoint {pointer.ref}")

    def read(self, ref: CheckpointRef, kind: str, work: Callable[[Readable], T]) -> T:
        """Run `work`, which reads and checks one file, on the first replica that gives it whole."""
        name = file_name(ref, kind)
        if name in self._inline:
            return work(self._inline)
        waiting = deque(self._opened())
        several = len(waiting) > 1
        away: set[str] = set()
        failures: dict[str, StateError] = {}
        does_without = False
        while waiting:
            self.raise_if_closed()
            source = waiting.popleft()
            if several and source.name not in away and source.is_away(self.raise_if_closed):
                # It has its turn when no other one gives the file.
                away.add(source.name)
                failures[source.name] = source.not_asked(name)
                waiting.append(source)
                continue
            if source.name in away and does_without:
                continue
            try:
                found = source.read(work, self.raise_if_closed, self.in_thread)
            except (CorruptError, MissingCheckpointError, StorageError) as error:
                failures[source.name] = error
                if several and source.away is error:
                    self._tell(source.name, f"{error}. This restore asks it only for what no other one has")
                if kind == SNAPSHOT and is_complete(source.status) and not isinstance(error, StorageError):
                    # It holds everything without this one; no need to wait for a backend that cannot be reached.
                    does_without = True
                continue
            self._note_gaps(ref, kind, failures)
            return found
        found_out = list(failures.values())
        if does_without:
            self._unreached += [failure for failure in found_out if isinstance(failure, StorageError)]
            found_out = [failure for failure in found_out if not isinstance(failure, StorageError)]
        for kinds in (StorageError, CorruptError, MissingCheckpointError):
            for failure in found_out:
                if isinstance(failure, kinds):
                    raise failure
        raise MissingCheckpointError(f"no backend is configured that might have {name}")

    def hold(self, file: SealedFile) -> None:
        """A file that no backend may have yet."""
        self._inline.hold(file)

    def where(self, ref: CheckpointRef, kind: str) -> str:
        """How to call a file in messages."""
        name = file_name(ref, kind)
        if name in self._inline or not self._replicas:
            return self._inline.where(name)
        return self._opened()[0].files.where(name)

    @property
    def unreached(self) -> StorageError | None:
        """Why a backend could not be asked for a file that another one seemed to do without; None when all could."""
        return self._unreached[0] if self._unreached else None

    @property
    def elsewhere(self) -> list[str]:
        """Names of backends that have confirmed the state and are not among those asked."""
        return [name for name in self._pointer.replication if name not in {replica.name for replica in self._replicas}]

    def report(self, what: str) -> None:
        """Tell of each backend all files that it should have given, and others gave, since the last report."""
        with self._lock:
            gaps, self._gaps = self._gaps, {}
        for name, files in gaps.items():
            kinds = {"missing": MissingCheckpointError, "damaged": CorruptError, "not reached": StorageError}
            parts = {
                kind: [file for file, why in files.items() if isinstance(why, errors)] for kind, errors in kinds.items()
            }
            listed = "; ".join(f"{kind}: {', '.join(sorted(found))}" for kind, found in parts.items() if found)
            _LOGGER.error(
                "%s cannot be restored from the backend %s alone: other backends gave %d files that it should have "
                "(%s). The first of them: %s",
                what,
                name,
                len(files),
                listed,
                next(iter(files.values())),
            )

    def close(self) -> None:
        """Have reads end, and whoever waits for them; from any thread. There are no further ones."""
        self._closed.set()
        for replica in self._replicas:
            replica.stop()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def raise_if_closed(self) -> None:
        """End a read or a wait."""
        if self._closed.is_set():
            raise InterruptedRestoreError(f"the restore of checkpoint {self._pointer.ref} was told to stop")

    def _opened(self) -> list[_Source]:
        # Under a lock: the first files are asked for side by side.
        with self._lock:
            if self._sources is None:
                self._sources = [self._open(replica) for replica in self._replicas]
            return self._sources

    def _open(self, replica: Restorable) -> _Source:
        status = self._replication.get(replica.name)
        try:
            pointer = self._pointer
            wanted = None if pointer.ref is None else Checkpoint(pointer.ref, pointer.markers)
            return _Source(replica.name, replica.files(wanted), status, self._silent_s)
        except StorageError as error:
            if len(self._replicas) == 1:
                raise
            return _Source(replica.name, _Unopened(replica.name, error), status, self._silent_s)

    def _note_gaps(self, ref: CheckpointRef, kind: str, failures: Mapping[str, StateError]) -> None:
        """What backends failed to give that another one gave, where it was theirs to give."""
        for source in self._opened() if failures else ():
            if source.name in failures and (source.name == self._preferred or source.promised(ref, kind)):
                with self._lock:
                    self._gaps.setdefault(source.name, {})[file_name(ref, kind)] = failures[source.name]
                    self.gaps += 1

    def _tell(self, name: str, why: str) -> None:
        with self._lock:
            told = name in self._told
            self._told.add(name)
        if not told:
            _LOGGER.error("the state cannot be restored from the backend %s: %s. The next one is asked.", name, why)
