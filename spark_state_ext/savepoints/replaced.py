"""The record of what an erasure of keys replaces in a savepoint: ``claim/replaced.json``, there until that is over.

Files that it names and the manifest does not are no part of the savepoint, and may have the keys. Whoever carries the
erasure on removes them, and so does whoever deletes the savepoint: the manifest alone would not lead to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arrow_schemas.checksum import opened_document, readable, sealed_document
from arrow_schemas.lineage import parse_file_name
from arrow_schemas.savepoint import SavepointManifest
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import CLAIM_FOLDER
from spark_state_ext.files.readable import document_in

__all__ = ["REPLACED_NAME", "Replaced", "drop_replaced", "replaced_in"]

REPLACED_NAME = "replaced.json"
_FORMAT = 1
_MEND = (
    "Remove it, and the checkpoint files of the savepoint that its manifest does not name: they may have erased keys"
)


@dataclass(frozen=True)
class Replaced:
    """Files that the manifest names before and after; those that it does not name in the end are to go.

    Parameters
    ----------
    savepoint_id
        Whose.
    files
        Names by bucket.
    """

    savepoint_id: str
    files: Mapping[int, tuple[str, ...]]

    def encode(self) -> bytes:
        """The file's bytes."""
        files = {str(bucket): list(names) for bucket, names in self.files.items()}
        return sealed_document({"format": _FORMAT, "savepoint_id": self.savepoint_id, "files": files})

    @staticmethod
    def decode(data: bytes, where: str) -> Replaced:
        """Read it."""
        with readable(where, "record of what takes the place of a savepoint's files", _MEND):
            fields = opened_document(data, where, _FORMAT, _MEND)
            files = {int(bucket): tuple(map(str, names)) for bucket, names in fields["files"].items()}
            # They are removed by these names.
            if any(parse_file_name(name) is None for names in files.values() for name in names):
                raise ValueError("it names what is no checkpoint file")
            return Replaced(str(fields["savepoint_id"]), files)
        raise AssertionError("unreachable: readable raises what it catches")


def replaced_in(savepoint: Folder) -> Replaced | None:
    """The record that is there; None: no erasure was stopped."""
    return document_in(savepoint.child(CLAIM_FOLDER), REPLACED_NAME, Replaced.decode)


def drop_replaced(
    savepoint: Folder, replaced: Replaced, manifest: SavepointManifest, allowed: Callable[[], None]
) -> None:
    """Remove the files of a record that the manifest does not name, and then the record."""
    named = {(it.operator, it.bucket, file.name) for it in manifest.buckets for file in it.files}
    # The record does not tell the operator. Names have random ids: they are none of another operator's.
    for operator in manifest.header.operators:
        for bucket, names in replaced.files.items():
            files = savepoint.child(operator, str(bucket))
            for name in names:
                if (operator, bucket, name) not in named:
                    allowed()
                    files.remove(name)
    allowed()
    savepoint.child(CLAIM_FOLDER).remove(REPLACED_NAME)
