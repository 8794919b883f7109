"""Wait until a query has ended: its lease says so, or is watched for as long as it lasts.

A claim to a query's folder uses pointers that are read after its lease is free, and may only make the record that
follows the one seen then (`Claim.after`): so these pointers are the last ones. A release of a claim waits in the same
way.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from spark_state_ext.errors import LiveRunError
from spark_state_ext.ownership.lease import LEASE_MS_MIN, Clock
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Decision, NumberedRecord, RunIdentity, Watch, decide

__all__ = ["wait_until_free"]

_POLL_S = 0.2


def wait_until_free(
    log: LeaseLog, claim: str | None, live: Callable[[NumberedRecord], LiveRunError], clock: Clock | None = None
) -> NumberedRecord | None:
    """Wait until the query with this claim no longer holds the lease; return the newest record.

    `live` returns the error to raise if the query is alive.
    """
    clock, me = clock or Clock(), RunIdentity.here("who waits for a lease", uuid.uuid4().hex)
    watch: Watch | None = None
    while True:
        lease, now_s = log.newest(first=True), clock.monotonic_s()
        is_over = lease is not None and lease.record.owner.is_over()
        decision = decide(lease, me, watch, now_s, LEASE_MS_MIN, is_over, claim)
        if decision is Decision.LIVE:
            assert lease is not None, "a record was renewed"
            raise live(lease)
        if decision is not Decision.WATCH:
            return lease
        assert lease is not None, "there is a record to watch"
        watch = watch or Watch(lease, now_s)
        clock.sleep_s(_POLL_S)
