"""No history gives one lease to two runs, and the simulator finds every broken variant of the lease."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from sim_histories import lease_histories
from sim_lease import WrongLeaseError, simulate_lease
from sim_lease_broken import BROKEN_LEASES, Patch
from sim_parts import Step
from sim_search import search_histories

from tests.helpers.soak import examples

HISTORIES = 200
SEED = 3


@settings(max_examples=examples(100), database=None, suppress_health_check=list(HealthCheck))
@given(lease_histories())
def test_no_history_gives_a_lease_to_two_runs(steps: tuple[Step, ...]) -> None:
    simulate_lease(steps)


def test_histories_contain_take_overs() -> None:
    take_overs: list[int] = []
    search_histories(lease_histories(), lambda steps: take_overs.append(simulate_lease(steps).take_overs), 50, SEED)
    # Every history ends with one take-over by a new run.
    assert sum(count > 1 for count in take_overs) > len(take_overs) / 4


@pytest.mark.parametrize("patches", BROKEN_LEASES.values(), ids=list(BROKEN_LEASES))
def test_the_simulator_finds_every_broken_variant_of_the_lease(patches: tuple[Patch, ...]) -> None:
    with pytest.raises(WrongLeaseError):
        search_histories(lease_histories(), lambda steps: simulate_lease(steps, patches), HISTORIES, SEED)
