"""When a snapshot is due, and the pointer of a snapshot that is not confirmed yet. Pure functions over values."""

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

# Loading fewer deltas than this is faster than writing a snapshot.
DELTAS_MIN = 10


def snapshot_due(lineage: Sequence[LineageEntry], state_bytes: int) -> bool:
    """True if the commit that made this lineage should write a snapshot.

    A snapshot is due when the deltas since the last snapshot are as large as the state itself. Then each row is written
    about twice in total, in snapshots and deltas together, and a restore reads at most about twice the state.
    """
    deltas = lineage[1:]
    if len(deltas) < DELTAS_MIN:
        return False
    return len(deltas) >= DELTAS_MAX or sum(entry.size_bytes for entry in deltas) >= state_bytes


def snapshot_overdue(lineage: Sequence[LineageEntry]) -> bool:
    """True if a snapshot was due so long ago that the background will not write it."""
    return len(lineage) >= 2 * DELTAS_MAX


def begins_with_parents(pointer: Pointer) -> bool:
    """True if a rescaled bucket has no snapshot of its own yet, not even an unconfirmed one."""
    return pointer.parents is not None and pointer.lineage[0].ref == pointer.parents


def with_unconfirmed_snapshot(pointer: Pointer) -> Pointer:
    """Return the pointer with its lineage cut to its checkpoint, whose snapshot is expected to arrive."""
    return replace(pointer, lineage=pointer.lineage[-1:])
