"""The claim to a savepoint: one query owns it, and deletes it once it needs nothing of it any more.

Files of a claim lie in the folder ``claim/`` of the savepoint: ``claim.json`` is made exclusively; ``consumed.json``
says that deleting has begun. (A claim to a query folder is a field of its lease.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from arrow_schemas.checksum import opened_document, readable, sealed_document
from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.errors import (
    ClaimedError,
    MissingCheckpointError,
    NotClaimableError,
)
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import CLAIM_FOLDER
from spark_state_ext.files.readable import document_in
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.removing import delete_files
from spark_state_ext.savepoints.replaced import replaced_in

__all__ = [
    "CLAIM_FOLDER",
    "ERASES",
    "SavepointClaim",
    "claim_of",
    "claim_savepoint",
    "consume",
    "drop_claim",
    "is_consumed",
    "refuse_claimed",
    "release_claim",
]

_LOGGER = logging.getLogger("spark_state_ext")
_CLAIM_NAME, _CONSUMED_NAME = "claim.json", "consumed.json"
_FORMAT = 1
# Whose claim it is that does not start from the savepoint but writes it anew.
ERASES = "erase_history of "
# How often it is looked whether the claim is there still.
_LOOK_S = 1.0


@dataclass(frozen=True)
class SavepointClaim:
    """Who owns a savepoint.

    Parameters
    ----------
    savepoint_id
        Id of the savepoint.
    by
        The query: the folder of its state; after `ERASES`, where keys are being erased from the savepoint.
    id
        Name of that folder, by which the query's attempts know their claim.
    """

    savepoint_id: str
    by: str
    id: str

    @property
    def erases(self) -> bool:
        """Whether the savepoint is being written anew without some keys."""
        return self.by.startswith(ERASES)

    def encode(self) -> bytes:
        """The file's bytes: the same from all of the query's tasks."""
        return sealed_document({"format": _FORMAT, "savepoint_id": self.savepoint_id, "by": self.by, "id": self.id})

    @staticmethod
    def decode(data: bytes, where: str) -> SavepointClaim:
        """Read a claim."""
        with readable(where, "claim to a savepoint"):
            fields = opened_document(data, where, _FORMAT)
            return SavepointClaim(str(fields["savepoint_id"]), str(fields["by"]), str(fields["id"]))
        raise AssertionError("unreachable: readable raises what it catches")


def claim_savepoint(savepoint: Folder, claim: SavepointClaim, mine: Collection[str]) -> SavepointClaim:
    """Claim a savepoint, or find that this query has."""
    if not savepoint.creates_exclusively:
        raise NotClaimableError(
            f"the savepoint at {savepoint.root} cannot be claimed: its store does not let exactly one of several make "
            "a file, so two queries might own it. Start with mode='no_claim', and delete it yourself."
        )
    files = savepoint.child(CLAIM_FOLDER)
    there = claim if files.create(_CLAIM_NAME, claim.encode()) else claim_of(savepoint)
    if there is None or not (there.id == claim.id or there.id in mine):
        raise _claimed(savepoint, there)
    if is_consumed(savepoint) and there.by == claim.by:
        # After the claim was made: whoever begins to delete marks that first, and looks whose claim is there then.
        # (Where another operator of the query has claimed it, the mark is of that one's own files.)
        raise ClaimedError(
            f"the savepoint at {savepoint.root} is being deleted by a query that had claimed it: take another one"
        )
    return there


def refuse_claimed(savepoint: Folder) -> None:
    """Refuse a savepoint that another query owns: it may be deleted while files are copied from it."""
    there = claim_of(savepoint)
    if there is not None:
        raise _claimed(savepoint, there)


def _claimed(savepoint: Folder, claim: SavepointClaim | None) -> ClaimedError:
    if claim is not None and claim.erases:
        return ClaimedError(
            f"the savepoint at {savepoint.root} is being written anew by {claim.by}: wait until that is over. Where it "
            "was stopped, run it again"
        )
    return ClaimedError(
        f"the savepoint at {savepoint.root} is claimed by the query at {claim.by if claim else 'another place'}, which "
        "deletes it: start from another savepoint. Where that query is gone for good, free this one with "
        "spark-state-ext savepoint release."
    )


def claim_of(savepoint: Folder) -> SavepointClaim | None:
    """Who has claimed a savepoint; None: nobody."""
    return document_in(savepoint.child(CLAIM_FOLDER), _CLAIM_NAME, SavepointClaim.decode)


def drop_claim(savepoint: Folder) -> None:
    """Remove the claim of one who needs the savepoint no more, and has not begun to delete it."""
    savepoint.child(CLAIM_FOLDER).remove(_CLAIM_NAME)
    savepoint.remove_if_empty(CLAIM_FOLDER)


def is_consumed(savepoint: Folder) -> bool:
    """Whether its owner has begun to delete it."""
    return savepoint.child(CLAIM_FOLDER).exists(_CONSUMED_NAME)


def consume(savepoint: Folder, claim_id: str, still_ours: Callable[[], None], operator: str | None = None) -> int:
    """Delete a claimed savepoint: what its manifest names, nothing else. May be stopped and repeated at any time."""
    claim = claim_of(savepoint)
    if claim is None or claim.id != claim_id:
        return 0
    manifest = _manifest_of(savepoint)
    if manifest is not None and manifest.header.id != claim.savepoint_id:
        # Somebody has put another savepoint there. Without the mark the claim can be released.
        return 0
    files = savepoint.child(CLAIM_FOLDER)
    looked_s = time.monotonic()

    def still_there(now: bool = False) -> None:
        # Several processes may be at it, as each finds out by itself. Who is late must not go on where another one has
        # finished: somebody may have put another savepoint there since.
        nonlocal looked_s
        still_ours()
        if now or time.monotonic() >= looked_s + _LOOK_S:
            looked_s = time.monotonic()
            if claim_of(savepoint) != claim:
                raise _FinishedError

    still_ours()
    files.create(_CONSUMED_NAME, sealed_document({"format": _FORMAT}))
    if claim_of(savepoint) != claim:
        # It was released before the mark was there. Whoever has claimed it since goes on once the mark is gone.
        files.remove(_CONSUMED_NAME)
        _remove_empty(savepoint)
        return 0
    try:
        return _consumed(savepoint, claim, still_there, operator)
    except _FinishedError:
        if claim_of(savepoint) is None:
            # This one's mark may have come after the other one had removed its own.
            files.remove(_CONSUMED_NAME)
            _remove_empty(savepoint)
        return 0


class _FinishedError(Exception):
    """Another process has deleted it all."""


def _consumed(
    savepoint: Folder, claim: SavepointClaim, still_there: Callable[[bool], None], operator: str | None
) -> int:
    files = savepoint.child(CLAIM_FOLDER)
    deleted = 0
    manifest = _manifest_of(savepoint)
    if manifest is not None:
        if manifest.header.id != claim.savepoint_id:
            # Somebody has put another savepoint there a moment ago.
            return 0
        deleted = delete_files(savepoint, manifest, still_there, operator)
        if savepoint.exists(MANIFEST_NAME):
            _LOGGER.info("files of other operators stay at %s until these need them no more", savepoint.root)
            return deleted
    still_there(True)
    # The claim last, so that whoever is stopped here knows on the next day that it is his to finish.
    files.remove(_CONSUMED_NAME)
    files.remove(_CLAIM_NAME)
    _remove_empty(savepoint)
    _LOGGER.info("the savepoint at %s, which this query had claimed, is deleted: %d files", savepoint.root, deleted)
    return deleted


def _manifest_of(savepoint: Folder) -> SavepointManifest | None:
    """What is there; None where who deleted it was stopped afterwards."""
    try:
        return read_manifest(savepoint)
    except MissingCheckpointError:
        return None


def _remove_empty(savepoint: Folder) -> None:
    savepoint.remove_if_empty(CLAIM_FOLDER)
    savepoint.remove_if_empty()


def release_claim(savepoint: Folder) -> SavepointClaim:
    """Free a claim whose owner died."""
    claim = claim_of(savepoint)
    if claim is None:
        raise MissingCheckpointError(f"nobody has claimed a savepoint at {savepoint.root}, or there is none")
    refused, has_begun = _in_use(savepoint, claim)
    if has_begun():
        raise refused
    files = savepoint.child(CLAIM_FOLDER)
    files.remove(_CLAIM_NAME)
    if has_begun():
        # It began in between: it looked whose the claim is after its mark, and this looks for the mark after the claim.
        files.create(_CLAIM_NAME, claim.encode())
        raise refused
    if not savepoint.exists(MANIFEST_NAME):
        # It began and finished in between, its mark included: there is nothing left that anybody could start from.
        raise MissingCheckpointError(
            f"there is no savepoint at {savepoint.root} any more: {claim.by}, which had claimed it, has deleted it, or "
            "somebody else has. Start from another one."
        )
    return claim


def _in_use(savepoint: Folder, claim: SavepointClaim) -> tuple[NotClaimableError, Callable[[], bool]]:
    """Why a claim may not be released, and what tells whether that is so."""
    what = f"the claim of {claim.by} to the savepoint at {savepoint.root} cannot be released"
    if not claim.erases:
        return NotClaimableError(f"{what}: it has begun to delete it"), lambda: is_consumed(savepoint)

    def writes() -> bool:
        replaced, manifest = replaced_in(savepoint), _manifest_of(savepoint)
        return replaced is not None and manifest is not None and replaced.savepoint_id == manifest.header.id

    return NotClaimableError(
        f"{what}: files with the keys may lie there that no manifest names. Run erase history again with this "
        "savepoint and the same keys, which removes them and frees it; or delete the savepoint with --force"
    ), writes
