"""The simulator of erase requests finds no errors in the product, and finds every broken variant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from sim_erasure_scenes import ERASURE_SCENES, ErasureScene, play_erasure_scene
from sim_erasures import ERASURE_STEPS, ErasureConfig, simulate_erasures
from sim_erasures_broken import BROKEN_ERASURES
from sim_histories import erasure_histories
from sim_parts import History, WrongStateError
from sim_search import search_histories

from tests.helpers.soak import examples

SEED = 3
# Histories that are tried for a variant that no scene finds.
BROKEN_MAX = 300
# The scene that finds each variant first. If it no longer does, all others are tried: slower, with the same result.
FOUND_BY = {
    "each process lists requests only once": "seen_by_one_bucket",
    "a missing request number is skipped": "listed_while_others_write",
    "a mark is trusted by its number alone": "asked_in_another_folder",
    "a request is done with its first bucket": "seen_by_one_bucket",
    "requests of one heartbeat count as handled earlier": "two_requests_in_one_heartbeat",
    "a record stays when the query goes back": "back_to_where_one_bucket_saw_it",
    "a record is withdrawn by the mark alone": "back_to_where_one_bucket_saw_it",
    "a request is removed when it is done": "seen_by_one_bucket",
    "a request is removed by a remembered record": "done_again_much_later",
    "a request is removed while a pointer needs it": "seen_by_one_bucket",
    "a request number is used twice": "asked_after_all_requests_were_removed",
    "a run that does not look proves requests done": "no_look_in_between",
    "a record does not wait for an earlier request": "damaged_before_all_buckets_read_it",
    "an unreadable request is skipped": "damaged_before_all_buckets_read_it",
}


@settings(max_examples=examples(80, 2_000), database=None, suppress_health_check=list(HealthCheck))
@given(erasure_histories())
def test_no_history_keeps_a_key_of_a_done_request(history: History) -> None:
    simulate_erasures(history)


@pytest.mark.parametrize("scene", ERASURE_SCENES, ids=lambda scene: scene.__name__)
def test_no_scene_keeps_a_key_of_a_done_request(scene: Callable[[ErasureScene], None]) -> None:
    play_erasure_scene(scene)


def test_an_attempt_may_carry_out_a_request_that_is_damaged_and_withdrawn_meanwhile() -> None:
    """Found by a random history: the damaged file's id cannot be read, so the withdrawn request gets another id."""
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
def test_the_simulator_finds_every_broken_variant_of_erase_requests(name: str) -> None:
    patches = BROKEN_ERASURES[name]

    with pytest.raises(WrongStateError):
        for scene in sorted(ERASURE_SCENES, key=lambda scene: scene.__name__ != FOUND_BY[name]):
            play_erasure_scene(scene, patches)
        search_histories(erasure_histories(), lambda history: simulate_erasures(history, patches), BROKEN_MAX, SEED)


def test_histories_contain_the_events_that_matter() -> None:
    counts: Counter[str] = Counter()
    search_histories(erasure_histories(), lambda history: counts.update(simulate_erasures(history).counted), 40, SEED)
    for event in ("requests made", "requests done", "keys erased", "requests removed", "goings back"):
        assert counts[event] > 40, event
    for event in ("records taken back", "listings overtaken", "store failures", "calls that could not read a request"):
        assert counts[event] > 0, event
