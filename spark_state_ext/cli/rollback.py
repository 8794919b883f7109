"""Going back: make an older batch the last one of a Spark checkpoint, so that its query goes on from there.

``spark-state-ext rollback CHECKPOINT --to-batch N`` (`docs/operating/going-back.md`). To remove offsets and
commits is not enough: the state that later batches wrote stays, and some of Spark's file managers do not overwrite it,
so that the query would go on with it and lose what it counts anew, in silence.

State goes first, the newest version first, then commits, then offsets. A query that is started after the command was
stopped in the middle finds no state for the batch that it wants, and fails; or only the offsets of the next batch are
left, which it then runs again as it was planned. The command can be run again at any time, and finishes.
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
from spark_state_ext.worker.threads import side_by_side

__all__ = [
    "Rollback",
    "apply_rollback",
    "check_idle",
    "plan_rollback",
    "plan_from_files",
    "rollback",
    "seconds_since_write",
]

# Twice Spark's maintenance interval: in an application that goes on, maintenance uploads a last snapshot of a query
# that has stopped, up to an interval later. A query that was rolled back before that may read it.
_IDLE_S = 120.0
_ROWS = parse_columns("kind, number int, path")


def rollback(
    checkpoint: Annotated[str, typer.Argument(help="Spark's checkpointLocation: an absolute path or a URL")],
    to_batch: Annotated[int, typer.Option(metavar="N", help="the last batch that is kept")],
    apply: Annotated[
        bool, typer.Option("--apply", help=f"move the files to {ROLLED_BACK}… in the checkpoint location")
    ] = False,
    delete: Annotated[bool, typer.Option("--delete", help="with --apply: delete them")] = False,
    idle_s: IdleOption = _IDLE_S,
    *,
    storage_options: StorageOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make an older batch the last one of a Spark checkpoint. Stop the query first.

    Prints the files that go, with the version of state or the batch that each is of. Without --apply nothing is
    changed.
    """
    if delete and not apply:
        raise typer.BadParameter("--delete goes with --apply")
    folder = Folder(checkpoint, storage_options)
    plan = plan_from_files(folder, to_batch)
    if apply:
        check_idle(plan, time.time(), idle_s, folder.root)
    write_records(map(vars, plan.files), _ROWS, output)
    counts = {kind: sum(file.kind == kind for file in plan.files) for kind in (STATE, COMMITS, OFFSETS)}
    say(f"files={len(plan.files)} " + " ".join(f"{kind}={count}" for kind, count in counts.items()))
    if not apply:
        say(_what_next(seconds_since_write(plan, time.time(), idle_s), idle_s))
        return
    aside = f"{ROLLED_BACK}to-{plan.to_batch}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    done = apply_rollback(folder, plan, None if delete else aside)
    say(f"deleted={done}" if delete else f"moved={done} to={folder.where(aside)}")


def _what_next(written_s: float | None, idle_s: float) -> str:
    if written_s is None:
        return "nothing was changed: --apply does it"
    return (
        f"nothing was changed. --apply would refuse now (not yet: written {written_s:.0f} s ago): stop the query, "
        f"and wait until {idle_s:g} s have passed, or say --idle-s 0"
    )


_PARALLEL_MAX = 8
_NAMED_MAX = 3
# Folders of each folder, to tell the root of an ArrowState.
_LOOKED_AT_MAX = 10


@dataclass(frozen=True)
class Rollback:
    """What to take out of a checkpoint."""

    # The batch that becomes the last one.
    to_batch: int
    # Files, in the order in which they go; those of one step in any order.
    steps: tuple[tuple[SparkFile, ...], ...]
    # When anything of the checkpoint was last written, seconds since 1970; None where the file system does not tell.
    newest_s: float | None

    @property
    def files(self) -> list[SparkFile]:
        """All files, in order."""
        return [file for step in self.steps for file in step]


