"""The record of the files that an erasure of keys replaces in a savepoint: ``claim/replaced.json``.

It exists until the erasure is finished. Files that it names and the manifest does not are not part of the savepoint,
and may have the keys. Continuing the erasure removes them, and so does deleting the savepoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arrow_schemas.checksum import open_document, report_damage, seal_document
from arrow_schemas.lineage import parse_file_name
from arrow_schemas.savepoint import SavepointManifest
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import CLAIM_FOLDER
from spark_state_ext.files.readable import read_document

__all__ = ["REPLACED_NAME", "ReplacedFiles", "drop_replaced", "read_replaced"]

REPLACED_NAME = "replaced.json"
_FORMAT = 1
_MEND = "Remove it, and the checkpoint files of the savepoint that are not in its manifest: they may have erased keys"


@dataclass(frozen=True)
class ReplacedFiles:
    """The files in the manifest before and after an erasure; those not in the final manifest are to be removed.

    Parameters
    ----------
    savepoint_id
        Id of the savepoint.
    files
        Names of files by bucket.
    """

    savepoint_id: str
    files: Mapping[int, tuple[str, ...]]

    def encode(self) -> bytes:
        """Return the file's bytes."""
        files = {str(bucket): list(names) for bucket, names in self.files.items()}
        return seal_document({"format": _FORMAT, "savepoint_id": self.savepoint_id, "files": files})

    @staticmethod
    def decode(data: bytes, where: str) -> ReplacedFiles:
        """Decode the record."""
        with report_damage(where, "record of a savepoint's replaced files", _MEND):
            fields = open_document(data, where, _FORMAT, _MEND)
            files = {int(bucket): tuple(map(str, names)) for bucket, names in fields["files"].items()}
            # Files with these names are deleted, so only names of checkpoint files are accepted.
            if any(parse_file_name(name) is None for names in files.values() for name in names):
                raise ValueError("it has a name that is not a checkpoint file's")
            return ReplacedFiles(str(fields["savepoint_id"]), files)
        raise AssertionError("unreachable: readable raises what it catches")


def read_replaced(savepoint: Folder) -> ReplacedFiles | None:
    """Read the record; None: no erasure was stopped."""
    return read_document(savepoint.child(CLAIM_FOLDER), REPLACED_NAME, ReplacedFiles.decode)


def drop_replaced(
    savepoint: Folder, replaced: ReplacedFiles, manifest: SavepointManifest, check_allowed: Callable[[], None]
) -> None:
    """Remove the files of a record that are not in the manifest, then the record; `check_allowed` raises to stop."""
    manifest_files = {
        (bucket.operator, bucket.bucket, file.name) for bucket in manifest.buckets for file in bucket.files
    }
    # The record does not name the operator. File names have random ids, so they match one operator only.
    for operator in manifest.header.operators:
        for bucket, names in replaced.files.items():
            files = savepoint.child(operator, str(bucket))
            for name in names:
                if (operator, bucket, name) not in manifest_files:
                    check_allowed()
                    files.remove(name)
    check_allowed()
    savepoint.child(CLAIM_FOLDER).remove(REPLACED_NAME)
