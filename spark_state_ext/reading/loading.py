"""From a pointer to the files that its state is made of, opened and checked; what is damaged is gone around."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer, ReplicationStatus
from spark_state_ext.backends import Checkpoint, RestoreManager
from spark_state_ext.backends.replication import Restorable
from spark_state_ext.errors import CorruptFileError, LineageError, MissingCheckpointError
from spark_state_ext.files.folder import Folder, Readable
from spark_state_ext.reading.bodies import Body
from spark_state_ext.reading.history import BucketFiles
from spark_state_ext.restore.load_plan import Chain, Fetch, plan_load
from spark_state_ext.restore.sources import Sources
from spark_state_ext.restore.trace import Failure, Trace, check_owner
from spark_state_ext.worker.threads import side_by_side

__all__ = ["loaded", "pointer_to", "sources_in"]

_PARALLEL_MAX = 8


class _FolderAsBackend:
    """A bucket's folder to read from, without what a backend brings along for writing."""

    root = True

    def __init__(self, folder: Folder, files: Readable) -> None:
        self._folder = folder
        self._files = files

    @property
    def name(self) -> str:
        return self._folder.root

    @property
    def restore(self) -> RestoreManager:
        return _FolderRestore(self._files)

    def close(self) -> None:
        """Nothing to do."""


class _FolderRestore:
    def __init__(self, files: Readable) -> None:
        self._files = files

    def init(self, checkpoint: Checkpoint) -> None:
        """Nothing to do: files are found by their names."""

    def restore(self) -> Readable:
        return self._files

    def close(self) -> None:
        """Nothing to do."""


def sources_in(
    folder: Folder, pointer: Pointer, *beside: Restorable, files: Readable | None = None, in_thread: bool = False
) -> Sources:
    """The files of a bucket's folder, what is inline in a pointer, and what else the state can be read from."""
    # Whatever other backends had: here is where one reads.
    status = {} if pointer.ref is None else {folder.root: ReplicationStatus(pointer.ref)}
    return Sources(
        [_FolderAsBackend(folder, folder if files is None else files), *beside],
        replace(pointer, replication=status),
        in_thread=in_thread,
    )


def pointer_to(
    files: BucketFiles, ref: CheckpointRef | None, operator: OperatorFile, origin: CheckpointRef | None = None
) -> Pointer:
    """A pointer as Spark holds one, as far as a load needs it, made from a file's header."""
    made = Pointer(operator.operator, files.bucket, operator.buckets, operator.schema_id, -1, None)
    if ref is None:
        return made
    if ref == origin:
        return replace(made, lineage=(LineageEntry(ref, 0),), parents=ref)
    header = files.header(ref)
    lineage = (*header.lineage, ref)
    # Loads begin at the newest snapshot that is there. Where none is, the delta's own header leads further back.
    whole = [at for at, it in enumerate(lineage) if SNAPSHOT in files.kinds.get(it, ())]
    lineage = lineage[whole[-1] if whole else 0 :]
    # A query that began with another operator's state has files that name that one.
    named = {files.header(it).operator for it in (lineage[0], ref) if it in files}
    return Pointer(
        operator.operator,
        files.bucket,
        operator.buckets,
        operator.schema_id,
        header.writer.batch,
        None,
        lineage=tuple(LineageEntry(it, 0) for it in lineage),
        parent=header.parent,
        origins=tuple(sorted(named - {operator.operator})),
    )


def loaded(
    pointer: Pointer, sources: Sources, open_file: Callable[[Readable, Fetch], Body], in_parallel: bool
) -> list[Body]:
    """The files that a pointer's state is made of, oldest first; the first one is whole by itself."""
    if pointer.ref is None:
        return []
    owners = (pointer.operator, *pointer.origins)
    kept_ms = pointer.ages.window_ms if pointer.ages is not None else None
    trace = Trace(sources, pointer.operator, pointer.bucket, kept_ms)
    chain, known = Chain.of(pointer), dict[Fetch, Body]()

    def look(fetch: Fetch) -> Body | Failure:
        try:
            found = sources.read(fetch.ref, fetch.kind, lambda files: open_file(files, fetch))
            check_owner(found.header, owners, pointer.bucket, sources.where(fetch.ref, fetch.kind))
            return found
        except (CorruptFileError, LineageError, MissingCheckpointError) as error:
            return error

    while True:
        plan = plan_load(chain, (), trace.gone)
        if plan is None:
            chain = trace.further_back(chain)
            continue
        unknown = [fetch for fetch in plan if fetch not in known]
        threads = min(_PARALLEL_MAX, len(unknown)) if in_parallel else 1
        found = [look(it) for it in unknown] if threads < 2 else side_by_side("looks", threads, look, unknown)
        for fetch, it in zip(unknown, found, strict=True):
            if isinstance(it, Body):
                known[fetch] = it
            else:
                trace.note(fetch, it)
        if any(fetch not in known for fetch in plan):
            continue
        contradiction = _contradiction(chain, plan, known, sources)
        if contradiction is None:
            return [known[fetch] for fetch in plan]
        fetch, error = contradiction
        trace.note(fetch, error)
        del known[fetch]


def _contradiction(
    chain: Chain, plan: list[Fetch], known: dict[Fetch, Body], sources: Sources
) -> tuple[Fetch, LineageError] | None:
    """The first file that was built on something else than the lineage says."""
    for fetch in plan:
        try:
            chain.check(known[fetch].header, sources.where(fetch.ref, fetch.kind))
        except LineageError as error:
            return fetch, error
    return None
