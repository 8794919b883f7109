"""One LMDB environment, opened once a process, behind a gate.

What this module knows of LMDB, and nobody above it needs to:

* `set_mapsize` while any transaction of the process is open corrupts memory (py-lmdb returns normally and the
  next read faults). So every transaction passes a gate that resizing takes exclusively.
* Another process may have grown the map: LMDB says MapResized, and the size is adopted.
* With ``sync=False`` a crash of the *machine* may leave a damaged file. The environment's folder is named after the
  machine's boot, so after a restart the old one is simply not used, and is removed.
* An environment must not be carried over a fork (`forks`) or opened twice in a process.
* Each takes open files, of which a process has so many (`descriptors`). So those used longest ago are closed when
  another one is opened; whoever has one of them opens it again.
* With py-lmdb 2, a write transaction that fails waits for all calls of the process into LMDB before it is taken back,
  also for another thread's that waits for that very transaction to end: both wait forever. So writers of one process
  wait for each other here, and not in LMDB.
* A page beyond the end of the file is a fault that ends the process, so a file that was cut short is not used. LMDB
  itself leaves out free pages at the end; writers make the file as long as its last page number says, to tell the two.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import lmdb

from spark_state_ext.errors import (
    ClosedEnvironmentError,
    CorruptStoreError,
    StorageError,
    StoreFullError,
    TooManyOpenFilesError,
)
from spark_state_ext.store.damage import can_be_mapped, rebuild_if_damaged
from spark_state_ext.store.forks import check_process, keep_for_ever
from spark_state_ext.store.gate import Gate
from spark_state_ext.store.local_disk import DATA_FILE, make_private, refuse_full, set_aside, storage_error, translated
from spark_state_ext.store.transaction import DATABASES, Reader, Writing
from spark_state_ext.worker import descriptors
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.removal import remove_tree

__all__ = ["MAP_BYTES_MIN", "READERS_MAX", "Environment"]

T = TypeVar("T")
ViewType = TypeVar("ViewType", bound=Reader)

MAP_BYTES_MIN = 1 << 20
# Task slots of an executor that may work on one bucket at once, with retries and speculation, are far fewer.
READERS_MAX = 512
_GROW_ATTEMPTS_MAX = 32
_LENGTH_CHECKS = 3
_LENGTHENED_WITHIN_S = 0.05


class Environment:
    """An LMDB environment that grows by itself. Get one with `Environment.at`."""

    _open: ClassVar[dict[Path, Environment]] = {}
    _open_lock = threading.Lock()
    # Of the process that this one was forked from.
    _inherited: ClassVar[dict[Path, Environment]] = {}

    def __init__(self, folder: Path, env: Any, file: int) -> None:
        self.folder = folder
        self.closed = False
        self._env = env
        self._file = file
        self._dbs: dict[bytes, Any] = {}
        self._gate = Gate()
        self._writer = threading.Lock()
        self._pid = os.getpid()
        self._used_s = time.monotonic()

    @classmethod
    def _opened(cls, folder: Path, map_bytes: int) -> Environment:
        """A folder's environment, open and looked at."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_full(folder)
            env = _open(folder, map_bytes)
        except (lmdb.Error, OSError) as error:
            if isinstance(error, lmdb.MemoryError) and can_be_mapped(folder / DATA_FILE, map_bytes):
                raise CorruptStoreError(f"the local store {folder} announces more pages than it has") from error
            raise storage_error(folder, error) from error
        try:
            file = os.open(folder / DATA_FILE, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:  # another process has just set it aside
            env.close()
            raise storage_error(folder, error) from error
        made = cls(folder, env, file)
        try:
            made._check_length()
            made._dbs = made._databases()
        except BaseException:
            made._end()
            raise
        return made

    def _check_length(self) -> None:
        """See that the file was not cut short; of its pages only the first two are looked at, as LMDB did."""
        for _ in range(_LENGTH_CHECKS):
            # First where it must end: it may grow meanwhile.
            length = self._least_length()
            found = os.fstat(self._file).st_size
            if found >= length:
                return
            # Another process may have committed just now, and be about to lengthen it.
            time.sleep(_LENGTHENED_WITHIN_S)
        raise CorruptStoreError(f"the local store {self.folder} was cut short: {found} of {length} bytes are left")

    def _lengthen(self) -> None:
        if os.fstat(self._file).st_size >= self._least_length():
            return
        # What was written is committed. A file that stays short is at worst built anew.
        with contextlib.suppress(lmdb.Error, OSError), self._env.begin(write=True):
            # In a transaction, when no other process makes it longer.
            if os.fstat(self._file).st_size < (length := self._least_length()):
                os.ftruncate(self._file, length)

    def _least_length(self) -> int:
        """Where the file's last page ends."""
        pages: int = self._env.info()["last_pgno"] + 1
        size: int = self._env.stat()["psize"]
        return pages * size

    def _databases(self) -> dict[bytes, Any]:
        with translated(self.folder):
            self._env.reader_check()
            for _ in range(_GROW_ATTEMPTS_MAX):
                try:
                    return {name: self._env.open_db(name) for name in DATABASES}
                except lmdb.MapResizedError:  # by another process, since this one opened the file
                    self._env.set_mapsize(0)
        raise StorageError(f"the map of {self.folder} was resized {_GROW_ATTEMPTS_MAX} times while it was opened")

    @classmethod
    def at(cls, bucket_folder: Path, map_bytes: int) -> Environment:
        """The environment of a bucket's folder for the machine's current boot; opened at most once a process."""
        folder = bucket_folder / boot_id()
        if (inherited := cls._inherited.get(folder)) is not None:
            check_process(inherited._pid, folder)
        with cls._open_lock:
            found = cls._open.get(folder)
            if found is not None and not found.closed:
                # Asked here too: code that is not Python's may fork as well.
                check_process(found._pid, folder)
                return found
            cls._close_idle(descriptors.stores_max() - 1)
            try:
                opened = cls._begun(bucket_folder, folder, map_bytes)
            except TooManyOpenFilesError:
                # Others in this process have more than was left to them.
                if not cls._close_idle(0):
                    raise
                opened = cls._begun(bucket_folder, folder, map_bytes)
            cls._open[folder] = opened
            return opened

    @classmethod
    def has_open(cls, folder: Path) -> bool:
        """Whether this process has the environment of a folder open."""
        with cls._open_lock:
            found = cls._open.get(folder)
            return found is not None and not found.closed

    @classmethod
    def _begun(cls, bucket_folder: Path, folder: Path, map_bytes: int) -> Environment:
        try:
            # 0700 on every level we make: state is user data, and the folder's parent is often world-readable.
            make_private(bucket_folder)
            with contextlib.suppress(FileNotFoundError):  # another process takes it for unused just now
                for stale in bucket_folder.iterdir():
                    if stale.name != folder.name:
                        remove_tree(stale, ignore_errors=True)
        except OSError as error:
            raise storage_error(folder, error) from error
        return rebuild_if_damaged(lambda: cls._opened(folder, map_bytes), lambda: set_aside(folder))

    @classmethod
    def _close_idle(cls, most: int) -> int:
        """Close those that nobody uses at this moment, used longest ago first, until so many are open; returns how
        many were closed. For who has the lock."""
        excess, closed = len(cls._open) - most, 0
        if excess <= 0:
            return 0
        for environment in sorted(cls._open.values(), key=lambda it: it._used_s):
            if closed == excess:
                break
            # Not waited for: it may be in use for long, and others may wait for the lock.
            with environment._gate.exclusive_if_free() as free:
                if free:
                    if not environment.closed:
                        environment._end()
                    del cls._open[environment.folder]
                    closed += 1
        return closed

    @classmethod
    def _after_fork(cls) -> None:
        """In a child: whatever the parent has open is none of its."""
        # Another thread may have had it, which does not live here.
        cls._open_lock = threading.Lock()
        for environment in cls._open.values():
            keep_for_ever(environment._env)
        cls._inherited = {**cls._inherited, **cls._open}
        cls._open = {}

    def discard(self) -> None:
        """Set the environment aside as damaged, so that the next `at` builds a new one."""
        with self._alone():
            try:
                # Closed first: py-lmdb 2 opens no environment at a path where this process still has one.
                self._env.close()
                if not self._replaced():
                    set_aside(self.folder)
            finally:
                self._end()
        self._forget()

    def is_replaced(self) -> bool:
        """Whether another process has set it aside, and begun a new one in its place."""
        with self._used():
            return self._replaced()

    def _replaced(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._file), (self.folder / DATA_FILE).stat())
        except OSError:  # it has not begun
            return False

    def close(self) -> None:
        """Close it, when nobody in this process uses it; the next `at` opens it again.

        In a process that was forked from this one nothing is done.
        """
        if self._pid != os.getpid():
            return
        with contextlib.suppress(ClosedEnvironmentError), self._alone():
            self._end()
        self._forget()

    def _end(self) -> None:
        self._env.close()
        os.close(self._file)
        # Not before: whoever finds it closed opens the folder again, which LMDB allows once a process.
        self.closed = True

    def _forget(self) -> None:
        # After the gate, which nobody waits for with the lock in hand.
        with self._open_lock:
            if self._open.get(self.folder) is self:
                del self._open[self.folder]

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        # Before the gate: threads that are inside do not live in a forked process.
        check_process(self._pid, self.folder)
        with self._gate.shared():
            self._check_open()
            self._used_s = time.monotonic()
            yield

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        check_process(self._pid, self.folder)
        with self._gate.exclusive():
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"the local store {self.folder} was closed while it was used; try again")

    @property
    def map_bytes(self) -> int:
        """Present size of the map."""
        with self._used():
            return self._map_bytes()

    def _map_bytes(self) -> int:
        size: int = self._env.info()["map_size"]
        return size

    def check_readers(self) -> None:
        """Free the slots of readers that were killed: as long as they stand, no page they saw is used again."""
        with self._used(), translated(self.folder):
            self._env.reader_check()

    def read(self, work: Callable[[Reader], T]) -> T:
        """Run `work` in one read transaction. Memory it gets from the reader dies with the call."""
        for _ in range(_GROW_ATTEMPTS_MAX):
            try:
                with self._used(), translated(self.folder):
                    return self._in_transaction(Reader, work, write=False)
            except lmdb.MapResizedError:
                self._follow_resize()
        raise StorageError(
            f"the map of {self.folder} was resized {_GROW_ATTEMPTS_MAX} times in a row by other processes"
        )

    def write(self, work: Callable[[Writing], T], need_bytes: int = 0) -> T:
        """Run `work` in one write transaction, again with a larger map when the map is full.

        `work` must be repeatable: nothing of a failed try remains. `need_bytes` is about what it adds; the map at least
        doubles and grows by twice that.
        """
        for _ in range(_GROW_ATTEMPTS_MAX):
            try:
                # A resize comes when the lock is free again: those who wait for it have the gate, and go first.
                with self._used(), self._writer, translated(self.folder):
                    done = self._in_transaction(Writing, work, write=True)
                    self._lengthen()
                    return done
            except lmdb.MapResizedError:
                self._follow_resize()
            except lmdb.MapFullError:
                self._grow(need_bytes)
        raise StoreFullError(f"the map of {self.folder} is {self.map_bytes} bytes large and still full")

    def _in_transaction(self, view: type[ViewType], work: Callable[[ViewType], T], write: bool) -> T:
        """Run `work` in a transaction, of which nothing is left when this returns, also by an error.

        What is left of it is taken down when nobody refers to it any more. With py-lmdb 1.4 that ends the process where
        somebody closes the environment at that moment, so it must be within the gate, and no traceback may hold it.
        """
        txn = self._env.begin(write=write, buffers=True)
        seen = view(txn, self._dbs)
        try:
            with txn:
                return work(seen)
        finally:
            seen.end()
            del txn

    def _follow_resize(self) -> None:
        with self._alone():
            try:
                self._resize(0)
            except StoreFullError as error:
                # No address space for all that another process has set aside. Opened again, it is mapped as far as it
                # is filled.
                raise ClosedEnvironmentError(f"the local store {self.folder} grew: {error}") from error

    def _grow(self, need_bytes: int) -> None:
        with self._alone():
            present = self._map_bytes()
            self._resize(max(2 * present, present + 2 * need_bytes) // MAP_BYTES_MIN * MAP_BYTES_MIN)

    def _resize(self, map_bytes: int) -> None:
        try:
            with translated(self.folder):
                self._env.set_mapsize(map_bytes)
        except BaseException:
            # The old map is gone, so nothing can be done with it; the next `at` opens it again.
            self._end()
            raise


def _open(folder: Path, map_bytes: int) -> Any:
    for attempts_left in reversed(range(_GROW_ATTEMPTS_MAX)):
        try:
            return lmdb.open(
                str(folder),
                map_size=max(map_bytes, MAP_BYTES_MIN),
                max_dbs=len(DATABASES),
                max_readers=READERS_MAX,
                mode=0o600,
                sync=False,
                metasync=False,
                readahead=False,
            )
        except lmdb.MapResizedError:  # by another process, between its two looks at the file
            if not attempts_left:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


os.register_at_fork(after_in_child=Environment._after_fork)
