"""Broken variants of claims to a query folder. The simulator of claims must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sim_lease import LeaseWorld

from spark_state_ext.ownership import lease as lease_module
from spark_state_ext.ownership import release
from spark_state_ext.ownership.lease import Clock, Lease
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import (
    Claim,
    Decision,
    LeaseRecord,
    NumberedRecord,
    RunIdentity,
    Watch,
    decide,
)

__all__ = ["BROKEN_CLAIMS"]

Patch = tuple[Any, str, Callable[[LeaseWorld], Any]]
_APPEND = LeaseLog.append


def _forget_claim(_: LeaseWorld) -> Any:
    """Only the record that makes a claim contains it."""

    def append(self: LeaseLog, after: NumberedRecord | None, record: LeaseRecord) -> bool:
        has_claim = after is not None and after.record.claim is not None
        return _APPEND(self, after, replace(record, claim=None) if has_claim else record)

    return append


def _clean_up_without_check(_: LeaseWorld) -> Any:
    """A clean-up checks only that its run has the lease, not which query has claimed the folder."""
    return lambda self, record: self._me.plan in record.replaced or not record.owner.is_same_run(self._me)


def _begin_without_check(_: LeaseWorld) -> Any:
    """A run that begins checks only whether another run is alive, not which query has claimed the folder."""

    def decide_without_claim(
        newest: NumberedRecord | None,
        me: RunIdentity,
        watch: Watch | None,
        now_s: float,
        lease_ms: int,
        over: bool,
        *_: Any,
    ) -> Decision:
        claim = None if newest is None or newest.record.claim is None else newest.record.claim.id
        return decide(newest, me, watch, now_s, lease_ms, over, claim)

    return decide_without_claim


def _let_last_claim_win(_: LeaseWorld) -> Any:
    """A new claim always succeeds, even if another query has claimed the folder."""
    return lambda claim, record: True


def _omit_building(_: LeaseWorld) -> Any:
    """Records do not say that a claim was built upon."""
    return lambda self: {"id": self.id, "by": self.by, "claimed_ms": self.claimed_ms, "built": False}


def _release_without_watching(_: LeaseWorld) -> Any:
    """A release does not check whether the claim's owner is alive."""
    return lambda log, *args: log.newest()


def _release_to_first_query(_: LeaseWorld) -> Any:
    """A release removes the claim without restoring the claim that it replaced."""
    return lambda query_folder, claim: None


def _restore_claim_as_it_was(_: LeaseWorld) -> Any:
    """A release restores the claim as it was recorded, which may not say yet that it was built upon."""

    def write_release(
        log: LeaseLog, newest: NumberedRecord, before: Claim | None, me: RunIdentity, clock: Clock
    ) -> bool:
        record = newest.record.take_over(me, int(clock.wall_s() * 1000), newest.record.lease_ms)
        return log.append(newest, replace(record, claim=before, released=True))

    return write_release


BROKEN_CLAIMS: dict[str, tuple[Patch, ...]] = {
    "the next record forgets the claim": ((LeaseLog, "append", _forget_claim),),
    "clean-up does not check the claim": ((Lease, "_is_held_by_other", _clean_up_without_check),),
    "a run that begins does not check the claim": ((lease_module, "decide", _begin_without_check),),
    "the last query to claim the folder gets it": ((lease_module, "may_replace", _let_last_claim_win),),
    "records do not say that a claim was built upon": (
        (Claim, "to_plain", _omit_building),
        (Lease, "_record_building", lambda _: lambda self: None),
    ),
    "a claim is released while its owner lives": ((release, "wait_until_free", _release_without_watching),),
    "a release forgets the replaced claim": ((release, "find_replaced_claim", _release_to_first_query),),
    "a release restores a claim as it was recorded": ((release, "_write_release", _restore_claim_as_it_was),),
}
