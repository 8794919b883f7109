"""No history of runs has readers take for committed what was given up, and every broken way of telling is found."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from sim_histories import timeline_histories
from sim_parts import Step
from sim_search import search_histories
from sim_timeline import TIMELINE_STEPS, WrongLineError, simulate_timeline
from sim_timeline_broken import BROKEN_TIMELINES

from tests.helpers.soak import examples

HISTORIES = 4000
SEED = 3
# Where steps of all kinds seldom come together as it needs.
KINDS = {
    "whoever is told another run id is a new run": ("batch", "batch", "quiet", "again"),
    "a late first call is believed for ever": ("batch", "batch", "batch", "batch", "first", "task"),
    "an old input tells which run was gone on from": ("batch", "quiet", "quiet", "quiet", "back", "return"),
}


@settings(max_examples=examples(150), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(timeline_histories())
def test_no_history_has_readers_take_what_was_given_up(steps: tuple[Step, ...]) -> None:
    simulate_timeline(steps)


def test_a_run_returns_after_several_others_to_what_they_gave_up() -> None:
    """Found by chance: the first call was of a bucket that had rested since before what was given up."""
    kinds = ("batch", "crashes", "batch", "back", "crashes", "batch", "return", "begin")
    numbers = ("", "0000000100000000", "0000000000010000", "", "0001000000000001", "", "", "0001000000000000")
    steps = [
        bytes([TIMELINE_STEPS.index(kind), *bytes.fromhex(given)]) for kind, given in zip(kinds, numbers, strict=True)
    ]
    simulate_timeline((b"\0\1", *steps))


def test_histories_are_of_the_kind_that_matters() -> None:
    seen: Counter[str] = Counter()
    search_histories(timeline_histories(), lambda steps: seen.update(simulate_timeline(steps).counted), 300, SEED)
    assert min(seen[kind] for kind in ("back", "return", "claim", "late", "task", "old", "remove", "unsure")) > 3
    # Most of the time readers are told something.
    assert seen["read"] > 3 * seen["refused"]


@pytest.mark.parametrize("name", BROKEN_TIMELINES)
def test_broken_timelines_are_found(name: str) -> None:
    histories, patches = timeline_histories(KINDS.get(name, TIMELINE_STEPS)), BROKEN_TIMELINES[name]
    with pytest.raises(WrongLineError):
        search_histories(histories, lambda steps: simulate_timeline(steps, patches), HISTORIES, SEED)
