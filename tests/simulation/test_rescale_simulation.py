"""The simulator of rescaling finds no errors in the product, and finds every broken variant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from sim_histories import rescale_histories
from sim_parts import History, Variant, WrongStateError
from sim_rescale_parts import RescaleConfig
from sim_rescale_scenes import RESCALE_SCENES, RescaleScene, play_rescale_scene
from sim_rescales import RESCALE_STEPS, simulate_rescales
from sim_rescales_broken import BROKEN_RESCALES
from sim_search import search_histories

from tests.helpers.soak import examples

SEED = 3
# Histories that are tried for a variant that no scene finds.
BROKEN_MAX = 300
# The scene that finds each variant first. If it no longer does, all others are tried: slower, with the same result.
FOUND_BY = {
    "parents are not compared with Spark's pointers": "overwritten_since_the_plan",
    "removed buckets do not compare pointers": "overwritten_since_the_plan",
    "each call copies its own parents": "overwritten_since_the_plan",
    "an origin's id follows from its bucket, and plans share a folder": "begun_twice",
    "all plans share a folder": "begun_twice",
    "parents are released before a snapshot arrives": "begun_twice",
    "a backend is complete with the deltas alone": "begun_twice",
    "a slice includes its upper border": "begun_twice",
    "a slice excludes its lower border": "begun_twice",
    "a parent is left out": "begun_twice",
    "batches without data do not note pointers": "batches_without_data_first",
    "pointers are neither noted nor compared": "batches_without_data_first",
    "a new bucket forgets timeouts": "begun_twice",
    "a new bucket takes its first parent's timeout": "begun_twice",
    "inline deltas are not copied": "begun_twice",
    "parents are searched in the first backend only": "backends_in_another_order",
    "parents are removed after the first snapshot": "only_one_bucket_has_a_snapshot",
    "the old folder is removed at once": "gone_back_to_before_the_rescaling",
    "nothing is ever removed": "finished_with_what_was_retained",
    "parents are dropped without a note": "finished_with_what_was_retained",
    "notes stay when the query goes back": "finished_then_gone_back",
    "a process looks for notes only once": "finished_by_one_lineage",
    "notes that parents are needed do not count": "finished_then_gone_back",
    "notes are withdrawn": "finished_by_the_attempt_that_counts",
    "parents are removed without a horizon": "finished_with_what_was_retained",
    "the first bucket's note counts for all buckets": "finished_by_the_first_bucket",
    "removals ignore holds": "saved_meanwhile",
    "a refused rescaling counts as the query": "refused_and_continued",
    "a folder is in force at the first call": "refused_and_continued",
    "erase requests are not copied": "refused_and_continued",
    "erase requests are copied from the parent and the folder in force only": "asked_while_rescaled_twice",
    "erase requests that are done in a nearer folder are copied": "rescaled_again_after_a_request",
    "records of erase requests count after the query went back": "gone_back_and_rescaled",
    "refused rescalings are never removed": "refused_for_good",
}


@settings(max_examples=examples(8, 1_000), database=None, suppress_health_check=list(HealthCheck))
@given(rescale_histories())
def test_no_history_moves_a_key_wrongly(history: History) -> None:
    simulate_rescales(history)


@pytest.mark.parametrize("scene", RESCALE_SCENES, ids=lambda scene: scene.__name__)
def test_no_scene_moves_a_key_wrongly(scene: Callable[[RescaleScene], None]) -> None:
    play_rescale_scene(scene, Variant())


@pytest.mark.parametrize("name", BROKEN_RESCALES)
def test_the_simulator_finds_every_broken_variant_of_rescaling(name: str) -> None:
    variant = BROKEN_RESCALES[name]

    with pytest.raises(WrongStateError):
        for scene in sorted(RESCALE_SCENES, key=lambda scene: scene.__name__ != FOUND_BY[name]):
            play_rescale_scene(scene, variant)
        search_histories(rescale_histories(), lambda history: simulate_rescales(history, variant), BROKEN_MAX, SEED)


def test_a_late_call_of_a_removed_bucket_may_find_nothing() -> None:
    """Found by a random history: it belongs to a plan that was given up, and its bucket's files were cleaned up since."""
    drawn = [
        "killed",
        "75002169b47b1800009229",
        "batch",
        "0000fd0031",
        "batch",
        "0a000000008800000087000000004f",
        "rescale",
        "00",
        "killed",
        "86003500005def",
        "zombie",
        "d62b",
        "twice",
        "4abbf20a28d7a27246dda28b160996c2",
        "quiet",
        "00",
        "killed",
        "22b5cd34255883",
        "gap",
        "00",
        "batch",
        "792d9586f54fdf9ad5a6d1af0045fbce",
        "killed",
        "91003bf5008f00003b0200b32e04359d",
        "gap",
        "fe9850",
        "twice",
        "00",
        "rescale",
        "000000009973",
    ]
    steps = [
        bytes([RESCALE_STEPS.index(kind)]) + bytes.fromhex(numbers).ljust(16, b"\0")
        for kind, numbers in zip(drawn[::2], drawn[1::2], strict=True)
    ]
    config = RescaleConfig(
        *(True, False, 1, False),
        journal=True,
        inline_bytes_max=8_000,
        patient=False,
        buckets=2,
        timeouts=True,
        replaces=False,
        partitions=2,
    )

    world = simulate_rescales(History(config, tuple(steps)))

    assert world.counted["late calls that find nothing to begin with"] == 1


def test_histories_contain_the_events_that_matter() -> None:
    counts: Counter[str] = Counter()
    search_histories(rescale_histories(), lambda history: counts.update(simulate_rescales(history).counted), 10, SEED)
    for event in ("plans that rescale", "batches that moved the state", "parents without a snapshot of their own"):
        assert counts[event] > 2, event
    for event in ("killed in a first batch", "switches of backends", "queries begun with a savepoint", "goings back"):
        assert counts[event] > 0, event
    for event in ("plans refused", "calls refused for a request", "reads", "requests"):
        assert counts[event] > 0, event
