"""Clean-up of a bucket's checkpoint files: what no pointer that Spark still has can lead to is deleted.

Everything is classified before anything is deleted, by `classify`, a function over values; any doubt and nothing is
deleted. In short: a file goes when no pointer that Spark may still hand out needs it, each from two snapshots that were
verified. Time is counted in beats of the bucket. The argument is in `docs/correctness.md`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, file_name, parse_file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.backend import Backend, Entry, is_temporary
from spark_state_ext.checkpoint import read_header, verify_checkpoint
from spark_state_ext.errors import CorruptError, MissingCheckpointError
from spark_state_ext.lineage import DELTAS_MAX, recent_beats

__all__ = ["Decision", "FileHeaders", "Headers", "classify", "clean_up", "clean_up_due", "is_crowded"]

_LOGGER = logging.getLogger("spark_state_ext")
# Younger temporary files may still be somebody's work.
_TEMPORARY_AGE_S = 86_400.0
# And this is on top of what beats tell, should an assumption about them be wrong.
_ORPHAN_AGE_S = 600.0
# The older one is what is left when the newer one turns out to be damaged.
SNAPSHOTS_KEPT = 2
_INTERVAL_CALLS_MIN = 10
_PARALLEL_MAX = 8

Kinds = Mapping[CheckpointRef, set[str]]


class Headers(Protocol):
    """What the headers of a bucket's files tell; `CorruptError` or `MissingError` where that is not known."""

    def of(self, ref: CheckpointRef) -> LineageHeader:
        """The header of a checkpoint's file."""
        ...

    def beats(self, refs: Sequence[CheckpointRef]) -> list[int]:
        """The beats of checkpoints."""
        ...


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
    """Whether there are more files than there are where clean-up runs, and not so many that reading them takes long.

    It keeps two snapshots with what lies between them, what was made within twice the batches retained, and a few
    siblings of each.
    """
    usual = 8 * (DELTAS_MAX + batches_retained)
    return usual < len(entries) < 5 * usual


