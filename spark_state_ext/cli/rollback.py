"""Roll back a query: make an older batch the last one of its Spark checkpoint, so that it continues from there.

``spark-state-ext rollback CHECKPOINT --to-batch N`` (`docs/operating/going-back.md`). Removing only offsets and commits
is not enough. The state that later batches wrote would stay, and some of Spark's file managers do not overwrite it: the
query would continue with the old state and silently lose what it computes again.

State is removed first, newest version first, then commits, then offsets. If the command is interrupted and the query is
started, either the state of its last batch is missing and it fails, or only the offsets of the next batch are left and
it runs that batch again as planned. The command can be run again at any time, and then finishes.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from arrow_schemas.operator import parse_operator_file_name
from spark_state_ext.cli.options import IdleOption, OutputOption, StorageOptions
from spark_state_ext.cli.output import Output, parse_columns, say, write_records
from spark_state_ext.cli.spark_checkpoint import (
    COMMITS,
    METADATA,
    OFFSETS,
    ROLLED_BACK,
    STATE,
    SparkFile,
    find_missing_version,
    parse_path,
    read_shuffle_partitions,
    read_state_ids,
)
from spark_state_ext.errors import (
    CorruptFileError,
    LiveRunError,
    MissingCheckpointError,
    UsageError,
)
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.worker.threads import map_in_parallel

__all__ = [
    "Rollback",
    "apply_rollback",
    "check_idle",
    "plan_from_files",
    "plan_rollback",
    "rollback",
    "seconds_since_write",
]

# Twice Spark's maintenance interval. If the application runs on after the query has stopped, maintenance uploads a last
# snapshot up to one interval later, and a query that was rolled back before that could read it.
_IDLE_S = 120.0
_ROWS = parse_columns("kind, number int, path")


def rollback(
    checkpoint: Annotated[str, typer.Argument(help="Spark's checkpointLocation: an absolute path or a URL")],
    to_batch: Annotated[int, typer.Option(metavar="N", help="the last batch to keep")],
    apply: Annotated[
        bool, typer.Option("--apply", help=f"move the files to {ROLLED_BACK}… in the checkpoint location")
    ] = False,
    delete: Annotated[bool, typer.Option("--delete", help="with --apply: delete the files instead")] = False,
    idle_s: IdleOption = _IDLE_S,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make an older batch the last one of a Spark checkpoint. Stop the query first.

    Prints the files to remove, each with its version of state or its batch. Nothing is changed without --apply.
    """
    if delete and not apply:
        raise typer.BadParameter("--delete needs --apply")
    folder = Folder(checkpoint, storage_options)
    plan = plan_from_files(folder, to_batch)
    if apply:
        check_idle(plan, time.time(), idle_s, folder.root)
    write_records(map(vars, plan.files), _ROWS, output)
    counts = {kind: sum(file.kind == kind for file in plan.files) for kind in (STATE, COMMITS, OFFSETS)}
    say(f"files={len(plan.files)} " + " ".join(f"{kind}={count}" for kind, count in counts.items()))
    if not apply:
        say(_describe_next_step(seconds_since_write(plan, time.time(), idle_s), idle_s))
        return
    aside = f"{ROLLED_BACK}to-{plan.to_batch}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    file_count = apply_rollback(folder, plan, None if delete else aside)
    say(f"deleted={file_count}" if delete else f"moved={file_count} to={folder.where(aside)}")


def _describe_next_step(written_s: float | None, idle_s: float) -> str:
    if written_s is None:
        return "no file was changed: give --apply to roll back"
    return (
        f"no file was changed. --apply would refuse now, because the checkpoint was written {written_s:.0f} s ago: "
        f"stop the query, and wait until {idle_s:g} s have passed, or give --idle-s 0"
    )


_PARALLEL_MAX = 8
_NAMED_MAX = 3
# The search for an operator file looks at so many folders in each folder.
_SEARCHED_FOLDERS_MAX = 10


@dataclass(frozen=True)
class Rollback:
    """The files to remove from a checkpoint."""

    # The batch that becomes the last one.
    to_batch: int
    # Files to remove step by step; within a step in any order.
    steps: tuple[tuple[SparkFile, ...], ...]
    # When the checkpoint was last written, seconds since 1970; None if the file system does not report it.
    newest_s: float | None

    @property
    def files(self) -> list[SparkFile]:
        """All files to remove, in order."""
        return [file for step in self.steps for file in step]


