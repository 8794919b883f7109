"""Decides whether a snapshot may be deleted, and why, for `savepoint status`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.savepoints.claims import SavepointClaim, is_consumed, read_claim
from spark_state_ext.savepoints.start_records import StartRecord, is_detached, read_start

__all__ = ["StartedQuery", "Verdict", "read_claim_status", "judge", "find_started_queries"]


@dataclass(frozen=True)
class StartedQuery:
    """A query that started from a snapshot.

    Parameters
    ----------
    query_folder
        Path of its state.
    record
        The query's start record.
    detached
        True if the query no longer needs the snapshot.
    """

    query_folder: str
    record: StartRecord
    detached: bool


@dataclass(frozen=True)
class Verdict:
    """The decision whether a snapshot may be deleted.

    Parameters
    ----------
    deletable
        True if the snapshot may be deleted.
    because
        The reason, as a sentence.
    """

    deletable: bool
    because: str

    def __str__(self) -> str:
        return f"deletable: {'yes' if self.deletable else 'no'}, because {self.because}"


def judge(
    started: Sequence[StartedQuery],
    claim: SavepointClaim | None,
    consumed: bool,
    looked_in: Sequence[str],
    operators: Collection[str] = (),
) -> Verdict:
    """Decide whether a snapshot may be deleted; `looked_in` are the roots that were searched for queries."""
    if claim is not None and claim.erases:
        return Verdict(
            False, f"{claim.by} is rewriting it: wait until that is finished, or run it again if it was stopped"
        )
    if claim is not None and claim.deletes:
        if consumed:
            return Verdict(True, f"{claim.by} has begun to delete it: if that was stopped, run it again")
        claim = None
    if claim is not None and consumed:
        return Verdict(False, f"{claim.by} owns it and is deleting it: let it finish")
    if claim is not None:
        return Verdict(
            False,
            f"{claim.by} has claimed it and will delete it in its second batch with data, unless it runs with "
            "clean_up=False or without start_from. If that query is gone for good, spark-state-ext savepoint release "
            "frees it",
        )
    waiting = [query for query in started if not query.detached]
    if waiting:
        return Verdict(
            False,
            f"{len(waiting)} of {len(started)} queries that started from it have not recorded a committed batch, which "
            f"they do in their second batch with data; the first of them is at {waiting[0].query_folder}. If that "
            "query "
            "is gone for good, remove that folder",
        )
    unused_operators = sorted(set(operators) - {query.record.operator for query in started}) if started else []
    if unused_operators:
        return Verdict(
            False,
            f"no query has started from its operators {', '.join(unused_operators)}, or such a query has had no batch "
            "with "
            "data yet: the state of these operators would be lost",
        )
    if started:
        return Verdict(True, f"all {len(started)} queries that started from it have committed a batch of their own")
    if not looked_in:
        return Verdict(
            False,
            "queries that started from it may still need it: name the roots of all queries that may have started from "
            "it, with --root",
        )
    return Verdict(
        True,
        f"no query below {', '.join(looked_in)} has started from it (a query that has had no batch with data yet is "
        "not "
        "found)",
    )


def read_claim_status(savepoint: Folder) -> tuple[SavepointClaim | None, bool]:
    """Read a savepoint's claim; also return True if its owner has begun to delete the savepoint."""
    claim = read_claim(savepoint)
    return claim, claim is not None and is_consumed(savepoint)


def find_started_queries(root: Folder, source: str, source_id: str) -> Iterable[StartedQuery]:
    """Yield the queries below a root that started from a snapshot."""
    for operator in (entry for entry in root.entries() if entry.folder):
        folder = root.child(operator.name)
        for entry in folder.entries():
            if not entry.folder or entry.name in (STARTING_FOLDER, SPILL_FOLDER):
                continue
            query_folder = folder.child(entry.name)
            try:
                record = read_start(query_folder)
            except MissingCheckpointError:
                continue
            if record is not None and record.is_of(source, source_id):
                yield StartedQuery(query_folder.root, record, is_detached(query_folder))
