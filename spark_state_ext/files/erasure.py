"""Decisions that bound the time until a removed key's bytes are gone. Pure functions over values.

The user sets a time within which the bytes of a removed key must be gone from the checkpoint files. A sixth of that
time is the **window**: a query may go back to batches that are no older than the window, and to the newest batch.
Within the bound, these steps happen: the bucket gets two snapshots of the state without the key; both grow older than
one and a half windows; then a clean-up deletes all older files. Each step is due by time, and happens in the next batch
with data. The argument is in `docs/correctness.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arrow_schemas.ages import Ages
from arrow_schemas.pointer import Pointer

__all__ = [
    "WINDOWS",
    "erased_before",
    "is_marked",
    "is_old",
    "note_time",
    "is_snapshot_due",
    "with_change",
    "with_snapshot",
]

# The bound, in windows. About five are needed: two until there are two snapshots, less than two until these are old
# enough, and an eighth for each step, as marks are an eighth of a window apart. The rest is a reserve for rare batches.
WINDOWS = 6
# Divisors of the window: marks are at least window / _MARKS apart, and the committed checkpoint is renewed when it is
# older than window / _RENEWALS.
_MARKS, _RENEWALS = 8, 4
# After a change, a bucket needs two more snapshots until its files are free of removed rows, and one more until the
# last of them is known to have arrived. (A snapshot of the change itself is not enough: the delta next to it names the
# removed keys.)
_CHANGED = 3


def note_time(pointer: Pointer, now_ms: int, window_ms: int | None) -> Pointer:
    """Return the pointer of a call with the call's time noted."""
    if window_ms is None:
        return pointer if pointer.ages is None else replace(pointer, ages=None)
    ages = pointer.ages
    if ages is None or ages.window_ms != window_ms:
        # Checkpoints made under another window were not renewed as often as this one needs, so start over.
        ages = Ages(window_ms, snapshot_ms=now_ms, snapshots_wanted=_CHANGED)
    # Later marks mean that the clock was set back: drop them.
    marks = [mark for mark in ages.marks if mark[0] <= now_ms]
    if not marks or now_ms - marks[-1][0] >= window_ms // _MARKS:
        marks.append((now_ms, pointer.heartbeats))
    return replace(pointer, ages=replace(ages, marks=tuple(_drop_unneeded(marks, window_ms))))


def is_marked(before: Pointer, after: Pointer) -> bool:
    """True if a call noted a time, so that a clean-up is due."""
    marks = after.ages.marks if after.ages is not None else ()
    return bool(marks) and (before.ages is None or marks[-1] not in before.ages.marks)


def is_old(ages: Ages, now_ms: int) -> bool:
    """True if the committed checkpoint must be renewed: a pointer must not name a much older checkpoint."""
    return not 0 <= now_ms - ages.newest_ms <= ages.window_ms // _RENEWALS or is_snapshot_due(ages, now_ms)


def is_snapshot_due(ages: Ages, now_ms: int) -> bool:
    """True if a snapshot is due by time, or a check whether the last one has arrived."""
    return ages.snapshots_wanted > 0 and not 0 <= now_ms - ages.snapshot_ms < ages.window_ms


def with_change(ages: Ages, now_ms: int, changed: bool) -> Ages:
    """Return the ages after a new checkpoint; `changed` is False if it only renews the one before."""
    return replace(ages, newest_ms=now_ms, snapshots_wanted=_CHANGED if changed else ages.snapshots_wanted)


def with_snapshot(ages: Ages, now_ms: int, changed: bool, arrived: bool) -> Ages:
    """Return the ages after a snapshot of the new checkpoint was started."""
    snapshots_wanted = ages.snapshots_wanted
    if not changed and snapshots_wanted > 1 and (arrived or snapshots_wanted == _CHANGED):
        snapshots_wanted -= 1
    return replace(ages, snapshot_ms=now_ms, snapshots_wanted=snapshots_wanted)


def erased_before(ages: Ages | None) -> int | None:
    """Return a heartbeat such that no pointer that a query may go back to needs a checkpoint from before it.

    A query may go back to the newest pointer, and to each one that was current at some time within the window before it
    was made. The files that a pointer needs were made at most a quarter of a window before it. Time is taken from the
    newest pointer itself, so files do not grow old while there are no batches.
    """
    if ages is None or not ages.marks:
        return None
    oldest = _newest_until(ages.marks, ages.marks[-1][0] - ages.window_ms)
    if oldest is None:
        return None
    before = _newest_until(ages.marks, oldest[0] - ages.window_ms // 2)
    return None if before is None else before[1]


def _drop_unneeded(marks: Sequence[tuple[int, int]], window_ms: int) -> Sequence[tuple[int, int]]:
    """Return the marks that `erased_before` may still need."""
    oldest = _newest_until(marks, marks[-1][0] - window_ms)
    before = None if oldest is None else _newest_until(marks, oldest[0] - window_ms // 2)
    return marks if before is None else marks[marks.index(before) :]


def _newest_until(marks: Sequence[tuple[int, int]], time_ms: int) -> tuple[int, int] | None:
    return next((mark for mark in reversed(marks) if mark[0] <= time_ms), None)
