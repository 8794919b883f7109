"""Who may delete what of a snapshot, judged by the ledger of a case (`docs/ownership.md`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from savepoint_cases import KILLED, Case
from savepoint_job import Query
from savepoint_ledger import CREATE, Entry, Ledger, summed

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import CLAIM_FOLDER

__all__ = ["Source", "found_wrong", "unlike"]

BY_THE_USER = "the user deletes the source"
NEW_JOBS = ("job 2", "snapshot 2", "job 3")


@dataclass(frozen=True)
class Source:
    """What a job was started from.

    Parameters
    ----------
    path
        Its folder, without a protocol: of a savepoint, or of the operator of the query that left its checkpoint.
    manifest
        Of a savepoint.
    """

    path: str
    manifest: SavepointManifest | None = None

    def files_in(self, top: Folder) -> list[str]:
        """Which files of it there are."""
        below = self.path[len(top._path) :].strip("/")
        return [entry.name for entry in top.tree() if entry.name.startswith(f"{below}/")]


def found_wrong(case: Case, ledger: Ledger, source: Source, second: Query) -> tuple[list[str], list[dict[str, Any]]]:
    """What was created or deleted against the rules, and who did what with the source.

    Parameters
    ----------
    case
        The case.
    ledger
        Its ledger.
    source
        What the second job was started from.
    second
        That job.
    """
    deletes, creates = ledger.deletes(source.path), ledger.creates(source.path)
    wrong: list[str] = []
    if case.adopts:
        wrong += _adopted(deletes, creates, second)
    elif case.mode == "claim":
        wrong += _consumed(deletes, source, second)
    elif source.manifest is not None:
        wrong += [_told(it) for it in deletes if it.phase != BY_THE_USER]
        wrong += [_told(it) for it in creates if it.phase.startswith(("job", "snapshot 2"))]
    else:
        wrong += _left_alone(deletes, creates)
    return wrong, summed([*creates, *deletes])


def unlike(case: Case, ledger: Ledger, there: set[str]) -> list[str]:
    """Where the ledger and the stores differ: then it has missed something, and proves nothing.

    Parameters
    ----------
    case, ledger
        The case, and its ledger.
    there
        All files that are there in the end.
    """
    undone: set[str] = set()
    if case.perturbation == KILLED:
        last = {it.pid: it for it in ledger.entries() if it.phase == "job 2 until it is killed"}
        # A disk's ledger notes what is about to be done; who is killed then does not do it. What was sent to S3 may
        # have come to the server, though its answer came to nobody.
        undone = {path for it in last.values() for path in (it.path, it.to)}
        undone = undone.union(*(ledger.unanswered(pid) for pid in last))
    differ = sorted((ledger.files_left() ^ there) - undone)
    return [
        f"the ledger and the store differ about {path}"
        for path in differ
        if not path.rpartition("/")[2].startswith(".tmp-")
    ]


def _left_alone(deletes: Sequence[Entry], creates: Sequence[Entry]) -> Iterable[str]:
    """Of the query that left its checkpoint a new one holds the folder, and deletes nothing there but its holds.

    The old query's own lease, uploads and clean-ups go on in its own time.
    """
    alone = True
    for it in sorted((*deletes, *creates), key=lambda it: it.at_s):
        alone &= it.phase != "job 1 goes on"
        gone = not it.made or it.made.rpartition("/")[0] != it.path.rpartition("/")[0]
        if not it.phase.startswith(NEW_JOBS) or it.role in ("hold", "lease"):
            continue
        if (gone and (alone or it.role != "clean-up")) or it.role in ("start", "claim", "detaching"):
            yield _told(it)


def _consumed(deletes: Sequence[Entry], source: Source, second: Query) -> Iterable[str]:
    """A claimed savepoint goes once its query is detached: what the manifest names, in the order that can be resumed."""
    assert source.manifest is not None, "a savepoint has one"
    if second.committed_s is None:
        yield "it is not known when the first batch of job 2 was committed"
        return
    # Several processes of the job may be at it; in S3 deleting what is gone already is no error.
    once: dict[str, Entry] = {}
    for it in deletes:
        once.setdefault(it.path, it)
    deletes = list(once.values())
    for it in deletes:
        if it.role != "claim consumption" or it.at_s < second.committed_s or not it.phase.startswith("job 2"):
            yield _told(it)
    files = [
        f"{source.path}/{bucket.operator}/{bucket.bucket}/{file.name}"
        for bucket in source.manifest.buckets
        for file in bucket.files
    ]
    claim = [f"{source.path}/{CLAIM_FOLDER}/{name}" for name in ("consumed.json", "claim.json")]
    gone = [it.path for it in deletes]
    if sorted(gone[: len(files)]) != sorted(files) or gone[len(files) :] != [f"{source.path}/{MANIFEST_NAME}", *claim]:
        yield f"other files were deleted, or in another order, than manifest and claim say: {gone}"


def _adopted(deletes: Sequence[Entry], creates: Sequence[Entry], second: Query) -> Iterable[str]:
    """In a folder that is adopted the new query cleans up as its owner, and the old one does nothing any more."""
    for it in deletes:
        owners = it.role in ("epochs", "lease", "hold", "clean-up") or (
            it.role == "detaching" and it.name.startswith("held-")
        )
        early = it.role == "clean-up" and it.phase.startswith(NEW_JOBS) and it.at_s < (second.committed_s or 0.0)
        if not owners or early:
            yield _told(it)
    for it in (*deletes, *creates):
        # The new query's lease may be released about then, by the driver, which is that of both here.
        if it.phase.startswith("job 1 after") and not any("lease_keeper._release" in name for name in it.by):
            yield _told(it)


def _told(entry: Entry) -> str:
    what = "created" if entry.what == CREATE else "deleted"
    return f"{entry.role} has {what} {entry.made or entry.path} in phase {entry.phase!r}, by {' < '.join(entry.by)}"
