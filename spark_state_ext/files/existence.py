"""Existence probes: check whether a replica still has what it confirmed, as its root may have been removed."""

from __future__ import annotations

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import CorruptError, MissingCheckpointError
from spark_state_ext.files.checkpoint import read_header
from spark_state_ext.files.folder import Readable

__all__ = ["has_checkpoint", "has_state"]

# How many snapshots in a row may never have arrived; older files are left to clean-up.
_ROUNDS_MAX = 10


def has_checkpoint(files: Readable, ref: CheckpointRef) -> bool:
    """True if a replica has a file of a checkpoint: its delta, or its snapshot if the replica joined there."""
    return _has(files, ref, DELTA) or _has(files, ref, SNAPSHOT)


def has_state(files: Readable, pointer: Pointer, through: CheckpointRef) -> bool:
    """True if a replica has both ends of the files for a state: the newest one, and the one that the deltas start from.

    The newest file alone is not enough: a running query goes on sending deltas to a root that was removed.
    """
    if not has_checkpoint(files, through):
        return False
    line = [entry.ref for entry in pointer.lineage if entry.ref.version <= through.version]
    for _ in range(_ROUNDS_MAX):
        if not line or _has(files, line[0], SNAPSHOT):
            return True
        if not _has(files, line[0], DELTA):
            # A replica that joined late has a snapshot of a later checkpoint, and deltas after it.
            return any(_has(files, ref, SNAPSHOT) for ref in line[1:])
        if line[0].version == 1:
            return True
        # The snapshot is unconfirmed: it is under way or lost.
        try:
            line = [*read_header(files, line[0], DELTA).lineage, *line]
        except CorruptError:
            return True  # The file exists; a later read reports what is wrong with it.
        except MissingCheckpointError:
            return False
    return True


def _has(files: Readable, ref: CheckpointRef, kind: str) -> bool:
    try:
        files.size(file_name(ref, kind))
    except MissingCheckpointError:
        return False
    return True
