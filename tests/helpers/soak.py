"""The number of cases of a test: a fixed part of them in the suite, and all of them in ``make soak``.

``SPARK_STATE_EXT_SOAK=1`` selects all of them. Every test that shortens its cases uses these functions, so that this one
variable turns the suite into its long form.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["SOAK", "every", "examples", "whole"]

T = TypeVar("T")

SOAK = os.environ.get("SPARK_STATE_EXT_SOAK", "") not in ("", "0")
# The factor by which the long form has more examples of a property.
_TIMES = 20


def examples(suite: int, soak: int | None = None) -> int:
    """Return the number of examples: `suite`, or `soak` in the long form, by default twenty times as many."""
    return suite if not SOAK else (_TIMES * suite if soak is None else soak)


def every(nth: int, begin: int = 0) -> slice:
    """Return a slice of every nth case from `begin` on, or of all cases in the long form."""
    return slice(None) if SOAK else slice(begin, None, nth)


def whole(suite: Sequence[T], more: Sequence[T]) -> list[T]:
    """Return the cases of the suite, and in the long form also `more` cases that test the same code."""
    return [*suite, *more] if SOAK else list(suite)