def classify(
    entries: Iterable[Entry],
    pointer: Pointer,
    batches_retained: int,
    now_s: float,
    headers: Headers,
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
        Spark's ``minBatchesToRetain`` now.
    now_s
        The time, seconds since 1970.
    headers
        Of the files in the listing.
    damaged
        Snapshots known to be damaged: not to be leaned on.

    Raises
    ------
    CorruptError, MissingError
        From `headers`: then nothing may be deleted.
    """
    kinds: dict[CheckpointRef, set[str]] = {}
    leftovers: list[str] = []
    young: set[CheckpointRef] = set()
    for entry in entries:
        parsed = parse_file_name(entry.name)
        age_s = -math.inf if entry.modified_s is None else now_s - entry.modified_s
        if parsed is not None and not entry.folder:
            kinds.setdefault(parsed[0], set()).add(parsed[1])
            if age_s <= _ORPHAN_AGE_S:
                young.add(parsed[0])
        elif not is_temporary(entry.name):
            return Decision(doubt=f"{entry.name} is none of our files")
        elif age_s > _TEMPORARY_AGE_S:
            leftovers.append(entry.name)
    if pointer.ref is None:
        return Decision(tuple(leftovers))
    if pointer.ref not in kinds:
        return Decision(doubt=f"the committed checkpoint {pointer.ref} has no file here")
    # Checkpoints with this beat or a later one may be named by a pointer that Spark may still hand out.
    recent = pointer.beats - recent_beats(max(batches_retained, pointer.retained))
    line = dict.fromkeys(_back_from(pointer.ref, kinds, headers))
    settled = _settled_snapshots(line, recent, kinds, headers, damaged)
    if not settled and headers.of(list(line)[-1]).parent is not None:
        # Something is gone that should be there; what is left below may be of use to whoever brings it back.
        return Decision(tuple(leftovers))
    gone = {ref for ref in line if settled and ref.version < settled[-1].version}
    beside = sorted(kinds.keys() - line.keys())
    lean_on = list(settled)
    try:
        for ref, beat in zip(beside, headers.beats(beside), strict=True):
            if beat < recent:
                gone.add(ref)
        for ref in beside:
            if ref not in gone:
                needed, snapshots = _needed_by(ref, line, settled, kinds, headers, damaged)
                gone -= needed
                lean_on += snapshots
    except _DoubtError as doubt:
        return Decision(doubt=str(doubt))
    gone -= young - line.keys()
    # The oldest first: a clean-up that stops in the middle leaves what later ones understand.
    names = [file_name(ref, kind) for ref in sorted(gone) for kind in sorted(kinds[ref])]
    return Decision((*leftovers, *names), tuple(dict.fromkeys(lean_on)) if names else ())


def _settled_snapshots(
    line: Iterable[CheckpointRef], recent: int, kinds: Kinds, headers: Headers, damaged: frozenset[CheckpointRef]
) -> list[CheckpointRef]:
    """The newest snapshots of a lineage from before all that Spark may still name, the newest first; none when too few.

    Executors that go on from memory may be at any checkpoint of the lineage that is recent, so none of these will do.
    """
    found: list[CheckpointRef] = []
    for ref in line:
        if _is_snapshot(ref, kinds, damaged) and headers.beats([ref])[0] < recent:
            found.append(ref)
            if len(found) == SNAPSHOTS_KEPT:
                return found
    return []


def _is_snapshot(ref: CheckpointRef, kinds: Kinds, damaged: frozenset[CheckpointRef]) -> bool:
    return SNAPSHOT in kinds[ref] and ref not in damaged


def _back_from(ref: CheckpointRef, kinds: Kinds, headers: Headers) -> Iterator[CheckpointRef]:
    """A checkpoint and its ancestors, the newest first, as far back as there are files."""
    yield ref
    while True:
        # Each header tells the ancestors back to the snapshot presumed at its time.
        lineage = headers.of(ref).lineage
        for ref in reversed(lineage):
            if ref not in kinds:
                return
            yield ref
        if not lineage:
            return


def _needed_by(
    recent: CheckpointRef,
    line: Container[CheckpointRef],
    settled: Sequence[CheckpointRef],
    kinds: Kinds,
    headers: Headers,
    damaged: frozenset[CheckpointRef],
) -> tuple[set[CheckpointRef], list[CheckpointRef]]:
    """A checkpoint beside a lineage with those of its ancestors that loading it may need, and snapshots of these."""
    needed: set[CheckpointRef] = set()
    snapshots: list[CheckpointRef] = []
    for ref in _back_from(recent, kinds, headers):
        if ref in line and (not settled or ref.version >= settled[0].version):
            # From here on all stays that the lineage leans on.
            return needed, []
        needed.add(ref)
        if _is_snapshot(ref, kinds, damaged):
            snapshots.append(ref)
            if len(snapshots) == SNAPSHOTS_KEPT:
                return needed, snapshots
    if not snapshots and headers.of(ref).parent is not None:
        raise _DoubtError(f"{recent} is recent and its ancestor {headers.of(ref).parent} has no file")
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
        Spark's ``minBatchesToRetain`` now.
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
    headers = FileHeaders(files, {entry.name for entry in entries})
    damaged: set[CheckpointRef] = set()
    while True:
        try:
            decision = classify(entries, pointer, batches_retained, now_s, headers, frozenset(damaged))
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


class FileHeaders:
    """Headers of files, remembered, as files are immutable: the beats of all that are there, and whole headers of some.

    Parameters
    ----------
    files
        The bucket's folder.
    names
        The listing.
    """

    _beats: ClassVar[OrderedDict[str, dict[CheckpointRef, int]]] = OrderedDict()
    _headers: ClassVar[OrderedDict[str, LineageHeader]] = OrderedDict()
    _FOLDERS_MAX = 256
    _HEADERS_MAX = 1_024

    def __init__(self, files: Backend, names: Collection[str]) -> None:
        self._files = files
        self._names = names
        listed = {parsed[0] for name in names if (parsed := parse_file_name(name))}
        known = self._beats.pop(files.root, {})
        self._known = {ref: beat for ref, beat in known.items() if ref in listed}
        self._beats[files.root] = self._known
        if len(self._beats) > self._FOLDERS_MAX:
            self._beats.popitem(last=False)

    def of(self, ref: CheckpointRef) -> LineageHeader:
        """The header of a checkpoint's file."""
        kind = DELTA if file_name(ref, DELTA) in self._names else SNAPSHOT
        where = self._files.where(file_name(ref, kind))
        header = self._headers.get(where)
        if header is None:
            header = read_header(self._files, ref, kind)
            self._headers[where] = header
            if len(self._headers) > self._HEADERS_MAX:
                self._headers.popitem(last=False)
        self._known[ref] = header.writer.beat
        return header

    def beats(self, refs: Sequence[CheckpointRef]) -> list[int]:
        """The beats of checkpoints."""
        unknown = [ref for ref in refs if ref not in self._known]
        if len(unknown) > 1:
            with ThreadPoolExecutor(min(_PARALLEL_MAX, len(unknown)), "spark_state_ext headers") as pool:
                list(pool.map(self.of, unknown))
        elif unknown:
            self.of(unknown[0])
        return [self._known[ref] for ref in refs]


_whole: OrderedDict[str, None] = OrderedDict()
_WHOLE_MAX = 4_096


def _is_whole(files: Backend, ref: CheckpointRef, scratch: Path) -> bool:
    """Whether a snapshot has the checksum that it announces; each worker process reads it once."""
    where = files.where(file_name(ref, SNAPSHOT))
    if where in _whole:
        return True
    try:
        verify_checkpoint(files, ref, SNAPSHOT, scratch)
    except (CorruptError, MissingCheckpointError) as error:
        _LOGGER.warning("%s; older files are kept in its place", error)
        return False
    _whole[where] = None
    if len(_whole) > _WHOLE_MAX:
        _whole.popitem(last=False)
    return True
