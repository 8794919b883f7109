"""Executors: pools of daemon threads, and one that runs work in the caller's thread."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from typing import Any, ClassVar, TypeVar

from spark_state_ext.errors import StorageError

__all__ = ["CallerExecutor", "DaemonPool", "map_ahead", "map_in_parallel"]

S = TypeVar("S")
T = TypeVar("T")

_IDLE_S = 60.0
# How long to wait for work that was started ahead and is no longer needed, and for threads when the process ends.
_END_S = 5.0
# How often `map_in_parallel` calls `while_waiting`.
_LOOK_S = 0.5


class DaemonPool(Executor):
    """A pool of daemon threads, which start when there is work and end after a time without work."""

    _exit_until_s: ClassVar[float | None] = None

    def __init__(self, name: str) -> None:
        self._name = name
        self._forget()
        # Callers set it to the number of buckets up to `THREADS_MAX`, plus one for each hung thread.
        self.threads_max = 1

    def _forget(self) -> None:
        self._pid = os.getpid()
        # An item None asks one thread to end.
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Work that is submitted and not finished, including callbacks; threads beyond this number are idle.
        self._outstanding = 0
        self._threads: set[threading.Thread] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._pid != os.getpid():
            # Threads do not survive a fork.
            self._forget()
        future: Future[Any] = Future()
        with self._lock:
            if self._outstanding >= len(self._threads) < self.threads_max:
                self._add_thread()
            self._outstanding += 1
            self._work.put((future, lambda: fn(*args, **kwargs)))
        return future

    def close(self) -> None:
        """Cancel work that has not started, and have each thread end after its current work, without waiting for it."""
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self._work.get_nowait()
                    if item is not None:
                        item[0].cancel()
                        self._outstanding -= 1
            for _ in self._threads:
                self._work.put(None)

    def _end_thread(self) -> None:
        self._threads.discard(threading.current_thread())
        if not self._threads:
            atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        """Wait some seconds for all threads to end, including idle ones.

        At exit, Python ends a daemon thread when it next requests the interpreter's lock. If the thread is then inside
        Arrow, which calls Python's files, or has just been woken, the whole process may be aborted: "terminate called
        without an active exception".
        """
        if self._pid == os.getpid():
            threads = list(self._threads)
            self.close()
            for thread in threads:
                thread.join(self.exit_left_s())

    @staticmethod
    def exit_left_s() -> float:
        """Return how many seconds an ending process may still wait for the threads of all pools."""
        if DaemonPool._exit_until_s is None:
            DaemonPool._exit_until_s = time.monotonic() + _END_S
        return max(0.0, DaemonPool._exit_until_s - time.monotonic())

    def _add_thread(self) -> None:
        try:
            thread = threading.Thread(target=self._loop, name=f"spark_state_ext {self._name}", daemon=True)
            thread.start()
            self._threads.add(thread)
            if len(self._threads) == 1:
                atexit.register(self._end_at_exit)
        except RuntimeError as error:  # no address space for its stack
            if not self._threads:
                raise StorageError(f"cannot start a thread for {self._name}: {error}") from error

    def _loop(self) -> None:
        while True:
            try:
                item = self._work.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._work.empty():
                        continue
                    self._end_thread()
                    return
            if item is None:
                with self._lock:
                    self._end_thread()
                return
            try:
                _run(*item)
            finally:
                with self._lock:
                    self._outstanding -= 1


def _run(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def map_in_parallel(
    name: str,
    threads: int,
    work: Callable[[S], T],
    items: Iterable[S],
    while_waiting: Callable[[], None] | None = None,
) -> list[T]:
    """Run `work` for each item in parallel daemon threads, and return the results in the order of the items.

    `while_waiting`, if given, is called regularly meanwhile.
    """
    pool = DaemonPool(name)
    pool.threads_max = threads
    try:
        futures = [pool.submit(work, item) for item in items]
        left = set(futures)
        while left:
            done, left = wait(left, None if while_waiting is None else _LOOK_S, FIRST_EXCEPTION)
            if any(future.exception() is not None for future in done):
                break
            if left and while_waiting is not None:
                while_waiting()
        return [future.result() for future in futures]
    finally:
        pool.close()


def map_ahead(name: str, threads: int, work: Callable[[S], T], items: Iterable[S]) -> Generator[T, None, None]:
    """Yield the results of `work` in the order of the items, running it for up to `threads` items ahead."""
    pool = DaemonPool(name)
    pool.threads_max = threads
    rest = iter(items)
    waiting: deque[Future[T]] = deque()
    try:
        while True:
            waiting.extend(pool.submit(work, item) for item in itertools.islice(rest, threads - len(waiting)))
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        pool.close()
        # Wait, because a process that ends while one of its threads is inside Arrow is aborted.
        wait([future for future in waiting if not future.cancelled()], timeout=_END_S)


class CallerExecutor(Executor):
    """An executor that runs work at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