def plan_rollback(
    entries: Iterable[Entry],
    to_batch: int,
    ids: Mapping[int, Mapping[str, frozenset[str]]],
    where: str,
    partitions: int | None = None,
) -> Rollback:
    """Decide which files to remove so that a batch becomes the last one."""
    entries = list(entries)
    parsed = {entry.name: parse_path(entry.name) for entry in entries}
    unknown = sorted(name for name, file in parsed.items() if file is None)
    if unknown:
        raise CorruptFileError(
            f"{where} holds {len(unknown)} files that this command does not know ({', '.join(unknown[:_NAMED_MAX])}), "
            "so it does not know to which batch they belong. Move them elsewhere if they are yours. A query with "
            "transformWithState cannot be rolled back by this command."
        )
    files = [file for file in parsed.values() if file is not None]
    _check_logs(files, to_batch, where)
    # If Spark has repartitioned the state, folders of further partitions hold state of other batches.
    _check_state(
        [file for file in files if partitions is None or _partition_number(file) < partitions], to_batch, ids, where
    )
    state = [file for file in files if file.kind == STATE and file.number > to_batch + 1]
    logs = [[file for file in files if file.kind == kind and file.number > to_batch] for kind in (COMMITS, OFFSETS)]
    steps = [step for group in (state, *logs) for step in _group_newest_first(group)]
    times = [
        entry.modified_s for entry in entries if entry.modified_s is not None and not entry.name.startswith(ROLLED_BACK)
    ]
    return Rollback(to_batch, tuple(steps), max(times, default=None))


def _group_newest_first(files: Iterable[SparkFile]) -> list[tuple[SparkFile, ...]]:
    by_number: dict[int, list[SparkFile]] = {}
    for file in files:
        by_number.setdefault(file.number, []).append(file)
    return [tuple(sorted(by_number[number], key=lambda file: file.path)) for number in sorted(by_number, reverse=True)]


def _check_logs(files: Sequence[SparkFile], to_batch: int, where: str) -> None:
    numbers = {
        kind: {file.number for file in files if file.kind == kind and not file.checksum} for kind in (OFFSETS, COMMITS)
    }
    if not numbers[COMMITS]:
        raise UsageError(
            f"{where} is not a Spark checkpoint location with committed batches: commits/ is empty or missing"
        )
    if to_batch not in numbers[COMMITS]:
        raise UsageError(
            f"batch {to_batch} is not a committed batch of {where}, which has {min(numbers[COMMITS])} to "
            f"{max(numbers[COMMITS])}: choose one of these"
        )
    # When it starts, Spark also reads the offsets of the batch before.
    for batch in range(max(0, to_batch - 1), to_batch + 1):
        if batch not in numbers[OFFSETS]:
            raise MissingCheckpointError(
                f"{where}/offsets/{batch} is missing, but a query needs it to continue after batch {to_batch}: choose "
                "a later batch"
            )


def _partition_number(file: SparkFile) -> int:
    return int(file.store.split("/")[2]) if file.kind == STATE else 0


def _check_state(
    files: Sequence[SparkFile], to_batch: int, ids: Mapping[int, Mapping[str, frozenset[str]]], where: str
) -> None:
    stores: dict[str, list[SparkFile]] = {}
    for file in files:
        if file.kind == STATE:
            stores.setdefault(file.store, []).append(file)
    version, missing = to_batch + 1, []
    for store in sorted(_list_expected_stores(stores, ids.get(to_batch, {})) | stores.keys()):
        partition = "/".join(store.split("/")[:3])
        # Batch b commits version b + 1.
        ids_by_version = {
            batch + 1: ids_of_batch[partition] for batch, ids_of_batch in ids.items() if partition in ids_of_batch
        }
        missing_version = find_missing_version(stores.get(store, ()), version, ids_by_version)
        if missing_version is not None:
            missing.append(f"version {missing_version} in {store}")
    if missing:
        raise MissingCheckpointError(
            f"the state after batch {to_batch} of {where} can no longer be loaded: files are missing in {len(missing)} "
            f"of {len(stores)} stores ({'; '.join(missing[:_NAMED_MAX])}). Spark keeps "
            "spark.sql.streaming.minBatchesToRetain batches: choose a later one."
        )


