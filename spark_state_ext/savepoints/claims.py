"""Claims to savepoints: one query owns a savepoint, and deletes it when it no longer needs it.

The folder ``claim/`` of the savepoint contains ``claim.json``, which only one query can create, and ``consumed.json``,
which marks that deletion has begun. (A claim to a query folder is a field of its lease instead.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from arrow_schemas.checksum import open_document, report_damage, seal_document
from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.errors import (
    ClaimedError,
    MissingCheckpointError,
    NotClaimableError,
)
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import CLAIM_FOLDER
from spark_state_ext.files.readable import read_document
from spark_state_ext.savepoints.deletion import delete_files
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.replaced_files import read_replaced

__all__ = [
    "CLAIM_FOLDER",
    "DELETES",
    "ERASES",
    "SavepointClaim",
    "read_claim",
    "claim_savepoint",
    "delete_claimed_savepoint",
    "drop_claim",
    "is_consumed",
    "refuse_claimed",
    "release_claim",
]

_LOGGER = logging.getLogger("spark_state_ext")
_CLAIM_NAME, _CONSUMED_NAME = "claim.json", "consumed.json"
_FORMAT = 1
# Prefix of the claimant if erase_history rewrites the savepoint; other claimants are queries that start from it.
ERASES = "erase_history of "
# The claimant if `savepoint delete` deletes the savepoint, so that no query starts from it meanwhile.
DELETES = "savepoint delete"
# How often a deletion checks that the claim still exists.
_CHECK_S = 1.0


@dataclass(frozen=True)
class SavepointClaim:
    """The owner of a savepoint.

    Parameters
    ----------
    savepoint_id
        Id of the savepoint.
    by
        The query's state folder, with the prefix `ERASES` if keys are being erased from the savepoint; a person; or
        `DELETES`.
    id
        Name of that folder, by which the query's attempts recognise their claim.
    """

    savepoint_id: str
    by: str
    id: str

    @property
    def erases(self) -> bool:
        """True if the savepoint is being rewritten without some keys."""
        return self.by.startswith(ERASES)

    @property
    def deletes(self) -> bool:
        """True if `savepoint delete` is deleting the savepoint, or was stopped while it did."""
        return self.by == DELETES

    def encode(self) -> bytes:
        """Return the file's bytes, which are the same for all tasks of the query."""
        return seal_document({"format": _FORMAT, "savepoint_id": self.savepoint_id, "by": self.by, "id": self.id})

    @staticmethod
    def decode(data: bytes, where: str) -> SavepointClaim:
        """Decode a claim file."""
        with report_damage(where, "claim to a savepoint"):
            fields = open_document(data, where, _FORMAT)
            return SavepointClaim(str(fields["savepoint_id"]), str(fields["by"]), str(fields["id"]))
        raise AssertionError("unreachable: readable raises what it catches")


def claim_savepoint(savepoint: Folder, claim: SavepointClaim, own_ids: Collection[str]) -> SavepointClaim:
    """Claim a savepoint; return the existing claim if this query or an id in `own_ids` made it."""
    if not savepoint.creates_exclusively:
        raise NotClaimableError(
            f"the savepoint at {savepoint.root} cannot be claimed: its file system cannot create a file exclusively, "
            "so two queries might own it. Start with mode='no_claim', and delete it yourself."
        )
    files = savepoint.child(CLAIM_FOLDER)
    existing = claim if files.create(_CLAIM_NAME, claim.encode()) else read_claim(savepoint)
    if existing is None or not (existing.id == claim.id or existing.id in own_ids):
        raise _claimed_error(savepoint, existing)
    if is_consumed(savepoint) and existing.by == claim.by:
        # Checked after the claim was made, because a deletion first writes its mark and then checks the claim.
        # (If another operator of the query claimed it, the mark refers to that operator's files.)
        raise ClaimedError(
            f"the savepoint at {savepoint.root} is being deleted by a query that had claimed it: use another savepoint"
        )
    return existing


def refuse_claimed(savepoint: Folder) -> None:
    """Refuse a savepoint that another query owns, because it may be deleted while files are copied from it."""
    claim = read_claim(savepoint)
    if claim is not None:
        raise _claimed_error(savepoint, claim)


def _claimed_error(savepoint: Folder, claim: SavepointClaim | None) -> ClaimedError:
    if claim is not None and claim.erases:
        return ClaimedError(
            f"the savepoint at {savepoint.root} is being rewritten by {claim.by}: wait until that is finished. If it "
            "was stopped, run it again"
        )
    if claim is not None and claim.deletes:
        return ClaimedError(
            f"the savepoint at {savepoint.root} is being deleted by {claim.by}: start from another savepoint. If the "
            "deletion was stopped, run it again"
        )
    return ClaimedError(
        f"the savepoint at {savepoint.root} is claimed by the query at {claim.by if claim else 'an unknown place'}, "
        "which deletes it: start from another savepoint. If that query is gone for good, free this savepoint with "
        "spark-state-ext savepoint release."
    )


def read_claim(savepoint: Folder) -> SavepointClaim | None:
    """Read the claim of a savepoint; None: it is not claimed."""
    return read_document(savepoint.child(CLAIM_FOLDER), _CLAIM_NAME, SavepointClaim.decode)


def drop_claim(savepoint: Folder) -> None:
    """Remove a claim whose owner no longer needs the savepoint and has not begun to delete it."""
    savepoint.child(CLAIM_FOLDER).remove(_CLAIM_NAME)
    savepoint.remove_if_empty(CLAIM_FOLDER)


