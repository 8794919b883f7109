"""A tap: deltas go to the replicas of their bucket while they are committed. Best effort, and never a backend.

What is offered waits in a bounded queue, for one thread. Where that is full, or a peer does not take it, it is dropped:
the peer reads the file from the store, as without a tap. No commit waits for any of it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from arrow_schemas.peers import DELTA_BYTES_MAX, PeerDelta
from arrow_schemas.standby import BucketKey
from spark_state_ext.errors import StorageError, UsageError
from spark_state_ext.peers.asking import Peers
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["TAP_VARIABLE", "DeltaTap", "Taps"]

_LOGGER = logging.getLogger("spark_state_ext")
TAP_VARIABLE = "SPARK_STATE_EXT_PEER_TAP"
# What waits at most.
_WAITING_DELTAS_MAX, _WAITING_BYTES_MAX = 256, 32 << 20


class DeltaTap:
    """That of a worker process for one root; several threads may offer."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._pool = DaemonPool("tap")
        self._lock = threading.Lock()
        self._waiting = self._waiting_bytes = 0
        # How many were offered and not sent; how many peers have taken one.
        self.dropped = self.taken = 0

    def offer(self, key: BucketKey, name: str, data: bytes | None) -> None:
        """Send a delta, unless there is too much to send. Waits for nothing, and raises nothing."""
        with self._lock:
            if (
                data is None
                or not 0 < len(data) <= DELTA_BYTES_MAX
                or not key.query_folder
                or self._waiting >= _WAITING_DELTAS_MAX
                or self._waiting_bytes + len(data) > _WAITING_BYTES_MAX
            ):
                self.dropped += 1
                return
            self._waiting += 1
            self._waiting_bytes += len(data)
        try:
            future: Future[None] = self._pool.submit(self._send, PeerDelta(key, name, data))
        except StorageError as error:
            _LOGGER.warning("a delta is not sent to peers: %s", error)
            future = Future()
            future.cancel()
        future.add_done_callback(lambda done: self._sent(done, len(data)))

    def close(self) -> None:
        """Drop what waits."""
        self._pool.close()

    def _send(self, delta: PeerDelta) -> None:
        taken = self._peers.send(delta)
        with self._lock:
            self.taken += taken

    def _sent(self, done: Future[None], size_bytes: int) -> None:
        with self._lock:
            self._waiting -= 1
            self._waiting_bytes -= size_bytes
            self.dropped += done.cancelled()
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            # A fault of ours: what may happen is dealt with where it does.
            _LOGGER.error("a delta was not sent to peers: %r", error)


class Taps:
    """Those of a worker process."""

    def __init__(self) -> None:
        self._taps: dict[Peers, DeltaTap] = {}

    def of(self, peers: Peers | None, environ: Mapping[str, str] = os.environ) -> DeltaTap | None:
        """The tap to the peers of a root; None where there are none, or the environment does not ask for it."""
        given = environ.get(TAP_VARIABLE, "")
        if given not in ("", "0", "1"):
            raise UsageError(f"{TAP_VARIABLE} is {given!r}: give 1 to have deltas sent to standby replicas, or 0")
        if peers is None or given != "1":
            return None
        if peers not in self._taps:
            self._taps[peers] = DeltaTap(peers)
        return self._taps[peers]

    def close(self) -> None:
        """Drop what waits."""
        while self._taps:
            self._taps.popitem()[1].close()
