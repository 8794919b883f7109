"""A store, imported by name, whose reads of checkpoint files are slow or fail, and that logs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.slow import ObjectDisk

__all__ = ["STORE", "StallingDisk"]

STORE = "stalling_disk.StallingDisk"
_ERRORS = {"refused": ConnectionRefusedError, "timeout": TimeoutError, "denied": PermissionError}


class StallingDisk(ObjectDisk):
    """A disk that behaves like an object store.

    Parameters
    ----------
    log
        A file to which each request for a checkpoint file adds a line.
    takes_s
        Duration of each such request in seconds.
    fails
        The error of each such request: ``refused``, ``timeout`` or ``denied``; empty for no error.
    """

    protocol = ("stalling", "memory")

    def __init__(self, log: str, takes_s: float = 0.0, fails: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._log = log
        self._takes_s = takes_s
        self._fails = fails

    def asked(self, what: str, path: str) -> None:
        """Log a request and delay it."""
        if not path.endswith(".arrow"):
            return
        with open(self._log, "a") as log:
            log.write(f"{what} {Path(path).name}\n")
        time.sleep(self._takes_s)
        if self._fails:
            raise _ERRORS[self._fails](f"{path}: {self._fails}")


def log_calls(name: str) -> Callable[..., Any]:
    real = getattr(ObjectDisk, name)

    def call(self: StallingDisk, path: str, *args: Any, **kwargs: Any) -> Any:
        self.asked(name, path)
        return real(self, path, *args, **kwargs)

    return call


for _name in ("cat_file", "info"):
    setattr(StallingDisk, _name, log_calls(_name))
