"""Freeing the claim to a query folder, whose owner died before it built upon it; its lease says so afterwards.

The query that it was claimed from has the folder back then, and another one may claim it. That is the query that began
the folder, or one that had claimed it itself: then its claim is in the lease again. Whether the owner lives is found
out as for any lease: by watching it. And what it may still do when it lives on after all, it does not do: before it
writes or cleans up, it looks whether its claim is there, and before it goes on from a committed pointer, it has said in
the lease that it builds.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from spark_state_ext.errors import LiveRunError, MissingCheckpointError, NotClaimableError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.claim_notes import is_handed_over, replaced_claim
from spark_state_ext.ownership.free import until_free
from spark_state_ext.ownership.lease import Clock
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Claim, Found, RunIdentity

__all__ = ["release_query_folder"]


def release_query_folder(query_folder: Folder, *, force: bool = False, clock: Clock | None = None) -> Claim:
    """Free the claim to a query folder. It waits for a lease where it cannot tell whether the owner lives."""
    log, clock = LeaseLog(query_folder), clock or Clock()
    me = RunIdentity.here("savepoint release", uuid.uuid4().hex)

    def live(found: Found) -> LiveRunError:
        return LiveRunError(
            f"the claim of {found.record.claim} to the state at {query_folder.root} cannot be released: its owner "
            f"lives, {found.record.owner}. Stop it first"
        )

    while True:
        found = log.newest()
        claim = None if found is None else found.record.claim
        if found is None or claim is None:
            raise MissingCheckpointError(f"nobody has claimed the state at {query_folder.root}")
        if claim.built:
            raise NotClaimableError(
                f"the claim of {claim} to the state at {query_folder.root} cannot be released: a batch of it is "
                "committed, and it may have deleted what the old query needs"
            )
        if until_free(log, claim.id, live, clock) != found:
            continue  # somebody wrote meanwhile: what is there is judged anew
        if not force:
            _refuse_handed_over(query_folder, claim)
        before = replaced_claim(query_folder, claim)
        if _freed(log, found, before, me, clock):
            return replace(claim, instead_of=None if before is None else before.id)


def _freed(log: LeaseLog, found: Found, before: Claim | None, me: RunIdentity, clock: Clock) -> bool:
    """Whether the record with the claim that was replaced, or with none, is the one that counts."""
    if before is not None:
        # A query is claimed from by its committed pointers. So it has built, whether or not its record said so.
        before = replace(before, built=True)
    # Whoever held it is replaced, so that no run of it goes on.
    record = found.record.taken_over(me, int(clock.wall_s() * 1000), found.record.lease_ms)
    return log.append(found, replace(record, claim=before, released=True, format_1_too=found.record.format_1_too))


def _refuse_handed_over(query_folder: Folder, claim: Claim) -> None:
    if is_handed_over(query_folder, claim.id):
        raise NotClaimableError(
            f"the claim of {claim} to the state at {query_folder.root} is not released: its first batch was handed to "
            "Spark, and may be committed. Look at its checkpoint; where nobody wants that query any more, --force "
            "releases the claim all the same"
        )
