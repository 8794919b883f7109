"""Deletes a savepoint: only the files in its manifest, and those that a stopped erasure of keys left behind."""

from __future__ import annotations

from collections.abc import Callable

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import CLAIM_FOLDER
from spark_state_ext.savepoints.replaced_files import drop_replaced, read_replaced

__all__ = ["delete_files"]


def delete_files(
    savepoint: Folder,
    manifest: SavepointManifest,
    check_claim: Callable[[bool], None] = lambda last: None,
    operator: str | None = None,
) -> int:
    """Delete a savepoint's files and return their number; `operator` limits this to one operator.

    The manifest is deleted last, so that a stopped deletion can be repeated; files that a stopped erasure left behind
    are deleted first, because they are not in the manifest.
    """
    for bucket in manifest.buckets:
        # Checked for all buckets before the first file is deleted.
        savepoint.child(bucket.operator, str(bucket.bucket)).refuse_links()
    replaced = read_replaced(savepoint)
    if replaced is not None and replaced.savepoint_id == manifest.header.id:
        drop_replaced(savepoint, replaced, manifest, lambda: check_claim(False))
        savepoint.remove_if_empty(CLAIM_FOLDER)
    deleted = 0
    other_buckets = [bucket for bucket in manifest.buckets if operator not in (None, bucket.operator)]
    for bucket in manifest.buckets:
        if operator not in (None, bucket.operator):
            continue
        folder = savepoint.child(bucket.operator, str(bucket.bucket))
        for file in bucket.files:
            check_claim(False)
            folder.remove(file.name)
            deleted += 1
        savepoint.remove_if_empty(bucket.operator, str(bucket.bucket))
    for name in manifest.header.operators:
        savepoint.remove_if_empty(name)
    for bucket in other_buckets:
        folder = savepoint.child(bucket.operator, str(bucket.bucket))
        if any(folder.exists(file.name) for file in bucket.files):
            return deleted
    check_claim(True)
    savepoint.remove(MANIFEST_NAME)
    savepoint.remove_if_empty()
    return deleted
