"""Counts of uploads and snapshots, for metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from spark_state_ext.store import LocalStore

__all__ = ["Tallies", "Tally"]


@dataclass(frozen=True)
class Tally:
    """Counts of a bucket's uploads or snapshots.

    Parameters
    ----------
    confirmed, took_s, size_bytes
        Number of confirmed uploads (one per backend), their total time in seconds including queues, and their bytes.
    failures
        Number of uploads that were refused or could not be made.
    """

    confirmed: int = 0
    took_s: float = 0.0
    size_bytes: int = 0
    failures: int = 0


class Tallies:
    """The counts of all buckets of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[str, Tally] = {}

    def add(self, store: LocalStore, tally: Tally) -> None:
        """Add to the counts of a bucket."""
        with self._lock:
            total = self._tallies.get(str(store.folder), Tally())
            self._tallies[str(store.folder)] = Tally(
                total.confirmed + tally.confirmed,
                total.took_s + tally.took_s,
                total.size_bytes + tally.size_bytes,
                total.failures + tally.failures,
            )

    def take(self, store: LocalStore) -> Tally:
        """Return and reset the counts of a bucket."""
        with self._lock:
            return self._tallies.pop(str(store.folder), Tally())
