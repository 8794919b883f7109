"""Folders of queries that no checkpoint names any more: found, and removed.

``spark-state-ext abandoned ROOT --checkpoint LOCATION …`` (`docs/operating/abandoned-state.md`). A query's
state lies in ``<root>/<operator>/<query folder>``. Its query folder is the query's id, which the Spark checkpoint has
in the file ``metadata``; but where the query's first tasks were not told their query, it has another name, which only
the pointers in Spark's own state tell. Spark's reader of state gets at these (``--spark``); without it, nothing is
taken for abandoned that was written within a long time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from arrow_schemas.operator import OperatorFile, parse_operator_file_name
from spark_state_ext.cli.options import OutputOption, RootPath, StorageOptions, options_for
from spark_state_ext.cli.output import Output, columns, say, write_records
from spark_state_ext.cli.paths import operators_below
from spark_state_ext.cli.spark_checkpoint import METADATA, STATE, query_id
from spark_state_ext.errors import CorruptError, LiveRunError, MissingCheckpointError, UsageError
from spark_state_ext.files.folder import Entry, Folder, refuse_relative
from spark_state_ext.files.layout import EPOCHS_FOLDER, LEASE_FOLDER, LEASE_FORMAT_1_NAME, SPILL_FOLDER, STARTING_FOLDER
from spark_state_ext.files.operator_catalog import is_new_query_folder
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.rescale.folders import first_folder

__all__ = [
    "ABANDONED",
    "OLDER_THAN_DAYS",
    "RECENT_DAYS_MIN",
    "Found",
    "QueryFolders",
    "abandoned",
    "judge",
    "look",
    "query_folders_by_metadata",
    "query_folders_of_checkpoints",
    "reason_of",
    "refuse_operators_without_metadata",
    "remove",
]

_ROWS = columns("verdict, operator, query, files int, bytes int, newest time_s, lease time_s, reason")
ABANDONED, NAMED, RECENT, UNKNOWN = "abandoned", "named", "recent", "unknown"
_DAY_S = 86_400.0
# However sure it is: a lease is renewed far more often.
RECENT_DAYS_MIN = 1.0
OLDER_THAN_DAYS = 30.0


def abandoned(
    root: RootPath,
    checkpoint: Annotated[
        list[str],
        typer.Option("--checkpoint", "-c", metavar="LOCATION", help="every checkpointLocation in use, on this root"),
    ],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[LOCATION]...", help="further ones, after --checkpoint")
    ] = None,
    operator: Annotated[list[str] | None, typer.Option(metavar="NAME", help="look at this one only")] = None,
    spark: Annotated[
        bool,
        typer.Option("--spark", help="read the checkpoints' state with Spark 4, which tells all that they name"),
    ] = False,
    older_than: Annotated[
        float,
        typer.Option(metavar="DAYS", min=RECENT_DAYS_MIN, help="without --spark: nobody has written there for so long"),
    ] = OLDER_THAN_DAYS,
    do_remove: Annotated[bool, typer.Option("--remove", help="remove what is abandoned")] = False,
    *,
    storage_options: StorageOptions,
    checkpoint_options: Annotated[dict[str, Any], options_for("the checkpoints")],
    output: OutputOption = Output.TABLE,
) -> None:
    """List the folders of queries that no Spark checkpoint names. Without --remove nothing is changed."""
    locations = [*checkpoint, *(more or [])]
    for location in [root, *locations]:
        refuse_relative(location, "a root or checkpoint")
    folder = Folder(root, storage_options)
    # Before Spark starts.
    operators_below(folder, operator or ())
    named = query_folders_of_checkpoints(locations, checkpoint_options, spark)
    found = [(it, judge(it, named, time.time(), older_than * _DAY_S)) for it in look(folder, operator or ())]
    write_records([_row(it, verdict, reason_of(it, verdict, named)) for it, verdict in found], _ROWS, output)
    going = [it for it, verdict in found if verdict == ABANDONED]
    say(f"folders={len(found)} abandoned={len(going)} bytes={sum(it.size_bytes for it in going)}")
    if not do_remove:
        say("nothing was removed: --remove removes what is abandoned")
        return
    for it in going:
        remove(folder, it)
        say(f"removed operator={it.operator} query={it.query_folder}")


def _row(found: Found, verdict: str, reason: str) -> dict[str, object]:
    return {
        "verdict": verdict,
        "operator": found.operator,
        "query": found.query_folder,
        "files": found.files,
        "bytes": found.size_bytes,
        "newest": None if found.newest_s is None else int(found.newest_s),
        "lease": None if found.lease_s is None else int(found.lease_s),
        "reason": reason or None,
    }


# Also what was not finished there. Rows in transit, too.
_LEASE = (f"{LEASE_FOLDER}/", LEASE_FORMAT_1_NAME)
_BEFORE_STATE = (*_LEASE, f"{EPOCHS_FOLDER}/", f"{SPILL_FOLDER}/")
_SPARK_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class QueryFolders:
    """Folders that checkpoints name."""

    names: frozenset[str]
    # There are no others that these checkpoints could name: their pointers were read.
    complete: bool


@dataclass(frozen=True)
class Found:
    """A folder below ``<root>/<operator>``."""

    operator: str
    query_folder: str
    # It has an operator file that names it; or a query's name, and only what a run leaves before its state begins.
    ours: bool
    files: int
    size_bytes: int
    # When the newest file in it was written, seconds since 1970; None where the file system does not tell.
    newest_s: float | None
    # When a run last renewed its lease on it, the same.
    lease_s: float | None
    # Folder that the query began in which has claimed it since; empty where none has, None where that cannot be read.
    claim: str | None = ""


def judge(found: Found, query_folders: QueryFolders, now_s: float, older_than_s: float) -> str:
    """Whether a folder is `ABANDONED`, `NAMED` by a checkpoint, too `RECENT` to tell, or `UNKNOWN`.

    Unknown is what is none of ours, and what only pointers can name, where `query_folders` are not complete.
    """
    # A query that is rescaled goes on in a folder that is called after its first one, and removes the others itself.
    named = {first_folder(name) for name in query_folders.names}
    if not named.isdisjoint({first_folder(found.query_folder), first_folder(found.claim or found.query_folder)}):
        return NAMED
    if not found.ours or found.claim is None or _needs_spark(found, query_folders):
        return UNKNOWN
    idle_s = -1.0 if found.newest_s is None else now_s - found.newest_s
    least_s = RECENT_DAYS_MIN * _DAY_S if query_folders.complete else max(older_than_s, RECENT_DAYS_MIN * _DAY_S)
    return ABANDONED if idle_s > least_s else RECENT


def _needs_spark(found: Found, query_folders: QueryFolders) -> bool:
    return not query_folders.complete and (
        is_new_query_folder(found.query_folder) or is_new_query_folder(found.claim or "")
    )


def look(root: Folder, operators: Collection[str] = ()) -> list[Found]:
    """The folders of queries below a root; arguments and errors are those of `operators_below`."""
    return [
        _found(root, operator, entry.name)
        for operator, entries in sorted(operators_below(root, operators).items())
        for entry in entries
        if entry.folder and entry.name not in (STARTING_FOLDER, SPILL_FOLDER)
    ]


def _found(root: Folder, operator: str, query_folder: str) -> Found:
    folder = root.child(operator, query_folder)
    files = folder.tree()
    leases = [entry for entry in files if entry.name.startswith(_LEASE)]
    return Found(
        operator,
        query_folder,
        any(_names(folder, entry.name, operator, query_folder) for entry in files) or _never_began(query_folder, files),
        len(files),
        sum(entry.size_bytes for entry in files),
        _newest_s(files),
        _newest_s(leases),
        _claim_of(folder) if leases else "",
    )


def _claim_of(folder: Folder) -> str | None:
    try:
        found = LeaseLog(folder).newest(first=True)
    except CorruptError:
        return None
    return "" if found is None or found.record.claim is None else found.record.claim.id


def _names(folder: Folder, name: str, operator: str, query_folder: str) -> bool:
    """Whether a file is an operator file of the folder that it lies in."""
    if parse_operator_file_name(name) is None:
        return False
    try:
        file = OperatorFile.decode(folder.get(name), folder.where(name))
    except (CorruptError, MissingCheckpointError):
        return False
    return (file.operator, file.query_id) == (operator, query_folder)


def _never_began(query_folder: str, files: Collection[Entry]) -> bool:
    """Whether a folder has what a run leaves before its state begins, and nothing else."""
    named_by_us = is_new_query_folder(query_folder) or _SPARK_ID.fullmatch(query_folder) is not None
    return named_by_us and bool(files) and all(entry.name.startswith(_BEFORE_STATE) for entry in files)


def _newest_s(entries: Iterable[Entry]) -> float | None:
    """The latest time; None when one of the files has none, or there is no file."""
    times = [entry.modified_s for entry in entries]
    return None if not times or None in times else max(time_s for time_s in times if time_s is not None)


def remove(root: Folder, found: Found) -> None:
    """Remove a folder, what makes it ours last, so that a removal that was stopped can be taken up again."""
    now = _found(root, found.operator, found.query_folder)
    if now != found:
        raise LiveRunError(
            f"{root.root}/{found.operator}/{found.query_folder} has changed while this command ran, so somebody uses "
            "it: nothing of it was removed. Find out which query that is, and give its checkpoint, too."
        )
    folder = root.child(found.operator, found.query_folder)
    entries = folder.entries()
    entries.sort(key=lambda entry: parse_operator_file_name(entry.name) is not None)
    for entry in entries:
        if entry.folder:
            folder.remove_tree(entry.name)
        else:
            folder.remove(entry.name)
    root.child(found.operator).remove_tree(found.query_folder)


def query_folders_by_metadata(checkpoints: Iterable[Folder]) -> QueryFolders:
    """What the file ``metadata`` of each checkpoint names."""
    names = set()
    for checkpoint in checkpoints:
        try:
            names.add(query_id(checkpoint.get(METADATA), checkpoint.where(METADATA)))
        except MissingCheckpointError as error:
            raise UsageError(
                f"{checkpoint.root} is no Spark checkpoint location: it has no file 'metadata'. Give the location as "
                "in the option checkpointLocation."
            ) from error
    return QueryFolders(frozenset(names), complete=False)


def refuse_operators_without_metadata(checkpoint: Folder) -> None:
    """Refuse a checkpoint with state that Spark's reader would pass over, without an error.

    Spark 4 finds operators by ``state/<operator>/_metadata``, which Spark 3.5 does not write.
    """
    states = checkpoint.child(STATE)
    for operator in (name for name in states.names() if name.isdecimal()):
        if "metadata" not in states.child(operator, "_metadata").names():
            raise UsageError(
                f"{states.root}/{operator} has no metadata of its operator, as Spark 3.5 writes none, so Spark "
                "cannot tell which folders it names: start the query once with Spark 4, or leave --spark out."
            )


def query_folders_of_checkpoints(
    locations: Sequence[str], storage_options: Mapping[str, Any], with_spark: bool
) -> QueryFolders:
    """Folders that checkpoints name."""
    checkpoints = [Folder(location, storage_options) for location in locations]
    found = query_folders_by_metadata(checkpoints)
    if not with_spark:
        return found
    for checkpoint in checkpoints:
        refuse_operators_without_metadata(checkpoint)
    # PySpark is not needed for the rest.
    from spark_state_ext.cli.sessions import query_folders_of, session

    spark = session(*locations)
    named = frozenset().union(*(query_folders_of(spark, location) for location in locations))
    return QueryFolders(found.names | named, complete=True)


def reason_of(found: Found, verdict: str, query_folders: QueryFolders) -> str:
    """What would tell more of a folder that is unknown; empty where there is nothing to say."""
    return "needs --spark" if verdict == UNKNOWN and found.ours and _needs_spark(found, query_folders) else ""
