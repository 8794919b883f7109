"""Whether pieces are asked of peers or of the store: whichever was faster where nobody waited. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Choice", "Measure", "asks_peers"]

# A request costs about as much as so many bytes.
_REQUEST_BYTES = 64 << 10
# After this time it is measured anew.
_OLD_S = 60.0
# How much a new measure counts against those before.
_NEW = 0.5


@dataclass(frozen=True)
class Measure:
    """How long one of them takes.

    Parameters
    ----------
    cost_s
        Seconds for a byte, where a request counts as 64 KiB.
    at_s
        When that was measured last.
    """

    cost_s: float
    at_s: float


def asks_peers(peer: Measure | None, store: Measure | None, now_s: float, beside: bool) -> bool:
    """Whether peers are asked first."""
    if beside and (peer is None or peer.at_s < now_s - _OLD_S):
        return True
    if beside and (store is None or store.at_s < now_s - _OLD_S):
        return False
    return peer is None or store is None or peer.cost_s <= store.cost_s


class Choice:
    """The measures of a process, for one root; several threads may note."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._peer: Measure | None = None
        self._store: Measure | None = None

    def asks_peers(self, beside: bool) -> bool:
        """As the function of that name, by what was noted."""
        return asks_peers(self._peer, self._store, self._clock_s(), beside)

    def note_peer(self, requests: int, size_bytes: int, took_s: float) -> None:
        """A peer has given bytes."""
        self._peer = self._measured(self._peer, requests, size_bytes, took_s)

    def note_store(self, requests: int, size_bytes: int, took_s: float) -> None:
        """The store has given bytes."""
        self._store = self._measured(self._store, requests, size_bytes, took_s)

    def _measured(self, before: Measure | None, requests: int, size_bytes: int, took_s: float) -> Measure:
        now_s, cost_s = self._clock_s(), took_s / (requests * _REQUEST_BYTES + size_bytes)
        if before is not None and before.at_s >= now_s - _OLD_S:
            cost_s = _NEW * cost_s + (1 - _NEW) * before.cost_s
        return Measure(cost_s, now_s)
