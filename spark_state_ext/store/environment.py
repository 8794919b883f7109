"""One LMDB environment, opened once a process, behind a gate.

What this module knows of LMDB, and nobody above it needs to:

* `set_mapsize` while any transaction of the process is open corrupts memory (py-lmdb returns normally and the
  next read faults). So every transaction passes a gate that resizing takes exclusively.
* Another process may have grown the map: LMDB says MapResized, and the size is adopted.
* With ``sync=False`` a crash of the *machine* may leave a damaged file. The environment's folder is named after the
  machine's boot, so after a restart the old one is simply not used, and is removed.
* An environment must not be carried over a fork or opened twice in a process.
* With py-lmdb 2, a write transaction that fails waits for all calls of the process into LMDB before it is taken back,
  also for another thread's that waits for that very transaction to end: both wait forever. So writers of one process
  wait for each other here, and not in LMDB.
* A page beyond the end of the file is a fault that ends the process, so a file that was cut short is not used. LMDB
  itself leaves out free pages at the end; writers make the file as long as its last page number says, to tell the two.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import lmdb

from spark_state_ext.errors import ClosedEnvironmentError, CorruptStoreError, StorageError, StoreFullError

__all__ = ["DATABASES", "Environment", "SharedEnvironment", "boot_id", "storage_error"]

T = TypeVar("T")
ViewType = TypeVar("ViewType", bound="Reader")

DATABASES = (b"meta", b"runs", b"chunks", b"pins", b"notes")
MAP_BYTES_MIN = 1 << 20
# Task slots of an executor that may work on one bucket at once, with retries and speculation, are far fewer.
_READERS_MAX = 512
_GROW_ATTEMPTS_MAX = 32
_REOPEN_ATTEMPTS_MAX = 32
# With less than this a disk counts as full.
_FREE_BYTES_MIN = 1 << 20
# What LMDB's lock file takes with that many readers, and as much again for its first pages of data.
_OPENED_BYTES = 1 << 16
_LENGTH_CHECKS = 3
_LENGTHENED_WITHIN_S = 0.05
_DATA_FILE, _LOCK_FILE = "data.mdb", "lock.mdb"
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Identifies this boot of the machine; a constant where the system does not tell."""
    try:
        return _BOOT_ID_FILE.read_text().strip().replace("-", "")[:16]
    except OSError:
        return "unknown-boot"


