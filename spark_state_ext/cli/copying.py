"""Copying a savepoint by its manifest, which is written last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arrow_schemas.savepoint import SavedFile, SavepointManifest
from spark_state_ext.engine.folders import scratch_folder
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.claims import refuse_claimed
from spark_state_ext.savepoints.copying import How, copied
from spark_state_ext.savepoints.manifest_file import finish_savepoint, refuse_existing
from spark_state_ext.worker.threads import side_by_side

__all__ = ["CopiedSavepoint", "copy_savepoint"]

_PARALLEL_MAX = 8


@dataclass(frozen=True)
class CopiedSavepoint:
    """A savepoint that was copied.

    Parameters
    ----------
    files, size_bytes
        How many files, and their bytes.
    duplicated
        How many of them were linked, or copied by the store.
    """

    files: int
    size_bytes: int
    duplicated: int


def copy_savepoint(
    source: Folder, manifest: SavepointManifest, target: Folder, advance: Callable[[int], None] = lambda size: None
) -> CopiedSavepoint:
    """Copy a savepoint. What a copy that failed has left is no savepoint."""
    refuse_existing(target)
    refuse_claimed(source)
    scratch = scratch_folder(None)
    named = [(it.operator, str(it.bucket), file) for it in manifest.buckets for file in it.files]

    def work(it: tuple[str, str, SavedFile]) -> How:
        operator, bucket, file = it
        how = copied(source.child(operator, bucket), file, target.child(operator, bucket), scratch)
        advance(file.size_bytes)
        return how

    how = side_by_side("copy", _PARALLEL_MAX, work, named) if named else []
    for bucket in manifest.buckets:
        target.child(bucket.operator, str(bucket.bucket)).sync()
    # A query that claimed it meanwhile may have begun to delete it; what was copied is whole all the same.
    finish_savepoint(target, manifest)
    sizes = [file.size_bytes for *_, file in named]
    return CopiedSavepoint(len(sizes), sum(sizes), sum(it is How.DUPLICATED for it in how))
