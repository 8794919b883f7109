"""What the next clean-up of a query folder would do, by files alone or by the pointers in Spark's checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from spark_state_ext.cli.bucket_files import checkpoint_files, headers_of, suggested_pointer
from spark_state_ext.errors import CorruptError, MissingError
from spark_state_ext.files.explained import Explanation, explained
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.retention import Decision
from spark_state_ext.ownership.holds import HOLDS_FOLDER

__all__ = ["RETAINED", "BucketCleanUp", "clean_up_of", "holders"]

# Spark's own default of spark.sql.streaming.minBatchesToRetain.
RETAINED = 100


@dataclass(frozen=True)
class BucketCleanUp:
    """What the next clean-up would do in a bucket's folder.

    Parameters
    ----------
    bucket, folder
        Which one.
    entries
        Its files.
    explanation
        What becomes of them.
    pointer
        What that goes by.
    """

    bucket: int
    folder: Folder
    entries: list[Entry]
    explanation: Explanation
    pointer: Pointer


def clean_up_of(
    bucket: int, folder: Folder, operator: OperatorFile, batches_retained: int, pointers: Mapping[int, Pointer] | None
) -> BucketCleanUp:
    """Decide for a bucket."""
    entries = folder.entries()
    pointer = (
        suggested_pointer(checkpoint_files([(bucket, folder)]), operator, bucket, batches_retained)
        if pointers is None
        else _reached(pointers.get(bucket), operator, bucket, entries)
    )
    try:
        found = explained(entries, pointer, batches_retained, time.time(), headers_of(folder, entries))
    except (CorruptError, MissingError) as error:
        reason = f"nothing is deleted here, as {error}"
        found = Explanation(Decision(doubt=str(error)), {entry.name: reason for entry in entries})
    return BucketCleanUp(bucket, folder, entries, found, pointer)


def _reached(pointer: Pointer | None, operator: OperatorFile, bucket: int, entries: list[Entry]) -> Pointer:
    """The pointer back to its newest checkpoint that has a file here: later ones are in Spark's state only."""
    if pointer is None:
        return Pointer(operator.operator, bucket, operator.buckets, operator.schema_id, -1, None)
    names = {entry.name.rsplit(".", 2)[0] for entry in entries}
    lineage = list(pointer.lineage)
    while len(lineage) > 1 and str(lineage[-1].ref) not in names:
        lineage.pop()
    parent = pointer.parent if len(lineage) == len(pointer.lineage) else None
    return replace(pointer, lineage=tuple(lineage), parent=parent)


def holders(query_folder: Folder) -> list[str]:
    """Names of the holds in a query folder: nothing is deleted while one of them lives."""
    return [entry.name for entry in query_folder.child(HOLDS_FOLDER).entries() if not entry.folder]
