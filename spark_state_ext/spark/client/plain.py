"""A block in which a thread plans queries on Spark's own state, even if its session is enabled for Arrow state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["uses_spark_state", "use_spark_state"]

_thread = threading.local()


@contextlib.contextmanager
def use_spark_state() -> Iterator[None]:
    """Make this thread plan on Spark's own state within the block: our own plan needs that."""
    before = uses_spark_state()
    _thread.plain = True
    try:
        yield
    finally:
        _thread.plain = before


def uses_spark_state() -> bool:
    """True if the thread is inside such a block."""
    return bool(getattr(_thread, "plain", False))
