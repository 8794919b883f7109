"""The simulators of savepoints, holds and claims find no errors in the product, and find every broken variant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from sim_claims import simulate_claims
from sim_claims_broken import BROKEN_CLAIMS, Patch
from sim_histories import claim_histories, savepoint_histories
from sim_lease import WrongLeaseError
from sim_parts import History, Step, Variant, WrongStateError
from sim_savepoint_scenes import SAVEPOINT_SCENES, SavepointScene, play_savepoint_scene
from sim_savepoints import simulate_savepoints
from sim_savepoints_broken import BROKEN_SAVEPOINTS
from sim_search import search_histories

from tests.helpers.soak import examples

SEED = 3
# With this seed, every broken variant of claims is found within this number of histories.
CLAIMS_BROKEN_MAX = 1_000
# Histories that are tried for a variant that no scene finds.
SAVEPOINTS_BROKEN_MAX = 300
# The scene that finds each variant first. If it no longer does, all others are tried: slower, with the same result.
FOUND_BY = {
    "a hold is written after the pointers are read": "copied_while_batches_go_on",
    "clean-up ignores holds": "hold_not_renewed_in_time",
    "a process looks for holds only once": "hold_not_renewed_in_time",
    "a hold ends although it is renewed": "copied_while_batches_go_on",
    "a renewal writes nothing": "copied_while_batches_go_on",
    "a hold never ends": "hold_not_renewed_in_time",
    "a holder does not notice that its hold is lost": "hold_not_renewed_in_time",
    "an unconfirmed snapshot counts as existing": "uploads_under_way",
    "inline deltas are not saved": "uploads_under_way",
    "uncommitted pointers are saved": "uploads_under_way",
    "a new query does not copy all files": "begun_twice",
    "a savepoint without a claim is deleted": "begun_twice",
    "more files are deleted than the manifest names": "claimed_twice",
    "a query is detached at its first call": "claimed_twice",
    "a savepoint is deleted at the first call": "claimed_twice",
    "the last query to claim a savepoint gets it": "claimed_twice",
    "a claim is not checked before deleting": "released_and_claimed_again",
    "the manifest is deleted first": "owner_dies_while_it_deletes",
    "a release ignores that files were deleted": "released_during_deletion",
    "a release checks the mark before it removes the claim": "released_during_deletion",
    "an owner checks the claim before it makes its mark": "released_during_deletion",
}


@settings(max_examples=examples(8, 1_000), database=None, suppress_health_check=list(HealthCheck))
@given(savepoint_histories())
def test_no_history_gives_a_wrong_savepoint(history: History) -> None:
    simulate_savepoints(history)


@pytest.mark.parametrize("scene", SAVEPOINT_SCENES, ids=lambda scene: scene.__name__)
def test_no_scene_gives_a_wrong_savepoint(scene: Callable[[SavepointScene], None]) -> None:
    play_savepoint_scene(scene, Variant())


@pytest.mark.parametrize("name", BROKEN_SAVEPOINTS)
def test_the_simulator_finds_every_broken_variant_of_savepoints(name: str) -> None:
    variant = BROKEN_SAVEPOINTS[name]

    with pytest.raises(WrongStateError):
        for scene in sorted(SAVEPOINT_SCENES, key=lambda scene: scene.__name__ != FOUND_BY[name]):
            play_savepoint_scene(scene, variant)
        search_histories(
            savepoint_histories(), lambda history: simulate_savepoints(history, variant), SAVEPOINTS_BROKEN_MAX, SEED
        )


@settings(max_examples=examples(60), database=None, suppress_health_check=list(HealthCheck))
@given(claim_histories())
def test_no_history_gives_a_folder_to_two_queries(steps: tuple[Step, ...]) -> None:
    simulate_claims(steps)


@pytest.mark.parametrize("patches", BROKEN_CLAIMS.values(), ids=list(BROKEN_CLAIMS))
def test_the_simulator_finds_every_broken_variant_of_claims(patches: tuple[Patch, ...]) -> None:
    with pytest.raises(WrongLeaseError):
        search_histories(claim_histories(), lambda steps: simulate_claims(steps, patches), CLAIMS_BROKEN_MAX, SEED)


def test_claim_histories_contain_the_events_that_matter() -> None:
    counts: Counter[str] = Counter()
    search_histories(claim_histories(), lambda steps: counts.update(simulate_claims(steps).counted), 60, SEED)
    assert counts["claims"] > 60
    for event in (
        "claims in a chain",
        "releases",
        "releases in a chain",
        "releases refused",
        "releases that arrive late",
    ):
        assert counts[event] > 0, event


@pytest.mark.soak
def test_savepoint_histories_contain_the_events_that_matter() -> None:
    counts: Counter[str] = Counter()
    search_histories(
        savepoint_histories(), lambda history: counts.update(simulate_savepoints(history).shared.counted), 300, SEED
    )
    for event in (
        "savepoints finished",
        "clean-ups held up",
        "first steps",
        "claims",
        "savepoints deleted by their user",
    ):
        assert counts[event] > 20, event
