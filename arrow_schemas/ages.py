"""When a bucket's checkpoints were made: a part of pointers if removed keys must be erased within a given time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Ages"]


@dataclass(frozen=True)
class Ages:
    """When a bucket's checkpoints were made. All times are Spark's batch times, in milliseconds since 1970.

    Parameters
    ----------
    window_ms
        How far back a query may go, in milliseconds.
    newest_ms
        When the committed checkpoint was made; 0 if unknown.
    snapshot_ms
        When the last snapshot began, or the waiting for the next one.
    snapshots_wanted
        How many more snapshots it takes until the bucket's files have no removed rows (`files.erasure`); 0: that is so.
    marks
        Pairs of a time and the pointer's heartbeats at that time, ascending.
    """

    window_ms: int
    newest_ms: int = 0
    snapshot_ms: int = 0
    snapshots_wanted: int = 0
    marks: tuple[tuple[int, int], ...] = ()

    def to_plain(self) -> list[Any]:
        """Return the fields as builtin values."""
        times = [self.window_ms, self.newest_ms, self.snapshot_ms, self.snapshots_wanted]
        return [*times, [list(mark) for mark in self.marks]]

    @staticmethod
    def from_plain(plain: list[Any]) -> Ages:
        """Convert the values of `to_plain` back; raise `TypeError` or `ValueError` if they do not fit."""
        window_ms, newest_ms, snapshot_ms, snapshots_left, marks = plain
        times = tuple((int(time_ms), int(heartbeats)) for time_ms, heartbeats in marks)
        return Ages(int(window_ms), int(newest_ms), int(snapshot_ms), int(snapshots_left), times)
