"""Clean-up of a bucket's checkpoint files: what no pointer that Spark still has can lead to is deleted.

Everything is classified before anything is deleted, by `classify`, a function over values; any doubt and nothing is
deleted. In short: a file goes when no pointer that Spark may still hand out needs it, each from two snapshots that were
verified. Time is counted in heartbeats of the bucket. The argument is in `docs/correctness.md`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader, file_name, parse_file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import CorruptError, LostFilesError, MissingCheckpointError
from spark_state_ext.files.erasure import erased_before
from spark_state_ext.files.folder import Entry, Listed, is_temporary
from spark_state_ext.files.horizon import DELTAS_MAX, recent_heartbeats
from spark_state_ext.files.known_files import FileHeaders, KnownFiles, Origin

__all__ = [
    "CleanUp",
    "Decision",
    "FileHeaders",
    "Headers",
    "KnownFiles",
    "Origin",
    "classify",
    "clean_up",
    "clean_up_due",
    "is_crowded",
]

_LOGGER = logging.getLogger("spark_state_ext")
# Younger temporary files may still be somebody's work.
_TEMPORARY_AGE_S = 86_400.0
# And younger files stay, with what they lean on, whatever heartbeats tell: should an assumption about them be wrong.
_ORPHAN_AGE_S = 600.0
# The older one is what is left when the newer one turns out to be damaged.
SNAPSHOTS_KEPT = 2
_INTERVAL_CALLS_MIN = 10

Kinds = Mapping[CheckpointRef, set[str]]


class Headers(Protocol):
    """What the headers of a bucket's files tell; `CorruptError` or `MissingError` where that is not known."""

    def of(self, ref: CheckpointRef) -> LineageHeader:
        """The header of a checkpoint's file."""
        ...

    def origins(self, refs: Sequence[CheckpointRef]) -> list[Origin]:
        """Where checkpoints come from."""
        ...


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
    held
        Whether somebody copies from the files, so that none may be deleted. Asked after the pointer was handed out: so
        whoever holds later reads pointers that are no older.
    """

    pointer: Pointer
    head: CheckpointRef
    batches_retained: int
    still_ours: Callable[[], None]
    deletes_max: int | None = None
    held: Callable[[], bool] = lambda: False


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
    """Decide for every file of a bucket's folder."""
    listing = _listing(entries, now_s)
    if listing.foreign:
        return Decision(doubt=f"{listing.foreign} is none of our files")
    head = head or pointer.ref
    if head is None:
        return Decision(listing.leftovers)
    if head not in listing.kinds:
        return Decision(doubt=f"the committed checkpoint {head} has no file here", lost=True)
    files = _Files(listing.kinds, headers, damaged)
    recent = _recent_from(pointer, batches_retained)
    line = _line_of(head, recent, files)
    if not line.settled and headers.of(list(line.refs)[-1]).parent is not None:
        # Either this place was added later, or something is gone that should be there; then what is left below may be
        # of use to whoever brings it back.
        return Decision(listing.leftovers, lost=not any(files.is_snapshot(ref) for ref in line.refs))
    beside = _beside(listing, line, recent, files)
    if beside.doubt:
        return Decision(doubt=beside.doubt)
    gone = (_below(line) | beside.old) - beside.kept
    # The oldest first: a clean-up that stops in the middle leaves what later ones understand.
    names = [file_name(ref, kind) for ref in sorted(gone) for kind in sorted(listing.kinds[ref])]
    lean_on = dict.fromkeys([*line.settled, *beside.lean_on])
    return Decision((*listing.leftovers, *names), tuple(lean_on) if names else ())


@dataclass(frozen=True)
class _Listing:
    """What lies in a folder: the kinds of files of each checkpoint, and which checkpoints have a young one; old
    temporary files; and a file that is none of ours, where there is one."""

    kinds: Kinds
    young: frozenset[CheckpointRef]
    leftovers: tuple[str, ...]
    foreign: str = ""


def _listing(entries: Iterable[Entry], now_s: float) -> _Listing:
    """First pass: what each file is by its name and its age."""
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
            return _Listing(kinds, frozenset(young), tuple(leftovers), entry.name)
        elif age_s > _TEMPORARY_AGE_S:
            leftovers.append(entry.name)
    return _Listing(kinds, frozenset(young), tuple(leftovers))


@dataclass(frozen=True)
class _Files:
    """The files of a bucket's checkpoints: which there are, what their headers tell, and which are damaged."""

    kinds: Kinds
    headers: Headers
    damaged: frozenset[CheckpointRef]

    def is_snapshot(self, ref: CheckpointRef) -> bool:
        return SNAPSHOT in self.kinds[ref] and ref not in self.damaged


def _recent_from(pointer: Pointer, batches_retained: int) -> int:
    """Checkpoints with this heartbeat or a later one may be named by a pointer that Spark may still hand out."""
    recent = pointer.heartbeats - recent_heartbeats(max(batches_retained, pointer.retained))
    erased = erased_before(pointer.ages)
    return recent if erased is None else max(recent, erased)


