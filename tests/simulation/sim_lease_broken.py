"""Ways in which the lease could have been built wrong. The simulator of leases has to find each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim_lease import LeaseWorld

from spark_state_ext.ownership import lease as lease_module
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Decision, LeaseRecord, NumberedRecord, RunIdentity, Watch, decide

__all__ = ["BROKEN_LEASES"]

Patch = tuple[Any, str, Callable[[LeaseWorld], Any]]


def _by_job_group(_: LeaseWorld) -> Any:
    """Runs are told apart by a name that users set, and every driver has the same."""
    return lambda self, other: self.query == other.query


def _over_with_a_process(world: LeaseWorld) -> Any:
    """A run is taken to be over when one of its executors' processes has ended."""

    def is_over(identity: RunIdentity) -> bool:
        driver = world.drivers[identity.pid - 1]
        return not driver.alive or driver.workers_ended > 0

    return is_over


def _by_the_time_of_day(world: LeaseWorld) -> Any:
    """The time in a record is compared with that of another machine."""

    def decided(
        found: NumberedRecord | None,
        me: RunIdentity,
        watch: Watch | None,
        now_s: float,
        lease_ms: int,
        over: bool,
        claim: str | None = None,
    ) -> Decision:
        # Half an hour behind the writer's, or ahead of it.
        wall_ms = 1000 * (1e9 + world.now_s + (1_800 if me.pid % 2 else -1_800))
        decision = decide(found, me, watch, now_s, lease_ms, over, claim)
        if decision is Decision.WATCH and found is not None and wall_ms - found.record.renewed_ms > lease_ms:
            return Decision.TAKE_OVER
        return decision

    return decided


def _watched_for_a_third(_: LeaseWorld) -> Any:
    """A newcomer does not wait for a whole lease."""

    def decided(
        found: NumberedRecord | None, me: RunIdentity, watch: Watch | None, now_s: float, *args: Any
    ) -> Decision:
        decision = decide(found, me, watch, now_s, *args)
        return Decision.TAKE_OVER if decision is Decision.WATCH and watch is not None else decision

    return decided


def _rewritten(_: LeaseWorld) -> Any:
    """There is one file, which everybody rewrites: the one that arrives last counts."""

    def append(self: LeaseLog, after: NumberedRecord | None, record: LeaseRecord) -> bool:
        self._files.put(f"{1:016d}.json", record.encode())
        return True

    return append


def _forgotten(_: LeaseWorld) -> Any:
    """The record does not say who was replaced."""
    return lambda self, me, now_ms, lease_ms: self.renew_by(me, now_ms, lease_ms)


def _never_looked(_: LeaseWorld) -> Any:
    """Who held it once believes that it still does."""
    return lambda self, and_so: self._newest


BROKEN_LEASES: dict[str, tuple[Patch, ...]] = {
    "a run told by its job group": ((RunIdentity, "is_same_run", _by_job_group),),
    "handed over because a process ended": ((RunIdentity, "is_over", _over_with_a_process),),
    "handed over by the time of day": ((lease_module, "decide", _by_the_time_of_day),),
    "not watched for a whole lease": ((lease_module, "decide", _watched_for_a_third),),
    "one file that is rewritten": ((LeaseLog, "append", _rewritten),),
    "nobody told who was replaced": ((LeaseRecord, "take_over", _forgotten),),
    "never looked at again": ((Lease, "_look", _never_looked),),
}
