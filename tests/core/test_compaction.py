"""The choice of the runs to merge, from their sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_state_ext.store.compaction import FANOUT, choose_compaction

SIZES = st.lists(st.integers(1, 1_000), max_size=30)


@given(SIZES, st.integers(1, 5_000))
def test_one_merge_reads_a_bounded_number_of_bytes(sizes: list[int], bytes_max: int) -> None:
    """This is rule 11."""
    chosen = choose_compaction(sizes, bytes_max)
    if chosen is not None:
        start, stop = chosen
        assert stop - start >= FANOUT
        assert sum(sizes[start:stop]) <= bytes_max


@given(st.lists(st.integers(1, 100), min_size=200, max_size=400))
def test_compaction_keeps_runs_few_and_rewrites_rows_rarely(commits: list[int]) -> None:
    """With tiers, the number of runs and the rewrites of a row grow with the logarithm of the number of commits."""
    runs: list[int] = []
    rewritten = 0
    for size in commits:
        runs.insert(0, size)
        chosen = choose_compaction(runs)
        if chosen is not None:
            start, stop = chosen
            rewritten += sum(runs[start:stop])
            runs[start:stop] = [sum(runs[start:stop])]
    assert sum(runs) == sum(commits)
    assert len(runs) <= 32
    assert rewritten <= 12 * sum(commits)
