"""Going through histories as Hypothesis makes them, each lived to its end in a world of replaced names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

__all__ = ["replaced", "searched"]

_History = TypeVar("_History")


def searched(
    drawn: SearchStrategy[_History],
    lived: Callable[[_History], object],
    count: int,
    from_seed: int,
    *,
    shrinks: bool = False,
) -> None:
    """Live through histories, the same ones for the same seed; raises what the first wrong one raises.

    Parameters
    ----------
    drawn
        Histories.
    lived
        Goes through one; raises when anything in it is wrong.
    count
        How many, where none is wrong.
    from_seed
        What they are drawn with.
    shrinks
        Whether Hypothesis looks for a shorter one that is wrong too.
    """

    @seed(from_seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def check(history: _History) -> None:
        lived(history)

    check()


@contextmanager
def replaced(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put values in the place of others for a while.

    Parameters
    ----------
    values
        Module or class, name in it, and what it is meanwhile. Of one name the last value counts.
    """
    values = list(values)
    before = [(owner, name, inspect.getattr_static(owner, name)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
