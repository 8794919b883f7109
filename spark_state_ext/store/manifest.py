"""The manifest: which runs there are, and which are being written; table ``runs`` of a local store's environment.

A run exists once its entry is there. One that takes several transactions is noted as begun, so that what a process
leaves behind when it dies can be told from what another is at.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator

from spark_state_ext.errors import MissingRunError
from spark_state_ext.store.checked import checked, opened
from spark_state_ext.store.runs import Run
from spark_state_ext.store.transaction import Reader, Writing

__all__ = ["begin", "begun", "check_present", "drop", "end", "every", "is_begun", "put", "put_new", "same"]

_TABLE = b"runs"
_RUN, _NEW = b"run/", b"new/"


def every(txn: Reader) -> Iterator[Run]:
    """All runs, in no order."""
    for key, value in txn.items(_TABLE, _RUN):
        yield Run.decode(opened(key, value))


def same(txn: Reader, run: Run) -> Run | None:
    """The run of the same checkpoints that is there already, written in another attempt."""
    wanted = (run.newest, run.oldest, run.base)
    return next((it for it in every(txn) if (it.newest, it.oldest, it.base) == wanted), None)


def check_present(txn: Reader, runs: Iterable[Run], doing: str) -> None:
    """Raise a MissingRunError when one of them has gone."""
    present = {run.key for run in every(txn)}
    for run in runs:
        if run.key not in present:
            raise MissingRunError(f"run {run.newest} was dropped before it was {doing}", run.newest)


def put(txn: Writing, run: Run) -> None:
    """Add a run."""
    _put(txn, _RUN + run.key.encode(), run.encode())


def put_new(txn: Writing, run: Run) -> Run:
    """Add a run, unless there is one of the same checkpoints already; the one that is there then."""
    existing = same(txn, run)
    if existing is None:
        put(txn, run)
    return existing or run


def drop(txn: Writing, run: Run) -> None:
    """Remove a run."""
    txn.delete(_TABLE, _RUN + run.key.encode())


def begin(txn: Writing, run_key: str) -> None:
    """Note that chunks of a run are being written."""
    _put(txn, _NEW + run_key.encode(), json.dumps({"started_s": time.time()}).encode())


def is_begun(txn: Reader, run_key: str) -> bool:
    """Whether that is noted still."""
    return txn.get(_TABLE, _NEW + run_key.encode()) is not None


def begun(txn: Reader) -> list[tuple[str, float]]:
    """Keys of runs that are being written, and since when: seconds since 1970."""
    # A list, as a change may move what a view shows.
    return [
        (key[len(_NEW) :].decode(), float(json.loads(opened(key, value))["started_s"]))
        for key, value in txn.items(_TABLE, _NEW)
    ]


def end(txn: Writing, run_key: str) -> None:
    """Remove that note."""
    txn.delete(_TABLE, _NEW + run_key.encode())


def _put(txn: Writing, key: bytes, value: bytes) -> None:
    txn.put(_TABLE, key, checked(key, value))
