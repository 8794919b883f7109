"""What a pointer tells of times, where removed keys' bytes have to be gone within a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Ages"]


@dataclass(frozen=True)
class Ages:
    """When a bucket's checkpoints were made. All times are those of batches by Spark, milliseconds since 1970.

    Parameters
    ----------
    window_ms
        How far back a query may go, milliseconds.
    newest_ms
        When the committed checkpoint was made; 0 when not known.
    snapshot_ms
        When the last snapshot was begun, or waiting for one.
    snapshots_wanted
        How far the bucket is from having no removed rows in its files (`files.erasure`); 0: it has none.
    marks
        Times, ascending, and the heartbeats that the pointer had then.
    """

    window_ms: int
    newest_ms: int = 0
    snapshot_ms: int = 0
    snapshots_wanted: int = 0
    marks: tuple[tuple[int, int], ...] = ()

    def to_plain(self) -> list[Any]:
        """As builtin values."""
        times = [self.window_ms, self.newest_ms, self.snapshot_ms, self.snapshots_wanted]
        return [*times, [list(mark) for mark in self.marks]]

    @staticmethod
    def from_plain(plain: list[Any]) -> Ages:
        """Inverse of `to_plain`; `TypeError` or `ValueError` where it cannot be."""
        window_ms, newest_ms, snapshot_ms, wanted, marks = plain
        times = tuple((int(time_ms), int(heartbeats)) for time_ms, heartbeats in marks)
        return Ages(int(window_ms), int(newest_ms), int(snapshot_ms), int(wanted), times)
