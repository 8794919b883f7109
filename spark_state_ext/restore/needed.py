"""Which files a pointer's state is made of: the plan of a load on an empty local store, carried out by looking only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from arrow_schemas.lineage import DELTA, CheckpointRef
from arrow_schemas.pointer import LineageEntry, Pointer
from spark_state_ext.errors import CorruptFileError, LineageError, MissingCheckpointError
from spark_state_ext.files.checkpoint import Announced, announced, verify_checkpoint
from spark_state_ext.files.folder import Readable
from spark_state_ext.restore.load_plan import Chain, Fetch, plan_load
from spark_state_ext.restore.sources import Sources
from spark_state_ext.restore.trace import Failure, Trace, check_owner
from spark_state_ext.worker.threads import side_by_side

__all__ = ["Needed", "NeededFile", "needed_files"]

_PARALLEL_MAX = 8


@dataclass(frozen=True)
class NeededFile:
    """A checkpoint file that is there, by its header and its footer.

    Parameters
    ----------
    fetch
        Which one.
    announced
        What it says of itself.
    files
        Who has it.
    """

    fetch: Fetch
    announced: Announced
    files: Readable


@dataclass(frozen=True)
class Needed:
    """What a pointer's state is made of.

    Parameters
    ----------
    lineage
        From a checkpoint whose state is there for certain to the committed one.
    files
        The files that loading it takes, oldest first.
    """

    lineage: tuple[LineageEntry, ...]
    files: tuple[NeededFile, ...]


def needed_files(pointer: Pointer, sources: Sources, verified_in: Path | None = None) -> Needed:
    """Find the files of a pointer's state. What is only presumed to be there is looked for, and may be absent."""
    if pointer.ref is None:
        return Needed((), ())
    operators = (pointer.operator, *pointer.origins)
    kept_ms = pointer.ages.window_ms if pointer.ages is not None else None
    trace = Trace(sources, pointer.operator, pointer.bucket, kept_ms)
    chain, known = Chain.of(pointer), dict[Fetch, NeededFile]()
    while True:
        plan = plan_load(chain, (), trace.gone)
        if plan is None:
            chain = trace.further_back(chain)
            continue
        unknown = [fetch for fetch in plan if fetch not in known]

        def look(fetch: Fetch) -> NeededFile | Failure:
            return _looked_at(fetch, sources, operators, pointer.bucket, verified_in)

        found = side_by_side("looks", min(_PARALLEL_MAX, len(unknown)), look, unknown) if unknown else []
        for fetch, it in zip(unknown, found, strict=True):
            if isinstance(it, NeededFile):
                known[fetch] = it
            else:
                trace.note(fetch, it)
        if any(fetch not in known for fetch in plan):
            continue
        try:
            for fetch in plan:
                chain.check(known[fetch].announced.header, sources.where(fetch.ref, fetch.kind))
        except LineageError as error:
            trace.note(fetch, error)
            del known[fetch]
            continue
        files = tuple(known[fetch] for fetch in plan)
        return Needed(_lineage_of(pointer, files), files)


def _looked_at(
    fetch: Fetch, sources: Sources, operators: Collection[str], bucket: int, verified_in: Path | None
) -> NeededFile | Failure:
    def look(files: Readable) -> NeededFile:
        it = announced(files, fetch.ref, fetch.kind)
        check_owner(it.header, operators, bucket, sources.where(fetch.ref, fetch.kind))
        if verified_in is not None:
            verify_checkpoint(files, fetch.ref, fetch.kind, verified_in)
        return NeededFile(fetch, it, files)

    try:
        return sources.read(fetch.ref, fetch.kind, look)
    except (CorruptFileError, LineageError, MissingCheckpointError) as error:
        return error


def _lineage_of(pointer: Pointer, files: tuple[NeededFile, ...]) -> tuple[LineageEntry, ...]:
    """Of a plan on an empty store, which has one file for each checkpoint."""
    told: dict[CheckpointRef, LineageEntry] = {entry.ref: entry for entry in pointer.lineage}
    entries = []
    for it in files:
        size = it.announced.size_bytes if it.fetch.kind == DELTA else 0
        entries.append(told.get(it.fetch.ref, LineageEntry(it.fetch.ref, size, it.announced.header.writer.heartbeat)))
    return tuple(entries)
