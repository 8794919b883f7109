"""Which runs to merge, which to drop: decisions over values, no I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from arrow_schemas.lineage import CheckpointRef
from spark_state_ext.errors import MissingRunError
from spark_state_ext.store.runs import Run

__all__ = ["COMPACTION_BYTES_MAX", "choose_compaction", "choose_compacted", "choose_runs", "droppable", "outgrown"]

FANOUT = 4
# One commit never rewrites more than this; runs that would need more stay apart.
COMPACTION_BYTES_MAX = 256 << 20
# A run joins a compaction while it is not much larger than all newer ones together.
_GROWTH = 1.5


def choose_runs(runs: Iterable[Run], head: CheckpointRef | None) -> list[Run]:
    """The runs that make up a checkpoint, newest first.

    Runs form a graph (run → checkpoints it covers → parent). From the head, each step takes the run that ends
    exactly there and reaches deepest; a compacted run is thereby never used for a checkpoint inside it. Where that way
    breaks off, because processes merged at odds with each other, the next best is tried.
    """
    ending: dict[CheckpointRef, list[Run]] = {}
    for run in runs:
        ending.setdefault(run.newest, []).append(run)
    if head is None:
        return []
    chosen: list[Run] = []
    # The ways still to try at each step, the best one last.
    untried = [_best_last(ending.pop(head, []))]
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
        # Taken out, as what lies below a checkpoint is the same from wherever it is reached: one visit settles it.
        below = ending.pop(run.parent, None)
        if below is None and broken_at is None:
            broken_at = run.parent
        untried.append(_best_last(below or []))
    assert broken_at is not None, "a way that does not end at a base breaks off somewhere"
    raise MissingRunError(f"the local store has no run for checkpoint {broken_at}", broken_at)


def _best_last(runs: list[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (not run.base, run.oldest.version), reverse=True)


def outgrown(sizes: Sequence[int], bytes_max: int = COMPACTION_BYTES_MAX) -> bool:
    """Whether runs are more than bounded compactions can keep few and free of rows that were written anew.

    Four runs that hold most of a state beyond a quarter of the bound can no longer be merged. Then it takes a snapshot,
    which goes through all of them anyway, to replace them.
    """
    return sum(sizes) > bytes_max // 2


def choose_compaction(
    sizes: Sequence[int], bytes_max: int = COMPACTION_BYTES_MAX, border: int = 0
) -> tuple[int, int] | None:
    """Which neighbouring runs to merge now (tiered, so that a row is rewritten a logarithmic number of times)."""
    for start in range(len(sizes)):
        total, stop = sizes[start], start + 1
        end = border if start < border else len(sizes)
        while stop < end and sizes[stop] <= _GROWTH * total and total + sizes[stop] <= bytes_max:
            total += sizes[stop]
            stop += 1
        if stop - start >= FANOUT:
            return start, stop
    return None


def choose_compacted(
    runs: Sequence[Run], bytes_max: int, unconfirmed: CheckpointRef | None, large: bool, keeps_files: bool
) -> Sequence[Run]:
    """The neighbouring runs of a checkpoint to merge now; none when nothing is due."""
    place = next((at for at, run in enumerate(runs) if run.newest == unconfirmed), None)
    if not keeps_files:
        chosen = choose_compaction([run.size_bytes for run in runs], bytes_max, (place or 0) if large else 0)
        return runs[slice(*chosen)] if chosen else ()
    end = len(runs) - bool(runs and runs[-1].file_bytes)
    # Nothing else may end where the snapshot does.
    for part in (runs[:end],) if place is None else (runs[: min(place, end)], runs[place + 1 : end]):
        chosen = choose_compaction([run.size_bytes for run in part], bytes_max)
        if chosen:
            return part[slice(*chosen)]
    return ()


def droppable(runs: Iterable[Run], head: CheckpointRef | None, pinned: frozenset[str]) -> list[Run]:
    """Runs that no later call with this or a newer input pointer can want.

    Only runs whose newest checkpoint is older than the *input* pointer's are considered (a zombie of an earlier
    batch has an earlier input pointer, so it cannot drop what a later batch was built on), and of those only
    runs that are not part of the pointer's own view. Nor are they part of any newer checkpoint's view: that may use
    older runs which this one does without, when the two were merged at odds.
    """
    runs = list(runs)
    if head is None:
        return []
    used = {run.key for run in choose_runs(runs, head)}
    for newer in {run.newest for run in runs if run.newest.version > head.version}:
        with contextlib.suppress(MissingRunError):  # not whole: nothing of it can be read from here anyway
            used.update(run.key for run in choose_runs(runs, newer))
    return [run for run in runs if run.newest.version < head.version and run.key not in used | pinned]
