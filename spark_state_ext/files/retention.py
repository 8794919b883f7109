"""Clean-up of a bucket's checkpoint files: what no pointer that Spark still has can lead to is deleted.

Everything is classified before anything is deleted, by `classify`, a function over values; any doubt and nothing is
deleted. In short: a file goes when no pointer that Spark may still hand out needs it, each from two snapshots that were
verified. Time is counted in heartbeats of the bucket. The argument is in `docs/correctness.md`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, file_name, parse_file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import CorruptError, LostFilesError, MissingCheckpointError
from spark_state_ext.files.checkpoint import read_header, verify_checkpoint
from spark_state_ext.files.erasure import erased_before
from spark_state_ext.files.folder import Entry, Listed, is_temporary
from spark_state_ext.files.horizon import DELTAS_MAX, recent_heartbeats
from spark_state_ext.worker.threads import side_by_side

__all__ = ["CleanUp", "Decision", "FileHeaders", "Headers", "classify", "clean_up", "clean_up_due", "is_crowded"]

_LOGGER = logging.getLogger("spark_state_ext")
# Younger temporary files may still be somebody's work.
_TEMPORARY_AGE_S = 86_400.0
# And younger files stay, with what they lean on, whatever heartbeats tell: should an assumption about them be wrong.
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

    def origins(self, refs: Sequence[CheckpointRef]) -> list[Origin]:
        """Where checkpoints come from."""
        ...


class Origin(NamedTuple):
    """At which heartbeat a checkpoint was made, and on what; None for the first."""

    heartbeat: int
    parent: CheckpointRef | None


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
    lost
        The committed state cannot be loaded from here: somebody has deleted what it needs.
    """

    delete: tuple[str, ...] = ()
    lean_on: tuple[CheckpointRef, ...] = ()
    doubt: str = ""
    lost: bool = False


@dataclass(frozen=True)
class CleanUp:
    """What a clean-up has to go by.

    Parameters
    ----------
    pointer
        The input pointer of a call: Spark has committed it for certain.
    head
        The newest checkpoint of its lineage that this backend has confirmed.
    batches_retained
        Spark's ``minBatchesToRetain`` now.
    still_ours
        Raises when another run has taken the state over.
    deletes_max
        How many files are deleted at most; the rest is left to another time.
    """

    pointer: Pointer
    head: CheckpointRef
    batches_retained: int
    still_ours: Callable[[], None]
    deletes_max: int | None = None


