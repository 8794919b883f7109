"""How much a test goes through: a part in the suite, which always is the same part, and all of it in ``make soak``.

``SPARK_STATE_EXT_SOAK=1`` asks for all of it. Every test that goes through less than it could asks here how much that is, so
that this one variable turns the suite into its long form.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["SOAK", "every", "examples", "whole"]

T = TypeVar("T")

SOAK = os.environ.get("SPARK_STATE_EXT_SOAK", "") not in ("", "0")
# How many times as many examples of a property the long form goes through.
_TIMES = 20


def examples(suite: int, soak: int | None = None) -> int:
    """How many examples of a property: `suite` of them, or in the long form `soak`, which is twenty times as many by default."""
    return suite if not SOAK else (_TIMES * suite if soak is None else soak)


def every(nth: int, begin: int = 0) -> slice:
    """Every so many of something that is in order, or all of it in the long form."""
    return slice(None) if SOAK else slice(begin, None, nth)


def whole(suite: Sequence[T], more: Sequence[T]) -> list[T]:
    """Cases of the suite, and in the long form those that go the same way too."""
    return [*suite, *more] if SOAK else list(suite)
