"""Clean-up of a bucket's checkpoint files: delete what no pointer that Spark still has can need.

`classify`, a function over values, decides about every file before any file is deleted; if it has any doubt, no file is
deleted. In short: a file is deleted if no pointer that Spark may still hand out needs it, even when each such pointer
keeps two verified snapshots to load from. Time is counted in heartbeats of the bucket. The argument is in
`docs/correctness.md`.
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
from spark_state_ext.files.header_cache import FileHeaders, KnownFiles, Origin
from spark_state_ext.files.horizon import DELTAS_MAX, recent_heartbeats

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
# Younger temporary files may still be written.
_TEMPORARY_AGE_S = 86_400.0
# Younger files stay, with the files that they need, whatever their heartbeats: in case an assumption is wrong.
_ORPHAN_AGE_S = 600.0
# The older snapshot is the reserve if the newer one turns out to be damaged.
SNAPSHOTS_KEPT = 2
_INTERVAL_CALLS_MIN = 10

Kinds = Mapping[CheckpointRef, set[str]]


class Headers(Protocol):
    """Headers of a bucket's files; raises `CorruptError` or `MissingCheckpointError` if a header cannot be read."""

    def of(self, ref: CheckpointRef) -> LineageHeader:
        """Return the header of a checkpoint's file."""
        ...

    def origins(self, refs: Sequence[CheckpointRef]) -> list[Origin]:
        """Return the origins of checkpoints."""
        ...


@dataclass(frozen=True)
class Decision:
    """Decision about a bucket's files.

    Parameters
    ----------
    delete
        Names of files to delete, in the order of deletion.
    lean_on
        Snapshots that must be whole before any file is deleted.
    doubt
        Why no file may be deleted; empty if there is no doubt.
    lost
        The committed state cannot be loaded from here: files that it needs were deleted.
    """

    delete: tuple[str, ...] = ()
    lean_on: tuple[CheckpointRef, ...] = ()
    doubt: str = ""
    lost: bool = False


@dataclass(frozen=True)
class CleanUp:
    """The input of a clean-up.

    Parameters
    ----------
    pointer
        The input pointer of a call: Spark has certainly committed it.
    head
        The newest checkpoint of its lineage that this backend has confirmed.
    batches_retained
        Spark's ``minBatchesToRetain`` now.
    still_ours
        Raises an error if another run of the query has taken over the state.
    deletes_max
        How many files are deleted at most; the rest is left to later clean-ups.
    held
        Returns True if there is a hold, so that no file may be deleted. It is called after the pointer was handed out,
        so a process that takes a hold later reads pointers that are no older.
    """

    pointer: Pointer
    head: CheckpointRef
    batches_retained: int
    still_ours: Callable[[], None]
    deletes_max: int | None = None
    held: Callable[[], bool] = lambda: False


