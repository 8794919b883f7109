"""Pins: runs that must not be dropped for a while, in the table ``pins`` of a local store's environment.

A snapshot in the making reads them in short transactions, never in one long one. A pin expires, because processes die.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any

from spark_state_ext.store.checked import checked, opened
from spark_state_ext.store.transaction import Reader, Writing

__all__ = ["expires_s", "extend", "pinned", "put", "release"]

_TABLE = b"pins"


def put(txn: Writing, name: str, run_keys: Iterable[str], seconds: float) -> None:
    """Pin runs."""
    key, pin = name.encode(), {"runs": list(run_keys), "expires_s": time.time() + seconds, "pid": os.getpid()}
    txn.put(_TABLE, key, checked(key, json.dumps(pin).encode()))


def expires_s(txn: Reader, name: str) -> float:
    """When a pin expires, seconds since 1970; 0 when there is none."""
    pin = _pin(txn, name)
    return 0.0 if pin is None else float(pin["expires_s"])


def extend(txn: Writing, name: str, seconds: float) -> bool:
    """Let a pin expire later; False when there is none."""
    pin = _pin(txn, name)
    if pin is None:
        return False
    put(txn, name, pin["runs"], seconds)
    return True


def release(txn: Writing, name: str) -> None:
    """Remove a pin."""
    txn.delete(_TABLE, name.encode())


def pinned(txn: Writing) -> set[str]:
    """Keys of the runs that are pinned; pins that have expired are removed."""
    found: set[str] = set()
    # Copied before the first change: a change may move what a view shows.
    for key, value in [(key, bytes(value)) for key, value in txn.items(_TABLE)]:
        pin = json.loads(opened(key, value))
        if pin["expires_s"] < time.time():
            txn.delete(_TABLE, key)
        else:
            found.update(pin["runs"])
    return found


def _pin(txn: Reader, name: str) -> dict[str, Any] | None:
    key = name.encode()
    value = txn.get(_TABLE, key)
    if value is None:
        return None
    pin: dict[str, Any] = json.loads(opened(key, value))
    return pin
