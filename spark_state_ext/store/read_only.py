"""Read-only access to an environment that another process writes: it creates, changes, repairs and removes no files.

A read transaction takes a slot in LMDB's table of readers, but no lock that a writer waits for. The job frees the slots
of killed processes (`Environment.check_readers`). Only processes of one PID namespace may share a table.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import lmdb

from spark_state_ext.errors import (
    ClosedEnvironmentError,
    CorruptStoreError,
    StateGoneError,
    StorageError,
    UsageError,
)
from spark_state_ext.store.damage import is_damage
from spark_state_ext.store.environment import READERS_MAX, Environment
from spark_state_ext.store.forks import check_process
from spark_state_ext.store.gate import Gate
from spark_state_ext.store.local_disk import DATA_FILE, storage_error, translate_errors
from spark_state_ext.store.shared_environment import SharedEnvironment
from spark_state_ext.store.transaction import DATABASES, Reader, Writer
from spark_state_ext.worker.boot import boot_id

__all__ = ["ReadOnlyEnvironment"]

T = TypeVar("T")

_RESIZES_MAX = 32


class ReadOnlyEnvironment(SharedEnvironment):
    """A bucket's environment in a process that only reads it. Get one with `ReadOnlyEnvironment.of`."""

    writes: ClassVar[bool] = False

    def __init__(self, folder: Path, env: Any, file: int) -> None:
        self._folder = folder
        self._env = env
        self._file = file
        self._gate = Gate()
        self._pid = os.getpid()
        self._closed = False
        self._dbs: dict[bytes, Any] = {}

    @staticmethod
    def of(bucket_folder: Path) -> ReadOnlyEnvironment:
        """Open the environment of a bucket's folder for the machine's current boot."""
        folder = bucket_folder / boot_id()
        if Environment.has_open(folder):
            raise UsageError(
                f"this process runs tasks that use the local store {folder}, and LMDB does not open a store twice in "
                "one process: read it from another process"
            )
        try:
            file = os.open(folder / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _gone_error(folder) from error
        except OSError as error:
            raise storage_error(folder, error) from error
        try:
            environment = ReadOnlyEnvironment(folder, _open(folder), file)
        except BaseException:
            os.close(file)
            raise
        try:
            environment._check_length()
            environment._dbs = environment._retry_resized(environment._databases)
        except BaseException:
            environment.close()
            raise
        return environment

    def _check_length(self) -> None:
        """Raise a CorruptStoreError if the file was cut short: reading a page beyond its end crashes the process."""
        length = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if os.fstat(self._file).st_size < length:
            raise CorruptStoreError(f"the local store {self._folder} was cut short: it should have {length} bytes")

    def _databases(self) -> dict[bytes, Any]:
        try:
            with translate_errors(self._folder):
                return {name: self._env.open_db(name, create=False) for name in DATABASES}
        except StorageError as error:
            if isinstance(error.__cause__, lmdb.NotFoundError):  # it is being created
                raise _gone_error(self._folder) from error
            raise

    @property
    def environment(self) -> Environment:
        """Refused: there is no writable environment in this process."""
        self._refuse()

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def map_bytes(self) -> int:
        size: int = self._env.info()["map_size"]
        return size

    def read(self, work: Callable[[Reader], T]) -> T:
        """Run `work` in one read transaction, as `Environment.read` does."""

        def in_transaction() -> T:
            check_process(self._pid, self._folder)
            with self._gate.shared(), translate_errors(self._folder):
                if self._closed:
                    raise ClosedEnvironmentError(f"the local store {self._folder} was closed while it was read")
                txn = self._env.begin(buffers=True)
                reader = Reader(txn, self._dbs)
                try:
                    with txn:
                        return work(reader)
                finally:
                    # No traceback may hold the transaction, because the environment may be closed next.
                    reader.release()
                    del txn

        return self._retry_resized(in_transaction)

    def _retry_resized(self, work: Callable[[], T]) -> T:
        """Run `work`, and again whenever the job has enlarged the map meanwhile."""
        for _ in range(_RESIZES_MAX):
            try:
                return work()
            except lmdb.MapResizedError:
                with self._gate.exclusive(), translate_errors(self._folder):
                    if not self._closed:
                        self._env.set_mapsize(0)
        raise StorageError(f"the map of {self._folder} was resized {_RESIZES_MAX} times in a row by the job")

    def is_replaced(self) -> bool:
        """True if the job has removed the environment or begun a new one in its place."""
        try:
            return not os.path.samestat(os.fstat(self._file), os.stat(f"{self._folder}/{DATA_FILE}"))
        except OSError:
            return True

    def close(self) -> None:
        """Wait for this process's readers and close the environment. Does nothing in a forked process."""
        if self._pid != os.getpid():
            return
        with self._gate.exclusive():
            if not self._closed:
                self._closed = True
                self._env.close()
                os.close(self._file)

    # -- operations of the job, refused here -------------------------------------------------------

    def write(self, work: Callable[[Writer], T], need_bytes: int = 0) -> T:
        """Refused: this process only reads."""
        self._refuse()

    def check_readers(self) -> None:
        """Refused: this process only reads."""
        self._refuse()

    def discard(self) -> None:
        """Refused: this process only reads."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(f"the local store {self._folder} is open for reading only")


def _open(folder: Path) -> Any:
    for attempts_left in reversed(range(_RESIZES_MAX)):
        try:
            return lmdb.open(
                str(folder),
                readonly=True,
                create=False,
                max_dbs=len(DATABASES),
                # The first process to open the environment creates the table of readers.
                max_readers=READERS_MAX,
                readahead=False,
            )
        except lmdb.MapResizedError:  # the job resized it while LMDB opened the file
            if not attempts_left:
                raise
        except (lmdb.Error, OSError) as error:
            if not (folder / DATA_FILE).exists():
                raise _gone_error(folder) from error
            if "already open" in str(error):
                raise UsageError(
                    f"this process already has the local store {folder} open: share one LiveState"
                ) from error
            if is_damage(error):
                raise CorruptStoreError(f"the local store {folder} is damaged, or being created: {error}") from error
            raise storage_error(folder, error) from error
    raise AssertionError("unreachable: the last attempt returns or raises")


def _gone_error(folder: Path) -> StateGoneError:
    return StateGoneError(
        f"there is no local store at {folder}: the bucket moved to another executor, or its store was removed. Read it "
        "on the host that runs the bucket now"
    )
