"""One background thread per worker process, for work that no batch waits for: snapshots and clean-up.

Worker processes end without notice, idle ones after a minute. So background work may stop at any line, and correctness
must not depend on it: a snapshot that never arrived was never confirmed, and clean-up continues another time.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from spark_state_ext.errors import StateError
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["Background", "Foreground", "Inline", "Runner", "Work"]

_LOGGER = logging.getLogger("spark_state_ext")
# If more work than this waits, the thread does not keep up: further work is refused, and its callers retry later.
_WAITING_MAX = 256
# Work that runs for longer is considered hung, most likely in a connection; another thread then runs the waiting work.
HUNG_S = 3_600.0

# The result is ignored.
Work = Callable[[], object]


class Runner(Protocol):
    """Something that runs work, immediately or later."""

    def submit(self, name: str, work: Work) -> bool:
        """Have `work` run, unless work of this name waits already; return whether it was accepted."""
        ...

    def busy(self, name: str) -> bool:
        """True if work of this name waits or runs."""
        ...


class Foreground:
    """Knows whether batches of a process wait for something, so that background work can pause meanwhile."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        # How many batches wait, and when a wait last ended.
        self.waiting = 0
        self._last_wait_ended_s = -math.inf

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Mark the block as one in which a batch waits for something."""
        with self._condition:
            self.waiting += 1
        try:
            yield
        finally:
            with self._condition:
                self.waiting -= 1
                self._last_wait_ended_s = time.monotonic()
                self._condition.notify_all()

    def stand_back(self, quiet_s: float, s_max: float) -> None:
        """Wait until no batch has waited for anything for `quiet_s`, but at most `s_max`."""
        until_s = time.monotonic() + s_max
        with self._condition:
            while (
                left_s := (until_s if self.waiting else min(self._last_wait_ended_s + quiet_s, until_s))
                - time.monotonic()
            ) > 0:
                self._condition.wait(left_s)


class Inline:
    """Runs work at once in the caller's thread: for tests, and for calls that need it done."""

    def submit(self, name: str, work: Work) -> bool:
        _run(name, work)
        return True

    def busy(self, name: str) -> bool:
        return False


class Background:
    """Runs work in a background thread, one piece after the other."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: OrderedDict[str, Work] = OrderedDict()
        self._running: str | None = None
        self._started_s = 0.0
        # How many pieces of work have ended, also by an error.
        self.finished = 0
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def submit(self, name: str, work: Work) -> bool:
        """Have `work` run after the work that waits already; return whether it was accepted."""
        with self._condition:
            # Replace a hung thread first: it may be why work of this name, or too much work, is waiting.
            # A thread may also have ended by a `BaseException`, such as a library's exit.
            if (self._thread is None or not self._thread.is_alive() or self._is_hung()) and not self._start():
                return False
            if name in self._waiting or len(self._waiting) >= _WAITING_MAX:
                return False
            self._waiting[name] = work
            self._condition.notify_all()
            return True

    def busy(self, name: str) -> bool:
        """True if work of this name waits or runs."""
        with self._condition:
            return (name == self._running and not self._is_hung()) or name in self._waiting

    def wait(self, timeout_s: float) -> bool:
        """Wait until all work has ended; return False if it has not after `timeout_s`."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting and self._running is None, timeout_s)

    def close(self) -> None:
        """Have the thread end after its current work, and drop the work that waits."""
        atexit.unregister(self._end_at_exit)
        with self._condition:
            self._waiting.clear()
            self._thread = None
            self._condition.notify_all()

    def _end_at_exit(self) -> None:
        """Wait some seconds for the current work, as pools of threads do (`DaemonPool`)."""
        thread = self._thread
        if self._pid == os.getpid() and thread is not None:
            self.close()
            thread.join(DaemonPool.exit_left_s())

    def _start(self) -> bool:
        # A daemon thread, because a worker process that is asked to end must not wait for an upload.
        thread = threading.Thread(target=self._loop, name="spark_state_ext background", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no address space for its stack
            _LOGGER.warning("cannot start the thread for snapshots and clean-up, which are delayed: %s", error)
            return False
        if self._thread is None:
            self._pid = os.getpid()
            atexit.register(self._end_at_exit)
        self._thread, self._running = thread, None
        return True

    def _is_hung(self) -> bool:
        return self._running is not None and time.monotonic() - self._started_s > HUNG_S

    def _loop(self) -> None:
        this_thread = threading.current_thread()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._waiting) or self._thread is not this_thread)
                if self._thread is not this_thread:  # considered hung, and replaced
                    return
                name, work = self._waiting.popitem(last=False)
                self._running, self._started_s = name, time.monotonic()
            try:
                _run(name, work)
            finally:
                with self._condition:
                    self.finished += 1
                    if self._thread is this_thread:
                        self._running = None
                    self._condition.notify_all()


def _run(name: str, work: Work) -> None:
    try:
        work()
    except StateError as error:
        _LOGGER.warning("%s: %s", name, error)
    except Exception:
        # A bug of this package. It must not end the thread, and would not be logged elsewhere.
        _LOGGER.exception("%s failed", name)
