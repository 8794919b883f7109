"""Encodes and decodes the manifest file of a savepoint; its checksum is verified before it is read."""

from __future__ import annotations

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_table import read_sealed_table, seal_table

__all__ = ["decode_manifest", "encode_manifest", "read_manifest"]


def encode_manifest(manifest: SavepointManifest) -> bytes:
    """Return the file's bytes."""
    return seal_table(manifest.schema(), manifest.batch())


def decode_manifest(data: bytes, where: str) -> SavepointManifest:
    """Decode a manifest file."""
    return read_sealed_table(data, where, SavepointManifest.of, lambda manifest: len(manifest.buckets))


def read_manifest(savepoint: Folder) -> SavepointManifest:
    """Read the manifest of a savepoint."""
    try:
        data = savepoint.get(MANIFEST_NAME)
    except MissingCheckpointError as error:
        raise MissingCheckpointError(
            f"there is no savepoint at {savepoint.root}: it has no {MANIFEST_NAME}. Check the path. An unfinished "
            "savepoint has no manifest, and a job deletes the savepoint that it claimed."
        ) from error
    return decode_manifest(data, savepoint.where(MANIFEST_NAME))
