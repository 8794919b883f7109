"""When a snapshot is due, and the pointer of a snapshot that is not confirmed yet. Pure functions over values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arrow_schemas.pointer import LineageEntry, Pointer
from spark_state_ext.files.horizon import DELTAS_MAX

__all__ = ["SnapshotCadence", "begins_with_parents", "with_unconfirmed_snapshot"]


@dataclass(frozen=True)
class SnapshotCadence:
    """After how many deltas a snapshot is due.

    Parameters
    ----------
    deltas_min
        With fewer deltas, no snapshot is due: loading them is faster than writing a snapshot.
    deltas_max
        With this many deltas, a snapshot is due, however small they are.
    """

    deltas_min: int = 10
    deltas_max: int = DELTAS_MAX

    def is_due(self, lineage: Sequence[LineageEntry], state_bytes: int) -> bool:
        """True if the commit that made this lineage should write a snapshot.

        A snapshot is due when the deltas since the last snapshot are as large as the state itself. Then each row is
        written about twice in total, in snapshots and deltas together, and a restore reads at most about twice the
        state.
        """
        deltas = lineage[1:]
        if len(deltas) < self.deltas_min:
            return False
        return len(deltas) >= self.deltas_max or sum(entry.size_bytes for entry in deltas) >= state_bytes

    def is_overdue(self, lineage: Sequence[LineageEntry]) -> bool:
        """True if a snapshot was due so long ago that the background will not write it."""
        return len(lineage) >= 2 * self.deltas_max


def begins_with_parents(pointer: Pointer) -> bool:
    """True if a rescaled bucket has no snapshot of its own yet, not even an unconfirmed one."""
    return pointer.parents is not None and pointer.lineage[0].ref == pointer.parents


def with_unconfirmed_snapshot(pointer: Pointer) -> Pointer:
    """Return the pointer with its lineage cut to its checkpoint, whose snapshot is expected to arrive."""
    return replace(pointer, lineage=pointer.lineage[-1:])
