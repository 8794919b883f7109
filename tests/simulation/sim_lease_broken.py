"""Broken variants of the lease. The simulator of leases must find each of them."""

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


def _compare_job_groups(_: LeaseWorld) -> Any:
    """Runs are distinguished by a label that users set and that is the same for every driver."""
    return lambda self, other: self.query == other.query


def _end_with_a_process(world: LeaseWorld) -> Any:
    """A run counts as ended when one of its executors' processes has ended."""

    def is_over(identity: RunIdentity) -> bool:
        driver = world.drivers[identity.pid - 1]
        return not driver.alive or driver.workers_ended > 0

    return is_over


def _compare_times_of_day(world: LeaseWorld) -> Any:
    """The time in a record is compared with the time of day of another machine."""

    def decide_wrongly(
        newest: NumberedRecord | None,
        me: RunIdentity,
        watch: Watch | None,
        now_s: float,
        lease_ms: int,
        over: bool,
        claim: str | None = None,
    ) -> Decision:
        # Half an hour behind the writer's clock, or ahead of it.
        wall_ms = 1000 * (1e9 + world.now_s + (1_800 if me.pid % 2 else -1_800))
        decision = decide(newest, me, watch, now_s, lease_ms, over, claim)
        if decision is Decision.WATCH and newest is not None and wall_ms - newest.record.renewed_ms > lease_ms:
            return Decision.TAKE_OVER
        return decision

    return decide_wrongly


def _watch_briefly(_: LeaseWorld) -> Any:
    """A new run does not wait for a whole lease."""

    def decide_wrongly(
        newest: NumberedRecord | None, me: RunIdentity, watch: Watch | None, now_s: float, *args: Any
    ) -> Decision:
        decision = decide(newest, me, watch, now_s, *args)
        return Decision.TAKE_OVER if decision is Decision.WATCH and watch is not None else decision

    return decide_wrongly


def _rewrite_one_file(_: LeaseWorld) -> Any:
    """There is one file, which all runs rewrite; the last write counts."""

    def append(self: LeaseLog, after: NumberedRecord | None, record: LeaseRecord) -> bool:
        self._files.put(f"{1:016d}.json", record.encode())
        return True

    return append


def _forget_replaced(_: LeaseWorld) -> Any:
    """The record does not name the runs that were replaced."""
    return lambda self, me, now_ms, lease_ms: self.renew_by(me, now_ms, lease_ms)


def _never_look(_: LeaseWorld) -> Any:
    """A run that once had the lease assumes that it still has it."""
    return lambda self, and_so: self._newest


BROKEN_LEASES: dict[str, tuple[Patch, ...]] = {
    "runs are distinguished by their job group": ((RunIdentity, "is_same_run", _compare_job_groups),),
    "the lease is handed over when a process ends": ((RunIdentity, "is_over", _end_with_a_process),),
    "the lease is handed over by the time of day": ((lease_module, "decide", _compare_times_of_day),),
    "a new run does not watch for a whole lease": ((lease_module, "decide", _watch_briefly),),
    "all records are written to one file": ((LeaseLog, "append", _rewrite_one_file),),
    "records do not name replaced runs": ((LeaseRecord, "take_over", _forget_replaced),),
    "an owner never reads the records again": ((Lease, "_look", _never_look),),
}
