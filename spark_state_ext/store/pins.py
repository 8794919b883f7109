"""Pins: runs that must not be dropped for a while, in the table ``pins`` of a local store's environment.

A snapshot in the making reads them in short transactions, never in one long one. A pin expires, because processes die.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable

from spark_state_ext.store.environment import Reader, Writing

__all__ = ["expires_s", "extend", "pinned", "put", "release"]

_TABLE = b"pins"


def put(txn: Writing, name: str, run_keys: Iterable[str], seconds: float) -> None:
    """Pin runs."""
    pin = {"runs": list(run_keys), "expires_s": time.time() + seconds, "pid": os.getpid()}
    txn.put(_TABLE, name.encode(), json.dumps(pin).encode())


def expires_s(txn: Reader, name: str) -> float:
    """When a pin expires, seconds since 1970; 0 when there is none."""
    value = txn.get(_TABLE, name.encode())
    return 0.0 if value is None else float(json.loads(bytes(value))["expires_s"])


def extend(txn: Writing, name: str, seconds: float) -> bool:
    """Let a pin expire later; False when there is none."""
    value = txn.get(_TABLE, name.encode())
    if value is None:
        return False
    put(txn, name, json.loads(bytes(value))["runs"], seconds)
    return True


def release(txn: Writing, name: str) -> None:
    """Remove a pin."""
    txn.delete(_TABLE, name.encode())


def pinned(txn: Writing) -> set[str]:
    """Keys of the runs that are pinned; pins that have expired are removed."""
    found: set[str] = set()
    # Copied before the first change: a change may move what a view shows.
    for key, value in [(key, bytes(value)) for key, value in txn.items(_TABLE)]:
        pin = json.loads(value)
        if pin["expires_s"] < time.time():
            txn.delete(_TABLE, key)
        else:
            found.update(pin["runs"])
    return found
