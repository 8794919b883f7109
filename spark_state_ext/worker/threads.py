"""Executors: threads that do not keep a process from ending, and none at all."""

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

__all__ = ["CallerExecutor", "DaemonPool", "ahead", "side_by_side"]

S = TypeVar("S")
T = TypeVar("T")

_IDLE_S = 60.0
# How long what was begun ahead, and is not wanted any more, is waited for; and what a thread does as the process ends.
_END_S = 5.0
# How often whoever waits does what there is to do meanwhile.
_LOOK_S = 0.5


class DaemonPool(Executor):
    """Threads that do not keep a process from ending, made when there is work and gone when there is none for long."""

    _exit_until_s: ClassVar[float | None] = None

    def __init__(self, name: str) -> None:
        self._name = name
        self._forget()
        # As many as there are buckets, up to `THREADS_MAX`, and one for each that hangs.
        self.threads_max = 1

    def _forget(self) -> None:
        self._pid = os.getpid()
        # None: one thread is to end.
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Work submitted and not done, callbacks included: a thread that has just taken some is not free for more.
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
        """Cancel what has not begun, and have each thread end with the work that it is at; nobody waits for them."""
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            with contextlib.suppress(queue.Empty):
                while True:
                    taken = self._work.get_nowait()
                    if taken is not None:
                        taken[0].cancel()
                        self._outstanding -= 1
            for _ in self._threads:
                self._work.put(None)

    def _end_thread(self) -> None:
        self._threads.discard(threading.current_thread())
        if not self._threads:
            atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        """Wait some seconds for threads to end, idle ones too.

        Python ends a daemon thread when it next asks for the interpreter's lock. If that is inside Arrow, which calls
        Python's files, or in a thread that has just been woken, the whole process may be aborted: "terminate called
        without an active exception".
        """
        if self._pid == os.getpid():
            threads = list(self._threads)
            self.close()
            for thread in threads:
                thread.join(self.exit_left_s())

    @staticmethod
    def exit_left_s() -> float:
        """How long an ending process still waits for its threads, of all pools together."""
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
                raise StorageError(f"no thread can be made for {self._name}: {error}") from error

    def _loop(self) -> None:
        while True:
            try:
                taken = self._work.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._work.empty():
                        continue
                    self._end_thread()
                    return
            if taken is None:
                with self._lock:
                    self._end_thread()
                return
            try:
                _run(*taken)
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


def side_by_side(
    name: str,
    threads: int,
    work: Callable[[S], T],
    items: Iterable[S],
    while_waiting: Callable[[], None] | None = None,
) -> list[T]:
    """Results of `work` for each item, in their order, from threads that do not keep a process from ending."""
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


def ahead(name: str, threads: int, work: Callable[[S], T], items: Iterable[S]) -> Generator[T, None, None]:
    """Results of `work` for each item, in their order, a few of them made before they are asked for."""
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
        # A process that ends while a thread of it is inside Arrow is aborted.
        wait([it for it in waiting if not it.cancelled()], timeout=_END_S)


class CallerExecutor(Executor):
    """Runs work at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