def clean_up_due(calls: int, bucket: int, batches_retained: int) -> bool:
    """True if this call is the bucket's turn; buckets take turns, so that the listings are spread over batches."""
    return (calls + bucket) % max(_INTERVAL_CALLS_MIN, batches_retained // 4) == 0


def is_crowded(entries: Sequence[Entry], batches_retained: int) -> bool:
    """True if there are more files than regular clean-ups leave, but not so many that reading them takes long.

    A clean-up leaves two snapshots and the files between them, files from within three times the batches retained, and
    a few siblings of each.
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
    """Decide which files of a bucket's folder are deleted."""
    listing = _sort_files(entries, now_s)
    if listing.foreign:
        return Decision(doubt=f"{listing.foreign} is not a file of spark_state_ext")
    head = head or pointer.ref
    if head is None:
        return Decision(listing.leftovers)
    if head not in listing.kinds:
        return Decision(doubt=f"the committed checkpoint {head} has no file here", lost=True)
    files = _Files(listing.kinds, headers, damaged)
    recent = _first_recent(pointer, batches_retained)
    line = _find_line(head, recent, files)
    if not line.settled and headers.of(list(line.refs)[-1]).parent is not None:
        # Either this backend was added later, or a needed file is gone; then the older files may help to repair it.
        return Decision(listing.leftovers, lost=not any(files.is_snapshot(ref) for ref in line.refs))
    siblings = _judge_siblings(listing, line, recent, files)
    if siblings.doubt:
        return Decision(doubt=siblings.doubt)
    deleted = (_find_superseded(line) | siblings.old) - siblings.kept
    # Oldest first, so that a clean-up that stops in the middle leaves files that later ones understand.
    names = [file_name(ref, kind) for ref in sorted(deleted) for kind in sorted(listing.kinds[ref])]
    lean_on = dict.fromkeys([*line.settled, *siblings.lean_on])
    return Decision((*listing.leftovers, *names), tuple(lean_on) if names else ())


@dataclass(frozen=True)
class _Listing:
    """The files in a folder: kinds of files by checkpoint, checkpoints that have a young file, old temporary files, and
    the name of a foreign file if there is one."""

    kinds: Kinds
    young: frozenset[CheckpointRef]
    leftovers: tuple[str, ...]
    foreign: str = ""


def _sort_files(entries: Iterable[Entry], now_s: float) -> _Listing:
    """First pass: sort the files by name and age."""
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
    """The files of a bucket's checkpoints: their kinds, their headers, and which snapshots are damaged."""

    kinds: Kinds
    headers: Headers
    damaged: frozenset[CheckpointRef]

    def is_snapshot(self, ref: CheckpointRef) -> bool:
        return SNAPSHOT in self.kinds[ref] and ref not in self.damaged


def _first_recent(pointer: Pointer, batches_retained: int) -> int:
    """Return the first heartbeat whose checkpoints may be named by a pointer that Spark may still hand out."""
    recent = pointer.heartbeats - recent_heartbeats(max(batches_retained, pointer.retained))
    erased = erased_before(pointer.ages)
    return recent if erased is None else max(recent, erased)


@dataclass(frozen=True)
class _Line:
    """The committed lineage: its checkpoints, and the settled snapshots that loads may start from, newest first."""

    refs: Mapping[CheckpointRef, None]
    settled: tuple[CheckpointRef, ...]

    def meets(self, ref: CheckpointRef | None) -> bool:
        """True if a checkpoint of the lineage is not older than its newest settled snapshot, and so stays loadable."""
        return ref in self.refs and ref is not None and (not self.settled or ref.version >= self.settled[0].version)


def _find_line(head: CheckpointRef, recent: int, files: _Files) -> _Line:
    """Second pass: find the committed lineage and its settled snapshots: the newest ones from before `recent`.

    If there are too few, no snapshot is settled. Recent snapshots do not count, as executors that go on from memory may
    be at any recent checkpoint of the lineage.
    """
    refs = dict.fromkeys(_walk_back(head, files.kinds, files.headers))
    settled: list[CheckpointRef] = []
    for ref in refs:
        if files.is_snapshot(ref) and files.headers.origins([ref])[0].heartbeat < recent:
            settled.append(ref)
            if len(settled) == SNAPSHOTS_KEPT:
                return _Line(refs, tuple(settled))
    return _Line(refs, ())


def _find_superseded(line: _Line) -> set[CheckpointRef]:
    """Third pass: return the lineage's checkpoints from before its settled snapshots, which are no longer loaded."""
    return {ref for ref in line.refs if line.settled and ref.version < line.settled[-1].version}


@dataclass(frozen=True)
class _Siblings:
    """Checkpoints that are not on the committed lineage.

    Parameters
    ----------
    old
        Checkpoints that no query goes on from.
    kept
        Checkpoints, on the lineage or not, that loading the other siblings needs.
    lean_on
        Snapshots among these that must be whole.
    doubt
        Why no file may be deleted; empty if no file is missing.
    """

    old: frozenset[CheckpointRef]
    kept: frozenset[CheckpointRef] = frozenset()
    lean_on: tuple[CheckpointRef, ...] = ()
    doubt: str = ""


def _judge_siblings(listing: _Listing, line: _Line, recent: int, files: _Files) -> _Siblings:
    """Fourth pass: judge checkpoints of other attempts and of parallel lineages."""
    siblings = sorted(files.kinds.keys() - line.refs.keys())
    origins = dict(zip(siblings, files.headers.origins(siblings), strict=True))
    # A checkpoint that the pointer holds inline may have arrived since, and is recent.
    old = {ref for ref in siblings if origins[ref].heartbeat < recent and ref not in listing.young}
    deletable = set(old)
    kept: set[CheckpointRef] = set()
    lean_on: list[CheckpointRef] = []
    for ref in siblings:
        if ref in deletable or line.meets(origins[ref].parent):
            continue
        needs = _find_needs(ref, line, files)
        if origins[ref].heartbeat >= recent:
            if needs.missing is not None:
                doubt = f"{ref} may be in use and its ancestor {needs.missing} has no file"
                return _Siblings(frozenset(old), doubt=doubt)
            lean_on += needs.snapshots
        kept.update(needs.refs)
        deletable.difference_update(needs.refs)
    return _Siblings(frozenset(old), frozenset(kept), tuple(lean_on))


def _walk_back(ref: CheckpointRef, kinds: Kinds, headers: Headers) -> Iterator[CheckpointRef]:
    """Iterate over a checkpoint and its ancestors, newest first, as far back as there are files."""
    yield ref
    while True:
        # Each header names the ancestors back to the snapshot that was unconfirmed at that time.
        lineage = headers.of(ref).lineage
        for ref in reversed(lineage):
            if ref not in kinds:
                return
            yield ref
        if not lineage:
            return


@dataclass
class _Needs:
    """The checkpoints that loading a checkpoint may need, the snapshots among them, and the first missing one."""

    refs: list[CheckpointRef] = field(default_factory=list)
    snapshots: list[CheckpointRef] = field(default_factory=list)
    missing: CheckpointRef | None = None


def _find_needs(sibling: CheckpointRef, line: _Line, files: _Files) -> _Needs:
    """Return what loading a sibling needs, down to its second snapshot or to its branch point on the lineage."""
    needs = _Needs()
    for ref in _walk_back(sibling, files.kinds, files.headers):
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
    """Delete the files that no retained pointer needs; return how many. It may be stopped and repeated at any time."""
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
            _LOGGER.warning("no files are cleaned up in %s: %s", files.root, decision.doubt)
            return 0
        newly_damaged = {ref for ref in decision.lean_on if not known.is_whole(files, ref, scratch)}
        if not newly_damaged:
            break
        damaged |= newly_damaged
    names = decision.delete[: request.deletes_max]
    _LOGGER.info(
        "clean-up in %s: of %d files, %d are not needed by any batch that Spark retains; %d of these are deleted now. "
        "Files from heartbeat %d on stay, and so do the two newest snapshots from before it and the files after them",
        files.root,
        len(entries),
        len(decision.delete),
        len(names),
        _first_recent(pointer, retained),
    )
    for name in names:
        # The check is cheap, and deleting all files may take long.
        request.still_ours()
        files.remove(name)
    return len(names)