def is_consumed(savepoint: Folder) -> bool:
    """True if the owner has begun to delete the savepoint."""
    return savepoint.child(CLAIM_FOLDER).exists(_CONSUMED_NAME)


def delete_claimed_savepoint(
    savepoint: Folder, claim_id: str, check_ours: Callable[[], None], operator: str | None = None
) -> int:
    """Delete the files in a claimed savepoint's manifest, and the claim; safe to stop and repeat at any time.

    `check_ours` raises if this process may no longer delete. Returns the number of deleted files.
    """
    claim = read_claim(savepoint)
    if claim is None or claim.id != claim_id:
        return 0
    manifest = _read_manifest_if_any(savepoint)
    if manifest is not None and manifest.header.id != claim.savepoint_id:
        # Another savepoint was put there. No mark is written, so that the claim can be released.
        return 0
    files = savepoint.child(CLAIM_FOLDER)
    checked_s = time.monotonic()

    def check_claim(at_once: bool = False) -> None:
        # Several processes may delete the same savepoint. A late one must stop when another one has finished, because
        # a new savepoint may have been put there since.
        nonlocal checked_s
        check_ours()
        if at_once or time.monotonic() >= checked_s + _CHECK_S:
            checked_s = time.monotonic()
            if read_claim(savepoint) != claim:
                raise _FinishedError

    check_ours()
    files.create(_CONSUMED_NAME, seal_document({"format": _FORMAT}))
    if read_claim(savepoint) != claim:
        # The claim was released before the mark was written. A new claimant continues once the mark is gone.
        files.remove(_CONSUMED_NAME)
        _remove_empty(savepoint)
        return 0
    try:
        return _delete_and_free(savepoint, claim, check_claim, operator)
    except _FinishedError:
        if read_claim(savepoint) is None:
            # This process may have written its mark after the other one had removed the mark.
            files.remove(_CONSUMED_NAME)
            _remove_empty(savepoint)
        return 0


class _FinishedError(Exception):
    """Another process has finished the deletion."""


def _delete_and_free(
    savepoint: Folder, claim: SavepointClaim, check_claim: Callable[[bool], None], operator: str | None
) -> int:
    files = savepoint.child(CLAIM_FOLDER)
    deleted = 0
    manifest = _read_manifest_if_any(savepoint)
    if manifest is not None:
        if manifest.header.id != claim.savepoint_id:
            # Another savepoint was put there a moment ago.
            return 0
        deleted = delete_files(savepoint, manifest, check_claim, operator)
        if savepoint.exists(MANIFEST_NAME):
            _LOGGER.info(
                "files of other operators stay at %s until these operators no longer need them", savepoint.root
            )
            return deleted
    check_claim(True)
    # The claim is removed last, so that a stopped query finds it again and can finish the deletion.
    files.remove(_CONSUMED_NAME)
    files.remove(_CLAIM_NAME)
    _remove_empty(savepoint)
    _LOGGER.info("the claimed savepoint at %s is deleted: %d files", savepoint.root, deleted)
    return deleted


def _read_manifest_if_any(savepoint: Folder) -> SavepointManifest | None:
    """Read the manifest; None if it was deleted."""
    try:
        return read_manifest(savepoint)
    except MissingCheckpointError:
        return None


def _remove_empty(savepoint: Folder) -> None:
    savepoint.remove_if_empty(CLAIM_FOLDER)
    savepoint.remove_if_empty()


def release_claim(savepoint: Folder) -> SavepointClaim:
    """Remove the claim of a dead owner and return it."""
    claim = read_claim(savepoint)
    if claim is None:
        raise MissingCheckpointError(f"there is no savepoint at {savepoint.root}, or it is not claimed")
    refusal, is_in_use = _find_refusal(savepoint, claim)
    if is_in_use():
        raise refusal
    files = savepoint.child(CLAIM_FOLDER)
    files.remove(_CLAIM_NAME)
    if is_in_use():
        # The owner began meanwhile. It checks the claim after writing its mark; this checks the mark after removing the
        # claim, so one of the two always notices the other.
        files.create(_CLAIM_NAME, claim.encode())
        raise refusal
    if not savepoint.exists(MANIFEST_NAME):
        # The owner began and finished meanwhile, and removed its mark too: no savepoint is left.
        raise MissingCheckpointError(
            f"there is no longer a savepoint at {savepoint.root}: it was deleted by {claim.by}, which had claimed it, "
            "or by somebody else. Start from another one."
        )
    return claim


def _find_refusal(savepoint: Folder, claim: SavepointClaim) -> tuple[NotClaimableError, Callable[[], bool]]:
    """Return the error that refuses to release a claim, and a function that is true if the claim is in use."""
    refused = f"the claim of {claim.by} to the savepoint at {savepoint.root} cannot be released"
    if not claim.erases:
        return NotClaimableError(f"{refused}: its owner has begun to delete it"), lambda: is_consumed(savepoint)

    def is_erasing() -> bool:
        replaced, manifest = read_replaced(savepoint), _read_manifest_if_any(savepoint)
        return replaced is not None and manifest is not None and replaced.savepoint_id == manifest.header.id

    return NotClaimableError(
        f"{refused}: files with the erased keys that are not in the manifest may be there. Run erase history again "
        "with this savepoint and the same keys, which removes the files and the claim; or delete the savepoint with "
        "--force"
    ), is_erasing
