"""Pins: promises that runs are not dropped for a while, in the table ``pins`` of a local store's environment.

They let the writer of a snapshot read its runs in many short transactions instead of a long one. A pin expires, because
its process may die.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any

from spark_state_ext.store.entry_checksums import add_checksum, remove_checksum
from spark_state_ext.store.transaction import Reader, Writer

__all__ = ["read_expiry_s", "extend", "read_pinned", "put", "release"]

_TABLE = b"pins"


def put(txn: Writer, name: str, run_keys: Iterable[str], seconds: float) -> None:
    """Pin runs."""
    key, pin = name.encode(), {"runs": list(run_keys), "expires_s": time.time() + seconds, "pid": os.getpid()}
    txn.put(_TABLE, key, add_checksum(key, json.dumps(pin).encode()))


def read_expiry_s(txn: Reader, name: str) -> float:
    """Return when a pin expires, in seconds since 1970; 0 if there is no such pin."""
    pin = _pin(txn, name)
    return 0.0 if pin is None else float(pin["expires_s"])


def extend(txn: Writer, name: str, seconds: float) -> bool:
    """Let a pin expire this many seconds from now; return False if there is no such pin."""
    pin = _pin(txn, name)
    if pin is None:
        return False
    put(txn, name, pin["runs"], seconds)
    return True


def release(txn: Writer, name: str) -> None:
    """Remove a pin."""
    txn.delete(_TABLE, name.encode())


def read_pinned(txn: Writer) -> set[str]:
    """Return the keys of pinned runs, and remove pins that have expired."""
    run_keys: set[str] = set()
    # Copied first, because a change to the table may invalidate entries that are read later.
    for key, value in [(key, bytes(value)) for key, value in txn.items(_TABLE)]:
        pin = json.loads(remove_checksum(key, value))
        if pin["expires_s"] < time.time():
            txn.delete(_TABLE, key)
        else:
            run_keys.update(pin["runs"])
    return run_keys


def _pin(txn: Reader, name: str) -> dict[str, Any] | None:
    key = name.encode()
    value = txn.get(_TABLE, key)
    if value is None:
        return None
    pin: dict[str, Any] = json.loads(remove_checksum(key, value))
    return pin
