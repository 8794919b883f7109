"""The manifest: which runs exist, and which are being written; table ``runs`` of a local store's environment.

A run exists once it has an entry. A run that is written in several transactions is first recorded as begun, with the
time, so that chunks left by a process that died can be distinguished from chunks of a run that is being written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator

from spark_state_ext.errors import MissingRunError
from spark_state_ext.store.entry_checksums import add_checksum, remove_checksum
from spark_state_ext.store.runs import Run
from spark_state_ext.store.transaction import Reader, Writer

__all__ = [
    "check_present",
    "drop",
    "find_same",
    "is_begun",
    "mark_begun",
    "put",
    "put_if_new",
    "read_begun",
    "read_runs",
    "unmark_begun",
]

_TABLE = b"runs"
_RUN, _NEW = b"run/", b"new/"


def read_runs(txn: Reader) -> Iterator[Run]:
    """Yield all runs, in no particular order."""
    for key, value in txn.items(_TABLE, _RUN):
        yield Run.decode(remove_checksum(key, value))


def find_same(txn: Reader, run: Run) -> Run | None:
    """Return the existing run of the same checkpoints, written by another attempt; None if there is none."""
    covered = (run.newest, run.oldest, run.base)
    return next((other for other in read_runs(txn) if (other.newest, other.oldest, other.base) == covered), None)


def check_present(txn: Reader, runs: Iterable[Run], doing: str) -> None:
    """Raise a MissingRunError if one of these runs was dropped; `doing` says what was to be done with them."""
    present = {run.key for run in read_runs(txn)}
    for run in runs:
        if run.key not in present:
            raise MissingRunError(f"run {run.newest} was dropped before it was {doing}", run.newest)


def put(txn: Writer, run: Run) -> None:
    """Add a run."""
    _put(txn, _RUN + run.key.encode(), run.encode())


def put_if_new(txn: Writer, run: Run) -> Run:
    """Add a run, unless there is one of the same checkpoints; return the run that exists afterwards."""
    existing = find_same(txn, run)
    if existing is None:
        put(txn, run)
    return existing or run


def drop(txn: Writer, run: Run) -> None:
    """Remove a run."""
    txn.delete(_TABLE, _RUN + run.key.encode())


def mark_begun(txn: Writer, run_key: str) -> None:
    """Record a run as begun: its chunks are being written."""
    _put(txn, _NEW + run_key.encode(), json.dumps({"started_s": time.time()}).encode())


def is_begun(txn: Reader, run_key: str) -> bool:
    """True if a run is recorded as begun."""
    return txn.get(_TABLE, _NEW + run_key.encode()) is not None


def read_begun(txn: Reader) -> list[tuple[str, float]]:
    """Return the keys of the runs recorded as begun, and when each began, in seconds since 1970."""
    # A list, because callers change the table, which may invalidate entries that are read later.
    return [
        (key[len(_NEW) :].decode(), float(json.loads(remove_checksum(key, value))["started_s"]))
        for key, value in txn.items(_TABLE, _NEW)
    ]


def unmark_begun(txn: Writer, run_key: str) -> None:
    """Remove the record that a run was begun."""
    txn.delete(_TABLE, _NEW + run_key.encode())


def _put(txn: Writer, key: bytes, value: bytes) -> None:
    txn.put(_TABLE, key, add_checksum(key, value))
