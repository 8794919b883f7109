"""The search in sorted hashes returns what NumPy's search returns, for any distribution of the hashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_state_ext.store.runs import first_at_least

SHAPES: dict[str, Callable[[Any], Any]] = {
    "evenly": lambda random: random,
    "few values": lambda random: random >> np.uint64(58),
    "bunched": lambda random: random // np.uint64(2**40),
    "half of them equal": lambda random: np.where(np.arange(len(random)) % 2 == 0, random[0], random),
    "one far away": lambda random: np.append(random[1:] >> np.uint64(30), np.uint64(2**64 - 1)),
    "all equal": lambda random: np.full_like(random, random[0]),
}


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25)
@given(rows=st.integers(1, 20_000), wanted=st.integers(0, 300), seed=st.integers(0, 2**32 - 1))
def test_first_at_least_returns_what_numpy_returns_for_any_distribution(
    shape: str, rows: int, wanted: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    hashes = np.sort(SHAPES[shape](rng.integers(0, 2**64, rows, dtype=np.uint64)))
    edges = np.array([0, 2**64 - 1, hashes[0], hashes[-1]], dtype=np.uint64)
    targets = np.sort(
        np.concatenate([hashes[rng.integers(0, rows, wanted)], rng.integers(0, 2**64, wanted, dtype=np.uint64), edges])
    )
    assert np.array_equal(first_at_least(hashes, targets), np.searchsorted(hashes, targets, side="left"))
