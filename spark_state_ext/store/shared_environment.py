"""A user's handle on an environment, which may be closed and opened again meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

from spark_state_ext.errors import ClosedEnvironmentError
from spark_state_ext.store.environment import Environment
from spark_state_ext.store.forks import check_process
from spark_state_ext.store.transaction import Reader, Writer

__all__ = ["SharedEnvironment"]

T = TypeVar("T")

_REOPEN_ATTEMPTS_MAX = 32


class SharedEnvironment:
    """A user's handle on a bucket's environment: opens it again whenever another user has closed it.

    Get one with `SharedEnvironment.at`.
    """

    writes: ClassVar[bool] = True

    def __init__(self, bucket_folder: Path, map_bytes: int, environment: Environment) -> None:
        self._bucket_folder = bucket_folder
        self._map_bytes = map_bytes
        self._pid = os.getpid()
        self._environment = environment

    @staticmethod
    def at(bucket_folder: Path, map_bytes: int) -> SharedEnvironment:
        """Open the environment of a bucket's folder."""
        return SharedEnvironment(bucket_folder, map_bytes, Environment.at(bucket_folder, map_bytes))

    @property
    def environment(self) -> Environment:
        """The environment, opened again if it was closed (another thread may close it at any moment)."""
        self.check_process()
        if self._environment.closed:
            self._environment = Environment.at(self._bucket_folder, self._map_bytes)
        return self._environment

    def check_process(self) -> None:
        """Raise a ForkedProcessError if this process was forked from the one that opened the environment."""
        check_process(self._pid, self._bucket_folder)

    @property
    def folder(self) -> Path:
        """The environment's folder."""
        return self.environment.folder

    @property
    def map_bytes(self) -> int:
        """See `Environment.map_bytes`."""
        return self._retry_closed(lambda environment: environment.map_bytes)

    def check_readers(self) -> None:
        """See `Environment.check_readers`."""
        self._retry_closed(Environment.check_readers)

    def read(self, work: Callable[[Reader], T]) -> T:
        """See `Environment.read`."""
        return self._retry_closed(lambda environment: environment.read(work))

    def write(self, work: Callable[[Writer], T], need_bytes: int = 0) -> T:
        """See `Environment.write`."""
        return self._retry_closed(lambda environment: environment.write(work, need_bytes))

    def is_replaced(self) -> bool:
        """See `Environment.is_replaced`."""
        return self._retry_closed(lambda environment: environment.is_replaced())

    def discard(self) -> None:
        """See `Environment.discard`."""
        self._retry_closed(Environment.discard)

    def close(self) -> None:
        """See `Environment.close`."""
        self._environment.close()

    def _retry_closed(self, task: Callable[[Environment], T]) -> T:
        for _ in range(_REOPEN_ATTEMPTS_MAX - 1):
            with contextlib.suppress(ClosedEnvironmentError):
                return task(self.environment)
        return task(self.environment)
