"""Release the claim to a query folder whose owner died before it built upon the folder, by a record in the lease.

Afterwards the query that it was claimed from owns the folder again, and another query may claim it. The old query began
the folder, or had claimed it itself: then its claim is in the lease again. As with any lease, watching it shows whether
the owner lives. An owner that lives nevertheless does no harm: it checks its claim before it writes or cleans up, and
it records in the lease that it builds before it goes on from a committed pointer.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from spark_state_ext.errors import LiveRunError, MissingCheckpointError, NotClaimableError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.claim_notes import find_replaced_claim, is_handed_over
from spark_state_ext.ownership.lease import Clock
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Claim, NumberedRecord, RunIdentity
from spark_state_ext.ownership.query_end import wait_until_free

__all__ = ["release_query_folder"]


def release_query_folder(query_folder: Folder, *, force: bool = False, clock: Clock | None = None) -> Claim:
    """Release the claim to a query folder; if it is unknown whether the owner lives, watch its lease first.

    The returned claim is the released one, with the id of the claim that it had replaced in `instead_of`.
    """
    log, clock = LeaseLog(query_folder), clock or Clock()
    me = RunIdentity.here("savepoint release", uuid.uuid4().hex)

    def make_live_error(lease: NumberedRecord) -> LiveRunError:
        return LiveRunError(
            f"the claim of {lease.record.claim} to the state at {query_folder.root} cannot be released: its owner "
            f"is alive, {lease.record.owner}. Stop it first"
        )

    while True:
        lease = log.newest()
        claim = None if lease is None else lease.record.claim
        if lease is None or claim is None:
            raise MissingCheckpointError(f"the state at {query_folder.root} is not claimed")
        if claim.built:
            raise NotClaimableError(
                f"the claim of {claim} to the state at {query_folder.root} cannot be released: a batch of it is "
                "committed, and it may have deleted what the old query needs"
            )
        if wait_until_free(log, claim.id, make_live_error, clock) != lease:
            continue  # the lease changed meanwhile: check the new record
        if not force:
            _refuse_handed_over(query_folder, claim)
        old_claim = find_replaced_claim(query_folder, claim)
        if _write_release(log, lease, old_claim, me, clock):
            return replace(claim, instead_of=None if old_claim is None else old_claim.id)


def _write_release(
    log: LeaseLog, lease: NumberedRecord, old_claim: Claim | None, me: RunIdentity, clock: Clock
) -> bool:
    """Write a record with the replaced claim, or without one; return False if another process was faster."""
    if old_claim is not None:
        # The claim was made with committed pointers of the old query. So that had built, even if its record did not
        # say so.
        old_claim = replace(old_claim, built=True)
    # The owner is marked as replaced, so that its run does not go on.
    record = lease.record.take_over(me, int(clock.wall_s() * 1000), lease.record.lease_ms)
    return log.append(lease, replace(record, claim=old_claim, released=True, format_1_too=lease.record.format_1_too))


def _refuse_handed_over(query_folder: Folder, claim: Claim) -> None:
    if is_handed_over(query_folder, claim.id):
        raise NotClaimableError(
            f"the claim of {claim} to the state at {query_folder.root} is not released: its first batch was handed to "
            "Spark, and may be committed. Look at its checkpoint; if that query is no longer needed, --force releases "
            "the claim anyway"
        )
