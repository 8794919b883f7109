"""The sources of a restore's files: the pointer itself first, then the backends in a given order.

A file has the same name and gets the same checks in every source, so a lineage may be put together from several
backends. If a backend does not have a file, or has it damaged, the next backend is asked; this is logged as an error if
the job prefers that backend, or if it had confirmed the file. After a backend has failed once, it is only asked for
files that no other backend has. A backend that neither answers nor fails for long is not asked again.
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
from spark_state_ext.backends.replication import Restorable, adapt_to_backends, is_complete
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
from spark_state_ext.files.sealed_file import SealedFile, SealedFiles
from spark_state_ext.worker.threads import DaemonPool

if TYPE_CHECKING:
    from spark_state_ext.files.checkpoint import CheckpointFile

__all__ = ["Sources", "restore_order"]

_LOGGER = logging.getLogger("spark_state_ext")
# How often threads that wait for a backend's first answer check whether the restore was stopped.
_LOOK_S = 0.5
T = TypeVar("T")


class _Answering:
    """A backend's files, which call a function as soon as the backend answers."""

    def __init__(self, files: Readable, answered: Callable[[], None]) -> None:
        self._files = files
        self._answered = answered
        if isinstance(files, Answering):
            files.tell(answered)

    def where(self, name: str) -> str:
        return self._files.where(name)

    def size(self, name: str) -> int:
        return self._note_answer(lambda: self._files.size(name))

    def get(self, name: str) -> bytes:
        return self._note_answer(lambda: self._files.get(name))

    def get_range(self, name: str, start: int, end: int) -> bytes:
        return self._note_answer(lambda: self._files.get_range(name, start, end))

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        self.size(name)  # so that no file is written for a reader that was given up
        self._files.get_file(name, local_path)

    def open_local(self, name: str) -> pa.NativeFile | None:
        file = self._files.open_local(name)
        if file is not None:
            self._answered()
        return file

    def duplicate_to(self, target: Folder, name: str) -> bool:
        files = self._files
        return isinstance(files, Duplicable) and self._note_answer(lambda: files.duplicate_to(target, name))

    def make(self, name: str, keep: Path) -> CheckpointFile | None:
        return self._files.make(name, keep) if isinstance(self._files, Making) else None

    def _note_answer(self, work: Callable[[], T]) -> T:
        result = work()
        self._answered()
        return result


class _Unopened:
    """The files of a backend that could not be opened: every read raises an error."""

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
    """A backend, and whether it is known to answer."""

    def __init__(self, name: str, files: Readable, status: ReplicationStatus | None, silent_s: float) -> None:
        self.name = name
        self.files = files
        self.status = status
        self._silent_s = silent_s
        self._silent: StorageError | None = None
        self._lock = threading.Lock()
        # Why the backend was given up, if it was.
        self.away: StorageError | None = None
        self._first = threading.Lock()
        self._known = threading.Event()

    def has_confirmed(self, ref: CheckpointRef, kind: str) -> bool:
        """True if the backend has confirmed this file, and clean-up cannot have removed it since."""
        status = self.status
        return kind == DELTA and status is not None and is_complete(status) and ref == status.through

    def is_away(self, raise_if_closed: Callable[[], None]) -> bool:
        """True if the backend does not answer. One thread finds this out, and the others wait for it."""
        if not self._known.is_set() and not self._first.acquire(blocking=False):
            while not self._known.wait(_LOOK_S):
                raise_if_closed()
        return self.away is not None

    def read(self, work: Callable[[Readable], T], raise_if_closed: Callable[[], None], in_thread: bool) -> T:
        """Run `work` on the backend's files; with `in_thread`, run even the first read in this thread."""
        try:
            if self._silent is not None:
                raise self._silent
            return work(self.files) if in_thread or self._known.is_set() else self._first_read(work, raise_if_closed)
        except StorageError as error:
            if not isinstance(error, StoreFullError):  # that error is about the local disk
                self.away = error
            raise
        finally:
            self._known.set()

    def _first_read(self, work: Callable[[Readable], T], raise_if_closed: Callable[[], None]) -> T:
        """Run `work` in a thread that is abandoned if the backend neither answers nor fails."""
        given_up = threading.Event()
        pool = DaemonPool("first read")
        future: Future[T] = pool.submit(work, _Answering(self.files, lambda: self._answered(given_up)))
        until_s = time.monotonic() + self._silent_s
        try:
            while not wait([future], min(_LOOK_S, max(until_s - time.monotonic(), 0.01))).done:
                if self._check_answer(until_s, given_up, raise_if_closed):
                    break
            return future.result()
        finally:
            pool.close()

    def _check_answer(self, until_s: float, given_up: threading.Event, raise_if_closed: Callable[[], None]) -> bool:
        """True if the backend has answered: from then on its reader may write files, and ends when it is stopped."""
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

    def not_asked_error(self, name: str) -> StorageError:
        """Return the error for a file that the backend was not asked for, as it had been given up."""
        error = StorageError(f"{self.files.where(name)} was not asked for, as the backend did not answer: {self.away}")
        error.__cause__ = self.away
        return error


def restore_order(replicas: Sequence[Restorable], pointer: Pointer, restore_from: str | None) -> list[Restorable]:
    """Return the backends in the order in which a restore asks them: first complete ones, the preferred one first."""

    def rank(replica: Restorable) -> tuple[bool, bool]:
        return not is_complete(pointer.replication.get(replica.name)), replica.name != restore_from

    return sorted(replicas, key=rank)


