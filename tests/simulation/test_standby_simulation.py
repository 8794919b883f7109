"""No history of hosts leaves a bucket without its replicas for long, and the simulator finds every broken variant."""

from __future__ import annotations

import pytest
from sim_histories import standby_histories
from sim_search import search_histories
from sim_standby import Patch, StandbyWorld, WrongStandbyError, simulate_standby
from sim_standby_broken import BROKEN_STANDBY

from tests.helpers.soak import examples

HISTORIES = 300
SEED = 3


def test_no_history_leaves_a_bucket_without_its_replicas() -> None:
    search_histories(standby_histories(), simulate_standby, examples(75, 3_000), SEED)


def test_histories_contain_the_events_that_matter() -> None:
    worlds: list[StandbyWorld] = []
    search_histories(standby_histories(), lambda steps: worlds.append(simulate_standby(steps)), 40, SEED)
    assert sum(len(world.running) > 2 for world in worlds) > len(worlds) / 3
    assert sum(world.died > 0 for world in worlds) > len(worlds) / 3
    assert sum(world.moves > 24 for world in worlds) > len(worlds) / 3


@pytest.mark.parametrize("patches", BROKEN_STANDBY.values(), ids=list(BROKEN_STANDBY))
def test_the_simulator_finds_every_broken_variant_of_standby(patches: tuple[Patch, ...]) -> None:
    with pytest.raises(WrongStandbyError):
        search_histories(standby_histories(), lambda steps: simulate_standby(steps, patches), HISTORIES, SEED)
