"""Decisions that keep a bound in time on removed keys' bytes. Pure functions over values.

The user says within which time a removed key's bytes have to be gone from the checkpoint files. A sixth of that is the
**window**: a query may go back to batches that are not older, and to the newest one. Within the bound the bucket gets a
snapshot of the state without the key, and a second one; then both grow older than a window and a half; then a clean-up
deletes what came before. Each step is due by time, and happens in the next batch with data. The argument is in
`docs/correctness.md`.
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
    "marked",
    "snapshot_asked",
    "with_change",
    "with_snapshot",
]

# The bound, in windows. It takes about five: two until there are two snapshots, not two until these are old enough, and
# an eighth for each step, as marks are no finer. The rest is for batches that come seldom.
WINDOWS = 6
# How far apart marks are, at least, and how old the committed checkpoint gets at most: window / so many.
_MARKS, _RENEWALS = 8, 4
# Snapshots that a changed bucket is away from having no removed rows in its files, and one until the last is known to
# be there. (A snapshot of the change itself is none of them: beside it lies the delta that tells the removed keys.)
_CHANGED = 3


def marked(pointer: Pointer, now_ms: int, window_ms: int | None) -> Pointer:
    """The pointer of a call with its time noted."""
    if window_ms is None:
        return pointer if pointer.ages is None else replace(pointer, ages=None)
    ages = pointer.ages
    if ages is None or ages.window_ms != window_ms:
        # What was made under another window was not renewed as this one needs it. So all begins anew.
        ages = Ages(window_ms, snapshot_ms=now_ms, snapshots_wanted=_CHANGED)
    # Later ones: the clock was set back.
    marks = [mark for mark in ages.marks if mark[0] <= now_ms]
    if not marks or now_ms - marks[-1][0] >= window_ms // _MARKS:
        marks.append((now_ms, pointer.heartbeats))
    return replace(pointer, ages=replace(ages, marks=tuple(_needed(marks, window_ms))))


def is_marked(before: Pointer, after: Pointer) -> bool:
    """Whether a call has noted a time, which is a clean-up's turn."""
    marks = after.ages.marks if after.ages is not None else ()
    return bool(marks) and (before.ages is None or marks[-1] not in before.ages.marks)


def is_old(ages: Ages, now_ms: int) -> bool:
    """Whether the committed checkpoint has to be renewed: what pointers name must not be much older than they are."""
    return not 0 <= now_ms - ages.newest_ms <= ages.window_ms // _RENEWALS or snapshot_asked(ages, now_ms)


def snapshot_asked(ages: Ages, now_ms: int) -> bool:
    """Whether a snapshot is due by time, or a look for the last one that was."""
    return ages.snapshots_wanted > 0 and not 0 <= now_ms - ages.snapshot_ms < ages.window_ms


def with_change(ages: Ages, now_ms: int, changed: bool) -> Ages:
    """With a new checkpoint, which may have removed rows or only renews the one before."""
    return replace(ages, newest_ms=now_ms, snapshots_wanted=_CHANGED if changed else ages.snapshots_wanted)


def with_snapshot(ages: Ages, now_ms: int, changed: bool, arrived: bool) -> Ages:
    """With a snapshot of the new checkpoint under way."""
    wanted = ages.snapshots_wanted
    if not changed and wanted > 1 and (arrived or wanted == _CHANGED):
        wanted -= 1
    return replace(ages, snapshot_ms=now_ms, snapshots_wanted=wanted)


def erased_before(ages: Ages | None) -> int | None:
    """A heartbeat before which no checkpoint was made that a pointer needs to which a query may go back.

    These pointers are the newest one, and those that counted at any time within the window before it was made. What
    each of them needs of a file was made a quarter of the window before it at most. As time is taken from the newest
    pointer itself, nothing grows old while no batch comes.
    """
    if ages is None or not ages.marks:
        return None
    oldest = _newest_until(ages.marks, ages.marks[-1][0] - ages.window_ms)
    if oldest is None:
        return None
    before = _newest_until(ages.marks, oldest[0] - ages.window_ms // 2)
    return None if before is None else before[1]


def _needed(marks: Sequence[tuple[int, int]], window_ms: int) -> Sequence[tuple[int, int]]:
    """Without those that `erased_before` never asks for again."""
    oldest = _newest_until(marks, marks[-1][0] - window_ms)
    before = None if oldest is None else _newest_until(marks, oldest[0] - window_ms // 2)
    return marks if before is None else marks[marks.index(before) :]


def _newest_until(marks: Sequence[tuple[int, int]], time_ms: int) -> tuple[int, int] | None:
    return next((mark for mark in reversed(marks) if mark[0] <= time_ms), None)
