"""A monotonic clock that only a test moves, so that the speed of the machine does not matter."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any

from spark_state_ext.commit.uploads import Upload
from tests.helpers.waiting import WAIT_S

__all__ = ["VirtualClock"]


class VirtualClock:
    """A clock that moves in `sleep`, and while a commit waits for uploads that hang."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._scheduled: list[tuple[float, int, Callable[[], Any]]] = []
        self._number = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    def after(self, seconds: float, work: Callable[[], Any]) -> None:
        """Call `work` after that many seconds."""
        heapq.heappush(self._scheduled, (self.now_s + seconds, next(self._number), work))

    def sleep(self, seconds: float) -> None:
        """Let time pass, and do the work that is due."""
        until_s = self.now_s + seconds
        while self._scheduled and self._scheduled[0][0] <= until_s:
            self.now_s, _, work = heapq.heappop(self._scheduled)
            work()
        self.now_s = until_s

    def pause(self, uploads: Iterable[Upload], timeout_s: float) -> None:
        """Replace `WorkerUploads.pause`: uploads that do not hang complete without any time passing on this clock."""
        awaited: list[Any] = list(uploads)
        if awaited and all(upload.manager.gate.is_set() for upload in awaited):
            wait([upload.done for upload in awaited], WAIT_S, return_when=FIRST_EXCEPTION)
            return
        self.sleep(timeout_s)
        # If another process has the uploads, its threads need real time to progress.
        time.sleep(0.001)
