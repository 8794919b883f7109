"""What is told of where tasks ran is what metrics say."""

from __future__ import annotations

import pyarrow as pa
import pytest
from locality_runs import SETTINGS, Placement, kept, placement


def calls(*batches: str, first: int = 0) -> pa.Table:
    """A call of each bucket in each batch; a letter is the worker's."""
    rows = [
        {"batch": first + at, "bucket": bucket, "ended_ms": 100 * at + bucket, "worker": worker}
        for at, workers in enumerate(batches)
        for bucket, worker in enumerate(workers)
    ]
    return pa.Table.from_pylist(rows)


def test_buckets_that_stay_and_move() -> None:
    assert placement(calls("abca", "abca", "abca"), 0, "a") == Placement(2, 1.0, 1.0, 1, 0.5, 0.5)
    # Three of four stay, then none does, then all.
    found = placement(calls("abca", "abcb", "bcaa", "bcaa"), 0, "c")
    assert found == Placement(3, 0.75, 0.0, 2.0, 0.5, 0.25)


def test_the_beginning_and_attempts_that_ended_earlier_do_not_count() -> None:
    table = pa.concat_tables([calls("cc", "ab", "ab", "ab"), calls("ba", first=1)])
    # The attempts of batch 1 on other workers ended before.
    assert table.column("ended_ms").to_pylist()[-2:] == [0, 1]
    assert placement(table, 1, "c") == Placement(2, 1.0, 1.0, 1, 0.5, 0.0)


@pytest.mark.parametrize("table", [calls("ab"), calls("ab", "a"), calls("a", "ab")])
def test_what_is_not_whole_is_refused(table: pa.Table) -> None:
    with pytest.raises(ValueError, match="do not each have all"):
        placement(table, 0, "a")


def test_results_are_kept_with_those_that_are_like_them() -> None:
    first, second, third = ({"name": it.name, "stayed": at} for at, it in enumerate(SETTINGS[:3]))
    file = kept(0.01, 20, [second], {})
    both = kept(0.01, 20, [first], file)
    assert both["settings"] == [first, second]
    assert kept(0.01, 20, [{**second, "stayed": 7}, third], both)["settings"] == [first, {**second, "stayed": 7}, third]
    # Of another state.
    assert kept(0.02, 20, [third], both)["settings"] == [third]


def test_settings_have_names_of_their_own() -> None:
    assert len({it.name for it in SETTINGS}) == len(SETTINGS)
    assert SETTINGS[0].conf == {}
