"""Decisions about lineage: when to write a snapshot, what to try to load. Pure functions over values."""

from __future__ import annotations

from collections.abc import Sequence

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef
from arrow_schemas.pointer import LineageEntry

__all__ = ["files_to_try", "snapshot_due"]

# Few deltas are quicker to load than a snapshot is to write.
DELTAS_MIN = 10
# And however small they are, so many files make a restore slow and the pointer long.
DELTAS_MAX = 100


def snapshot_due(lineage: Sequence[LineageEntry], state_bytes: int) -> bool:
    """Whether the commit that made this lineage should write a snapshot.

    A snapshot is due when the deltas since the last one weigh as much as the state itself: each row is then written
    about twice over its life in snapshots and deltas together, and a restore reads at most about twice the state.

    Parameters
    ----------
    lineage
        Checkpoints since the last snapshot, that one first.
    state_bytes
        Bytes of the whole state, as runs.
    """
    deltas = lineage[1:]
    if len(deltas) < DELTAS_MIN:
        return False
    return len(deltas) >= DELTAS_MAX or sum(entry.size_bytes for entry in deltas) >= state_bytes


def files_to_try(ref: CheckpointRef, lineage: Sequence[LineageEntry]) -> tuple[str, ...]:
    """Kinds of file that can stand in for a missing run, the likeliest first.

    Inside the pointer's lineage a delta is wanted. At its beginning a snapshot is presumed; when that is missing or
    damaged the delta of the same checkpoint leads further back (SPARK-49374), to a place the pointer does not name,
    where again a snapshot is the likelier.
    """
    inside = {entry.ref for entry in lineage[1:]}
    return (DELTA, SNAPSHOT) if ref in inside else (SNAPSHOT, DELTA)
