"""A follower compared with a dict, in any order of steps of active and follower. Broken followers are detected."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from core_support import change_sets
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from standby_support import PrunesToTheNewest, World, covering

from arrow_schemas.lineage import CheckpointRef
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.errors import (
    StateError,
)
from spark_state_ext.standby.bucket_listing import Listing
from spark_state_ext.standby.follower import BucketFollower
from spark_state_ext.store import compaction
from spark_state_ext.testing.model import Key, Row
from tests.helpers.soak import examples


class FollowerMachine(RuleBasedStateMachine):
    """Steps of the active and of a follower in any order; `World` acts as Spark."""

    follower_class: type[BucketFollower] = BucketFollower

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="follower-machine-"))
        cadence = SnapshotCadence(2, 4)
        self.world = World(self.base / "world", cadence=cadence, follower_class=self.follower_class)
        self.runs = 0
        # True until the first write after a service start: until then, only file times show which lineage is current.
        self.unsure = False

    def teardown(self) -> None:
        self.world.close()
        shutil.rmtree(self.base, ignore_errors=True)

    @rule(changed=change_sets(max_size=5), attempts=st.integers(1, 3), follows=st.booleans(), data=st.data())
    def batch(self, changed: dict[Key, Row | None], attempts: int, follows: bool, data: st.DataObject) -> None:
        results = []
        for _ in range(attempts):
            results.append(self.world.attempt(changed))
            if follows:
                self.world.follower.step()
        self.world.commit(data.draw(st.sampled_from(results)))
        self.unsure = False

    @rule(changed=change_sets(max_size=5))
    def batch_on_the_followers_host(self, changed: dict[Key, Row | None]) -> None:
        self.world.batch(changed, store=self.world.task())
        self.unsure = False

    @precondition(lambda self: len(self.world.history) > 2)
    @rule(changed=change_sets(max_size=3), data=st.data())
    def zombie(self, changed: dict[Key, Row | None], data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.world.history) - 2))
        self.world.attempt(changed, at=at)

    @precondition(lambda self: len(self.world.history) > 2)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        self.world.go_back(data.draw(st.integers(1, len(self.world.history) - 2)))
        # Pointers of old batches may need runs that are merged or pruned by now.
        self.unsure = True

    @rule()
    def restart_service(self) -> None:
        self.world.stores.close()
        self.world.follow()
        self.unsure = True

    @rule()
    def remove_store(self) -> None:
        """`reclaim` of another process removes the store; the task's process, which is this one, has closed it."""
        self.world.task().close()
        shutil.rmtree(self.world.at.stores, ignore_errors=True)

    @rule()
    def follow(self) -> None:
        result = self.world.follower.step()
        assert result.error is None
        assert result.is_caught_up
        if not self.unsure:
            assert self.world.adopted() == 0
        assert covering(self.world.task()) <= self.world.committed

    @rule()
    def read_as_task(self) -> None:
        self.world.adopted()


def run_machine(
    machine: type[FollowerMachine], monkeypatch: pytest.MonkeyPatch, histories: int, fixed: bool = False
) -> None:
    # Merge runs as soon as there are two.
    monkeypatch.setattr(compaction, "FANOUT", 2)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            derandomize=fixed,
            stateful_step_count=25,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_follower_has_the_state_of_a_dict_after_any_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run_machine(FollowerMachine, monkeypatch, examples(15))


class FollowsTheLastOneOnly(BucketFollower):
    """A broken follower: of two attempts, it loads only the one that was written last."""

    def _follow(self, listing: Listing, candidates: Sequence[CheckpointRef]) -> dict[CheckpointRef, StateError]:
        return super()._follow(listing, candidates[-1:])


# The search ends with the first failure.
BROKEN_MAX = 200


class TakesItsStoreForGranted(BucketFollower):
    """A broken follower: it does not check whether the store was replaced."""

    def _notice_new_store(self) -> None:
        pass


@pytest.mark.parametrize("broken", [PrunesToTheNewest, FollowsTheLastOneOnly, TakesItsStoreForGranted])
def test_broken_followers_are_detected(monkeypatch: pytest.MonkeyPatch, broken: type[BucketFollower]) -> None:
    class Machine(FollowerMachine):
        follower_class = broken

    with pytest.raises(AssertionError):
        # The histories are the same each time, so that the result does not depend on chance.
        run_machine(Machine, monkeypatch, BROKEN_MAX, fixed=True)
