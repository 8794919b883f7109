"""Find and remove query folders that no Spark checkpoint names.

``spark-state-ext abandoned ROOT --checkpoint LOCATION …`` (`docs/operating/abandoned-state.md`). A query's
state lies in ``<root>/<operator>/<query folder>``. The query folder is usually named by the query's id, which is in the
Spark checkpoint's file ``metadata``. If the query's first tasks did not know that id, the folder has another name,
which only the pointers in Spark's own state contain. ``--spark`` reads these pointers with Spark; without it, a folder
counts as abandoned only if it was not written for a long time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from arrow_schemas.operator import OperatorFile, parse_operator_file_name
from spark_state_ext.cli.options import OutputOption, RootPath, StorageOptions, make_json_option
from spark_state_ext.cli.output import Output, parse_columns, say, write_records
from spark_state_ext.cli.paths import list_operators
from spark_state_ext.cli.spark_checkpoint import METADATA, STATE, read_query_id
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
    "FolderInfo",
    "QueryFolders",
    "abandoned",
    "explain_verdict",
    "judge_folder",
    "list_folders",
    "read_folders_from_metadata",
    "read_named_folders",
    "refuse_operators_without_metadata",
    "remove_folder",
]

_ROWS = parse_columns("verdict, operator, query, files int, bytes int, newest time_s, lease time_s, reason")
ABANDONED, NAMED, RECENT, UNKNOWN = "abandoned", "named", "recent", "unknown"
_DAY_S = 86_400.0
# A folder that was written more recently is never abandoned: a run renews its lease far more often than this.
RECENT_DAYS_MIN = 1.0
OLDER_THAN_DAYS = 30.0


def abandoned(
    root: RootPath,
    checkpoint: Annotated[
        list[str],
        typer.Option(
            "--checkpoint", "-c", metavar="LOCATION", help="checkpointLocation of a query on this root; give all in use"
        ),
    ],
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[LOCATION]...", help="more checkpoint locations, after --checkpoint")
    ] = None,
    operator: Annotated[list[str] | None, typer.Option(metavar="NAME", help="look at this operator only")] = None,
    spark: Annotated[
        bool,
        typer.Option("--spark", help="read with Spark 4 all folders that the checkpoints' state names"),
    ] = False,
    older_than: Annotated[
        float,
        typer.Option(metavar="DAYS", min=RECENT_DAYS_MIN, help="without --spark: days since the last write, at least"),
    ] = OLDER_THAN_DAYS,
    do_remove: Annotated[bool, typer.Option("--remove", help="remove abandoned folders")] = False,
    *,
    storage_options: StorageOptions,
    checkpoint_options: Annotated[dict[str, Any], make_json_option("the checkpoints")],
    output: OutputOption = Output.TABLE,
) -> None:
    """List the query folders that no Spark checkpoint names. Nothing is changed without --remove."""
    locations = [*checkpoint, *(more or [])]
    for location in [root, *locations]:
        refuse_relative(location, "a root or checkpoint")
    folder = Folder(root, storage_options)
    # Check the root before Spark starts.
    list_operators(folder, operator or ())
    named = read_named_folders(locations, checkpoint_options, spark)
    verdicts = [
        (info, judge_folder(info, named, time.time(), older_than * _DAY_S))
        for info in list_folders(folder, operator or ())
    ]
    write_records(
        [_row(info, verdict, explain_verdict(info, verdict, named)) for info, verdict in verdicts], _ROWS, output
    )
    removable = [info for info, verdict in verdicts if verdict == ABANDONED]
    say(f"folders={len(verdicts)} abandoned={len(removable)} bytes={sum(info.size_bytes for info in removable)}")
    if not do_remove:
        say("no folder was removed: --remove removes abandoned folders")
        return
    for info in removable:
        remove_folder(folder, info)
        say(f"removed operator={info.operator} query={info.query_folder}")


def _row(info: FolderInfo, verdict: str, reason: str) -> dict[str, object]:
    return {
        "verdict": verdict,
        "operator": info.operator,
        "query": info.query_folder,
        "files": info.files,
        "bytes": info.size_bytes,
        "newest": None if info.newest_s is None else int(info.newest_s),
        "lease": None if info.lease_s is None else int(info.lease_s),
        "reason": reason or None,
    }


# What a run writes before its state begins, unfinished files and rows in transit included.
_LEASE = (f"{LEASE_FOLDER}/", LEASE_FORMAT_1_NAME)
_BEFORE_STATE = (*_LEASE, f"{EPOCHS_FOLDER}/", f"{SPILL_FOLDER}/")
_SPARK_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class QueryFolders:
    """The query folders that checkpoints name."""

    names: frozenset[str]
    # True if the checkpoints name no other folders, because their pointers were read.
    complete: bool


@dataclass(frozen=True)
class FolderInfo:
    """A folder below ``<root>/<operator>``."""

    operator: str
    query_folder: str
    # True if an operator file in it names it, or it is named like a query and has no state yet.
    is_ours: bool
    files: int
    size_bytes: int
    # When the newest file in it was written, seconds since 1970; None if the file system does not report it.
    newest_s: float | None
    # When a run last renewed its lease on it, seconds since 1970, or None.
    lease_s: float | None
    # First folder of the query that has claimed this one; empty if it is not claimed, None if the claim is unreadable.
    claim: str | None = ""


def judge_folder(info: FolderInfo, query_folders: QueryFolders, now_s: float, older_than_s: float) -> str:
    """Return `ABANDONED`, `NAMED` by a checkpoint, too `RECENT` to decide, or `UNKNOWN`.

    `UNKNOWN` means that the folder is not ours, or that only pointers can name it and `query_folders` is not complete.
    """
    # A rescaled query continues in a folder that is named after its first one, and removes its other folders itself.
    named = {first_folder(name) for name in query_folders.names}
    if not named.isdisjoint({first_folder(info.query_folder), first_folder(info.claim or info.query_folder)}):
        return NAMED
    if not info.is_ours or info.claim is None or _needs_spark(info, query_folders):
        return UNKNOWN
    idle_s = -1.0 if info.newest_s is None else now_s - info.newest_s
    least_s = RECENT_DAYS_MIN * _DAY_S if query_folders.complete else max(older_than_s, RECENT_DAYS_MIN * _DAY_S)
    return ABANDONED if idle_s > least_s else RECENT


def _needs_spark(info: FolderInfo, query_folders: QueryFolders) -> bool:
    return not query_folders.complete and (
        is_new_query_folder(info.query_folder) or is_new_query_folder(info.claim or "")
    )


def list_folders(root: Folder, operators: Collection[str] = ()) -> list[FolderInfo]:
    """Return the query folders below a root; arguments and errors are as for `list_operators`."""
    return [
        _inspect_folder(root, operator, entry.name)
        for operator, entries in sorted(list_operators(root, operators).items())
        for entry in entries
        if entry.folder and entry.name not in (STARTING_FOLDER, SPILL_FOLDER)
    ]


def _inspect_folder(root: Folder, operator: str, query_folder: str) -> FolderInfo:
    folder = root.child(operator, query_folder)
    files = folder.tree()
    leases = [entry for entry in files if entry.name.startswith(_LEASE)]
    return FolderInfo(
        operator,
        query_folder,
        any(_is_own_operator_file(folder, entry.name, operator, query_folder) for entry in files)
        or _has_no_state_yet(query_folder, files),
        len(files),
        sum(entry.size_bytes for entry in files),
        _latest_s(files),
        _latest_s(leases),
        _read_claim(folder) if leases else "",
    )


def _read_claim(folder: Folder) -> str | None:
    try:
        newest = LeaseLog(folder).newest(first=True)
    except CorruptError:
        return None
    return "" if newest is None or newest.record.claim is None else newest.record.claim.id


def _is_own_operator_file(folder: Folder, name: str, operator: str, query_folder: str) -> bool:
    """Return True if a file is an operator file that names the folder it is in."""
    if parse_operator_file_name(name) is None:
        return False
    try:
        file = OperatorFile.decode(folder.get(name), folder.where(name))
    except (CorruptError, MissingCheckpointError):
        return False
    return (file.operator, file.query_id) == (operator, query_folder)


def _has_no_state_yet(query_folder: str, files: Collection[Entry]) -> bool:
    """Return True if a folder has only files that a run writes before its state begins."""
    named_by_us = is_new_query_folder(query_folder) or _SPARK_ID.fullmatch(query_folder) is not None
    return named_by_us and bool(files) and all(entry.name.startswith(_BEFORE_STATE) for entry in files)


def _latest_s(entries: Iterable[Entry]) -> float | None:
    """Return the latest time; None if a file has no time, or there is no file."""
    times = [entry.modified_s for entry in entries]
    return None if not times or None in times else max(time_s for time_s in times if time_s is not None)


def remove_folder(root: Folder, info: FolderInfo) -> None:
    """Remove a folder, its operator files last, so that an interrupted removal can be continued."""
    now = _inspect_folder(root, info.operator, info.query_folder)
    if now != info:
        raise LiveRunError(
            f"{root.root}/{info.operator}/{info.query_folder} changed while this command ran, so a query uses it: none "
            "of its files was removed. Find out which query that is, and give its checkpoint, too."
        )
    folder = root.child(info.operator, info.query_folder)
    entries = folder.entries()
    entries.sort(key=lambda entry: parse_operator_file_name(entry.name) is not None)
    for entry in entries:
        if entry.folder:
            folder.remove_tree(entry.name)
        else:
            folder.remove(entry.name)
    root.child(info.operator).remove_tree(info.query_folder)


def read_folders_from_metadata(checkpoints: Iterable[Folder]) -> QueryFolders:
    """Return the query folders that the file ``metadata`` of each checkpoint names."""
    names = set()
    for checkpoint in checkpoints:
        try:
            names.add(read_query_id(checkpoint.get(METADATA), checkpoint.where(METADATA)))
        except MissingCheckpointError as error:
            raise UsageError(
                f"{checkpoint.root} is not a Spark checkpoint location: it has no file 'metadata'. Give the location "
                "as in the option checkpointLocation."
            ) from error
    return QueryFolders(frozenset(names), complete=False)


def refuse_operators_without_metadata(checkpoint: Folder) -> None:
    """Refuse a checkpoint with state that Spark's reader would skip without an error.

    Spark 4 finds operators by ``state/<operator>/_metadata``, which Spark 3.5 does not write.
    """
    states = checkpoint.child(STATE)
    for operator in (name for name in states.names() if name.isdecimal()):
        if "metadata" not in states.child(operator, "_metadata").names():
            raise UsageError(
                f"{states.root}/{operator} has no metadata of its operator, because Spark 3.5 does not write it, so "
                "Spark cannot read which folders it names: start the query once with Spark 4, or leave --spark out."
            )


def read_named_folders(locations: Sequence[str], storage_options: Mapping[str, Any], with_spark: bool) -> QueryFolders:
    """Return the query folders that checkpoints name, from pointers too if `with_spark`."""
    checkpoints = [Folder(location, storage_options) for location in locations]
    by_metadata = read_folders_from_metadata(checkpoints)
    if not with_spark:
        return by_metadata
    for checkpoint in checkpoints:
        refuse_operators_without_metadata(checkpoint)
    # Imported here, because the rest of this module does not need PySpark.
    from spark_state_ext.cli.sessions import get_session, read_query_folders

    spark = get_session(*locations)
    by_pointers = frozenset().union(*(read_query_folders(spark, location) for location in locations))
    return QueryFolders(by_metadata.names | by_pointers, complete=True)


def explain_verdict(info: FolderInfo, verdict: str, query_folders: QueryFolders) -> str:
    """Return what would decide the verdict on an unknown folder; empty if there is nothing to add."""
    return "needs --spark" if verdict == UNKNOWN and info.is_ours and _needs_spark(info, query_folders) else ""
