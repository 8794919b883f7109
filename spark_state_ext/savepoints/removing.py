"""Deleting a savepoint: what its manifest names, what a stopped erasure of keys has left of it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import CLAIM_FOLDER
from spark_state_ext.savepoints.replaced import drop_replaced, replaced_in

__all__ = ["delete_files"]


def delete_files(
    savepoint: Folder,
    manifest: SavepointManifest,
    still_ours: Callable[[bool], None] = lambda last: None,
    operator: str | None = None,
) -> int:
    """Delete files of buckets first, and the manifest last, so that who is stopped knows what is left to do.

    What a stopped erasure has left goes before all else, as the manifest does not lead there.
    """
    for bucket in manifest.buckets:
        # All of them before the first file goes.
        savepoint.child(bucket.operator, str(bucket.bucket)).refuse_links()
    replaced = replaced_in(savepoint)
    if replaced is not None and replaced.savepoint_id == manifest.header.id:
        drop_replaced(savepoint, replaced, manifest, lambda: still_ours(False))
        savepoint.remove_if_empty(CLAIM_FOLDER)
    deleted = 0
    others = [it for it in manifest.buckets if operator not in (None, it.operator)]
    for bucket in manifest.buckets:
        if operator not in (None, bucket.operator):
            continue
        folder = savepoint.child(bucket.operator, str(bucket.bucket))
        for file in bucket.files:
            still_ours(False)
            folder.remove(file.name)
            deleted += 1
        savepoint.remove_if_empty(bucket.operator, str(bucket.bucket))
    for name in manifest.header.operators:
        savepoint.remove_if_empty(name)
    for bucket in others:
        folder = savepoint.child(bucket.operator, str(bucket.bucket))
        if any(folder.exists(file.name) for file in bucket.files):
            return deleted
    still_ours(True)
    savepoint.remove(MANIFEST_NAME)
    savepoint.remove_if_empty()
    return deleted
