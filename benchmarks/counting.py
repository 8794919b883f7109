"""The job that is measured: a running count and sum per key, written as anybody would write it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

__all__ = ["OUTPUT", "STATE", "count_and_sum", "event_batches", "expected"]

OUTPUT = "key bigint, n bigint, total double"
STATE = "n bigint, total double"


def count_and_sum(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Count a key's events and add up their values, over all batches."""
    n, total = state.get if state.exists else (0, 0.0)
    for pdf in pdfs:
        n += len(pdf)
        total += pdf["value"].sum()
    state.update((n, total))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "total": [total]})


def event_batches(batches: int, events: int, keys: int, seed: int) -> list[pd.DataFrame]:
    """Make the events: uniform random keys; values in eighths, so that sums are exact in any order.

    Returns
    -------
    list of pandas.DataFrame
        One frame a batch with columns ``key`` (int64) and ``value`` (float64), `events` rows each.
    """
    rng = np.random.default_rng(seed)
    # Keys are no dense range: their hashes, and the sizes of what holds them, shall be ordinary ones.
    names = rng.choice(2**40, size=keys, replace=False)
    return [
        pd.DataFrame({"key": names[rng.integers(0, keys, events)], "value": rng.integers(0, 8000, events) / 8})
        for _ in range(batches)
    ]


def expected(batches: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The final answer by plain pandas: ``key``, ``n``, ``total``, ascending by key."""
    grouped = pd.concat(batches).groupby("key")["value"]
    return pd.DataFrame({"n": grouped.size(), "total": grouped.sum()}).reset_index()
