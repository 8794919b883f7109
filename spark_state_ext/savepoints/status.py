"""Whether a snapshot may be deleted, and why: what `savepoint status` says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.savepoints.claims import SavepointClaim, claim_of, is_consumed
from spark_state_ext.savepoints.records import StartRecord, is_detached, start_of

__all__ = ["Started", "Verdict", "claimed", "judged", "started_below"]


@dataclass(frozen=True)
class Started:
    """A query that was started from a snapshot.

    Parameters
    ----------
    query_folder
        Where its state is.
    record
        What that tells of the start.
    detached
        It needs nothing of the snapshot any more.
    """

    query_folder: str
    record: StartRecord
    detached: bool


@dataclass(frozen=True)
class Verdict:
    """Whether a snapshot may be deleted.

    Parameters
    ----------
    deletable
        It may.
    because
        Why, or why not: a sentence.
    """

    deletable: bool
    because: str

    def __str__(self) -> str:
        return f"deletable: {'yes' if self.deletable else 'no'}, because {self.because}"


def judged(
    started: Sequence[Started],
    claim: SavepointClaim | None,
    consumed: bool,
    looked_in: Sequence[str],
    operators: Collection[str] = (),
) -> Verdict:
    """Decide."""
    if claim is not None and claim.erases:
        return Verdict(
            False, f"{claim.by} is writing it anew: wait until that is over, or run it again where it was stopped"
        )
    if claim is not None and consumed:
        return Verdict(False, f"{claim.by} owns it and is deleting it: let it finish")
    if claim is not None:
        return Verdict(
            False,
            f"{claim.by} has claimed it, and deletes it itself in its second batch with data, unless it runs with "
            "clean_up=False or without start_from. Where that query is gone for good, spark-state-ext "
            "savepoint release frees it",
        )
    waiting = [it for it in started if not it.detached]
    if waiting:
        return Verdict(
            False,
            f"{len(waiting)} of {len(started)} queries that were started from it have not told that a batch of theirs "
            f"is committed, which they do in their second batch with data; the first is at {waiting[0].query_folder}. "
            "Where that query is gone for good, remove that folder",
        )
    never = sorted(set(operators) - {it.record.operator for it in started}) if started else []
    if never:
        return Verdict(
            False,
            f"of its operators {', '.join(never)} was not started, or has had no batch with data: its state would be "
            "lost",
        )
    if started:
        return Verdict(
            True, f"all {len(started)} queries that were started from it have committed a batch of their own"
        )
    if not looked_in:
        return Verdict(
            False,
            "it is not known whether a query that was started from it needs it still: name the roots of those that "
            "may have been, with --root",
        )
    return Verdict(
        True,
        f"no query is known that was started from it (below {', '.join(looked_in)}; one that was started and has had "
        "no batch with data is not seen)",
    )


def claimed(savepoint: Folder) -> tuple[SavepointClaim | None, bool]:
    """Who has claimed a savepoint, and whether that one has begun to delete it."""
    claim = claim_of(savepoint)
    return claim, claim is not None and is_consumed(savepoint)


def started_below(root: Folder, source: str, source_id: str) -> Iterable[Started]:
    """Queries below a root that were started from a snapshot."""
    for operator in (it for it in root.entries() if it.folder):
        folder = root.child(operator.name)
        for entry in folder.entries():
            if not entry.folder or entry.name in (STARTING_FOLDER, SPILL_FOLDER):
                continue
            query_folder = folder.child(entry.name)
            try:
                record = start_of(query_folder)
            except MissingCheckpointError:
                continue
            if record is not None and record.is_of(source, source_id):
                yield Started(query_folder.root, record, is_detached(query_folder))
