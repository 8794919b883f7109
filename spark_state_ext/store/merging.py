"""Which runs to merge, which to drop: decisions over values, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from arrow_schemas.lineage import CheckpointRef
from spark_state_ext.errors import MissingRunError
from spark_state_ext.store.runs import Run

__all__ = ["MERGE_BYTES_MAX", "choose_merge", "choose_runs", "droppable"]

FANOUT = 4
# One commit never rewrites more than this; runs that would need more stay apart.
MERGE_BYTES_MAX = 256 << 20
# A run joins a merge while it is not much larger than all newer ones together.
_GROWTH = 1.5


def choose_runs(runs: Iterable[Run], head: CheckpointRef | None) -> list[Run]:
    """The runs that make up a checkpoint, newest first.

    Runs form a graph (run → checkpoints it covers → parent). From the head, each step takes the run that ends
    exactly there and reaches deepest; a merged run is thereby never used for a checkpoint inside it.

    Raises
    ------
    MissingRunError
        When the chain breaks; `ref` holds the checkpoint that no run ends at.
    """
    ending: dict[CheckpointRef, list[Run]] = {}
    for run in runs:
        ending.setdefault(run.newest, []).append(run)
    chosen: list[Run] = []
    at = head
    while at is not None:
        candidates = ending.get(at)
        if not candidates:
            raise MissingRunError(f"the local store has no run for checkpoint {at}", at)
        best = min(candidates, key=lambda run: (not run.base, run.oldest.version))
        chosen.append(best)
        at = None if best.base else best.parent
    return chosen


def choose_merge(sizes: Sequence[int], bytes_max: int = MERGE_BYTES_MAX) -> tuple[int, int] | None:
    """Which neighbouring runs to merge now (tiered, so that a row is rewritten a logarithmic number of times).

    Parameters
    ----------
    sizes
        Bytes of the runs, newest first.
    bytes_max
        Bound of the bytes that one merge reads.

    Returns
    -------
    tuple of int or None
        Slice ``start, stop`` of the runs, at least `FANOUT` of them; None when nothing is due.
    """
    for start in range(len(sizes)):
        total, stop = sizes[start], start + 1
        while stop < len(sizes) and sizes[stop] <= _GROWTH * total and total + sizes[stop] <= bytes_max:
            total += sizes[stop]
            stop += 1
        if stop - start >= FANOUT:
            return start, stop
    return None


def droppable(runs: Iterable[Run], head: CheckpointRef | None, pinned: frozenset[str]) -> list[Run]:
    """Runs that no later call with this or a newer input pointer can want.

    Only runs whose newest checkpoint is older than the *input* pointer's are considered (a zombie of an earlier
    batch has an earlier input pointer, so it cannot drop what a later batch was built on), and of those only
    runs that are not part of the pointer's own view.
    """
    runs = list(runs)
    if head is None:
        return []
    used = {run.key for run in choose_runs(runs, head)}
    return [run for run in runs if run.newest.version < head.version and run.key not in used | pinned]
