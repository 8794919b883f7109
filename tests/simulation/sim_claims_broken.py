"""Ways in which claims to a query folder could have been built wrong. The simulator of claims has to find each."""

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


def _forgotten(_: LeaseWorld) -> Any:
    """Only the record that makes a claim has it."""

    def append(self: LeaseLog, after: NumberedRecord | None, record: LeaseRecord) -> bool:
        again = after is not None and after.record.claim is not None
        return _APPEND(self, after, replace(record, claim=None) if again else record)

    return append


def _not_checked_by_clean_up(_: LeaseWorld) -> Any:
    """Who cleans up looks whether the lease is his run's, and not whose the folder is."""
    return lambda self, record: self._me.plan in record.replaced or not record.owner.is_same_run(self._me)


def _not_checked_at_the_start(_: LeaseWorld) -> Any:
    """Who begins looks whether another run lives, and not whose the folder is."""

    def decided(
        found: NumberedRecord | None,
        me: RunIdentity,
        watch: Watch | None,
        now_s: float,
        lease_ms: int,
        over: bool,
        *_: Any,
    ) -> Decision:
        claim = None if found is None or found.record.claim is None else found.record.claim.id
        return decide(found, me, watch, now_s, lease_ms, over, claim)

    return decided


def _taken_by_the_last(_: LeaseWorld) -> Any:
    """Whoever claims the folder gets it, whoever had claimed it before."""
    return lambda claim, record: True


def _built_unsaid(_: LeaseWorld) -> Any:
    """The record does not say that somebody has built upon the claim."""
    return lambda self: {"id": self.id, "by": self.by, "claimed_ms": self.claimed_ms, "built": False}


def _released_unwatched(_: LeaseWorld) -> Any:
    """Who releases a claim does not look whether its owner lives."""
    return lambda log, *args: log.newest()


def _released_to_the_first(_: LeaseWorld) -> Any:
    """A release takes the claim away, whichever one it replaced: the query that began the folder has it then."""
    return lambda query_folder, claim: None


def _put_back_unbuilt(_: LeaseWorld) -> Any:
    """A release puts the claim back as it stood, which may not say yet that its query has built."""

    def freed(log: LeaseLog, found: NumberedRecord, before: Claim | None, me: RunIdentity, clock: Clock) -> bool:
        record = found.record.take_over(me, int(clock.wall_s() * 1000), found.record.lease_ms)
        return log.append(found, replace(record, claim=before, released=True))

    return freed


BROKEN_CLAIMS: dict[str, tuple[Patch, ...]] = {
    "a claim forgotten by the next record": ((LeaseLog, "append", _forgotten),),
    "a claim not checked by clean-up": ((Lease, "_is_held_by_other", _not_checked_by_clean_up),),
    "a claim not checked by who begins": ((lease_module, "decide", _not_checked_at_the_start),),
    "a claim that the last one has": ((lease_module, "takes_place", _taken_by_the_last),),
    "a claim of which nobody knows that it was built upon": (
        (Claim, "to_plain", _built_unsaid),
        (Lease, "_record_building", lambda _: lambda self: None),
    ),
    "a claim released while its owner lives": ((release, "wait_until_free", _released_unwatched),),
    "a release that forgets the claim that was replaced": ((release, "find_replaced_claim", _released_to_the_first),),
    "a claim put back without what was built": ((release, "_write_release", _put_back_unbuilt),),
}
