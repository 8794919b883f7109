"""One thread a worker process for work that no batch waits for: snapshots and clean-up.

Worker processes die without notice, idle ones after a minute. So whatever runs here may stop at any line, and nothing
depends on it: a snapshot that never arrived was never confirmed, and clean-up goes on another time.
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
# More than this waiting means that the thread does not keep up: then the work is refused, and due again later.
_WAITING_MAX = 256
# Work that runs for longer hangs, most likely in a connection; what waits behind it is given to another thread.
HUNG_S = 3_600.0

# What it returns is of no interest.
Work = Callable[[], object]


class Runner(Protocol):
    """Something that runs work sooner or later."""

    def submit(self, name: str, work: Work) -> bool:
        """Have `work` run, unless work of this name waits already; whether it was taken."""
        ...

    def busy(self, name: str) -> bool:
        """Whether work of this name waits or runs."""
        ...


class Foreground:
    """What batches of a process wait for, so that work beside them can stand back."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        # How many wait, and when the last one had what it waited for.
        self.waiting = 0
        self._last_s = -math.inf

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """While a batch waits for something."""
        with self._condition:
            self.waiting += 1
        try:
            yield
        finally:
            with self._condition:
                self.waiting -= 1
                self._last_s = time.monotonic()
                self._condition.notify_all()

    def stand_back(self, quiet_s: float, s_max: float) -> None:
        """Wait until no batch has waited for anything for a while."""
        until_s = time.monotonic() + s_max
        with self._condition:
            while (
                left_s := (until_s if self.waiting else min(self._last_s + quiet_s, until_s)) - time.monotonic()
            ) > 0:
                self._condition.wait(left_s)


class Inline:
    """Runs work at once, in the caller's thread: for tests, and where a call must have it done."""

    def submit(self, name: str, work: Work) -> bool:
        _run(name, work)
        return True

    def busy(self, name: str) -> bool:
        return False


class Background:
    """Runs work in a thread of its own, one after the other."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: OrderedDict[str, Work] = OrderedDict()
        self._running: str | None = None
        self._since_s = 0.0
        # Pieces of work that came to their end.
        self.finished = 0
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def submit(self, name: str, work: Work) -> bool:
        """Have `work` run after what waits already."""
        with self._condition:
            # First, as it may be what keeps work of this name, or too much of any, waiting.
            # A thread may also have ended: by what is no `Exception`, such as a library's exit.
            if (self._thread is None or not self._thread.is_alive() or self._hangs()) and not self._start():
                return False
            if name in self._waiting or len(self._waiting) >= _WAITING_MAX:
                return False
            self._waiting[name] = work
            self._condition.notify_all()
            return True

    def busy(self, name: str) -> bool:
        """Whether work of this name waits or runs."""
        with self._condition:
            return (name == self._running and not self._hangs()) or name in self._waiting

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; whether that came to be."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._waiting and self._running is None, timeout_s)

    def close(self) -> None:
        """Have the thread end, with the work that it is at; what waits is not done."""
        atexit.unregister(self._end_at_exit)
        with self._condition:
            self._waiting.clear()
            self._thread = None
            self._condition.notify_all()

    def _end_at_exit(self) -> None:
        """As for a pool of threads: wait some seconds for the work under way."""
        thread = self._thread
        if self._pid == os.getpid() and thread is not None:
            self.close()
            thread.join(DaemonPool.exit_left_s())

    def _start(self) -> bool:
        # A daemon: a worker process that is told to end must not wait for an upload.
        thread = threading.Thread(target=self._loop, name="spark_state_ext background", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no address space for its stack
            _LOGGER.warning("snapshots and clean-up wait: %s", error)
            return False
        if self._thread is None:
            self._pid = os.getpid()
            atexit.register(self._end_at_exit)
        self._thread, self._running = thread, None
        return True

    def _hangs(self) -> bool:
        return self._running is not None and time.monotonic() - self._since_s > HUNG_S

    def _loop(self) -> None:
        me = threading.current_thread()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: bool(self._waiting) or self._thread is not me)
                if self._thread is not me:  # taken for hanging, and replaced
                    return
                name, work = self._waiting.popitem(last=False)
                self._running, self._since_s = name, time.monotonic()
            try:
                _run(name, work)
            finally:
                with self._condition:
                    self.finished += 1
                    if self._thread is me:
                        self._running = None
                    self._condition.notify_all()


def _run(name: str, work: Work) -> None:
    try:
        work()
    except StateError as error:
        _LOGGER.warning("%s: %s", name, error)
    except Exception:
        # A fault of ours. It must not end the thread, and nobody else would tell of it.
        _LOGGER.exception("%s failed", name)
