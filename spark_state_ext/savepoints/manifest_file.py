"""The manifest of a savepoint as a file: written last, exclusively; read only after its checksum was right."""

from __future__ import annotations

import logging

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, StateError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_table import sealed_table, unsealed_table
from spark_state_ext.savepoints.copying import refuse_incomplete
from spark_state_ext.savepoints.placement import refuse_in_state

__all__ = [
    "decode_manifest",
    "encode_manifest",
    "finish_savepoint",
    "read_manifest",
    "refuse_existing",
    "write_manifest",
]

_LOGGER = logging.getLogger("spark_state_ext")


def encode_manifest(manifest: SavepointManifest) -> bytes:
    """The file's bytes."""
    return sealed_table(manifest.schema(), manifest.batch())


def decode_manifest(data: bytes, where: str) -> SavepointManifest:
    """Read a manifest."""
    return unsealed_table(data, where, SavepointManifest.of, lambda found: len(found.buckets))


def write_manifest(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Make a savepoint of the files that lie in a folder.

    Of several who do so for one folder at once, one succeeds. Each other one removes its files that are not in that
    savepoint.
    """
    if not savepoint.create(MANIFEST_NAME, encode_manifest(manifest)):
        _remove_others(savepoint, manifest)
        raise _there_is_one(savepoint)


def finish_savepoint(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Make a savepoint of the files that lie in a folder, after a look at whether all are there."""
    try:
        refuse_incomplete(savepoint, manifest)
    except CorruptFileError:
        # One that lost the folder may have removed a file that this one has found there.
        if not savepoint.exists(MANIFEST_NAME):
            raise
    write_manifest(savepoint, manifest)


def _remove_others(savepoint: Folder, lost: SavepointManifest) -> None:
    """Remove the files of a savepoint that lost its folder to another one, but for those that both have."""
    try:
        named = _files_of(read_manifest(savepoint))
    except StateError as error:
        # What belongs to the other savepoint is not known, so nothing is removed.
        _LOGGER.warning("files of a savepoint that could not be made stay at %s: %s", savepoint.root, error)
        return
    for operator, bucket, name in sorted(_files_of(lost) - named):
        savepoint.child(operator, bucket).remove(name)
    for saved in lost.buckets:
        savepoint.remove_if_empty(saved.operator, str(saved.bucket))
    for operator in lost.header.operators:
        savepoint.remove_if_empty(operator)


def _files_of(manifest: SavepointManifest) -> set[tuple[str, str, str]]:
    """Operator, bucket and name of each file that a manifest names."""
    return {(it.operator, str(it.bucket), file.name) for it in manifest.buckets for file in it.files}


def refuse_existing(savepoint: Folder) -> None:
    """Refuse a folder in which there is a savepoint, or anything else, or which lies in the root of a query's state."""
    refuse_in_state(savepoint)
    names = savepoint.names()
    if MANIFEST_NAME in names:
        raise _there_is_one(savepoint)
    if names:
        raise UsageError(
            f"{savepoint.root} is not empty ({', '.join(names[:3])}): a savepoint needs a folder of its own. Name one "
            "that does not exist yet, or remove what a savepoint that failed has left there."
        )


def _there_is_one(savepoint: Folder) -> UsageError:
    return UsageError(f"there is a savepoint at {savepoint.root} already: name a folder that does not exist yet")


def read_manifest(savepoint: Folder) -> SavepointManifest:
    """The manifest of a savepoint."""
    try:
        data = savepoint.get(MANIFEST_NAME)
    except MissingCheckpointError as error:
        raise MissingCheckpointError(
            f"there is no savepoint at {savepoint.root}: it has no {MANIFEST_NAME}. Look at the path; a savepoint that "
            "was not finished has none, and one that a job has claimed is deleted by it."
        ) from error
    return decode_manifest(data, savepoint.where(MANIFEST_NAME))
