"""Clean-up of a bucket's checkpoint files: what no pointer that Spark still has can lead to is deleted.

Everything is classified before anything is deleted, by `classify`, a function over values; any doubt and nothing is
deleted. In short: a file goes when no pointer that Spark may still hand out needs it, each from two snapshots that were
verified. Time is counted in calls of the bucket. The argument is in `docs/correctness.md`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, file_name, parse_file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.backend import Backend, Entry, is_temporary
from spark_state_ext.checkpoint import read_header, verify_checkpoint
from spark_state_ext.errors import CorruptError, MissingCheckpointError
from spark_state_ext.lineage import DELTAS_MAX

__all__ = ["Decision", "classify", "clean_up", "clean_up_due", "is_crowded"]

_LOGGER = logging.getLogger("spark_state_ext")
# Younger temporary files, and younger files beside the lineage, may still be somebody's work.
ORPHAN_AGE_S = 86_400.0
# The older one is what is left when the newer one turns out to be damaged.
SNAPSHOTS_KEPT = 2
_INTERVAL_CALLS_MIN = 10
# Headers and verdicts that this process remembers; files are immutable.
_REMEMBERED_MAX = 4_096

Kinds = Mapping[CheckpointRef, set[str]]
HeaderOf = Callable[[CheckpointRef], LineageHeader]


class _DoubtError(Exception):
    """Something does not add up, so nothing may be deleted."""


@dataclass(frozen=True)
class Decision:
    """What to do with a bucket's files.

    Parameters
    ----------
    delete
        Names of files to delete, in the order in which to.
    lean_on
        Snapshots that must be whole before anything is deleted.
    doubt
        Why nothing may be deleted; empty when there is no doubt.
    """

    delete: tuple[str, ...] = ()
    lean_on: tuple[CheckpointRef, ...] = ()
    doubt: str = ""


def clean_up_due(calls: int, bucket: int, batches_retained: int) -> bool:
    """Whether this call is a bucket's turn; buckets take turns, so that no batch has all the listings."""
    return (calls + bucket) % max(_INTERVAL_CALLS_MIN, batches_retained // 4) == 0


def is_crowded(entries: Sequence[Entry], batches_retained: int) -> bool:
    """Whether there are more files than ever are where clean-up runs: then the call itself has to clean up.

    It keeps two snapshots, the deltas after the older one and those of retained batches, and as much of siblings.
    """
    return len(entries) > 4 * (DELTAS_MAX + batches_retained)


def classify(
    entries: Iterable[Entry],
    pointer: Pointer,
    batches_retained: int,
    now_s: float,
    header_of: HeaderOf,
    damaged: frozenset[CheckpointRef] = frozenset(),
) -> Decision:
    """Decide for every file of a bucket's folder.

    Parameters
    ----------
    entries
        The listing.
    pointer
        The *input* pointer of a call: committed for certain.
    batches_retained
        Spark's ``minBatchesToRetain``.
    now_s
        The time, seconds since 1970.
    header_of
        Header of a file of a checkpoint in the listing.
    damaged
        Snapshots known to be damaged: not to be leaned on.

    Raises
    ------
    CorruptError, MissingError
        From `header_of`: then nothing may be deleted.
    """
    kinds: dict[CheckpointRef, set[str]] = {}
    leftovers: list[str] = []
    old: set[str] = set()
    for entry in entries:
        parsed = parse_file_name(entry.name)
        if entry.modified_s is not None and entry.modified_s + ORPHAN_AGE_S < now_s:
            old.add(entry.name)
        if parsed is not None and not entry.folder:
            kinds.setdefault(parsed[0], set()).add(parsed[1])
        elif not is_temporary(entry.name):
            return Decision(doubt=f"{entry.name} is none of our files")
        elif entry.name in old:
            leftovers.append(entry.name)
    if pointer.ref is None:
        return Decision(tuple(leftovers))
    if pointer.ref not in kinds:
        return Decision(doubt=f"the committed checkpoint {pointer.ref} has no file here")
    line = list(_back_from(pointer.ref, kinds, header_of))
    settled = (
        ref
        for ref in line
        if _is_snapshot(ref, kinds, damaged) and _is_settled(ref, pointer, header_of, batches_retained)
    )
    lean_on = [ref for ref, _ in zip(settled, range(SNAPSHOTS_KEPT), strict=False)]
    if len(lean_on) < SNAPSHOTS_KEPT:
        return Decision(tuple(leftovers))
    below = {ref for ref in kinds if ref.version < lean_on[-1].version}
    try:
        for ref in sorted(kinds.keys() - set(line)):
            # A bucket's checkpoint is renewed once in so many beats, so twice as many are the bound.
            if header_of(ref).writer.beat + 2 * batches_retained >= pointer.beats:
                kept, snapshots = _needed_by(ref, kinds, header_of, damaged)
                below -= kept
                lean_on += snapshots
    except _DoubtError as doubt:
        return Decision(doubt=str(doubt))
    young = {ref for ref in below.difference(line) if not all(file_name(ref, kind) in old for kind in kinds[ref])}
    # The oldest first: a clean-up that stops in the middle leaves what later ones understand.
    names = [file_name(ref, kind) for ref in sorted(below - young) for kind in sorted(kinds[ref])]
    return Decision((*leftovers, *names), tuple(dict.fromkeys(lean_on)) if names else ())


def _is_snapshot(ref: CheckpointRef, kinds: Kinds, damaged: frozenset[CheckpointRef]) -> bool:
    return SNAPSHOT in kinds[ref] and ref not in damaged


def _is_settled(ref: CheckpointRef, pointer: Pointer, header_of: HeaderOf, batches_retained: int) -> bool:
    """Whether a checkpoint on a pointer's lineage is older than the batches that Spark retains.

    In each batch a bucket is called once at most. So what was made more calls ago than batches are retained was made
    before these, and every pointer of that lineage that Spark may still hand out is built on it.
    """
    return header_of(ref).writer.call + batches_retained < pointer.calls


def _back_from(ref: CheckpointRef, kinds: Kinds, header_of: HeaderOf) -> Iterator[CheckpointRef]:
    """A checkpoint and its ancestors, the newest first, as far back as there are files."""
    yield ref
    while True:
        # Each header tells the ancestors back to the snapshot presumed at its time.
        lineage = header_of(ref).lineage
        for ref in reversed(lineage):
            if ref not in kinds:
                return
            yield ref
        if not lineage:
            return


def _needed_by(
    recent: CheckpointRef, kinds: Kinds, header_of: HeaderOf, damaged: frozenset[CheckpointRef]
) -> tuple[set[CheckpointRef], list[CheckpointRef]]:
    """A checkpoint beside the lineage with those of its ancestors that loading it may need, and snapshots of these."""
    needed: set[CheckpointRef] = set()
    snapshots: list[CheckpointRef] = []
    for ref in _back_from(recent, kinds, header_of):
        needed.add(ref)
        if _is_snapshot(ref, kinds, damaged):
            snapshots.append(ref)
            if len(snapshots) == SNAPSHOTS_KEPT:
                return needed, snapshots
    if not snapshots and header_of(ref).parent is not None:
        raise _DoubtError(f"{recent} is recent and its ancestor {header_of(ref).parent} has no file")
    return needed, snapshots


def clean_up(
    files: Backend,
    pointer: Pointer,
    batches_retained: int,
    scratch: Path,
    still_ours: Callable[[], None],
    now_s: float | None = None,
    entries: Sequence[Entry] | None = None,
) -> int:
    """Delete what no retained pointer leads to; returns how many files. May be repeated, and stopped, at any time.

    Parameters
    ----------
    files
        The bucket's folder.
    pointer
        The input pointer of the call.
    batches_retained
        Spark's ``minBatchesToRetain``.
    scratch
        Local folder for temporary files.
    still_ours
        Raises when another run has taken the state over.
    now_s
        The time, for tests.
    entries
        A listing of the folder, where the caller has one; it may be of any time after the pointer was handed out.

    Raises
    ------
    StorageError
        When listing or deleting failed.
    OwnershipError
        From `still_ours`.
    """
    entries = files.entries() if entries is None else entries
    now_s = time.time() if now_s is None else now_s
    headers = _Headers(files, {entry.name for entry in entries})
    damaged: set[CheckpointRef] = set()
    while True:
        try:
            decision = classify(entries, pointer, batches_retained, now_s, headers.of, frozenset(damaged))
        except (CorruptError, MissingCheckpointError) as error:
            decision = Decision(doubt=str(error))
        if decision.doubt:
            _LOGGER.warning("nothing is cleaned up in %s: %s", files.root, decision.doubt)
            return 0
        found = {ref for ref in decision.lean_on if not _is_whole(files, ref, scratch)}
        if not found:
            break
        damaged |= found
    for name in decision.delete:
        # Cheap; and it may take long until all are gone.
        still_ours()
        files.remove(name)
    return len(decision.delete)


class _Headers:
    """Headers of files, remembered: files are immutable."""

    _known: ClassVar[OrderedDict[str, LineageHeader]] = OrderedDict()

    def __init__(self, files: Backend, names: set[str]) -> None:
        self._files = files
        self._names = names

    def of(self, ref: CheckpointRef) -> LineageHeader:
        kind = DELTA if file_name(ref, DELTA) in self._names else SNAPSHOT
        where = self._files.where(file_name(ref, kind))
        if where not in self._known:
            self._known[where] = read_header(self._files, ref, kind)
            if len(self._known) > _REMEMBERED_MAX:
                self._known.popitem(last=False)
        return self._known[where]


_whole: OrderedDict[str, None] = OrderedDict()


def _is_whole(files: Backend, ref: CheckpointRef, scratch: Path) -> bool:
    """Whether a snapshot has the checksum that it announces; read once a process."""
    where = files.where(file_name(ref, SNAPSHOT))
    if where in _whole:
        return True
    try:
        verify_checkpoint(files, ref, SNAPSHOT, scratch)
    except (CorruptError, MissingCheckpointError) as error:
        _LOGGER.warning("%s; older files are kept in its place", error)
        return False
    _whole[where] = None
    if len(_whole) > _REMEMBERED_MAX:
        _whole.popitem(last=False)
    return True