class Sources:
    """The files of a bucket, from all its sources."""

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
        self._inline = SealedFiles((SealedFile.of(file.name, file.data) for file in pointer.inline), "in Spark's state")
        self._replicas = list(replicas)
        self._sources: list[_Source] | None = None
        self._pointer = pointer
        # Old pointers do not name backends; they refer to the files in the root.
        self._replication = adapt_to_backends(pointer, replicas).replication
        self._preferred = preferred
        self._logged_backends: set[str] = set()
        self._unreached: list[StorageError] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # By backend: files that it should have given but another backend gave, with the reason.
        self._gaps: dict[str, dict[str, StateError]] = {}
        # Total number of such files.
        self.gaps = 0
        if preferred is not None and not is_complete(self._replication.get(preferred)):
            self._log_once(preferred, f"it does not have the whole state at checkpoint {pointer.ref}")

    def read(self, ref: CheckpointRef, kind: str, work: Callable[[Readable], T]) -> T:
        """Run `work`, which reads and checks one file, on the first replica for which that succeeds."""
        name = file_name(ref, kind)
        if name in self._inline:
            return work(self._inline)
        queue = deque(self._open_all())
        several = len(queue) > 1
        away: set[str] = set()
        failures: dict[str, StateError] = {}
        does_without = False
        while queue:
            self.raise_if_closed()
            source = queue.popleft()
            if several and source.name not in away and source.is_away(self.raise_if_closed):
                # Its turn comes after all others failed to give the file.
                away.add(source.name)
                failures[source.name] = source.not_asked_error(name)
                queue.append(source)
                continue
            if source.name in away and does_without:
                continue
            try:
                result = source.read(work, self.raise_if_closed, self.in_thread)
            except (CorruptError, MissingCheckpointError, StorageError) as error:
                failures[source.name] = error
                if several and source.away is error:
                    self._log_once(source.name, f"{error}. This restore asks it only for files that no other one has")
                if kind == SNAPSHOT and is_complete(source.status) and not isinstance(error, StorageError):
                    # This complete backend needs no such snapshot, so do not wait for a backend that does not answer.
                    does_without = True
                continue
            self._note_gaps(ref, kind, failures)
            return result
        errors = list(failures.values())
        if does_without:
            self._unreached += [failure for failure in errors if isinstance(failure, StorageError)]
            errors = [failure for failure in errors if not isinstance(failure, StorageError)]
        for kinds in (StorageError, CorruptError, MissingCheckpointError):
            for failure in errors:
                if isinstance(failure, kinds):
                    raise failure
        raise MissingCheckpointError(f"no configured backend may have {name}")

    def hold(self, file: SealedFile) -> None:
        """Add a file that no backend may have yet."""
        self._inline.hold(file)

    def where(self, ref: CheckpointRef, kind: str) -> str:
        """Return a file's name for messages."""
        name = file_name(ref, kind)
        if name in self._inline or not self._replicas:
            return self._inline.where(name)
        return self._open_all()[0].files.where(name)

    @property
    def unreached(self) -> StorageError | None:
        """The error of a backend that could not be asked for a file that another one seemed not to need, if any."""
        return self._unreached[0] if self._unreached else None

    @property
    def elsewhere(self) -> list[str]:
        """Names of backends that have confirmed the state, but are not among this restore's backends."""
        return [name for name in self._pointer.replication if name not in {replica.name for replica in self._replicas}]

    def report(self, what: str) -> None:
        """Log for each backend the files that it should have given but others gave, since the last report."""
        with self._lock:
            gaps, self._gaps = self._gaps, {}
        for name, files in gaps.items():
            kinds = {"missing": MissingCheckpointError, "damaged": CorruptError, "not reached": StorageError}
            parts = {
                kind: [file for file, why in files.items() if isinstance(why, errors)] for kind, errors in kinds.items()
            }
            problems = "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in parts.items() if names)
            _LOGGER.error(
                "%s cannot be restored from the backend %s alone: other backends gave %d files that it should have "
                "(%s). The first error: %s",
                what,
                name,
                len(files),
                problems,
                next(iter(files.values())),
            )

    def close(self) -> None:
        """Stop all reads and the threads that wait for them, and refuse further reads. Any thread may call this."""
        self._closed.set()
        for replica in self._replicas:
            replica.stop()

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        return self._closed.is_set()

    def raise_if_closed(self) -> None:
        """Raise an InterruptedRestoreError if `close` was called."""
        if self._closed.is_set():
            raise InterruptedRestoreError(f"the restore of checkpoint {self._pointer.ref} was told to stop")

    def _open_all(self) -> list[_Source]:
        # Under a lock, as the first files are requested in parallel.
        with self._lock:
            if self._sources is None:
                self._sources = [self._open(replica) for replica in self._replicas]
            return self._sources

    def _open(self, replica: Restorable) -> _Source:
        status = self._replication.get(replica.name)
        try:
            pointer = self._pointer
            checkpoint = None if pointer.ref is None else Checkpoint(pointer.ref, pointer.markers)
            return _Source(replica.name, replica.files(checkpoint), status, self._silent_s)
        except StorageError as error:
            if len(self._replicas) == 1:
                raise
            return _Source(replica.name, _Unopened(replica.name, error), status, self._silent_s)

    def _note_gaps(self, ref: CheckpointRef, kind: str, failures: Mapping[str, StateError]) -> None:
        """Note for which backends another one had to give a file that they should have given."""
        for source in self._open_all() if failures else ():
            if source.name in failures and (source.name == self._preferred or source.has_confirmed(ref, kind)):
                with self._lock:
                    self._gaps.setdefault(source.name, {})[file_name(ref, kind)] = failures[source.name]
                    self.gaps += 1

    def _log_once(self, name: str, why: str) -> None:
        with self._lock:
            is_logged = name in self._logged_backends
            self._logged_backends.add(name)
        if not is_logged:
            _LOGGER.error("the state cannot be restored from the backend %s: %s. The next one is asked.", name, why)
