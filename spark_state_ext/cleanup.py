"""Clean-up of a bucket's checkpoint files: what no pointer that Spark still has can lead to is deleted.

Everything is classified before anything is deleted, by `classify`, a function over values; any doubt and nothing is
deleted. In short: a file goes when two verified snapshots above it hold what it held, and every pointer that Spark may
still hand out leans on those or on later ones. The argument is in `docs/correctness.md`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, file_name, parse_file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.backend import Backend, Entry, is_temporary
from spark_state_ext.checkpoint import read_header, verify_checkpoint
from spark_state_ext.errors import CorruptError, MissingCheckpointError

__all__ = ["Decision", "classify", "clean_up", "clean_up_due", "settled_snapshots"]

_LOGGER = logging.getLogger("spark_state_ext")
# Younger temporary files, and younger files beside the lineage, may still be somebody's work.
ORPHAN_AGE_S = 86_400.0
# The older one is what is left when the newer one turns out to be damaged.
_SNAPSHOTS_KEPT = 2
_INTERVAL_BATCHES_MIN = 10
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


def clean_up_due(batch: int, bucket: int, batches_retained: int) -> bool:
    """Whether this batch is a bucket's turn; buckets take turns, so that no batch has all the listings."""
    return (batch + bucket) % max(_INTERVAL_BATCHES_MIN, batches_retained // 4) == 0


def settled_snapshots(pointer: Pointer, batches_retained: int) -> list[CheckpointRef]:
    """Presumed snapshots on a pointer's lineage from before the batches that Spark retains, oldest first.

    Every pointer of that lineage that Spark may still hand out is that snapshot's checkpoint or comes after it.
    """
    entries = [*pointer.snapshots, *pointer.lineage[:1]]
    return [e.ref for e in entries if e.batch >= 0 and e.batch + batches_retained < pointer.batch]


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
        Header of a file of a checkpoint in the listing; asked only where names do not tell.
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
    settled = settled_snapshots(pointer, batches_retained)
    lean_on = [ref for ref in settled if SNAPSHOT in kinds.get(ref, ()) and ref not in damaged][-_SNAPSHOTS_KEPT:]
    if len(lean_on) < _SNAPSHOTS_KEPT:
        return Decision(tuple(leftovers))
    border = lean_on[0].version
    below = {ref for ref in kinds if ref.version < border}
    try:
        if len({ref.version for ref in kinds}) < len(kinds):
            below = _without_parallel(below, pointer, batches_retained, kinds, header_of, border, old)
    except _DoubtError as doubt:
        return Decision(doubt=str(doubt))
    # The oldest first: a clean-up that stops in the middle leaves what later ones understand.
    names = [file_name(ref, kind) for ref in sorted(below) for kind in sorted(kinds[ref])]
    return Decision((*leftovers, *names), tuple(lean_on) if names else ())


def _without_parallel(
    below: set[CheckpointRef],
    pointer: Pointer,
    batches_retained: int,
    kinds: Kinds,
    header_of: HeaderOf,
    border: int,
    old: set[str],
) -> set[CheckpointRef]:
    """What may go of the files below the border, where some version was written more than once.

    Under Spark's checkpoint format 1, executors that run the same task each go on from what they have in memory, for as
    many batches as they like: two actions in `foreachBatch` are enough. So lineages can be parallel, and any of them
    may turn out to be the one that is committed. Those of which a file is recent keep what they lean on.
    """
    mine = _ancestors(pointer, kinds, header_of)
    kept: set[CheckpointRef] = set()
    for ref in sorted(kinds.keys() - mine, reverse=True):
        if ref in kept:
            continue
        header = header_of(ref)
        # A quiet bucket renews its checkpoint once in so many batches, so twice as many are the bound.
        if header.writer.batch + 2 * batches_retained >= pointer.batch:
            kept |= _needed_by(header, mine, kinds, header_of, border)
    beside = below - mine
    young = {ref for ref in beside if not all(file_name(ref, kind) in old for kind in kinds[ref])}
    return below - kept - young


def _ancestors(pointer: Pointer, kinds: Kinds, header_of: HeaderOf) -> set[CheckpointRef]:
    """The pointer's checkpoint and its ancestors, as far back as there are files."""
    found = {entry.ref for entry in pointer.lineage}
    first = pointer.lineage[0].ref
    while first in kinds:
        header = header_of(first)
        found.update(header.lineage)
        if not header.lineage:
            break
        first = header.lineage[0]
    return found


def _needed_by(
    header: LineageHeader, mine: set[CheckpointRef], kinds: Kinds, header_of: HeaderOf, border: int
) -> set[CheckpointRef]:
    """A checkpoint and those of its ancestors that loading it needs and that are not kept anyway."""
    needed: set[CheckpointRef] = {header.ref}
    if SNAPSHOT in kinds[header.ref] and DELTA not in kinds[header.ref]:
        return needed
    lineage = list(header.lineage)
    while lineage:
        ref = lineage.pop()
        if ref in mine and ref.version >= border:
            return needed
        if ref not in kinds:
            raise _DoubtError(f"{header.ref} is recent and its ancestor {ref} has no file")
        needed.add(ref)
        if SNAPSHOT in kinds[ref]:
            return needed
        if not lineage:
            lineage = list(header_of(ref).lineage)
    return needed


def clean_up(
    files: Backend,
    pointer: Pointer,
    batches_retained: int,
    scratch: Path,
    still_ours: Callable[[], None],
    now_s: float | None = None,
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

    Raises
    ------
    StorageError
        When listing or deleting failed.
    OwnershipError
        From `still_ours`.
    """
    entries = files.entries()
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
    if decision.delete:
        still_ours()
    for name in decision.delete:
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