def plan_rollback(
    entries: Iterable[Entry],
    to_batch: int,
    ids: Mapping[int, Mapping[str, frozenset[str]]],
    where: str,
    partitions: int | None = None,
) -> Rollback:
    """Decide what must go for a batch to be the last one."""
    entries = list(entries)
    parsed = {entry.name: parse_path(entry.name) for entry in entries}
    unknown = sorted(name for name, file in parsed.items() if file is None)
    if unknown:
        raise CorruptFileError(
            f"{where} holds {len(unknown)} files that this command does not know ({', '.join(unknown[:_NAMED_MAX])}), "
            "so it cannot tell what belongs to which batch. Move them elsewhere if they are yours; a query with "
            "transformWithState cannot be rolled back by it."
        )
    files = [file for file in parsed.values() if file is not None]
    _check_logs(files, to_batch, where)
    # Where Spark has repartitioned the state, the folders of other partitions hold that of other batches.
    _check_state([it for it in files if partitions is None or _partition(it) < partitions], to_batch, ids, where)
    state = [file for file in files if file.kind == STATE and file.number > to_batch + 1]
    logs = [[file for file in files if file.kind == kind and file.number > to_batch] for kind in (COMMITS, OFFSETS)]
    steps = [step for group in (state, *logs) for step in _newest_first(group)]
    times = [
        entry.modified_s for entry in entries if entry.modified_s is not None and not entry.name.startswith(ROLLED_BACK)
    ]
    return Rollback(to_batch, tuple(steps), max(times, default=None))


def _newest_first(files: Iterable[SparkFile]) -> list[tuple[SparkFile, ...]]:
    by_number: dict[int, list[SparkFile]] = {}
    for file in files:
        by_number.setdefault(file.number, []).append(file)
    return [tuple(sorted(by_number[number], key=lambda file: file.path)) for number in sorted(by_number, reverse=True)]


def _check_logs(files: Sequence[SparkFile], to_batch: int, where: str) -> None:
    there = {kind: {it.number for it in files if it.kind == kind and not it.checksum} for kind in (OFFSETS, COMMITS)}
    if not there[COMMITS]:
        raise UsageError(
            f"{where} is no Spark checkpoint location with committed batches: there is nothing in commits/"
        )
    if to_batch not in there[COMMITS]:
        raise UsageError(
            f"batch {to_batch} is not among the committed batches of {where}, which are {min(there[COMMITS])} to "
            f"{max(there[COMMITS])}: choose one of these"
        )
    # Spark reads the one before, too, when it starts.
    for batch in range(max(0, to_batch - 1), to_batch + 1):
        if batch not in there[OFFSETS]:
            raise MissingCheckpointError(
                f"{where}/offsets/{batch} is gone, without which no query starts after batch {to_batch}: choose a "
                "later batch"
            )


def _partition(file: SparkFile) -> int:
    return int(file.store.split("/")[2]) if file.kind == STATE else 0


def _check_state(
    files: Sequence[SparkFile], to_batch: int, ids: Mapping[int, Mapping[str, frozenset[str]]], where: str
) -> None:
    stores: dict[str, list[SparkFile]] = {}
    for file in files:
        if file.kind == STATE:
            stores.setdefault(file.store, []).append(file)
    version, missing = to_batch + 1, []
    for store in sorted(_partitions(stores, ids.get(to_batch, {})) | stores.keys()):
        partition = "/".join(store.split("/")[:3])
        # Batch b commits version b + 1.
        known = {batch + 1: told[partition] for batch, told in ids.items() if partition in told}
        lacking = find_missing_version(stores.get(store, ()), version, known)
        if lacking is not None:
            missing.append(f"version {lacking} in {store}")
    if missing:
        raise MissingCheckpointError(
            f"the state that batch {to_batch} of {where} left cannot be loaded any more: {len(missing)} of "
            f"{len(stores)} stores lack files ({'; '.join(missing[:_NAMED_MAX])}). Spark keeps "
            "spark.sql.streaming.minBatchesToRetain batches: choose a later one."
        )


