"""A block in which a thread plans on Spark's own state, whatever its session was enabled for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["is_plain", "unpatched"]

_thread = threading.local()


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Within this block the thread plans on Spark's own state: our own plan needs it."""
    before = is_plain()
    _thread.plain = True
    try:
        yield
    finally:
        _thread.plain = before


def is_plain() -> bool:
    """Whether the thread is in such a block."""
    return bool(getattr(_thread, "plain", False))
