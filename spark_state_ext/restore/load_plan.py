"""Decide which files to load for a checkpoint, from its lineage. Pure functions over values (SPARK-49374)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import LineageError, MissingRunError
from spark_state_ext.store.compaction import choose_runs
from spark_state_ext.store.runs import Run

__all__ = [
    "Chain",
    "Fetch",
    "plan_load",
]


@dataclass(frozen=True)
class Chain:
    """The known ancestors of a checkpoint and the checkpoint itself, oldest first.

    Parameters
    ----------
    refs
        The checkpoints.
    rooted
        The first one has no parent, so that its delta is the whole state.
    start
        Position of the checkpoint that the lineage begins with; its snapshot may be unconfirmed. Checkpoints before it
        are useful only if the local store has them.
    """

    refs: tuple[CheckpointRef, ...]
    rooted: bool = False
    start: int = 0

    @staticmethod
    def of(pointer: Pointer) -> Chain:
        """Return the chain of a pointer's checkpoint, from the lineage in the pointer."""
        refs = tuple(entry.ref for entry in pointer.lineage)
        if len(refs) == 1 and pointer.parent is not None:
            # The checkpoint has a new snapshot. If the local store has its parent, only the delta is missing.
            return Chain((pointer.parent, *refs), start=1)
        # A bucket's first checkpoint has version 1, and its delta is the whole state.
        return Chain(refs, rooted=refs[0].version == 1)

    def extend(self, header: LineageHeader, where: str) -> Chain:
        """Return the chain extended by the ancestors in the header of its first checkpoint."""
        first = self.refs[self.start]
        if header.ref != first:
            raise LineageError(f"{where} has the lineage of {header.ref} instead of the lineage of {first}")
        self.check(header, where)
        return Chain((*header.lineage, *self.refs[self.start :]), rooted=header.parent is None)

    def check(self, header: LineageHeader, where: str) -> None:
        """Raise a LineageError if a file's lineage contradicts this one."""
        at = self.refs.index(header.ref)
        if at == 0:
            if self.rooted and header.parent is not None:
                raise LineageError(f"{where} was built on {header.parent}, but in the lineage it has no parent")
            return
        if header.parent != self.refs[at - 1]:
            raise LineageError(f"{where} was built on {header.parent}, but in the lineage on {self.refs[at - 1]}")
        for expected, ancestor in zip(reversed(self.refs[:at]), reversed(header.lineage), strict=False):
            if expected != ancestor:
                raise LineageError(f"{where} names {ancestor} among its ancestors, but the lineage has {expected}")


@dataclass(frozen=True)
class Fetch:
    """A checkpoint file that a load needs."""

    ref: CheckpointRef
    kind: str


def plan_load(chain: Chain, runs: Iterable[Run], gone: Collection[Fetch]) -> list[Fetch] | None:
    """Return the files to fetch, oldest first, to read the last checkpoint of a chain; None if that is impossible."""
    runs = list(runs)
    runs_by_newest: dict[CheckpointRef, list[Run]] = {}
    for run in runs:
        runs_by_newest.setdefault(run.newest, []).append(run)
    positions = {ref: at for at, ref in enumerate(chain.refs)}

    def fetches_after(base: int) -> list[Fetch] | None:
        """Return the deltas to fetch for the checkpoints after a base; None if one of them is gone."""
        fetches: list[Fetch] = []
        at = len(chain.refs) - 1
        while at > base:
            # A local run may cover several checkpoints: use the one that reaches furthest back, but not below the base.
            below = [
                positions.get(run.parent, -1)
                for run in runs_by_newest.get(chain.refs[at], ())
                if run.parent is not None
            ]
            below = [position for position in below if base <= position < at]
            if below:
                at = min(below)
                continue
            fetch = Fetch(chain.refs[at], DELTA)
            if fetch in gone:
                return None
            fetches.append(fetch)
            at -= 1
        return fetches[::-1]

    # If possible, start from the newest checkpoint that the local store has.
    for base in range(len(chain.refs) - 1, -1, -1):
        if chain.refs[base] in runs_by_newest and _is_whole(runs, chain.refs[base]):
            fetches = fetches_after(base)
            if fetches is not None:
                return fetches
    # Otherwise start from the unconfirmed snapshot. If a delta after it is gone, try any snapshot from there on.
    lost = [positions[fetch.ref] for fetch in gone if fetch.kind == DELTA and fetch.ref in positions]
    for base in range(max(lost), len(chain.refs)) if lost else range(chain.start, chain.start + 1):
        ref = chain.refs[base]
        as_delta = base == 0 and chain.rooted and Fetch(ref, DELTA) not in gone
        fetch = Fetch(ref, DELTA if as_delta else SNAPSHOT)
        if fetch not in gone:
            fetches = fetches_after(base)
            if fetches is not None:
                return [fetch, *fetches]
    return None


def _is_whole(runs: Iterable[Run], ref: CheckpointRef) -> bool:
    try:
        choose_runs(runs, ref)
    except MissingRunError:
        return False
    return True
