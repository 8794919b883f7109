"""The manifest of a savepoint as a file: written last, exclusively; read only after its checksum was right."""

from __future__ import annotations

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.errors import MissingCheckpointError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_table import sealed_table, unsealed_table
from spark_state_ext.savepoints.placement import refuse_in_state

__all__ = ["decode_manifest", "encode_manifest", "read_manifest", "refuse_existing", "write_manifest"]


def encode_manifest(manifest: SavepointManifest) -> bytes:
    """The file's bytes."""
    return sealed_table(manifest.schema(), manifest.batch())


def decode_manifest(data: bytes, where: str) -> SavepointManifest:
    """Read a manifest.

    Raises
    ------
    CorruptFileError
        When it is damaged, or none.
    VersionSkewError
        When a newer release wrote it.
    """
    return unsealed_table(data, where, SavepointManifest.of, lambda found: len(found.buckets))


def write_manifest(savepoint: Folder, manifest: SavepointManifest) -> None:
    """Make a savepoint of the files that lie in a folder.

    Raises
    ------
    UsageError
        When there is another savepoint.
    StorageError
        When it could not be written.
    """
    if not savepoint.create(MANIFEST_NAME, encode_manifest(manifest)):
        raise _there_is_one(savepoint)


def refuse_existing(savepoint: Folder) -> None:
    """Refuse a folder in which there is a savepoint, or anything else, or which lies in the root of a query's state.

    Raises
    ------
    UsageError
        When there is.
    """
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
    """The manifest of a savepoint.

    Raises
    ------
    MissingCheckpointError
        When there is none.
    CorruptFileError, VersionSkewError
        When it cannot be read.
    StorageError
        When the store fails.
    """
    try:
        data = savepoint.get(MANIFEST_NAME)
    except MissingCheckpointError as error:
        raise MissingCheckpointError(
            f"there is no savepoint at {savepoint.root}: it has no {MANIFEST_NAME}. Look at the path; a savepoint that "
            "was not finished has none, and one that a job has claimed is deleted by it."
        ) from error
    return decode_manifest(data, savepoint.where(MANIFEST_NAME))
