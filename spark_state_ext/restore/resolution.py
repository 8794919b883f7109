"""Find the files that a pointer's state is made of, by the plan of a load into an empty local store.

If a file is missing, damaged or of another lineage, the load is planned again without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from arrow_schemas.lineage import LineageHeader
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import CorruptError, CorruptFileError, LineageError, MissingCheckpointError
from spark_state_ext.files.readable import Readable
from spark_state_ext.restore.load_plan import Chain, Fetch, plan_load
from spark_state_ext.restore.sources import Sources
from spark_state_ext.restore.trace import Failure, Trace, check_owner
from spark_state_ext.worker.threads import map_in_parallel

__all__ = ["THREADS_MAX", "resolve"]

# Object stores answer slowly, so files are looked at in parallel.
THREADS_MAX = 8


class _HasHeader(Protocol):
    @property
    def header(self) -> LineageHeader: ...


T = TypeVar("T", bound=_HasHeader)


def resolve(
    pointer: Pointer,
    sources: Sources,
    look: Callable[[Readable, Fetch], T],
    threads_max: int = THREADS_MAX,
    confirm: Callable[[Readable, Fetch], None] = lambda files, fetch: None,
) -> list[T]:
    """Return the files of a pointer's state, oldest first, as opened by `look`; the first one needs no other file.

    `confirm` checks a file further, after it is known to belong to the bucket.
    """
    if pointer.ref is None:
        return []
    owners = (pointer.operator, *pointer.origins)
    kept_ms = pointer.ages.window_ms if pointer.ages is not None else None
    trace = Trace(sources, pointer.operator, pointer.bucket, kept_ms)
    chain, files_by_fetch = Chain.of(pointer), dict[Fetch, T]()

    def look_up(fetch: Fetch) -> T | Failure:
        def look_and_check(files: Readable) -> T:
            file = look(files, fetch)
            check_owner(file.header, owners, pointer.bucket, sources.where(fetch.ref, fetch.kind))
            confirm(files, fetch)
            return file

        try:
            return sources.read(fetch.ref, fetch.kind, look_and_check)
        except (CorruptFileError, LineageError, MissingCheckpointError) as error:
            return error

    while True:
        plan = plan_load(chain, (), trace.gone)
        if plan is None:
            chain = trace.trace_back(chain)
            continue
        unknown = [fetch for fetch in plan if fetch not in files_by_fetch]
        threads = min(threads_max, len(unknown))
        results = (
            [look_up(fetch) for fetch in unknown]
            if threads < 2
            else map_in_parallel("looks", threads, look_up, unknown)
        )
        for fetch, result in zip(unknown, results, strict=True):
            if isinstance(result, (CorruptError, MissingCheckpointError)):
                trace.note(fetch, result)
            else:
                files_by_fetch[fetch] = result
        if all(fetch in files_by_fetch for fetch in plan):
            contradiction = _find_contradiction(chain, plan, files_by_fetch, sources)
            if contradiction is None:
                return [files_by_fetch[fetch] for fetch in plan]
            fetch, error = contradiction
            trace.note(fetch, error)
            del files_by_fetch[fetch]


def _find_contradiction(
    chain: Chain, plan: list[Fetch], files_by_fetch: dict[Fetch, T], sources: Sources
) -> tuple[Fetch, LineageError] | None:
    """Return the first file whose parent differs from the lineage, with the error; None if there is none."""
    for fetch in plan:
        try:
            chain.check(files_by_fetch[fetch].header, sources.where(fetch.ref, fetch.kind))
        except LineageError as error:
            return fetch, error
    return None