def _list_expected_stores(stores: Iterable[str], committed: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the stores that must exist: each partition of an operator up to the last one in files or commit log."""
    expected = set()
    counts: dict[str, int] = {}
    with_named_stores = set()
    for store in stores:
        _, operator, partition, *name = store.split("/")
        counts[operator] = max(counts.get(operator, 0), int(partition) + 1)
        with_named_stores.update([operator] if name else [])
    for store in committed:
        _, operator, partition = store.split("/")
        counts[operator] = max(counts.get(operator, 0), int(partition) + 1)
    for operator, count in counts.items():
        if operator in with_named_stores:
            names = {
                store.split("/")[3] for store in stores if store.split("/")[1] == operator and store.count("/") == 3
            }
            expected |= {f"state/{operator}/{partition}/{name}" for partition in range(count) for name in names}
        else:
            expected |= {f"state/{operator}/{partition}" for partition in range(count)}
    return expected


def check_idle(plan: Rollback, now_s: float, idle_s: float, where: str) -> None:
    """Refuse if the checkpoint was written within the last `idle_s` seconds."""
    idle_for_s = seconds_since_write(plan, now_s, idle_s)
    if idle_for_s is not None:
        raise LiveRunError(
            f"{where} was written {idle_for_s:.0f} s ago, so its query may be running: stop it. "
            "If it is stopped, wait, or give --idle-s 0."
        )


def seconds_since_write(plan: Rollback, now_s: float, idle_s: float) -> float | None:
    """Return how long ago the checkpoint was written; None if at least `idle_s` ago or not reported."""
    if plan.newest_s is None or now_s - plan.newest_s >= idle_s:
        return None
    return max(0.0, now_s - plan.newest_s)


def apply_rollback(checkpoint: Folder, plan: Rollback, aside: str | None) -> int:
    """Remove the planned files, or move them to `aside`; return their number."""
    count = 0
    for step in plan.steps:
        remove_file = checkpoint.remove if aside is None else partial(_move_aside, checkpoint, aside)
        # Finish each step before the next one.
        count += len(map_in_parallel("rollback", _PARALLEL_MAX, remove_file, [file.path for file in step]))
    return count


def _move_aside(checkpoint: Folder, aside: str, path: str) -> None:
    checkpoint.move(path, posixpath.join(aside, path))


def plan_from_files(checkpoint: Folder, to_batch: int) -> Rollback:
    """Read a checkpoint location and plan its rollback (`plan_rollback`)."""
    _refuse_other_folder(checkpoint)
    entries = checkpoint.tree()
    logs = [file for file in (parse_path(entry.name) for entry in entries) if file is not None and file.kind == COMMITS]
    state_ids = {
        file.number: read_state_ids(checkpoint.get(file.path), checkpoint.where(file.path))
        for file in logs
        if file.number <= to_batch and not file.checksum
    }
    offsets = f"{OFFSETS}/{to_batch}"
    # If the offsets are missing, `plan_rollback` raises an error for it.
    has_offsets = any(entry.name == offsets for entry in entries)
    partitions = read_shuffle_partitions(checkpoint.get(offsets), checkpoint.where(offsets)) if has_offsets else None
    return plan_rollback(entries, to_batch, state_ids, checkpoint.root, partitions)


def _refuse_other_folder(checkpoint: Folder) -> None:
    """Refuse a folder that is not a Spark checkpoint: its error is clearer than one about unknown files."""
    if not {METADATA, COMMITS}.isdisjoint(checkpoint.names()):
        return
    hint = "; it looks like the root of an ArrowState, or a folder in it" if _contains_operator_file(checkpoint) else ""
    raise UsageError(
        f"{checkpoint.root} is not a Spark checkpoint location: it has neither 'metadata' nor commits/{hint}. Give "
        "the location as in the option checkpointLocation."
    )


def _contains_operator_file(folder: Folder, below: int = 2) -> bool:
    """Return True if there is an operator file here or in the first few folders below."""
    entries = folder.entries()
    if any(parse_operator_file_name(entry.name) is not None for entry in entries):
        return True
    folders = [entry.name for entry in entries if entry.folder][: _SEARCHED_FOLDERS_MAX if below else 0]
    return any(_contains_operator_file(folder.child(name), below - 1) for name in folders)
