"""Checks, by the ledger of a case, that only those who may delete files of a snapshot did so (`docs/ownership.md`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from savepoint_cases import KILLED, Case
from savepoint_job import Query
from savepoint_ledger import CREATE, Entry, Ledger, summarise

from arrow_schemas.savepoint import MANIFEST_NAME, SavepointManifest
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import CLAIM_FOLDER

__all__ = ["Source", "find_differences", "find_violations"]

BY_THE_USER = "the user deletes the source"
NEW_JOBS = ("job 2", "snapshot 2", "job 3")


@dataclass(frozen=True)
class Source:
    """The snapshot that a job was started from.

    Parameters
    ----------
    path
        Its folder without a protocol: that of a savepoint, or of the operator of the query that left its checkpoint.
    manifest
        The manifest, if it is a savepoint.
    """

    path: str
    manifest: SavepointManifest | None = None

    def files_in(self, top: Folder) -> list[str]:
        """Return the names of its files that exist."""
        below = self.path[len(top._path) :].strip("/")
        return [entry.name for entry in top.tree() if entry.name.startswith(f"{below}/")]


def find_violations(
    case: Case, ledger: Ledger, source: Source, second: Query
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the creations and deletions that break the rules, and a summary of who did what with the source.

    Parameters
    ----------
    case, ledger
        The case and its ledger.
    source
        The snapshot that the second job was started from.
    second
        The second job.
    """
    deletes, creates = ledger.deletes(source.path), ledger.creates(source.path)
    violations: list[str] = []
    if case.adopts:
        violations += _find_violations_in_adopted(deletes, creates, second)
    elif case.mode == "claim":
        violations += _find_violations_in_claimed(deletes, source, second)
    elif source.manifest is not None:
        violations += [_describe(entry) for entry in deletes if entry.phase != BY_THE_USER]
        violations += [_describe(entry) for entry in creates if entry.phase.startswith(("job", "snapshot 2"))]
    else:
        violations += _find_violations_in_retained(deletes, creates)
    return violations, summarise([*creates, *deletes])


def find_differences(case: Case, ledger: Ledger, existing: set[str]) -> list[str]:
    """Return where the ledger and the stores differ: a ledger that has missed a change proves nothing.

    Parameters
    ----------
    case, ledger
        The case and its ledger.
    existing
        All files that exist in the end.
    """
    uncertain: set[str] = set()
    if case.perturbation == KILLED:
        last = {entry.pid: entry for entry in ledger.entries() if entry.phase == "job 2 until it is killed"}
        # On a disk the ledger notes a change just before it happens, and a process that is killed then does not make it.
        # A request to S3 may have reached the server although the process was killed before the answer.
        uncertain = {path for entry in last.values() for path in (entry.path, entry.to)}
        uncertain = uncertain.union(*(ledger.unanswered(pid) for pid in last))
    differ = sorted((ledger.files_left() ^ existing) - uncertain)
    return [
        f"the ledger and the store differ about {path}"
        for path in differ
        if not path.rpartition("/")[2].startswith(".tmp-")
    ]


def _find_violations_in_retained(deletes: Sequence[Entry], creates: Sequence[Entry]) -> Iterable[str]:
    """Find violations in the folder of a query that left its checkpoint: a new query deletes only its own holds there.

    The old query's own lease, uploads and clean-ups continue in the background.
    """
    old_job_stopped = True
    for entry in sorted((*deletes, *creates), key=lambda entry: entry.at_s):
        old_job_stopped &= entry.phase != "job 1 goes on"
        is_removal = not entry.new_path or entry.new_path.rpartition("/")[0] != entry.path.rpartition("/")[0]
        if not entry.phase.startswith(NEW_JOBS) or entry.role in ("hold", "lease"):
            continue
        if (is_removal and (old_job_stopped or entry.role != "clean-up")) or entry.role in (
            "start",
            "claim",
            "detaching",
        ):
            yield _describe(entry)


def _find_violations_in_claimed(deletes: Sequence[Entry], source: Source, second: Query) -> Iterable[str]:
    """Find violations in a claimed savepoint.

    Once its query is detached, the files that the manifest names are deleted, in an order that allows resuming.
    """
    assert source.manifest is not None, "a savepoint has a manifest"
    if second.committed_s is None:
        yield "it is not known when the first batch of job 2 was committed"
        return
    # Several processes of the job may delete at the same time; in S3 deleting a deleted object is no error.
    first_deletes: dict[str, Entry] = {}
    for entry in deletes:
        first_deletes.setdefault(entry.path, entry)
    deletes = list(first_deletes.values())
    for entry in deletes:
        if entry.role != "claim consumption" or entry.at_s < second.committed_s or not entry.phase.startswith("job 2"):
            yield _describe(entry)
    files = [
        f"{source.path}/{bucket.operator}/{bucket.bucket}/{file.name}"
        for bucket in source.manifest.buckets
        for file in bucket.files
    ]
    claim = [f"{source.path}/{CLAIM_FOLDER}/{name}" for name in ("consumed.json", "claim.json")]
    deleted_paths = [entry.path for entry in deletes]
    if sorted(deleted_paths[: len(files)]) != sorted(files) or deleted_paths[len(files) :] != [
        f"{source.path}/{MANIFEST_NAME}",
        *claim,
    ]:
        yield f"the deleted files or their order differ from the manifest and claim: {deleted_paths}"


def _find_violations_in_adopted(deletes: Sequence[Entry], creates: Sequence[Entry], second: Query) -> Iterable[str]:
    """Find violations in an adopted folder: the new query cleans up as its owner, and the old query changes nothing."""
    for entry in deletes:
        is_owners = entry.role in ("epochs", "lease", "hold", "clean-up") or (
            entry.role == "detaching" and entry.name.startswith("held-")
        )
        is_early = (
            entry.role == "clean-up" and entry.phase.startswith(NEW_JOBS) and entry.at_s < (second.committed_s or 0.0)
        )
        if not is_owners or is_early:
            yield _describe(entry)
    for entry in (*deletes, *creates):
        # The driver, which both queries share here, may release the new query's lease in this phase.
        if entry.phase.startswith("job 1 after") and not any("lease_keeper._release" in name for name in entry.by):
            yield _describe(entry)


def _describe(entry: Entry) -> str:
    what = "created" if entry.what == CREATE else "deleted"
    return f"{entry.role} has {what} {entry.new_path or entry.path} in phase {entry.phase!r}, by {' < '.join(entry.by)}"
