"""Whether a replica still has what it confirmed, as far as a few questions tell: somebody may have removed its root."""

from __future__ import annotations

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import CorruptError, MissingCheckpointError
from spark_state_ext.files.checkpoint import read_header
from spark_state_ext.files.folder import Readable

__all__ = ["has_checkpoint", "has_state"]

# Snapshots that never arrived, in a row; what lies further back is left to clean-up.
_ROUNDS_MAX = 10


def has_checkpoint(files: Readable, ref: CheckpointRef) -> bool:
    """Whether a replica has a file of a checkpoint: its delta, or where the replica joined then, its snapshot."""
    return _has(files, ref, DELTA) or _has(files, ref, SNAPSHOT)


def has_state(files: Readable, pointer: Pointer, through: CheckpointRef) -> bool:
    """Whether a replica has both ends of what leads to a state: its newest file, and that from which deltas go on.

    The newest alone would not tell that a root was removed under a running query, which goes on to send deltas there.
    """
    if not has_checkpoint(files, through):
        return False
    line = [entry.ref for entry in pointer.lineage if entry.ref.version <= through.version]
    for _ in range(_ROUNDS_MAX):
        if not line or _has(files, line[0], SNAPSHOT):
            return True
        if not _has(files, line[0], DELTA):
            # A replica that joined late has a snapshot of a later checkpoint, and deltas from there on.
            return any(_has(files, ref, SNAPSHOT) for ref in line[1:])
        if line[0].version == 1:
            return True
        # Its snapshot is unconfirmed, and is on its way or lost.
        try:
            line = [*read_header(files, line[0], DELTA).lineage, *line]
        except CorruptError:
            return True  # it is there, and whoever needs it says what is wrong with it
        except MissingCheckpointError:
            return False
    return True


def _has(files: Readable, ref: CheckpointRef, kind: str) -> bool:
    try:
        files.size(file_name(ref, kind))
    except MissingCheckpointError:
        return False
    return True
