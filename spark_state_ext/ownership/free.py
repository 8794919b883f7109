"""Whether a query has ended: its lease tells, or is watched for as long as it lasts.

Who claims the folder of a query goes by pointers that were read before. They are the last ones only if nobody has
written since the lease was free.
"""

from __future__ import annotations

import uuid

from spark_state_ext.errors import LiveRunError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import LEASE_MS_MIN, Clock
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Decision, Found, RunIdentity, Watch, decide

__all__ = ["refuse_live", "wait_until_free"]

_POLL_S = 0.2


def wait_until_free(query_folder: Folder, clock: Clock | None = None) -> int:
    """Wait until nobody holds the lease of a query that nobody has claimed.

    Parameters
    ----------
    query_folder
        The query's folder.
    clock
        Where the time comes from.

    Returns
    -------
    int
        Number of the newest record; 0: there is none. Of a folder that is claimed, without waiting.

    Raises
    ------
    LiveRunError
        When the query runs.
    StorageError
        When the store fails.
    """
    log, clock = LeaseLog(query_folder), clock or Clock()
    me = RunIdentity.here("a claim", uuid.uuid4().hex)
    watch: Watch | None = None
    while True:
        found = log.newest(first=True)
        if found is None or found.record.claim is not None:
            return 0 if found is None else found.number
        now_s = clock.monotonic_s()
        decision = decide(found, me, watch, now_s, LEASE_MS_MIN, found.record.owner.is_over())
        if decision is Decision.LIVE:
            raise _live(query_folder, found)
        if decision is not Decision.WATCH:
            return found.number
        watch = watch or Watch(found, now_s)
        clock.sleep_s(_POLL_S)


def refuse_live(query_folder: Folder, number: int, claims: set[str | None]) -> None:
    """Refuse pointers that may not be the last ones.

    Parameters
    ----------
    query_folder
        The query's folder.
    number
        What `wait_until_free` gave before the pointers were read.
    claims
        Ids of the claims that the pointers name.

    Raises
    ------
    LiveRunError
        When somebody has written since, or a query that has claimed the folder itself may be running.
    """
    found = LeaseLog(query_folder).newest(first=True)
    if found is None or (found.number == number and found.record.claim is None):
        return
    claim = found.record.claim
    if found.number != number or (
        claim is not None and claim.id in claims and not (found.record.released or found.record.owner.is_over())
    ):
        raise _live(query_folder, found)


def _live(query_folder: Folder, found: Found) -> LiveRunError:
    return LiveRunError(
        f"the state at {query_folder.root} cannot be claimed: {found.record.owner} writes it, or has not said that it "
        f"has ended. Stop the old query first. Where it was killed, wait for {found.record.lease_ms / 1000:.0f} s, and "
        "plan the new one again"
    )
