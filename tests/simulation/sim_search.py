"""Run histories that Hypothesis generates, and replace attributes while they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

__all__ = ["replace_attributes", "search_histories"]

_History = TypeVar("_History")


def search_histories(
    strategy: SearchStrategy[_History],
    run: Callable[[_History], object],
    count: int,
    from_seed: int,
    *,
    shrinks: bool = False,
) -> None:
    """Run generated histories, the same ones for the same seed; raises the error of the first that fails.

    Parameters
    ----------
    strategy
        Strategy that generates histories.
    run
        Runs one history; raises if an invariant is violated.
    count
        Number of histories, if none fails.
    from_seed
        Seed of the generator.
    shrinks
        Whether Hypothesis shortens a history that fails.
    """

    @seed(from_seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check(history: _History) -> None:
        run(history)

    check()


@contextmanager
def replace_attributes(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes of modules and classes until the context ends.

    Parameters
    ----------
    values
        Module or class, attribute name and new value. If a name is given twice, the last value counts.
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
