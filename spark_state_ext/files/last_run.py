"""Which of a query's runs was the last one, written down before its files are written anew.

Files tell it by when they were written, and a file that is written anew is younger than all of them. So who does that
says before which run was the last (`docs/design/007b-erasing.md`). Once another run has written a file, that one is.
"""

from __future__ import annotations

from dataclasses import dataclass

from arrow_schemas.checksum import opened_document, readable, sealed_document
from arrow_schemas.erase import ERASE_FOLDER
from arrow_schemas.lineage import CheckpointRef
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LAST_RUN_NAME
from spark_state_ext.files.readable import document_in

__all__ = ["LastRun", "last_run_of", "note_last_run"]

_FORMAT = 1
_MEND = "Remove it, and run the query for two batches before you read its state or erase again."


@dataclass(frozen=True)
class LastRun:
    """The last run that had written files.

    Parameters
    ----------
    runs
        All runs that had, by Spark's ids.
    bucket, ref
        The checkpoint that was written last, which is one of the last run.
    """

    runs: frozenset[str]
    bucket: int
    ref: CheckpointRef

    def encode(self) -> bytes:
        """The file's bytes."""
        fields = {"format": _FORMAT, "runs": sorted(self.runs), "bucket": self.bucket}
        return sealed_document({**fields, "version": self.ref.version, "id": self.ref.id})

    @staticmethod
    def decode(data: bytes, where: str) -> LastRun:
        """Read it."""
        with readable(where, "record of a query's last run", _MEND):
            fields = opened_document(data, where, _FORMAT, _MEND)
            return LastRun(
                frozenset(str(it) for it in fields["runs"]),
                int(fields["bucket"]),
                CheckpointRef(fields["version"], fields["id"]),
            )
        raise AssertionError("unreachable: readable raises what it catches")


def note_last_run(query_folder: Folder, last: LastRun) -> None:
    """Write it down, in the place of what is there."""
    query_folder.child(ERASE_FOLDER).put(LAST_RUN_NAME, last.encode())


def last_run_of(query_folder: Folder) -> LastRun | None:
    """What was written down; None: nothing, as no file was written anew."""
    return document_in(query_folder.child(ERASE_FOLDER), LAST_RUN_NAME, LastRun.decode)
