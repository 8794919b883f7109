"""Existence probes: whether a backend still has what it confirmed, when a run of the query first comes to a bucket.

Where the local store is warm, no batch reads a checkpoint file. So a root that was removed meanwhile would go unnoticed
until clean-up has its turn, and nothing but the local store would hold the state. A probe asks for the sizes of two or
three files while the bucket's function runs; the commit waits for it, and sends the whole state where the file is gone.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

from arrow_schemas.pointer import Pointer
from spark_state_ext.backends.replication import Replica, is_complete
from spark_state_ext.errors import OwnershipError, StateError
from spark_state_ext.files.existence import has_state
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["Probes"]

_LOGGER = logging.getLogger("spark_state_ext")
_SEEN_MAX = 4_096
# A probe that comes this late, as its process slept, may miss what was deleted rightly.
_LATE_S = 600.0
# A commit waits so long for a probe, and none does for as long after a store did not answer one.
_WAIT_S_MAX = 60.0
_SLICE_S = 1.0


class Probes:
    """What a process has probed."""

    def __init__(self) -> None:
        # Its own thread: a store that hangs keeps neither snapshots nor clean-up from going on.
        self.beside = DaemonPool("probes")
        # By bucket and backend: the run that probed, or is about to.
        self._seen: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._wait_from_s = 0.0

    def once(
        self,
        key: str,
        run_id: str,
        known: Callable[[], Pointer],
        replicas: Sequence[Replica],
        lost: Callable[[str], None],
    ) -> list[Future[None]]:
        """Probe whether backends have what they confirmed, unless this run did; returns at once."""
        new = [replica for replica in replicas if self._seen.get((key, replica.name)) != run_id]
        pointer = known() if new else None
        begun: list[Future[None]] = []
        for replica in new:
            status = None if pointer is None else pointer.replication.get(replica.name)
            if pointer is None or status is None or not is_complete(status) or status.through is None:
                continue
            self._seen[key, replica.name] = run_id
            if len(self._seen) > _SEEN_MAX:
                self._seen.popitem(last=False)
            try:
                there = partial(has_state, replica.files(), pointer, status.through)
                begun.append(self.beside.submit(self._probe, key, replica.name, there, lost, time.monotonic()))
            except StateError as error:
                self._again(key, replica.name, error)
        return begun

    def await_all(self, probes: Sequence[Future[None]], while_waiting: Callable[[], None] = lambda: None) -> None:
        """Wait for probes, but not long where a store does not answer: what they find then, the next commit mends."""
        until_s = time.monotonic() + _WAIT_S_MAX
        while wait(probes, 0.0).not_done:
            now_s = time.monotonic()
            if now_s < self._wait_from_s:
                return
            if now_s >= until_s:
                self._wait_from_s = now_s + _WAIT_S_MAX
                _LOGGER.warning("a backend does not tell whether it has what it confirmed; batches go on meanwhile")
                return
            wait(probes, min(_SLICE_S, until_s - now_s))
            while_waiting()

    def _probe(
        self, key: str, name: str, there: Callable[[], bool], lost: Callable[[str], None], asked_s: float
    ) -> None:
        try:
            if there() or time.monotonic() - asked_s > _LATE_S:
                return
            _LOGGER.error(
                "%s cannot give back the state of %s, which it had: somebody has removed it, or deleted files there. "
                "The next commit sends the bucket's whole state there",
                name,
                key,
            )
            lost(name)
        except OwnershipError as error:
            # The run's next call tells, too.
            _LOGGER.warning("%s", error)
        except StateError as error:
            self._again(key, name, error)
        except Exception:
            # A fault of ours, which nobody else would tell of.
            _LOGGER.exception("looking for the state of %s in %s failed", key, name)

    def _again(self, key: str, name: str, error: StateError) -> None:
        """The next call has another look."""
        _LOGGER.warning("whether %s has what it confirmed cannot be told: %s", name, error)
        self._seen.pop((key, name), None)
        self._wait_from_s = time.monotonic() + _WAIT_S_MAX
