"""Readers never read what was given up, in any history of runs, and the simulator finds every broken variant of epochs."""

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
# Kinds of steps for variants that need a combination which is rare among all kinds.
KINDS = {
    "a task with another run id is taken for a new run": ("batch", "batch", "quiet", "again"),
    "a late first call is never corrected": ("batch", "batch", "batch", "batch", "first", "task"),
    "an old input decides which run was continued": ("batch", "quiet", "quiet", "quiet", "back", "return"),
}
# Seeds that find a variant sooner than the usual one.
SEEDS = {"an old input decides which run was continued": 6}


@settings(max_examples=examples(150), database=None, suppress_health_check=list(HealthCheck))
@given(timeline_histories())
def test_readers_never_read_what_was_given_up(steps: tuple[Step, ...]) -> None:
    simulate_timeline(steps)


def test_a_run_may_return_to_what_several_runs_before_it_gave_up() -> None:
    """Found by a random history: the first call was of a bucket that was last called before what was given up."""
    kinds = ("batch", "crashes", "batch", "back", "crashes", "batch", "return", "begin")
    numbers = ("", "0000000100000000", "0000000000010000", "", "0001000000000001", "", "", "0001000000000000")
    steps = [
        bytes([TIMELINE_STEPS.index(kind), *bytes.fromhex(given)]) for kind, given in zip(kinds, numbers, strict=True)
    ]
    simulate_timeline((b"\0\1", *steps))


def test_histories_contain_the_events_that_matter() -> None:
    counts: Counter[str] = Counter()
    search_histories(timeline_histories(), lambda steps: counts.update(simulate_timeline(steps).counted), 300, SEED)
    assert min(counts[kind] for kind in ("back", "return", "claim", "late", "task", "old", "remove", "unsure")) > 3
    # Most of the time readers get an answer.
    assert counts["read"] > 3 * counts["refused"]


@pytest.mark.parametrize("name", BROKEN_TIMELINES)
def test_the_simulator_finds_every_broken_variant_of_epochs(name: str) -> None:
    histories, patches = timeline_histories(KINDS.get(name, TIMELINE_STEPS)), BROKEN_TIMELINES[name]
    with pytest.raises(WrongLineError):
        search_histories(histories, lambda steps: simulate_timeline(steps, patches), HISTORIES, SEEDS.get(name, SEED))
