"""Decisions about runs: which ones to read, to merge and to drop. No I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from arrow_schemas.lineage import CheckpointRef
from spark_state_ext.errors import MissingRunError
from spark_state_ext.store.runs import Run

__all__ = [
    "COMPACTION_BYTES_MAX",
    "choose_compaction",
    "choose_runs_to_compact",
    "choose_runs",
    "find_droppable",
    "is_outgrown",
]

FANOUT = 4
# One commit never rewrites more than this; runs that would need more stay apart.
COMPACTION_BYTES_MAX = 256 << 20
# A run joins a compaction while it is not much larger than all newer ones together.
_GROWTH = 1.5


def choose_runs(runs: Iterable[Run], head: CheckpointRef | None) -> list[Run]:
    """Return the runs that make up a checkpoint, newest first.

    Runs form a graph (run → checkpoints it covers → parent). From the head, each step takes the run that ends
    exactly there and reaches deepest, so a compacted run is never used for a checkpoint inside it. If a path breaks
    off, because processes merged different runs, the next best run is tried.
    """
    runs_by_end: dict[CheckpointRef, list[Run]] = {}
    for run in runs:
        runs_by_end.setdefault(run.newest, []).append(run)
    if head is None:
        return []
    chosen: list[Run] = []
    # Runs still to try at each step, the best one last.
    untried = [_sort_best_last(runs_by_end.pop(head, []))]
    broken_at: CheckpointRef | None = None if untried[0] else head
    while untried:
        if not untried[-1]:
            untried.pop()
            if chosen:
                chosen.pop()
            continue
        run = untried[-1].pop()
        chosen.append(run)
        if run.base or run.parent is None:
            return chosen
        # Removed from the graph: whether a checkpoint leads to a base is the same on every path, so visit it once.
        below = runs_by_end.pop(run.parent, None)
        if below is None and broken_at is None:
            broken_at = run.parent
        untried.append(_sort_best_last(below or []))
    assert broken_at is not None, "a path that does not end at a base breaks off somewhere"
    raise MissingRunError(f"the local store has no run for checkpoint {broken_at}", broken_at)


def _sort_best_last(runs: list[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (not run.base, run.oldest.version), reverse=True)


def is_outgrown(sizes: Sequence[int], bytes_max: int = COMPACTION_BYTES_MAX) -> bool:
    """True if runs are too large for bounded compactions to keep them few and free of overwritten rows.

    Four runs that together hold most of the state, each above a quarter of the bound, can no longer be merged. Then
    only a snapshot can replace them, which reads all of them anyway.
    """
    return sum(sizes) > bytes_max // 2


def choose_compaction(
    sizes: Sequence[int], bytes_max: int = COMPACTION_BYTES_MAX, border: int = 0
) -> tuple[int, int] | None:
    """Choose which neighbouring runs to merge now: tiered, so that a row is rewritten a logarithmic number of times."""
    for start in range(len(sizes)):
        total, stop = sizes[start], start + 1
        end = border if start < border else len(sizes)
        while stop < end and sizes[stop] <= _GROWTH * total and total + sizes[stop] <= bytes_max:
            total += sizes[stop]
            stop += 1
        if stop - start >= FANOUT:
            return start, stop
    return None


def choose_runs_to_compact(
    runs: Sequence[Run], bytes_max: int, unconfirmed: CheckpointRef | None, large: bool, keeps_files: bool
) -> Sequence[Run]:
    """Choose the neighbouring runs of a checkpoint to merge now; an empty sequence if no merge is due."""
    position = next((index for index, run in enumerate(runs) if run.newest == unconfirmed), None)
    if not keeps_files:
        chosen = choose_compaction([run.size_bytes for run in runs], bytes_max, (position or 0) if large else 0)
        return runs[slice(*chosen)] if chosen else ()
    end = len(runs) - bool(runs and runs[-1].file_bytes)
    # A merge must not cover the snapshot's checkpoint: no other run may end there.
    for part in (runs[:end],) if position is None else (runs[: min(position, end)], runs[position + 1 : end]):
        chosen = choose_compaction([run.size_bytes for run in part], bytes_max)
        if chosen:
            return part[slice(*chosen)]
    return ()


def find_droppable(runs: Iterable[Run], head: CheckpointRef | None, pinned: frozenset[str]) -> list[Run]:
    """Return the runs that no call with this or a newer input pointer can need.

    Only runs older than the *input* pointer's checkpoint are candidates: a zombie task of an earlier batch has an
    earlier input pointer, so it cannot drop what a later batch was built on. Runs in the view of that checkpoint, or of
    any newer one, are kept: a newer view may use older runs that the pointer's view skips, if different processes
    merged different runs.
    """
    runs = list(runs)
    if head is None:
        return []
    needed = {run.key for run in choose_runs(runs, head)}
    for newer in {run.newest for run in runs if run.newest.version > head.version}:
        with contextlib.suppress(MissingRunError):  # incomplete, so it cannot be read from here anyway
            needed.update(run.key for run in choose_runs(runs, newer))
    return [run for run in runs if run.newest.version < head.version and run.key not in needed | pinned]
