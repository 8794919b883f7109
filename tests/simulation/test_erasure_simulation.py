"""The simulator of erase requests finds nothing in what is built, and everything in what is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from sim_erasure_scenes import ERASURE_SCENES, ErasureScene, played_erasures
from sim_erasures import ERASURE_STEPS, ErasureConfig, simulate_erasures
from sim_erasures_broken import BROKEN_ERASURES
from sim_histories import erasure_histories
from sim_parts import History, WrongStateError
from sim_search import searched

from tests.helpers.soak import examples

SEED = 3
# Those that histories find where no scene does.
BROKEN_MAX = 300
# What finds each of them first. Where it no longer does, all the rest is tried: that is slower, and says the same.
FOUND_BY = {
    "listed once by each process": "seen_by_one_bucket",
    "a gap passed by": "listed_behind_a_writer",
    "a mark trusted by its number": "asked_in_another_folder",
    "done with the first bucket": "seen_by_one_bucket",
    "dealt with earlier, in one heartbeat": "two_in_one_heartbeat",
    "done though the query went back": "back_to_where_one_bucket_had_seen_it",
    "taken back by the mark": "back_to_where_one_bucket_had_seen_it",
    "removed when it is done": "seen_by_one_bucket",
    "removed by what is remembered": "done_again_much_later",
    "removed before a pointer is too old": "seen_by_one_bucket",
    "a number used twice": "asked_for_when_all_are_gone",
    "proven by who does not look": "nobody_looked_between",
    "noted though one before it waits": "damaged_before_all_have_read_it",
    "an unreadable request passed by": "damaged_before_all_have_read_it",
}


@settings(max_examples=examples(80, 2_000), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(erasure_histories())
def test_no_history_keeps_a_key_that_is_said_to_be_erased(history: History) -> None:
    simulate_erasures(history)


@pytest.mark.parametrize("script", ERASURE_SCENES, ids=lambda script: script.__name__)
def test_no_scene_keeps_a_key_that_is_said_to_be_erased(script: Callable[[ErasureScene], None]) -> None:
    played_erasures(script)


def test_an_attempt_carries_out_what_it_read_before_the_request_was_damaged_and_withdrawn() -> None:
    """Found by chance: the withdrawn request has another id then, as that of the damaged file cannot be read."""
    config = ErasureConfig(
        checkpoint_v2=False,
        last_wins=False,
        changelog=False,
        timeouts=True,
        switches=False,
        retained=1,
        partitions=1,
        buckets=3,
        ingests=False,
    )
    steps = (
        ("batch", "00000000000000000000000000010000"),
        ("batch", "00000000000000010000000000000000"),
        ("go", ""),
        ("go", ""),
        ("ask", "010002"),
        ("zombie", "0001"),
        ("batch", "0005110100000000059700000001000a"),
        ("spoil", ""),
        ("batch", ""),
        ("go", ""),
        ("withdraw", "01"),
        ("zombie", "01"),
    )
    history = [bytes([ERASURE_STEPS.index(kind), *bytes.fromhex(given.ljust(32, "0"))]) for kind, given in steps]
    simulate_erasures(History(config, tuple(history)))


@pytest.mark.parametrize("name", BROKEN_ERASURES)
def test_broken_erasures_are_found(name: str) -> None:
    patches = BROKEN_ERASURES[name]

    with pytest.raises(WrongStateError):
        for script in sorted(ERASURE_SCENES, key=lambda script: script.__name__ != FOUND_BY[name]):
            played_erasures(script, patches)
        searched(erasure_histories(), lambda history: simulate_erasures(history, patches), BROKEN_MAX, SEED)


def test_histories_are_of_the_kind_that_matters() -> None:
    seen: Counter[str] = Counter()
    searched(erasure_histories(), lambda history: seen.update(simulate_erasures(history).counted), 40, SEED)
    for name in ("requests made", "requests done", "keys erased", "requests removed", "goings back"):
        assert seen[name] > 40, name
    for name in ("records taken back", "listings overtaken", "store failures", "calls that could not read a request"):
        assert seen[name] > 0, name
