"""Protection against forks of a process that has LMDB environments open: a user's function may fork.

LMDB forbids using an environment in a forked child. Parent and child share a memory-mapped table of which reader uses
which pages: a child that closes its environment frees the parent's readers there, and the parent's next write
overwrites the pages they read. So a child must not touch an inherited environment; even garbage collection would close
it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from spark_state_ext.errors import ForkedProcessError

__all__ = ["check_process", "keep_forever"]


def check_process(pid: int, folder: Path) -> None:
    """Raise a ForkedProcessError if this is not the process that opened the local store."""
    if pid != os.getpid():
        raise ForkedProcessError(
            f"the local store {folder} was used in process {os.getpid()}, which was forked from worker {pid}. A "
            "child that your function forks must neither use state nor return from the function: end it with os._exit "
            '(multiprocessing does), or start it with subprocess or multiprocessing.get_context("spawn").'
        )


def keep_forever(instance: object) -> None:
    """Keep an object from ever being collected, even at exit: its destructor would change what the parent uses.

    py-lmdb 1.4 closes an environment when it is collected, in any process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(instance))
