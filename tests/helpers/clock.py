"""A machine's monotonic clock on which no time passes but what a test lets pass: how fast the machine is does not matter."""

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
    """Time passes in `sleep`, and while a commit waits for uploads that hang."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._coming: list[tuple[float, int, Callable[[], Any]]] = []
        self._number = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    def after(self, seconds: float, work: Callable[[], Any]) -> None:
        """Call `work` when so much time has passed."""
        heapq.heappush(self._coming, (self.now_s + seconds, next(self._number), work))

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.now_s + seconds
        while self._coming and self._coming[0][0] <= until_s:
            self.now_s, _, work = heapq.heappop(self._coming)
            work()
        self.now_s = until_s

    def pause(self, uploads: Iterable[Upload], timeout_s: float) -> None:
        """In place of `WorkerUploads.pause`: what does not hang comes to its end in no time, however long that takes."""
        waited_for: list[Any] = list(uploads)
        if waited_for and all(upload.manager.gate.is_set() for upload in waited_for):
            wait([upload.done for upload in waited_for], WAIT_S, return_when=FIRST_EXCEPTION)
            return
        self.sleep(timeout_s)
        # Where another process has them, that one's threads want to come to something as well.
        time.sleep(0.001)
