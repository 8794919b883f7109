"""What is known of a savepoint, and what may be done with it (`docs/operating/savepoints.md`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.cli.roots import operators_below
from spark_state_ext.cli.targets import absolute, given_folder
from spark_state_ext.errors import NotClaimableError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease_log import LEASE_FOLDER
from spark_state_ext.ownership.release import release_query_folder
from spark_state_ext.savepoints.claims import CLAIM_FOLDER, claim_of, drop_claim, release_claim
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.removing import delete_files
from spark_state_ext.savepoints.status import Started, Verdict, claimed, judged, started_below

__all__ = ["Status", "delete", "release", "status_of"]


@dataclass(frozen=True)
class Status:
    """What is known of a savepoint.

    Parameters
    ----------
    manifest
        What is in it.
    started
        Queries that were started from it.
    verdict
        Whether it may be deleted.
    """

    manifest: SavepointManifest
    started: tuple[Started, ...]
    verdict: Verdict


def status_of(savepoint: Folder, roots: Sequence[str], storage_options: Mapping[str, Any]) -> Status:
    """Look at a savepoint, and below roots for queries that were started from it."""
    folders = [_root(root, storage_options) for root in roots]
    manifest = read_manifest(savepoint)
    started = tuple(it for root in folders for it in started_below(root, savepoint.root, manifest.header.id))
    claim, consumed = claimed(savepoint)
    looked_in = [root.root for root in folders]
    return Status(manifest, started, judged(started, claim, consumed, looked_in, manifest.header.operators))


def _root(path: str, storage_options: Mapping[str, Any]) -> Folder:
    """A root in which somebody has state: below a wrong one nobody would be found."""
    root = given_folder(absolute(path), storage_options)
    operators_below(root)
    return root


def release(folder: Folder, force: bool) -> str:
    """Free a claim; says whose it was, and which claim to a query folder counts again."""
    names = set(folder.names())
    if LEASE_FOLDER in names and names.isdisjoint({MANIFEST_NAME, CLAIM_FOLDER}):
        freed = release_query_folder(folder, force=force)
        return freed.by if freed.instead_of is None else f"{freed.by}; the claim {freed.instead_of} counts again"
    return release_claim(folder).by


def delete(savepoint: Folder, roots: Sequence[str], storage_options: Mapping[str, Any], force: bool) -> int:
    """Delete what the manifest of a savepoint names; how many checkpoint files that were."""
    if MANIFEST_NAME not in savepoint.names():
        for root in roots:
            _root(root, storage_options)
        raise UsageError(
            f"{savepoint.root} has no {MANIFEST_NAME}, so what belongs to it is not known: remove the folder by hand "
            "where a savepoint failed there"
        )
    status = status_of(savepoint, roots, storage_options)
    if not status.verdict.deletable and not force:
        raise NotClaimableError(
            f"{savepoint.root} is not deleted: {status.verdict.because} (--force deletes it all the same)"
        )
    deleted = delete_files(savepoint, status.manifest)
    claim = claim_of(savepoint)
    if claim is not None and claim.erases:
        # Of a query's claim the query itself makes an end. There is nothing left that keys could be erased from.
        drop_claim(savepoint)
        savepoint.remove_if_empty()
    return deleted
