"""One LMDB environment, opened once per process, behind a gate.

This module deals with the following properties of LMDB, so that its callers need not:

* `set_mapsize` while any transaction of the process is open corrupts memory (py-lmdb returns normally and the
  next read faults). So every transaction passes a gate that resizing takes exclusively.
* Another process may have grown the map: LMDB then raises MapResized, and this process adopts the new size.
* With ``sync=False`` a crash of the *machine* may leave a damaged file. The environment's folder is named after the
  machine's boot, so after a restart the old folder is not used, and is removed.
* An environment must not be used after a fork (`forks`) or opened twice in a process.
* Each environment takes open files, of which a process has a limited number (`descriptors`). So opening one closes
  those unused for longest; their users open them again when needed.
* With py-lmdb 2, a write transaction that fails waits for all of the process's calls into LMDB before it is rolled
  back, even for a thread that waits for this very transaction to end: a deadlock. So writers of one process wait for
  each other here, and not in LMDB.
* Access to a page beyond the end of the file crashes the process, so a file that was cut short is not used. LMDB itself
  omits free pages at the end of its file. To distinguish the two cases, writers extend the file up to its last page.
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
from spark_state_ext.store.forks import check_process, keep_forever
from spark_state_ext.store.gate import Gate
from spark_state_ext.store.local_disk import (
    DATA_FILE,
    make_private,
    refuse_full,
    set_aside,
    storage_error,
    translate_errors,
)
from spark_state_ext.store.transaction import DATABASES, Reader, Writer
from spark_state_ext.worker import descriptors
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.removal import remove_tree

__all__ = ["MAP_BYTES_MIN", "READERS_MAX", "Environment"]

T = TypeVar("T")
ViewType = TypeVar("ViewType", bound=Reader)

MAP_BYTES_MIN = 1 << 20
# Far more than the tasks that may work on one bucket at once, including retries and speculation.
READERS_MAX = 512
_GROW_ATTEMPTS_MAX = 32
_LENGTH_CHECKS = 3
_LENGTHENED_WITHIN_S = 0.05


class Environment:
    """An LMDB environment that grows automatically. Get one with `Environment.at`."""

    _environments: ClassVar[dict[Path, Environment]] = {}
    _open_lock = threading.Lock()
    # Environments of the process that this one was forked from.
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
        self._last_used_s = time.monotonic()

    @classmethod
    def _open_checked(cls, folder: Path, map_bytes: int) -> Environment:
        """Open a folder's environment and check its length."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_full(folder)
            env = _open_lmdb(folder, map_bytes)
        except (lmdb.Error, OSError) as error:
            if isinstance(error, lmdb.MemoryError) and can_be_mapped(folder / DATA_FILE, map_bytes):
                raise CorruptStoreError(f"the local store {folder} claims more pages than its file has") from error
            raise storage_error(folder, error) from error
        try:
            file = os.open(folder / DATA_FILE, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:  # another process has just removed the environment
            env.close()
            raise storage_error(folder, error) from error
        environment = cls(folder, env, file)
        try:
            environment._check_length()
            environment._dbs = environment._databases()
        except BaseException:
            environment._close()
            raise
        return environment

    def _check_length(self) -> None:
        """Raise a CorruptStoreError if the file was cut short; reads only the first two pages, as LMDB has done."""
        for _ in range(_LENGTH_CHECKS):
            # Read the expected length before the actual one, because the file may grow in between.
            length = self._least_length()
            size = os.fstat(self._file).st_size
            if size >= length:
                return
            # Another process may have just committed and be about to extend the file.
            time.sleep(_LENGTHENED_WITHIN_S)
        raise CorruptStoreError(f"the local store {self.folder} was cut short: {size} of {length} bytes are left")

    def _lengthen(self) -> None:
        if os.fstat(self._file).st_size >= self._least_length():
            return
        # Errors are harmless: the data is committed, and a file that stays too short is at worst rebuilt.
        with contextlib.suppress(lmdb.Error, OSError), self._env.begin(write=True):
            # Within a write transaction, because then no other process extends the file.
            if os.fstat(self._file).st_size < (length := self._least_length()):
                os.ftruncate(self._file, length)

    def _least_length(self) -> int:
        """Return the offset of the end of the file's last page."""
        pages: int = self._env.info()["last_pgno"] + 1
        size: int = self._env.stat()["psize"]
        return pages * size

    def _databases(self) -> dict[bytes, Any]:
        with translate_errors(self.folder):
            self._env.reader_check()
            for _ in range(_GROW_ATTEMPTS_MAX):
                try:
                    return {name: self._env.open_db(name) for name in DATABASES}
                except lmdb.MapResizedError:  # another process resized it since this one opened the file
                    self._env.set_mapsize(0)
        raise StorageError(f"the map of {self.folder} was resized {_GROW_ATTEMPTS_MAX} times while it was opened")

    @classmethod
    def at(cls, bucket_folder: Path, map_bytes: int) -> Environment:
        """Return the environment of a bucket's folder for the machine's current boot; open it once per process."""
        folder = bucket_folder / boot_id()
        if (inherited := cls._inherited.get(folder)) is not None:
            check_process(inherited._pid, folder)
        with cls._open_lock:
            environment = cls._environments.get(folder)
            if environment is not None and not environment.closed:
                # Checked here too, because a fork by native code does not call `_after_fork`.
                check_process(environment._pid, folder)
                return environment
            cls._close_idle(descriptors.stores_max() - 1)
            try:
                new = cls._open_for_boot(bucket_folder, folder, map_bytes)
            except TooManyOpenFilesError:
                # Other code in this process has more files open than `descriptors` leaves for it.
                if not cls._close_idle(0):
                    raise
                new = cls._open_for_boot(bucket_folder, folder, map_bytes)
            cls._environments[folder] = new
            return new

    @classmethod
    def has_open(cls, folder: Path) -> bool:
        """True if this process has the environment of a folder open."""
        with cls._open_lock:
            environment = cls._environments.get(folder)
            return environment is not None and not environment.closed

    @classmethod
    def _open_for_boot(cls, bucket_folder: Path, folder: Path, map_bytes: int) -> Environment:
        try:
            # 0700 on every level we make: state is user data, and the folder's parent is often world-readable.
            make_private(bucket_folder)
            with contextlib.suppress(FileNotFoundError):  # another process is removing the folder as unused
                for stale in bucket_folder.iterdir():
                    if stale.name != folder.name:
                        remove_tree(stale, ignore_errors=True)
        except OSError as error:
            raise storage_error(folder, error) from error
        return rebuild_if_damaged(lambda: cls._open_checked(folder, map_bytes), lambda: set_aside(folder))

    @classmethod
    def _close_idle(cls, count_max: int) -> int:
        """Close environments not in use, longest unused first, until `count_max` are open; return how many were closed.

        The caller must hold `_open_lock`.
        """
        excess, closed = len(cls._environments) - count_max, 0
        if excess <= 0:
            return 0
        for environment in sorted(cls._environments.values(), key=lambda candidate: candidate._last_used_s):
            if closed == excess:
                break
            # Do not wait for its users: that may take long, and other threads may wait for `_open_lock`.
            with environment._gate.exclusive_if_free() as free:
                if free:
                    if not environment.closed:
                        environment._close()
                    del cls._environments[environment.folder]
                    closed += 1
        return closed

    @classmethod
    def _after_fork(cls) -> None:
        """In a forked child, make the parent's environments unusable."""
        # A new lock: the old one may be held by a thread of the parent that does not exist here.
        cls._open_lock = threading.Lock()
        for environment in cls._environments.values():
            keep_forever(environment._env)
        cls._inherited = {**cls._inherited, **cls._environments}
        cls._environments = {}

    def discard(self) -> None:
        """Set the environment aside as damaged, so that the next `at` builds a new one."""
        with self._use_exclusively():
            try:
                # Close it first: py-lmdb 2 refuses to open an environment at a path that this process has open.
                self._env.close()
                if not self._is_replaced():
                    set_aside(self.folder)
            finally:
                self._close()
        self._forget()

    def is_replaced(self) -> bool:
        """True if another process has removed the environment and begun a new one in its place."""
        with self._use():
            return self._is_replaced()

    def _is_replaced(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._file), (self.folder / DATA_FILE).stat())
        except OSError:  # the new environment does not exist yet
            return False

    def close(self) -> None:
        """Wait for this process's users and close the environment; the next `at` opens it again.

        Does nothing in a process that was forked from this one.
        """
        if self._pid != os.getpid():
            return
        with contextlib.suppress(ClosedEnvironmentError), self._use_exclusively():
            self._close()
        self._forget()

    def _close(self) -> None:
        self._env.close()
        os.close(self._file)
        # Set last: a thread that sees it opens the folder again, and LMDB allows one open environment per process.
        self.closed = True

    def _forget(self) -> None:
        # Outside of the gate: no thread may wait for the gate while it holds the lock.
        with self._open_lock:
            if self._environments.get(self.folder) is self:
                del self._environments[self.folder]

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        # Before the gate: in a forked child, the threads that are inside do not exist and would never leave.
        check_process(self._pid, self.folder)
        with self._gate.shared():
            self._check_open()
            self._last_used_s = time.monotonic()
            yield

    @contextlib.contextmanager
    def _use_exclusively(self) -> Iterator[None]:
        check_process(self._pid, self.folder)
        with self._gate.exclusive():
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"the local store {self.folder} was closed while it was used; try again")

    @property
    def map_bytes(self) -> int:
        """Current size of the map."""
        with self._use():
            return self._map_bytes()

    def _map_bytes(self) -> int:
        size: int = self._env.info()["map_size"]
        return size

    def check_readers(self) -> None:
        """Free the slots of readers that were killed, because LMDB does not reuse any page that a reader may see."""
        with self._use(), translate_errors(self.folder):
            self._env.reader_check()

    def read(self, work: Callable[[Reader], T]) -> T:
        """Run `work` in one read transaction. Memory from the reader is valid only during the call."""
        for _ in range(_GROW_ATTEMPTS_MAX):
            try:
                with self._use(), translate_errors(self.folder):
                    return self._in_transaction(Reader, work, write=False)
            except lmdb.MapResizedError:
                self._follow_resize()
        raise StorageError(
            f"the map of {self.folder} was resized {_GROW_ATTEMPTS_MAX} times in a row by other processes"
        )

    def write(self, work: Callable[[Writer], T], need_bytes: int = 0) -> T:
        """Run `work` in one write transaction; if the map is full, run it again with a larger map.

        `work` must be repeatable: a failed try is rolled back. `need_bytes` is about how much it adds; the map grows by
        at least twice that, and at least doubles.
        """
        for _ in range(_GROW_ATTEMPTS_MAX):
            try:
                # Threads that wait for `_writer` are inside the gate, so they go first and a resize comes after them.
                with self._use(), self._writer, translate_errors(self.folder):
                    result = self._in_transaction(Writer, work, write=True)
                    self._lengthen()
                    return result
            except lmdb.MapResizedError:
                self._follow_resize()
            except lmdb.MapFullError:
                self._grow(need_bytes)
        raise StoreFullError(f"the map of {self.folder} is {self.map_bytes} bytes large and still full")

    def _in_transaction(self, reader_type: type[ViewType], work: Callable[[ViewType], T], write: bool) -> T:
        """Run `work` in a transaction, and release the transaction object before returning or raising.

        With py-lmdb 1.4 the process crashes if a transaction object is collected while another thread closes the
        environment. So it must be collected within the gate, and no traceback may hold it.
        """
        txn = self._env.begin(write=write, buffers=True)
        reader = reader_type(txn, self._dbs)
        try:
            with txn:
                return work(reader)
        finally:
            reader.release()
            del txn

    def _follow_resize(self) -> None:
        with self._use_exclusively():
            try:
                self._resize(0)
            except StoreFullError as error:
                # There is no address space for the larger map of another process. When opened again, the environment is
                # mapped only as far as it is filled.
                raise ClosedEnvironmentError(f"the local store {self.folder} grew: {error}") from error

    def _grow(self, need_bytes: int) -> None:
        with self._use_exclusively():
            present = self._map_bytes()
            self._resize(max(2 * present, present + 2 * need_bytes) // MAP_BYTES_MIN * MAP_BYTES_MIN)

    def _resize(self, map_bytes: int) -> None:
        try:
            with translate_errors(self.folder):
                self._env.set_mapsize(map_bytes)
        except BaseException:
            # The old map is gone, so the environment is unusable; the next `at` opens it again.
            self._close()
            raise


def _open_lmdb(folder: Path, map_bytes: int) -> Any:
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
        except lmdb.MapResizedError:  # another process resized it while LMDB opened the file
            if not attempts_left:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


os.register_at_fork(after_in_child=Environment._after_fork)
