"""Notes about the claims to a query folder, in its folder ``claims/``. A release of a claim needs them.

``<claim>.json`` says that a call of the claiming query's first batch gave its pointer to Spark, which may commit it.
``<claim>.after-<number>.json`` says which claim the new one replaced: the claim in lease record `number`. It is written
before the record that makes the claim, so every claim has one. The format of the record itself did not change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from arrow_schemas.checksum import open_document, report_damage, seal_document
from spark_state_ext.errors import MissingCheckpointError, NotClaimableError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import CLAIMS_FOLDER
from spark_state_ext.ownership.lease_record import Claim, NumberedRecord

__all__ = ["is_handed_over", "note_handed_over", "note_replaced_claim", "find_replaced_claim"]

_FORMAT = 1
_NOTE = re.compile(r"(.+)\.after-(\d+)\.json")
_HANDED_OVER = ".json"


def note_handed_over(query_folder: Folder, claim_id: str) -> None:
    """Record that Spark gets a pointer of the query that has claimed a folder, and so may commit it.

    Every bucket's first call does this before it returns the pointer.
    """
    query_folder.child(CLAIMS_FOLDER).create(f"{claim_id}{_HANDED_OVER}", seal_document({"format": _FORMAT}))


def is_handed_over(query_folder: Folder, claim_id: str) -> bool:
    """True if `note_handed_over` was called for a claim."""
    return query_folder.child(CLAIMS_FOLDER).exists(f"{claim_id}{_HANDED_OVER}")


def note_replaced_claim(query_folder: Folder, claim: Claim, after: NumberedRecord | None) -> None:
    """Record which claim a new one replaces, before the lease record with the new one is made."""
    old_claim = None if after is None else after.record.claim
    if after is None and claim.instead_of is not None:
        # The lease was removed. The claim is known from the pointers that the new query begins with.
        place = query_folder.root.rpartition("/")[0]
        old_claim = Claim(claim.instead_of, f"{place}/{claim.instead_of}", 0)
    fields = {"format": _FORMAT, "replaced": None if old_claim is None else old_claim.to_plain()}
    name = f"{claim.id}.after-{0 if after is None else after.number}.json"
    query_folder.child(CLAIMS_FOLDER).create(name, seal_document(fields))


def find_replaced_claim(query_folder: Folder, claim: Claim) -> Claim | None:
    """Return the claim that a claim replaced; None if it was made against the query that began the folder."""
    files = query_folder.child(CLAIMS_FOLDER)
    names = files.names()
    # An attempt that lost against another record also left a note. The last attempt made the claim.
    notes = [(int(match[2]), name) for name in names if (match := _NOTE.fullmatch(name)) and match[1] == claim.id]
    if notes:
        _, name = max(notes)
        where = files.where(name)
        try:
            data = files.get(name)
        except MissingCheckpointError as error:
            raise MissingCheckpointError(f"{where} was removed a moment ago: run this again") from error
        with report_damage(where, "note of the claim that another one replaced"):
            replaced: Mapping[str, object] | None = open_document(data, where, _FORMAT)["replaced"]
            return None if replaced is None else Claim.of_plain(replaced)
    others = [name for name in names if not _NOTE.fullmatch(name) and name != f"{claim.id}{_HANDED_OVER}"]
    if others:
        raise NotClaimableError(
            f"the claim of {claim} to the state at {query_folder.root} cannot be released: an earlier build made it "
            f"and did not record which claim it replaced, and other queries had claimed the folder before it "
            f"({', '.join(name.removesuffix(_HANDED_OVER) for name in others[:5])}). Start its query again, or begin a "
            "new one from that query's checkpoint or a savepoint with mode='no_claim'"
        )
    return None
