"""Decides whether to ask peers or the store for pieces: whichever was faster in the background. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Choice", "Measure", "asks_peers"]

# A request costs about as much as this many bytes.
_REQUEST_BYTES = 64 << 10
# A measurement older than this is made again.
_OLD_S = 60.0
# Weight of a new measurement against the earlier ones.
_NEW_WEIGHT = 0.5


@dataclass(frozen=True)
class Measure:
    """How fast peers or the store are.

    Parameters
    ----------
    cost_s
        Seconds per byte; a request counts as 64 KiB.
    at_s
        When it was last measured.
    """

    cost_s: float
    at_s: float


def asks_peers(peer: Measure | None, store: Measure | None, now_s: float, in_background: bool) -> bool:
    """Return True if peers should be asked before the store."""
    if in_background and (peer is None or peer.at_s < now_s - _OLD_S):
        return True
    if in_background and (store is None or store.at_s < now_s - _OLD_S):
        return False
    return peer is None or store is None or peer.cost_s <= store.cost_s


class Choice:
    """The measurements of a process for one root. Thread-safe."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._peer: Measure | None = None
        self._store: Measure | None = None

    def asks_peers(self, in_background: bool) -> bool:
        """Return `asks_peers` for the measurements noted so far."""
        return asks_peers(self._peer, self._store, self._clock_s(), in_background)

    def note_peer(self, requests: int, size_bytes: int, took_s: float) -> None:
        """Note that a peer has sent bytes."""
        self._peer = self._measure(self._peer, requests, size_bytes, took_s)

    def note_store(self, requests: int, size_bytes: int, took_s: float) -> None:
        """Note that the store has sent bytes."""
        self._store = self._measure(self._store, requests, size_bytes, took_s)

    def _measure(self, before: Measure | None, requests: int, size_bytes: int, took_s: float) -> Measure:
        now_s, cost_s = self._clock_s(), took_s / (requests * _REQUEST_BYTES + size_bytes)
        if before is not None and before.at_s >= now_s - _OLD_S:
            cost_s = _NEW_WEIGHT * cost_s + (1 - _NEW_WEIGHT) * before.cost_s
        return Measure(cost_s, now_s)
