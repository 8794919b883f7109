"""Existence probes: check that backends still have what they confirmed, when a run of the query first calls a bucket.

If the local store is complete, no batch reads a checkpoint file. A root that was deleted meanwhile would go unnoticed
until the next clean-up, and only the local store would hold the state. A probe asks for the sizes of two or three files
while the bucket's function runs. The commit waits for the probe and sends the whole state if a file is missing.
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
from spark_state_ext.errors import InterruptedRestoreError, OwnershipError, StateError
from spark_state_ext.files.existence import has_state
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["Probes"]

_LOGGER = logging.getLogger("spark_state_ext")
_SEEN_MAX = 4_096
# If a probe runs this late, because its process slept, files that it misses may have been deleted rightly.
_LATE_S = 600.0
# Longest wait of a commit for a probe. After a store did not answer, commits do not wait at all for as long.
_WAIT_S_MAX = 60.0
_SLICE_S = 1.0


class Probes:
    """The probes of a process."""

    def __init__(self) -> None:
        # Probes have their own thread, so that a store that hangs does not block snapshots or clean-up.
        self.thread = DaemonPool("probes")
        # By bucket and backend: the run that probed it or is about to.
        self._seen: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._wait_from_s = 0.0

    def start_once(
        self,
        key: str,
        run_id: str,
        read_confirmed: Callable[[], Pointer],
        replicas: Sequence[Replica],
        on_lost: Callable[[str], None],
    ) -> list[Future[None]]:
        """Start a probe of each backend that this run has not probed yet; return the running probes."""
        unprobed = [replica for replica in replicas if self._seen.get((key, replica.name)) != run_id]
        pointer = read_confirmed() if unprobed else None
        probes: list[Future[None]] = []
        for replica in unprobed:
            status = None if pointer is None else pointer.replication.get(replica.name)
            if pointer is None or status is None or not is_complete(status) or status.through is None:
                continue
            self._seen[key, replica.name] = run_id
            if len(self._seen) > _SEEN_MAX:
                self._seen.popitem(last=False)
            try:
                exists = partial(has_state, replica.files(), pointer, status.through)
                probes.append(self.thread.submit(self._probe, key, replica.name, exists, on_lost, time.monotonic()))
            except StateError as error:
                self._allow_retry(key, replica.name, error)
        return probes

    def await_all(self, probes: Sequence[Future[None]], while_waiting: Callable[[], None] = lambda: None) -> None:
        """Wait for probes, at most a minute; what a later probe finds missing, the next commit sends again."""
        until_s = time.monotonic() + _WAIT_S_MAX
        while wait(probes, 0.0).not_done:
            now_s = time.monotonic()
            if now_s < self._wait_from_s:
                return
            if now_s >= until_s:
                self._wait_from_s = now_s + _WAIT_S_MAX
                _LOGGER.warning(
                    "a backend does not answer whether it still has what it confirmed; batches continue meanwhile"
                )
                return
            wait(probes, min(_SLICE_S, until_s - now_s))
            while_waiting()

    def _probe(
        self, key: str, name: str, exists: Callable[[], bool], on_lost: Callable[[str], None], asked_s: float
    ) -> None:
        try:
            if exists() or time.monotonic() - asked_s > _LATE_S:
                return
            _LOGGER.error(
                "%s no longer has the state of %s that it had confirmed: the backend was removed, or files in it were "
                "deleted. The next commit sends the bucket's whole state there",
                name,
                key,
            )
            on_lost(name)
        except OwnershipError as error:
            # The run's next call raises this error, too.
            _LOGGER.warning("%s", error)
        except InterruptedRestoreError:
            # The call ended first, and the next one probes again. That the call ended is not a reason to warn.
            self._seen.pop((key, name), None)
        except StateError as error:
            self._allow_retry(key, name, error)
        except Exception:
            # A bug in this package; no caller would see the exception.
            _LOGGER.exception("looking for the state of %s in %s failed", key, name)

    def _allow_retry(self, key: str, name: str, error: StateError) -> None:
        """Let the next call probe again."""
        _LOGGER.warning("could not check whether %s still has what it confirmed: %s", name, error)
        self._seen.pop((key, name), None)
        self._wait_from_s = time.monotonic() + _WAIT_S_MAX
