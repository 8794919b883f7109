"""A store, made by name, whose reads of checkpoint files take long or fail, and that counts them."""

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
    """A disk under an object store's rules.

    Parameters
    ----------
    log
        A file that gets a line for each request that is for a checkpoint file.
    takes_s
        How long each of them takes, seconds.
    fails
        How each of them fails then: ``refused``, ``timeout`` or ``denied``; empty when it does not.
    """

    protocol = ("stalling", "memory")

    def __init__(self, log: str, takes_s: float = 0.0, fails: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._log = log
        self._takes_s = takes_s
        self._fails = fails

    def asked(self, what: str, path: str) -> None:
        """Note a request, and take the time."""
        if not path.endswith(".arrow"):
            return
        with open(self._log, "a") as log:
            log.write(f"{what} {Path(path).name}\n")
        time.sleep(self._takes_s)
        if self._fails:
            raise _ERRORS[self._fails](f"{path}: {self._fails}")


def _noted(name: str) -> Callable[..., Any]:
    real = getattr(ObjectDisk, name)

    def call(self: StallingDisk, path: str, *args: Any, **kwargs: Any) -> Any:
        self.asked(name, path)
        return real(self, path, *args, **kwargs)

    return call


for _name in ("cat_file", "info"):
    setattr(StallingDisk, _name, _noted(_name))