def _partitions(stores: Iterable[str], committed: Mapping[str, frozenset[str]]) -> set[str]:
    """Stores that must be there: what the commit log names, and no gaps among an operator's partitions."""
    found = set()
    counts: dict[str, int] = {}
    named = set()
    for store in stores:
        _, operator, partition, *name = store.split("/")
        counts[operator] = max(counts.get(operator, 0), int(partition) + 1)
        named.update([operator] if name else [])
    for store in committed:
        _, operator, partition = store.split("/")
        counts[operator] = max(counts.get(operator, 0), int(partition) + 1)
    for operator, count in counts.items():
        if operator in named:
            names = {
                store.split("/")[3] for store in stores if store.split("/")[1] == operator and store.count("/") == 3
            }
            found |= {f"state/{operator}/{partition}/{name}" for partition in range(count) for name in names}
        else:
            found |= {f"state/{operator}/{partition}" for partition in range(count)}
    return found


def check_idle(plan: Rollback, now_s: float, idle_s: float, where: str) -> None:
    """Refuse while somebody writes."""
    written = seconds_since_write(plan, now_s, idle_s)
    if written is not None:
        raise LiveRunError(
            f"{where} was written {written:.0f} s ago, so its query may be running: stop it. "
            "Where it is stopped, wait, or say --idle-s 0."
        )


def seconds_since_write(plan: Rollback, now_s: float, idle_s: float) -> float | None:
    """How long ago the checkpoint was written; None where that is long enough, or the file system does not tell."""
    if plan.newest_s is None or now_s - plan.newest_s >= idle_s:
        return None
    return max(0.0, now_s - plan.newest_s)


def apply_rollback(checkpoint: Folder, plan: Rollback, aside: str | None) -> int:
    """Take the files out; returns how many there were."""
    done = 0
    for step in plan.steps:
        work = checkpoint.remove if aside is None else partial(_put_aside, checkpoint, aside)
        # One step after the other.
        done += len(side_by_side("rollback", _PARALLEL_MAX, work, [file.path for file in step]))
    return done


def _put_aside(checkpoint: Folder, aside: str, path: str) -> None:
    checkpoint.move(path, posixpath.join(aside, path))


def plan_from_files(checkpoint: Folder, to_batch: int) -> Rollback:
    """`plan_rollback` of what lies in a checkpoint location."""
    _refuse_other_folder(checkpoint)
    entries = checkpoint.tree()
    logs = [file for file in (parse_path(entry.name) for entry in entries) if file is not None and file.kind == COMMITS]
    ids = {
        file.number: read_state_ids(checkpoint.get(file.path), checkpoint.where(file.path))
        for file in logs
        if file.number <= to_batch and not file.checksum
    }
    offsets = f"{OFFSETS}/{to_batch}"
    # Where they are gone, the plan says so.
    there = any(entry.name == offsets for entry in entries)
    partitions = read_shuffle_partitions(checkpoint.get(offsets), checkpoint.where(offsets)) if there else None
    return plan_rollback(entries, to_batch, ids, checkpoint.root, partitions)


def _refuse_other_folder(checkpoint: Folder) -> None:
    """Refuse what is no checkpoint at all, before its files are called unknown."""
    if not {METADATA, COMMITS}.isdisjoint(checkpoint.names()):
        return
    ours = "; it looks like the root of an ArrowState, or a folder in it" if _has_operator(checkpoint) else ""
    raise UsageError(
        f"{checkpoint.root} is no Spark checkpoint location: it has neither 'metadata' nor commits/{ours}. Give "
        "checkpointLocation."
    )


def _has_operator(folder: Folder, below: int = 2) -> bool:
    """Whether there is an operator file, here or in the first few folders."""
    entries = folder.entries()
    if any(parse_operator_file_name(entry.name) is not None for entry in entries):
        return True
    folders = [entry.name for entry in entries if entry.folder][: _LOOKED_AT_MAX if below else 0]
    return any(_has_operator(folder.child(name), below - 1) for name in folders)
