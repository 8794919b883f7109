"""Decisions about lineage: when to write a snapshot, what to load. Pure functions over values (SPARK-49374)."""

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
    """Ancestors of a checkpoint and the checkpoint itself, oldest first, as far back as is known.

    Parameters
    ----------
    refs
        The checkpoints.
    rooted
        The first one was built on no state at all, so that its delta is the whole state.
    start
        Position of the checkpoint that the lineage begins with; its snapshot may be unconfirmed. Those before
        it are of use only when they are here.
    """

    refs: tuple[CheckpointRef, ...]
    rooted: bool = False
    start: int = 0

    @staticmethod
    def of(pointer: Pointer) -> Chain:
        """What a pointer tells of its checkpoint's ancestors."""
        refs = tuple(entry.ref for entry in pointer.lineage)
        if len(refs) == 1 and pointer.parent is not None:
            # Where its parent is here, the delta is all that lacks of a checkpoint whose snapshot is fresh.
            return Chain((pointer.parent, *refs), start=1)
        # A bucket's first checkpoint has version 1, and its delta is all there is.
        return Chain(refs, rooted=refs[0].version == 1)

    def extended(self, header: LineageHeader, where: str) -> Chain:
        """The chain reaching as far back as the header of its first checkpoint tells."""
        first = self.refs[self.start]
        if header.ref != first:
            raise LineageError(f"{where} tells the lineage of {header.ref}; that of {first} was expected")
        self.check(header, where)
        return Chain((*header.lineage, *self.refs[self.start :]), rooted=header.parent is None)

    def check(self, header: LineageHeader, where: str) -> None:
        """Compare a file's lineage with this one where both tell."""
        at = self.refs.index(header.ref)
        if at == 0:
            if self.rooted and header.parent is not None:
                raise LineageError(f"{where} was built on {header.parent}; the lineage expects no state before it")
            return
        if header.parent != self.refs[at - 1]:
            raise LineageError(f"{where} was built on {header.parent}; the lineage expects {self.refs[at - 1]}")
        for mine, its in zip(reversed(self.refs[:at]), reversed(header.lineage), strict=False):
            if mine != its:
                raise LineageError(f"{where} names {its} among its ancestors; the lineage has {mine} there")


@dataclass(frozen=True)
class Fetch:
    """A checkpoint file that a load needs."""

    ref: CheckpointRef
    kind: str


def plan_load(chain: Chain, runs: Iterable[Run], gone: Collection[Fetch]) -> list[Fetch] | None:
    """Which files to fetch so that the last checkpoint of a chain can be read, oldest first."""
    runs = list(runs)
    ending: dict[CheckpointRef, list[Run]] = {}
    for run in runs:
        ending.setdefault(run.newest, []).append(run)
    place = {ref: at for at, ref in enumerate(chain.refs)}

    def above(base: int) -> list[Fetch] | None:
        """What is lacking of the checkpoints above a base."""
        fetches: list[Fetch] = []
        at = len(chain.refs) - 1
        while at > base:
            # A run here may cover several checkpoints: the one that reaches deepest, but not below the base.
            below = [place.get(run.parent, -1) for run in ending.get(chain.refs[at], ()) if run.parent is not None]
            below = [to for to in below if base <= to < at]
            if below:
                at = min(below)
                continue
            fetch = Fetch(chain.refs[at], DELTA)
            if fetch in gone:
                return None
            fetches.append(fetch)
            at -= 1
        return fetches[::-1]

    # From what is here, when possible: the newest such checkpoint.
    for base in range(len(chain.refs) - 1, -1, -1):
        if chain.refs[base] in ending and _whole(runs, chain.refs[base]):
            found = above(base)
            if found is not None:
                return found
    # Else from the unconfirmed snapshot. Where a delta above it is gone, any snapshot from there on is worth a try.
    lost = [place[fetch.ref] for fetch in gone if fetch.kind == DELTA and fetch.ref in place]
    for base in range(max(lost), len(chain.refs)) if lost else range(chain.start, chain.start + 1):
        ref = chain.refs[base]
        as_delta = base == 0 and chain.rooted and Fetch(ref, DELTA) not in gone
        fetch = Fetch(ref, DELTA if as_delta else SNAPSHOT)
        if fetch not in gone:
            found = above(base)
            if found is not None:
                return [fetch, *found]
    return None


def _whole(runs: Iterable[Run], ref: CheckpointRef) -> bool:
    try:
        choose_runs(runs, ref)
    except MissingRunError:
        return False
    return True
