"""Explain in words why the next clean-up deletes or keeps each file of a bucket, as `classify` decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.files.folder import Entry
from spark_state_ext.files.retention import (
    Decision,
    Headers,
    _Files,
    _find_line,
    _first_recent,
    _judge_siblings,
    _Line,
    _Listing,
    _Siblings,
    _sort_files,
    classify,
)

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """Decision about a bucket's files, and its reasons.

    Parameters
    ----------
    decision
        The decision of `classify`.
    reasons
        The reason for each file, by its name: a part of a sentence.
    """

    decision: Decision
    reasons: Mapping[str, str]

    def goes(self, name: str) -> bool:
        """True if the next clean-up deletes this file."""
        return name in self.decision.delete


def explain(
    entries: Iterable[Entry], pointer: Pointer, batches_retained: int, now_s: float, headers: Headers
) -> Explanation:
    """Decide which files of a bucket's folder are deleted, and explain why."""
    entries = list(entries)
    decision = classify(entries, pointer, batches_retained, now_s, headers)
    names = [entry.name for entry in entries]
    if decision.doubt:
        return Explanation(decision, dict.fromkeys(names, f"nothing is deleted here, as {decision.doubt}"))
    listing = _sort_files(entries, now_s)
    reasons = dict.fromkeys(names, "it is a temporary file, which may still be written; it is deleted after a day")
    reasons |= dict.fromkeys(listing.leftovers, "it is a temporary file of a writer that died")
    if pointer.ref is None or pointer.ref not in listing.kinds:
        reason = "the bucket has no committed checkpoint"
        return Explanation(decision, reasons | {file_name(*file): reason for file in _list_files(listing)})
    files = _Files(listing.kinds, headers, frozenset())
    recent = _first_recent(pointer, batches_retained)
    line = _find_line(pointer.ref, recent, files)
    siblings = _judge_siblings(listing, line, recent, files)
    explain = _Reasons(decision, listing, line, siblings, recent, files)
    return Explanation(
        decision, reasons | {file_name(ref, kind): explain.of(ref, kind) for ref, kind in _list_files(listing)}
    )


def _list_files(listing: _Listing) -> list[tuple[CheckpointRef, str]]:
    return [(ref, kind) for ref in listing.kinds for kind in listing.kinds[ref]]


@dataclass(frozen=True)
class _Reasons:
    """Results of the passes of `classify`, from which each file's reason is put together."""

    decision: Decision
    listing: _Listing
    line: _Line
    siblings: _Siblings
    recent: int
    files: _Files

    def of(self, ref: CheckpointRef, kind: str) -> str:
        if file_name(ref, kind) in self.decision.delete:
            return self._goes(ref)
        (origin,) = self.files.headers.origins([ref])
        if origin.heartbeat >= self.recent:
            which = "" if ref in self.line.refs else ", of another attempt than the committed one,"
            # The first call of a bucket is at heartbeat 1.
            since = f"heartbeat {self.recent}" if self.recent > 1 else "the first"
            return (
                f"it was made at heartbeat {origin.heartbeat}: a batch that Spark retains may name a checkpoint{which} "
                f"from {since} on"
            )
        if ref in self.line.refs:
            return self._on_the_line(ref, kind)
        if ref in self.listing.young:
            return "it is less than 10 minutes old, and such young files are never deleted"
        return "a checkpoint that stays was built on it"

    def _goes(self, ref: CheckpointRef) -> str:
        if ref in self.line.refs:
            return f"every batch that Spark retains loads from snapshot {self.line.settled[-1].version} or a later one"
        return f"it is of another attempt than the committed one, from before heartbeat {self.recent}"

    def _on_the_line(self, ref: CheckpointRef, kind: str) -> str:
        if not self.line.settled:
            return (
                f"it is of the committed lineage, and there are not yet two snapshots from before heartbeat "
                f"{self.recent} to load from instead"
            )
        if ref in self.line.settled and kind == SNAPSHOT:
            which = "newest" if ref == self.line.settled[0] else "second"
            return f"it is the {which} snapshot from before heartbeat {self.recent}: loads begin with it"
        return "it follows a snapshot that loads begin with"
