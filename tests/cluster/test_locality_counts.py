"""The placement that is measured equals that in the metrics of calls."""

from __future__ import annotations

import pyarrow as pa
import pytest
from locality_runs import SETTINGS, Placement, measure_placement, merge_results


def make_calls(*batches: str, first: int = 0) -> pa.Table:
    """Return a call of each bucket in each batch; each letter is the name of the bucket's worker."""
    rows = [
        {"batch": first + at, "bucket": bucket, "ended_ms": 100 * at + bucket, "worker": worker}
        for at, workers in enumerate(batches)
        for bucket, worker in enumerate(workers)
    ]
    return pa.Table.from_pylist(rows)


def test_the_placement_counts_buckets_that_stay_and_move() -> None:
    assert measure_placement(make_calls("abca", "abca", "abca"), 0, "a") == Placement(2, 1.0, 1.0, 1, 0.5, 0.5)
    # Three of four buckets stay, then none, then all.
    placement = measure_placement(make_calls("abca", "abcb", "bcaa", "bcaa"), 0, "c")
    assert placement == Placement(3, 0.75, 0.0, 2.0, 0.5, 0.25)


def test_warm_up_batches_and_earlier_attempts_do_not_count() -> None:
    table = pa.concat_tables([make_calls("cc", "ab", "ab", "ab"), make_calls("ba", first=1)])
    # The attempts of batch 1 on other workers ended earlier.
    assert table.column("ended_ms").to_pylist()[-2:] == [0, 1]
    assert measure_placement(table, 1, "c") == Placement(2, 1.0, 1.0, 1, 0.5, 0.0)


@pytest.mark.parametrize("table", [make_calls("ab"), make_calls("ab", "a"), make_calls("a", "ab")])
def test_incomplete_or_too_few_batches_are_refused(table: pa.Table) -> None:
    with pytest.raises(ValueError, match="do not each have all"):
        measure_placement(table, 0, "a")


def test_results_are_merged_with_comparable_ones_only() -> None:
    first, second, third = ({"name": setting.name, "stayed": at} for at, setting in enumerate(SETTINGS[:3]))
    file = merge_results(0.01, 20, [second], {})
    both = merge_results(0.01, 20, [first], file)
    assert both["settings"] == [first, second]
    assert merge_results(0.01, 20, [{**second, "stayed": 7}, third], both)["settings"] == [
        first,
        {**second, "stayed": 7},
        third,
    ]
    # The size of the state differs here.
    assert merge_results(0.02, 20, [third], both)["settings"] == [third]


def test_settings_have_unique_names() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert SETTINGS[0].conf == {}