@dataclass(frozen=True)
class _Line:
    """The committed lineage: its checkpoints, the newest first, and the snapshots that loads may lean on."""

    refs: Mapping[CheckpointRef, None]
    settled: tuple[CheckpointRef, ...]

    def meets(self, ref: CheckpointRef | None) -> bool:
        """Whether a checkpoint is where all stays that the lineage leans on: at or above the newest settled one."""
        return ref in self.refs and ref is not None and (not self.settled or ref.version >= self.settled[0].version)


def _line_of(head: CheckpointRef, recent: int, files: _Files) -> _Line:
    """Second pass: the lineage of the committed checkpoint, with its newest snapshots from before all that Spark may
    still name, the newest first; none when too few.

    Executors that go on from memory may be at any checkpoint of the lineage that is recent, so none of these will do.
    """
    refs = dict.fromkeys(_back_from(head, files.kinds, files.headers))
    found: list[CheckpointRef] = []
    for ref in refs:
        if files.is_snapshot(ref) and files.headers.origins([ref])[0].heartbeat < recent:
            found.append(ref)
            if len(found) == SNAPSHOTS_KEPT:
                return _Line(refs, tuple(found))
    return _Line(refs, ())


def _below(line: _Line) -> set[CheckpointRef]:
    """Third pass: what of the lineage nobody loads any more, as snapshots above it are settled."""
    return {ref for ref in line.refs if line.settled and ref.version < line.settled[-1].version}


@dataclass(frozen=True)
class _Beside:
    """What is to become of checkpoints beside the committed lineage.

    Parameters
    ----------
    old
        Those from which nobody goes on.
    kept
        What loading the others needs, on the lineage or beside it.
    lean_on
        Snapshots among it that have to be whole.
    doubt
        Why nothing may be deleted, where something is missing.
    """

    old: frozenset[CheckpointRef]
    kept: frozenset[CheckpointRef] = frozenset()
    lean_on: tuple[CheckpointRef, ...] = ()
    doubt: str = ""


def _beside(listing: _Listing, line: _Line, recent: int, files: _Files) -> _Beside:
    """Fourth pass: checkpoints of other attempts, and of lineages in parallel."""
    beside = sorted(files.kinds.keys() - line.refs.keys())
    origins = dict(zip(beside, files.headers.origins(beside), strict=True))
    # What the pointer holds inline may have arrived since, and is recent.
    old = {ref for ref in beside if origins[ref].heartbeat < recent and ref not in listing.young}
    going = set(old)
    kept: set[CheckpointRef] = set()
    lean_on: list[CheckpointRef] = []
    for ref in beside:
        if ref in going or line.meets(origins[ref].parent):
            continue
        needs = _needs_of(ref, line, files)
        if origins[ref].heartbeat >= recent:
            if needs.missing is not None:
                doubt = f"{ref} may be in use and its ancestor {needs.missing} has no file"
                return _Beside(frozenset(old), doubt=doubt)
            lean_on += needs.snapshots
        kept.update(needs.refs)
        going.difference_update(needs.refs)
    return _Beside(frozenset(old), frozenset(kept), tuple(lean_on))


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


@dataclass
class _Needs:
    """What loading a checkpoint may need: itself and ancestors, snapshots among these, and what of it is not there."""

    refs: list[CheckpointRef] = field(default_factory=list)
    snapshots: list[CheckpointRef] = field(default_factory=list)
    missing: CheckpointRef | None = None


def _needs_of(beside: CheckpointRef, line: _Line, files: _Files) -> _Needs:
    """The needs of a checkpoint beside a lineage, down to its second snapshot or to where it comes from the lineage."""
    needs = _Needs()
    for ref in _back_from(beside, files.kinds, files.headers):
        if line.meets(ref):
            return _Needs(needs.refs)
        needs.refs.append(ref)
        if files.is_snapshot(ref):
            needs.snapshots.append(ref)
            if len(needs.snapshots) == SNAPSHOTS_KEPT:
                break
    if not needs.snapshots:
        needs.missing = files.headers.of(needs.refs[-1]).parent
    return needs


def clean_up(
    files: Listed,
    request: CleanUp,
    scratch: Path,
    now_s: float | None = None,
    entries: Sequence[Entry] | None = None,
    known: KnownFiles | None = None,
) -> int:
    """Delete what no retained pointer leads to; returns how many files. May be repeated, and stopped, at any time."""
    if request.held():
        return 0
    entries = files.entries() if entries is None else entries
    now_s = time.time() if now_s is None else now_s
    known = KnownFiles() if known is None else known
    headers = FileHeaders(files, {entry.name for entry in entries}, known)
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
        found = {ref for ref in decision.lean_on if not known.is_whole(files, ref, scratch)}
        if not found:
            break
        damaged |= found
    names = decision.delete[: request.deletes_max]
    _LOGGER.info(
        "clean-up in %s: of %d files %d are needed by no batch that Spark retains; %d of these go now. "
        "Files from heartbeat %d on stay, and so do the two newest snapshots from before it with what followed them",
        files.root,
        len(entries),
        len(decision.delete),
        len(names),
        _recent_from(pointer, retained),
    )
    for name in names:
        # Cheap; and it may take long until all are gone.
        request.still_ours()
        files.remove(name)
    return len(names)
