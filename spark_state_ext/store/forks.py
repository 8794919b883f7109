"""Processes that are forked from one that has LMDB environments open, as a user's function may do.

LMDB forbids to use an environment in a forked child. Parent and child share the file that says who reads which pages,
by a map: a child that closes its environment frees the parent's readers there, and the parent's next write
overwrites what they read. So a child may do nothing with an environment that it inherits, not even let Python collect
it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from spark_state_ext.errors import ForkedProcessError

__all__ = ["check_process", "keep_for_ever"]


def check_process(pid: int, folder: Path) -> None:
    """See that this is the process that has a local store open."""
    if pid != os.getpid():
        raise ForkedProcessError(
            f"the local store {folder} was used in process {os.getpid()}, forked from worker {pid} that has it "
            "open. A child that your function forks must not come back from the function, nor use state: end it "
            'with os._exit (multiprocessing does), or start it with subprocess or multiprocessing.get_context("spawn").'
        )


def keep_for_ever(thing: object) -> None:
    """Never collect an object, also when Python ends: its destructor would touch what the parent uses.

    py-lmdb 1.4 closes environments when they are collected, in whatever process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
