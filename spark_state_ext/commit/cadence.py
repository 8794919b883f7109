"""When a snapshot is due, and what a pointer says of it before it is confirmed. Pure functions over values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arrow_schemas.pointer import LineageEntry, Pointer
from spark_state_ext.files.horizon import DELTAS_MAX

__all__ = [
    "DELTAS_MAX",
    "DELTAS_MIN",
    "begins_with_parents",
    "with_unconfirmed_snapshot",
    "snapshot_due",
    "snapshot_overdue",
]

# Few deltas are quicker to load than a snapshot is to write.
DELTAS_MIN = 10


def snapshot_due(lineage: Sequence[LineageEntry], state_bytes: int) -> bool:
    """Whether the commit that made this lineage should write a snapshot.

    A snapshot is due when the deltas since the last one weigh as much as the state itself: each row is then written
    about twice over its life in snapshots and deltas together, and a restore reads at most about twice the state.
    """
    deltas = lineage[1:]
    if len(deltas) < DELTAS_MIN:
        return False
    return len(deltas) >= DELTAS_MAX or sum(entry.size_bytes for entry in deltas) >= state_bytes


def snapshot_overdue(lineage: Sequence[LineageEntry]) -> bool:
    """Whether a snapshot was due so long ago that nobody in the background will write it."""
    return len(lineage) >= 2 * DELTAS_MAX


def begins_with_parents(pointer: Pointer) -> bool:
    """Whether a rescaled bucket has no snapshot of its own yet, nor one under way."""
    return pointer.parents is not None and pointer.lineage[0].ref == pointer.parents


def with_unconfirmed_snapshot(pointer: Pointer) -> Pointer:
    """The pointer with its lineage pruned, presuming that a snapshot of its checkpoint will arrive."""
    return replace(pointer, lineage=pointer.lineage[-1:])