def clean_up_due(calls: int, bucket: int, batches_retained: int) -> bool:
    """Whether this call is a bucket's turn; buckets take turns, so that no batch has all the listings."""
    return (calls + bucket) % max(_INTERVAL_CALLS_MIN, batches_retained // 4) == 0


def is_crowded(entries: Sequence[Entry], batches_retained: int) -> bool:
    """Whether there are more files than there are where clean-up runs, and not so many that reading them takes long.

    It keeps two snapshots with what lies between them, what was made within three times the batches retained, and a few
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
    head: CheckpointRef | None = None,
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
    head
        The newest checkpoint of the pointer's lineage that this place has for certain; that of the pointer when none is
        given.

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
    head = head or pointer.ref
    if head is None:
        return Decision(tuple(leftovers))
    if head not in kinds:
        return Decision(doubt=f"the committed checkpoint {head} has no file here", lost=True)
    # Checkpoints with this heartbeat or a later one may be named by a pointer that Spark may still hand out.
    recent = pointer.heartbeats - recent_heartbeats(max(batches_retained, pointer.retained))
    erased = erased_before(pointer.ages)
    recent = recent if erased is None else max(recent, erased)
    line = dict.fromkeys(_back_from(head, kinds, headers))
    settled = _settled_snapshots(line, recent, kinds, headers, damaged)
    if not settled and headers.of(list(line)[-1]).parent is not None:
        # Either this place was added later, or something is gone that should be there; then what is left below may be
        # of use to whoever brings it back.
        return Decision(tuple(leftovers), lost=not any(_is_snapshot(ref, kinds, damaged) for ref in line))
    gone = {ref for ref in line if settled and ref.version < settled[-1].version}
    beside = sorted(kinds.keys() - line.keys())
    origins = dict(zip(beside, headers.origins(beside), strict=True))
    # What the pointer holds inline may have arrived since, and is recent.
    gone.update(ref for ref in beside if origins[ref].heartbeat < recent and ref not in young)
    lean_on = list(settled)
    for ref in beside:
        if ref in gone or _meets(origins[ref].parent, line, settled):
            continue
        needs = _needs_of(ref, line, settled, kinds, headers, damaged)
        if origins[ref].heartbeat >= recent:
            if needs.missing is not None:
                return Decision(doubt=f"{ref} may be in use and its ancestor {needs.missing} has no file")
            lean_on += needs.snapshots
        gone.difference_update(needs.refs)
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
        if _is_snapshot(ref, kinds, damaged) and headers.origins([ref])[0].heartbeat < recent:
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
        # Each header tells the ancestors back to the snapshot that was unconfirmed at its time.
        lineage = headers.of(ref).lineage
        for ref in reversed(lineage):
            if ref not in kinds:
                return
            yield ref
        if not lineage:
            return


def _meets(ref: CheckpointRef | None, line: Container[CheckpointRef], settled: Sequence[CheckpointRef]) -> bool:
    """Whether a checkpoint is where all stays that the lineage leans on: at or above the newest settled snapshot."""
    return ref in line and ref is not None and (not settled or ref.version >= settled[0].version)


@dataclass
class _Needs:
    """What loading a checkpoint may need: itself and ancestors, snapshots among these, and what of it is not there."""

    refs: list[CheckpointRef] = field(default_factory=list)
    snapshots: list[CheckpointRef] = field(default_factory=list)
    missing: CheckpointRef | None = None


def _needs_of(
    beside: CheckpointRef,
    line: Container[CheckpointRef],
    settled: Sequence[CheckpointRef],
    kinds: Kinds,
    headers: Headers,
    damaged: frozenset[CheckpointRef],
) -> _Needs:
    """The needs of a checkpoint beside a lineage, down to its second snapshot or to where it comes from the lineage."""
    needs = _Needs()
    for ref in _back_from(beside, kinds, headers):
        if _meets(ref, line, settled):
            return _Needs(needs.refs)
        needs.refs.append(ref)
        if _is_snapshot(ref, kinds, damaged):
            needs.snapshots.append(ref)
            if len(needs.snapshots) == SNAPSHOTS_KEPT:
                break
    if not needs.snapshots:
        needs.missing = headers.of(needs.refs[-1]).parent
    return needs


def clean_up(
    files: Listed,
    request: CleanUp,
    scratch: Path,
    now_s: float | None = None,
    entries: Sequence[Entry] | None = None,
) -> int:
    """Delete what no retained pointer leads to; returns how many files. May be repeated, and stopped, at any time.

    Parameters
    ----------
    files
        The bucket's files.
    request
        What to go by.
    scratch
        Local folder for temporary files.
    now_s
        The time, for tests.
    entries
        A listing of the folder, where the caller has one; it may be of any time after the pointer was handed out.

    Raises
    ------
    LostFilesError
        When somebody has deleted what the committed state needs.
    StorageError
        When listing or deleting failed.
    OwnershipError
        From `CleanUp.still_ours`.
    """
    entries = files.entries() if entries is None else entries
    now_s = time.time() if now_s is None else now_s
    headers = FileHeaders(files, {entry.name for entry in entries})
    pointer, retained, head = request.pointer, request.batches_retained, request.head
    damaged: set[CheckpointRef] = set()
    while True:
        try:
            decision = classify(entries, pointer, retained, now_s, headers, frozenset(damaged), head)
        except (CorruptError, MissingCheckpointError) as error:
            decision = Decision(doubt=str(error))
        if decision.lost:
            raise LostFilesError(
                f"{files.root} cannot give back {head}, which it had: files that it needs were deleted or damaged"
            )
        if decision.doubt:
            _LOGGER.warning("nothing is cleaned up in %s: %s", files.root, decision.doubt)
            return 0
        found = {ref for ref in decision.lean_on if not _is_whole(files, ref, scratch)}
        if not found:
            break
        damaged |= found
    names = decision.delete[: request.deletes_max]
    for name in names:
        # Cheap; and it may take long until all are gone.
        request.still_ours()
        files.remove(name)
    return len(names)


class FileHeaders:
    """Headers of files, remembered, as files are immutable: the origins of all that are there, whole headers of some.

    Parameters
    ----------
    files
        The bucket's folder.
    names
        The listing.
    """

    _FOLDERS_MAX = 256
    _HEADERS_MAX = 1_024
    _origins: ClassVar[OrderedDict[str, dict[CheckpointRef, Origin]]] = OrderedDict()
    _headers: ClassVar[OrderedDict[str, LineageHeader]] = OrderedDict()

    def __init__(self, files: Listed, names: Collection[str]) -> None:
        self._files = files
        self._names = names
        listed = {parsed[0] for name in names if (parsed := parse_file_name(name))}
        known = self._origins.pop(files.identity, {})
        # A copy, as threads of a clean-up that failed may still be adding to it.
        self._known = {ref: origin for ref, origin in known.copy().items() if ref in listed}
        self._origins[files.identity] = self._known
        if len(self._origins) > self._FOLDERS_MAX:
            self._origins.popitem(last=False)

    def of(self, ref: CheckpointRef) -> LineageHeader:
        """The header of a checkpoint's file."""
        kind = DELTA if file_name(ref, DELTA) in self._names else SNAPSHOT
        where = f"{self._files.identity} {file_name(ref, kind)}"
        # Taken out and put in again: in the order of their last use.
        header = self._headers.pop(where, None) or read_header(self._files, ref, kind)
        self._headers[where] = header
        if len(self._headers) > self._HEADERS_MAX:
            self._headers.popitem(last=False)
        self._known[ref] = Origin(header.writer.heartbeat, header.parent)
        return header

    def origins(self, refs: Sequence[CheckpointRef]) -> list[Origin]:
        """Where checkpoints come from; what is not known is read side by side."""
        unknown = [ref for ref in refs if ref not in self._known]
        if len(unknown) > 1:
            side_by_side("headers", min(_PARALLEL_MAX, len(unknown)), self.of, unknown)
        elif unknown:
            self.of(unknown[0])
        return [self._known[ref] for ref in refs]


_whole: OrderedDict[str, None] = OrderedDict()
_WHOLE_MAX = 4_096


def _is_whole(files: Listed, ref: CheckpointRef, scratch: Path) -> bool:
    """Whether a snapshot has the checksum that it announces; each worker process reads it once."""
    where = f"{files.identity} {file_name(ref, SNAPSHOT)}"
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
