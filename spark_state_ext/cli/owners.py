"""Whose a file is, and what keeps it: by where it lies and what it is called."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arrow_schemas.erase import ERASE_FOLDER, parse_erase_name
from arrow_schemas.lineage import parse_file_name
from arrow_schemas.operator import parse_operator_file_name
from arrow_schemas.partitions import parse_partitions_name
from arrow_schemas.savepoint import MANIFEST_NAME
from spark_state_ext.cli.clean_ups import clean_up_of, holders
from spark_state_ext.cli.targets import query_folder_at
from spark_state_ext.files.folder import Folder, is_temporary
from spark_state_ext.files.operator_catalog import SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.ownership.claim_notes import CLAIMS_FOLDER
from spark_state_ext.ownership.holds import HOLDS_FOLDER
from spark_state_ext.ownership.lease_log import LEASE_FOLDER
from spark_state_ext.rescale.parents import PARENTS_FOLDER
from spark_state_ext.savepoints.claims import CLAIM_FOLDER, claim_of
from spark_state_ext.savepoints.manifest_file import read_manifest

__all__ = ["Owned", "owner_of"]

GOES, STAYS = "goes", "stays"
_YOU = "you"


@dataclass(frozen=True)
class Owned:
    """Whose a file is.

    Parameters
    ----------
    kind
        What it is.
    owner
        Who may delete it.
    does
        Whether the next clean-up deletes it: ``"goes"`` or ``"stays"``.
    why
        A sentence.
    """

    kind: str
    owner: str
    does: str
    why: str


def owner_of(folder: Folder, name: str, storage_options: Mapping[str, Any], batches_retained: int) -> Owned:
    """Find out whose a file is."""
    above = _above(folder, storage_options)
    if name == MANIFEST_NAME:
        return Owned("manifest", _YOU, STAYS, "without it there is no savepoint here; savepoint delete removes it last")
    if folder.name == CLAIM_FOLDER and MANIFEST_NAME in above.names():
        return _of_claim(above)
    if PARENTS_FOLDER in (folder.name, above.name):
        query = above if folder.name == PARENTS_FOLDER else _above(above, storage_options)
        why = "the query was rescaled, and its buckets begin with it; the query removes it when it needs it no more"
        return _of_query(query, "file of a parent", why)
    if parse_file_name(name) is not None or is_temporary(name):
        return _in_bucket(folder, name, storage_options, batches_retained)
    if parse_operator_file_name(name) is not None:
        return _of_query(folder, "operator file", "every start of the query reads it")
    if parse_partitions_name(name) is not None:
        return _of_query(folder, "assignment of partitions", "every start of the query reads the last one")
    if folder.name == LEASE_FOLDER or name == "lease.json":
        query = folder if name == "lease.json" else above
        return _of_query(query, "lease", "it says which run of the query may write here; renewing it removes old ones")
    if folder.name == HOLDS_FOLDER:
        why = "somebody copies from the query folder; it goes when that ends, or was not renewed for ten minutes"
        return _of_query(above, "hold", why)
    if folder.name == ERASE_FOLDER and (parsed := parse_erase_name(name)) is not None:
        return _of_erasure(above, done=parsed[1])
    if folder.name == CLAIMS_FOLDER and name.endswith(".json"):
        why = "it says what became of a claim to the folder, and which one that replaced; savepoint release reads it"
        return _of_query(above, "note of a claim", why)
    if SPILL_FOLDER in (folder.name, above.name):
        why = "rows on their way through a batch: a later batch removes it, or after a day"
        return Owned("spill file", "the query", GOES, why)
    if folder.name == STARTING_FOLDER:
        return Owned("record of a first batch", "the query", GOES, "a later batch removes it after 30 days")
    if name in ("start.json", "detached.json", "left_behind.json") or name.startswith("held-"):
        return _of_query(folder, "record of the query's start", "it tells what the query was started from")
    return Owned("file", _YOU, STAYS, "it is none of ours, and in a bucket's folder it stops every clean-up")


def _in_bucket(folder: Folder, name: str, storage_options: Mapping[str, Any], batches_retained: int) -> Owned:
    parsed = parse_file_name(name)
    kind = "temporary file" if parsed is None else f"{parsed[1]} file"
    above = _above(folder, storage_options)
    savepoint = _above(above, storage_options)
    if MANIFEST_NAME in savepoint.names():
        return _in_savepoint(savepoint, above.name, folder.name, name, kind)
    operator = query_folder_at(above)
    held_by = holders(above)
    found = clean_up_of(int(folder.name) if folder.name.isdecimal() else 0, folder, operator, batches_retained, None)
    why = found.explanation.reasons[name]
    does = GOES if found.explanation.goes(name) else STAYS
    if held_by and does == GOES:
        return Owned(kind, f"the query at {above.root}", STAYS, f"somebody copies from the query folder: {held_by[0]}")
    return Owned(kind, f"the query at {above.root}", does, why)


def _in_savepoint(savepoint: Folder, operator: str, bucket: str, name: str, kind: str) -> Owned:
    manifest = read_manifest(savepoint)
    named = any(
        file.name == name
        for it in manifest.buckets
        if (it.operator, str(it.bucket)) == (operator, bucket)
        for file in it.files
    )
    claim = claim_of(savepoint)
    owner = _YOU if claim is None else f"the query at {claim.by}"
    if not named:
        return Owned(
            kind, _YOU, STAYS, f"it lies in the savepoint at {savepoint.root}, whose manifest does not name it"
        )
    return Owned(kind, owner, STAYS, f"the savepoint {manifest.header.id} at {savepoint.root} needs it")


def _of_claim(savepoint: Folder) -> Owned:
    claim = claim_of(savepoint)
    by = "a query" if claim is None else f"the query at {claim.by}"
    return Owned("claim", by, STAYS, f"{by} owns the savepoint, and deletes it; savepoint release frees it")


def _of_erasure(query_folder: Folder, *, done: bool) -> Owned:
    if done:
        return _of_query(query_folder, "record of an erase request", "without it the request's number is given again")
    why = "the keys to erase: the query removes it once the request is done and its batches are not retained any more"
    return _of_query(query_folder, "erase request", why)


def _of_query(query_folder: Folder, kind: str, why: str) -> Owned:
    return Owned(kind, f"the query at {query_folder.root}", STAYS, why)


def _above(folder: Folder, storage_options: Mapping[str, Any]) -> Folder:
    """The folder that one lies in; the same where there is none above it."""
    root = folder.root.rstrip("/")
    above = posixpath.dirname(root) or posixpath.dirname(os.path.abspath(root))
    if not above or above.endswith(":/"):
        return folder
    return Folder(above, storage_options)
