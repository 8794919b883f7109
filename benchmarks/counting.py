"""The job that several benchmarks measure: a running count and sum by key, written plainly for each API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "INPUT",
    "OUTPUT",
    "STATE",
    "count_and_sum",
    "count_and_sum_in_arrow",
    "count_and_sum_of_rows",
    "count_and_sum_to_tuples",
    "event_batches",
    "every_key_once",
    "expected",
    "same_answer",
]

INPUT = "key bigint, value double"
OUTPUT = "key bigint, n bigint, total double"
STATE = "n bigint, total double"


def count_and_sum(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Count a key's events and add up their values over all batches; yield a frame with one row."""
    n, total = state.get if state.exists else (0, 0.0)
    for pdf in pdfs:
        n += len(pdf)
        total += pdf["value"].sum()
    state.update((n, total))
    yield pd.DataFrame({"key": [key[0]], "n": [n], "total": [total]})


def count_and_sum_to_tuples(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: Any) -> list[tuple[Any, ...]]:
    """Do the same as `count_and_sum`, but return a list with a tuple instead of a frame."""
    n, total = state.get if state.exists else (0, 0.0)
    for pdf in pdfs:
        n += len(pdf)
        total += pdf["value"].sum()
    state.update((n, total))
    return [(key[0], n, total)]


def count_and_sum_of_rows(key: Any, rows: list[Any], state: Any) -> list[tuple[Any, ...]]:
    """Do the same as `count_and_sum`, but on plain rows instead of frames; return a list with a tuple."""
    n, total = state.get if state.exists else (0, 0.0)
    n += len(rows)
    for row in rows:
        total += row.value
    state.update((n, total))
    return [(key.key, n, total)]


def count_and_sum_in_arrow(batch: Any) -> pa.Table:
    """Do the same as `count_and_sum`, but for all keys at once; return an Arrow table with a row for each key."""
    new = batch.aggregate([([], "count_all"), ("value", "sum")])
    n = pc.add(pc.fill_null(batch.state["n"], 0), new["count_all"])
    total = pc.add(pc.fill_null(batch.state["total"], 0.0), new["value_sum"])
    batch.update({"n": n, "total": total})
    return batch.keys.append_column("n", n).append_column("total", total)


def event_batches(batches: int, events: int, keys: int, seed: int) -> list[pd.DataFrame]:
    """Make random events, with uniformly distributed keys.

    Values are multiples of 1/8, so that sums are exact in any order.

    Returns
    -------
    list of pandas.DataFrame
        One frame for each batch, with the columns ``key`` (int64) and ``value`` (float64) and `events` rows.
    """
    rng = np.random.default_rng(seed)
    # Keys of a dense range would be special: neither their hashes nor the sizes of what holds them would be typical.
    names = rng.choice(2**40, size=keys, replace=False)
    return [
        pd.DataFrame({"key": names[rng.integers(0, keys, events)], "value": rng.integers(0, 8000, events) / 8})
        for _ in range(batches)
    ]


def every_key_once(batches: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return a batch with one event for each key of the given batches: its output shows the state of all keys."""
    keys = np.unique(np.concatenate([batch["key"].to_numpy() for batch in batches]))
    return pd.DataFrame({"key": keys, "value": np.full(len(keys), 0.5)})


def expected(batches: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the right final answer, computed with plain pandas: ``key``, ``n`` and ``total``, ascending by key."""
    grouped = pd.concat(batches).groupby("key")["value"]
    return pd.DataFrame({"n": grouped.size(), "total": grouped.sum()}).reset_index()


def same_answer(answer: pd.DataFrame, right: pd.DataFrame) -> bool:
    """Return whether an answer equals the right one exactly; its rows may have any order.

    Exact comparison is possible because the sums are exact in any order.
    """
    answer = answer.sort_values("key")
    return len(answer) == len(right) and all(
        np.array_equal(answer[name].to_numpy(), right[name].to_numpy()) for name in ("key", "n", "total")
    )
