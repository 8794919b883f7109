"""The files of a savepoint for tests that do not read its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from core_support import first_pointer

from arrow_schemas import CheckpointRef, LineageEntry, OperatorFile
from arrow_schemas.savepoint import NATIVE, SavedBucket, SavedFile, SavepointHeader, SavepointManifest
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.writer import write_manifest

__all__ = ["ID", "SCHEMA", "savepoint_at"]

ID = "12" * 16
SCHEMA = '{"fields": [{"metadata": {}, "name": "n", "nullable": true, "type": "long"}], "type": "struct"}'


def savepoint_at(path: Path) -> Folder:
    """Write a savepoint of two buckets with one file each."""
    folder = Folder(str(path))
    buckets = []
    for bucket in range(2):
        ref = CheckpointRef(3, f"{bucket:032x}")
        file = SavedFile(f"{ref}.snapshot.arrow", 4, "blkcrcs=" + "0" * 32)
        folder.child("counts", str(bucket)).put(file.name, b"rows")
        pointer = replace(first_pointer(bucket), buckets=2, lineage=(LineageEntry(ref, 4, 1),), rows=5)
        buckets.append(SavedBucket("counts", bucket, pointer, (file,)))
    operators = {"counts": OperatorFile("counts", "query", 2, SCHEMA, SCHEMA)}
    header = SavepointHeader(ID, NATIVE, 1_700_000_000_000, operators, "0.2.0", "query", 7)
    write_manifest(folder, SavepointManifest(header, tuple(buckets)))
    return folder