class Gate:
    """Many users, or one alone: transactions share it, resizing the map takes it exclusively."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._users = 0
        self._closed = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._users += 1
        try:
            yield
        finally:
            with self._condition:
                self._users -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._closed = True
            self._condition.wait_for(lambda: self._users == 0)
        try:
            yield
        finally:
            with self._condition:
                self._closed = False
                self._condition.notify_all()


class Environment:
    """An LMDB environment that grows by itself. Get one with `Environment.at`."""

    _open: ClassVar[dict[Path, Environment]] = {}
    _open_lock = threading.Lock()

    def __init__(self, folder: Path, map_bytes: int) -> None:
        self.folder = folder
        self.closed = False
        self._gate = Gate()
        self._writer = threading.Lock()
        self._pid = os.getpid()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_full(folder)
            self._env = self._opened(map_bytes)
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            raise CorruptStoreError(f"the local store {folder} is damaged: {error}") from error
        except (lmdb.Error, OSError) as error:
            if "data format" in str(error):  # py-lmdb 3 has no class of its own for files of another LMDB
                raise CorruptStoreError(f"the local store {folder} cannot be read: {error}") from error
            raise storage_error(folder, error) from error
        try:
            self._file = os.open(folder / _DATA_FILE, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:  # another process has just set it aside
            self._env.close()
            raise storage_error(folder, error) from error
        try:
            self._check_length()
            self._dbs: dict[bytes, Any] = self._databases()
        except BaseException:
            self._end()
            raise

    def _opened(self, map_bytes: int) -> Any:
        for attempts_left in reversed(range(_GROW_ATTEMPTS_MAX)):
            try:
                return lmdb.open(
                    str(self.folder),
                    map_size=max(map_bytes, MAP_BYTES_MIN),
                    max_dbs=len(DATABASES),
                    max_readers=_READERS_MAX,
                    mode=0o600,
                    sync=False,
                    metasync=False,
                    readahead=False,
                )
            except lmdb.MapResizedError:  # by another process, between its two looks at the file
                if not attempts_left:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

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
        with _translated(self.folder):
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
        with cls._open_lock:
            found = cls._open.get(folder)
            if found is not None and not found.closed and found._pid == os.getpid():
                return found
            # 0700 on every level we make: state is user data, and the folder's parent is often world-readable.
            _make_private(bucket_folder)
            with contextlib.suppress(FileNotFoundError):  # another process takes it for unused just now
                for stale in bucket_folder.iterdir():
                    if stale.name != folder.name:
                        shutil.rmtree(stale, ignore_errors=True)
            try:
                opened = cls(folder, map_bytes)
            except CorruptStoreError:
                set_aside(folder)
                opened = cls(folder, map_bytes)
            cls._open[folder] = opened
            return opened

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
            return not os.path.samestat(os.fstat(self._file), (self.folder / _DATA_FILE).stat())
        except OSError:  # it has not begun
            return False

    def close(self) -> None:
        """Close it, when nobody in this process uses it; the next `at` opens it again."""
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
        with self._gate.shared():
            self._check_open()
            yield

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
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
        with self._used(), _translated(self.folder):
            self._env.reader_check()

    def read(self, work: Callable[[Reader], T]) -> T:
        """Run `work` in one read transaction. Memory it gets from the reader dies with the call."""
        for _ in range(_GROW_ATTEMPTS_MAX):
            try:
                with self._used(), _translated(self.folder):
                    return self._in_transaction(Reader, work, write=False)
            except lmdb.MapResizedError:
                self._adopt()
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
                with self._used(), self._writer, _translated(self.folder):
                    done = self._in_transaction(Writing, work, write=True)
                    self._lengthen()
                    return done
            except lmdb.MapResizedError:
                self._adopt()
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

    def _adopt(self) -> None:
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
            with _translated(self.folder):
                self._env.set_mapsize(map_bytes)
        except BaseException:
            # The old map is gone, so nothing can be done with it; the next `at` opens it again.
            self._end()
            raise


class SharedEnvironment:
    """A bucket's environment as one of its users has it: opened again whenever another one closed it.

    Parameters
    ----------
    bucket_folder, map_bytes
        As for `Environment.at`.
    """

    def __init__(self, bucket_folder: Path, map_bytes: int) -> None:
        self._bucket_folder = bucket_folder
        self._map_bytes = map_bytes
        self._opened = Environment.at(bucket_folder, map_bytes)

    @property
    def opened(self) -> Environment:
        """The environment; open, unless it is closed at this very moment."""
        if self._opened.closed:
            self._opened = Environment.at(self._bucket_folder, self._map_bytes)
        return self._opened

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.opened.folder

    @property
    def map_bytes(self) -> int:
        """As `Environment.map_bytes`."""
        return self._do(lambda opened: opened.map_bytes)

    def check_readers(self) -> None:
        """As `Environment.check_readers`."""
        self._do(Environment.check_readers)

    def read(self, work: Callable[[Reader], T]) -> T:
        """As `Environment.read`."""
        return self._do(lambda opened: opened.read(work))

    def write(self, work: Callable[[Writing], T], need_bytes: int = 0) -> T:
        """As `Environment.write`."""
        return self._do(lambda opened: opened.write(work, need_bytes))

    def is_replaced(self) -> bool:
        """As `Environment.is_replaced`."""
        return self._do(lambda opened: opened.is_replaced())

    def discard(self) -> None:
        """As `Environment.discard`."""
        self._do(Environment.discard)

    def close(self) -> None:
        """As `Environment.close`."""
        self._opened.close()

    def _do(self, task: Callable[[Environment], T]) -> T:
        for _ in range(_REOPEN_ATTEMPTS_MAX - 1):
            with contextlib.suppress(ClosedEnvironmentError):
                return task(self.opened)
        return task(self.opened)


class Reader:
    """A read transaction's view of the databases."""

    def __init__(self, txn: lmdb.Transaction, dbs: dict[bytes, Any]) -> None:
        self._txn = txn
        self._dbs = dbs

    def end(self) -> None:
        """Let go of the transaction."""
        del self._txn

    def get(self, db: bytes, key: bytes) -> memoryview | None:
        """The value of a key, valid until the transaction ends; None when absent."""
        value = self._txn.get(key, db=self._dbs[db])
        return None if value is None else memoryview(value)

    def items(self, db: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        """All entries whose key begins with `prefix`, ascending."""
        with self._txn.cursor(db=self._dbs[db]) as cursor:
            if cursor.set_range(prefix) if prefix else cursor.first():
                for key, value in cursor:
                    if bytes(key[: len(prefix)]) != prefix:
                        return
                    yield bytes(key), memoryview(value)


class Writing(Reader):
    """A write transaction's view of the databases."""

    def put(self, db: bytes, key: bytes, value: bytes | memoryview) -> None:
        """Set a key."""
        self._txn.put(key, value, db=self._dbs[db])

    def delete(self, db: bytes, key: bytes) -> None:
        """Remove a key, if present."""
        self._txn.delete(key, db=self._dbs[db])

    def delete_prefix(self, db: bytes, prefix: bytes) -> None:
        """Remove all keys that begin with `prefix`."""
        for key in [key for key, _ in self.items(db, prefix)]:
            self._txn.delete(key, db=self._dbs[db])


def set_aside(folder: Path) -> None:
    """Move a damaged environment's folder away and delete it; processes that have it open keep their copy."""
    away = folder.with_name(f"damaged-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):  # another process was first
        folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def _make_private(folder: Path) -> None:
    missing = [folder, *folder.parents]
    missing = missing[: next(i for i, parent in enumerate(missing) if parent.exists())]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


@contextlib.contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.MapResizedError, lmdb.MapFullError):
        raise
    except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError) as error:
        raise CorruptStoreError(f"the local store {folder} is damaged: {error}") from error
    except lmdb.Error as error:
        raise storage_error(folder, error) from error


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return _FREE_BYTES_MIN


def _refuse_full(folder: Path) -> None:
    """Raise an OSError where a new store has no room.

    LMDB writes its lock file by a map, and where the disk has no page for that the system ends the process.
    """
    try:
        # Pages that it has; its length says nothing, as it begins as a hole.
        held = 512 * (folder / _LOCK_FILE).stat().st_blocks
    except FileNotFoundError:
        held = 0
    if not held and _free_bytes(folder) < _OPENED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def storage_error(folder: Path, error: Exception) -> StorageError:
    """What the system or LMDB said of a local store, as an error that says what to do."""
    text = str(error)
    number = getattr(error, "errno", None)
    # A write that the disk took in part only is an "Input/output error" to LMDB.
    full = "Input/output error" in text and _free_bytes(folder) < _FREE_BYTES_MIN
    if full or number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "quota" in text:
        return StoreFullError(
            f"the disk of the local store {folder} is full: {text}. Make room or set local_dir elsewhere."
        )
    if number == errno.ENOMEM or "Cannot allocate memory" in text:
        return StoreFullError(
            f"no address space to map the local store {folder}: {text}. Raise spark.executor.pyspark.memory, or "
            "use more buckets."
        )
    return StorageError(f"the local store {folder} failed: {text}. Set local_dir to a writable local disk.")
