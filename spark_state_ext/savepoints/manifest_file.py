"""The manifest of a savepoint as a file: read only after its checksum was right."""

from __future__ import annotations

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_table import sealed_table, unsealed_table

__all__ = ["decode_manifest", "encode_manifest", "read_manifest"]


def encode_manifest(manifest: SavepointManifest) -> bytes:
    """The file's bytes."""
    return sealed_table(manifest.schema(), manifest.batch())


def decode_manifest(data: bytes, where: str) -> SavepointManifest:
    """Read a manifest."""
    return unsealed_table(data, where, SavepointManifest.of, lambda found: len(found.buckets))


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
