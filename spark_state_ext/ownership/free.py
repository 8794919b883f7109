"""Whether a query has ended: its lease tells, or is watched for as long as it lasts.

Who claims the folder of a query goes by pointers that are read once its lease is free, and makes only the record that
follows the one seen then (`Claim.after`): so they are the last ones. Who frees a claim waits in the same way.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

from spark_state_ext.errors import LiveRunError
from spark_state_ext.ownership.lease import LEASE_MS_MIN, Clock
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Decision, Found, RunIdentity, Watch, decide

__all__ = ["until_free"]

_POLL_S = 0.2


def until_free(
    log: LeaseLog, claim: str | None, live: Callable[[Found], LiveRunError], clock: Clock | None = None
) -> Found | None:
    """Wait until the query with certain pointers holds its lease no more."""
    clock, me = clock or Clock(), RunIdentity.here("who waits for a lease", uuid.uuid4().hex)
    watch: Watch | None = None
    while True:
        found, now_s = log.newest(first=True), clock.monotonic_s()
        over = found is not None and found.record.owner.is_over()
        decision = decide(found, me, watch, now_s, LEASE_MS_MIN, over, claim)
        if decision is Decision.LIVE:
            assert found is not None, "somebody has renewed it"
            raise live(found)
        if decision is not Decision.WATCH:
            return found
        assert found is not None, "there is something to watch"
        watch = watch or Watch(found, now_s)
        clock.sleep_s(_POLL_S)
