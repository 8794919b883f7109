"""What became of uploads and of snapshots, counted for metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from spark_state_ext.store import LocalStore

__all__ = ["Tallies", "Tally"]


@dataclass(frozen=True)
class Tally:
    """What became of a bucket's uploads, or of its snapshots.

    Parameters
    ----------
    confirmed, took_s, size_bytes
        How many were confirmed, a backend each; in how many seconds, queues included; and their bytes.
    failures
        How many were not made, or were refused.
    """

    confirmed: int = 0
    took_s: float = 0.0
    size_bytes: int = 0
    failures: int = 0


class Tallies:
    """Those of a process's buckets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, Tally] = {}

    def add(self, store: LocalStore, more: Tally) -> None:
        """Count what a bucket's process has seen."""
        with self._lock:
            it = self._of.get(str(store.folder), Tally())
            self._of[str(store.folder)] = Tally(
                it.confirmed + more.confirmed,
                it.took_s + more.took_s,
                it.size_bytes + more.size_bytes,
                it.failures + more.failures,
            )

    def take(self, store: LocalStore) -> Tally:
        """What was counted in this process since this was asked last."""
        with self._lock:
            return self._of.pop(str(store.folder), Tally())
