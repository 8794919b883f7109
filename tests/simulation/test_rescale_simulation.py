"""The simulator of rescaling finds nothing in what is built, and everything in what is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from sim_histories import rescale_histories
from sim_parts import History, Variant, WrongStateError
from sim_rescale_scenes import RESCALE_SCENES, RescaleScene, play_rescale_scene
from sim_rescales import simulate_rescales
from sim_rescales_broken import BROKEN_RESCALES
from sim_search import search_histories

from tests.helpers.soak import examples

SEED = 3
# Those that histories find where no scene does.
BROKEN_MAX = 300
# What finds each of them first. Where it no longer does, all the rest is tried: that is slower, and says the same.
FOUND_BY = {
    "not compared with what Spark hands out": "overwritten_since_the_plan",
    "buckets that are no more not compared": "overwritten_since_the_plan",
    "each call brings its own parents": "overwritten_since_the_plan",
    "an origin of the bucket alone, and one folder for all plans": "begun_twice",
    "one folder for all plans": "begun_twice",
    "parents let go with a snapshot under way": "begun_twice",
    "complete with the deltas": "begun_twice",
    "a slice with its upper border": "begun_twice",
    "a slice without its lower border": "begun_twice",
    "a parent left out": "begun_twice",
    "notes forgotten": "without_data_first",
    "notes forgotten, and not compared": "without_data_first",
    "timeouts forgotten": "begun_twice",
    "timeouts of the first parent": "begun_twice",
    "inline deltas left behind": "begun_twice",
    "parents looked for in the first backend": "backends_in_another_order",
    "parents removed with the first snapshot": "only_one_bucket_has_a_snapshot",
    "the old folder removed at once": "gone_back_to_before",
    "never finished": "finished_with_what_was_retained",
    "dropped without a note": "finished_with_what_was_retained",
    "notes that stay when the query goes back": "finished_but_gone_back",
    "notes looked for once": "finished_by_one_lineage",
    "notes that parents are needed not counted": "finished_but_gone_back",
    "notes taken back": "finished_by_the_attempt_that_counts",
    "parents removed without a horizon": "finished_with_what_was_retained",
    "the first bucket's note counted for all": "finished_by_the_first_bucket",
    "finishing blind to holds": "saved_meanwhile",
    "a refused rescaling is taken for the query": "refused_and_gone_on",
    "in force with the first call": "refused_and_gone_on",
    "erase requests left behind": "refused_and_gone_on",
    "refused rescalings never removed": "refused_for_good",
}


@settings(max_examples=examples(12, 1_000), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(rescale_histories())
def test_no_history_moves_a_key_wrongly(history: History) -> None:
    simulate_rescales(history)


@pytest.mark.parametrize("script", RESCALE_SCENES, ids=lambda script: script.__name__)
def test_no_scene_moves_a_key_wrongly(script: Callable[[RescaleScene], None]) -> None:
    play_rescale_scene(script, Variant())


@pytest.mark.parametrize("name", BROKEN_RESCALES)
def test_broken_rescales_are_found(name: str) -> None:
    variant = BROKEN_RESCALES[name]

    with pytest.raises(WrongStateError):
        for script in sorted(RESCALE_SCENES, key=lambda script: script.__name__ != FOUND_BY[name]):
            play_rescale_scene(script, variant)
        search_histories(rescale_histories(), lambda history: simulate_rescales(history, variant), BROKEN_MAX, SEED)


def test_histories_are_of_the_kind_that_matters() -> None:
    seen: Counter[str] = Counter()
    search_histories(rescale_histories(), lambda history: seen.update(simulate_rescales(history).counted), 30, SEED)
    for name in ("plans that rescale", "batches that moved the state", "parents without a snapshot of their own"):
        assert seen[name] > 10, name
    for name in ("killed in a first batch", "switches of backends", "queries begun with a savepoint", "goings back"):
        assert seen[name] > 0, name
    for name in ("plans refused", "calls refused for a request", "reads", "requests"):
        assert seen[name] > 0, name
