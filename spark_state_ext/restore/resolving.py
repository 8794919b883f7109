"""From a pointer to the files that its state is made of: the plan of a load on an empty local store, carried out.

What turns out to be missing, damaged, or of another lineage is gone around: the plan is made again without it.
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
from spark_state_ext.worker.threads import side_by_side

__all__ = ["THREADS_MAX", "resolve"]

# Object stores answer slowly, and in parallel.
THREADS_MAX = 8


class _Found(Protocol):
    @property
    def header(self) -> LineageHeader: ...


T = TypeVar("T", bound=_Found)


def resolve(
    pointer: Pointer,
    sources: Sources,
    look: Callable[[Readable, Fetch], T],
    threads_max: int = THREADS_MAX,
    confirm: Callable[[Readable, Fetch], None] = lambda files, fetch: None,
) -> list[T]:
    """The files of a pointer's state, oldest first, as `look` opened each; the first one is whole by itself.

    `confirm` reads a file further, once it is known to be the bucket's.
    """
    if pointer.ref is None:
        return []
    owners = (pointer.operator, *pointer.origins)
    kept_ms = pointer.ages.window_ms if pointer.ages is not None else None
    trace = Trace(sources, pointer.operator, pointer.bucket, kept_ms)
    chain, known = Chain.of(pointer), dict[Fetch, T]()

    def found(fetch: Fetch) -> T | Failure:
        def checked(files: Readable) -> T:
            it = look(files, fetch)
            check_owner(it.header, owners, pointer.bucket, sources.where(fetch.ref, fetch.kind))
            confirm(files, fetch)
            return it

        try:
            return sources.read(fetch.ref, fetch.kind, checked)
        except (CorruptFileError, LineageError, MissingCheckpointError) as error:
            return error

    while True:
        plan = plan_load(chain, (), trace.gone)
        if plan is None:
            chain = trace.further_back(chain)
            continue
        unknown = [fetch for fetch in plan if fetch not in known]
        threads = min(threads_max, len(unknown))
        results = [found(it) for it in unknown] if threads < 2 else side_by_side("looks", threads, found, unknown)
        for fetch, result in zip(unknown, results, strict=True):
            if isinstance(result, (CorruptError, MissingCheckpointError)):
                trace.note(fetch, result)
            else:
                known[fetch] = result
        if all(fetch in known for fetch in plan):
            wrong = _contradiction(chain, plan, known, sources)
            if wrong is None:
                return [known[fetch] for fetch in plan]
            fetch, error = wrong
            trace.note(fetch, error)
            del known[fetch]


def _contradiction(
    chain: Chain, plan: list[Fetch], known: dict[Fetch, T], sources: Sources
) -> tuple[Fetch, LineageError] | None:
    """The first file that was built on something else than the lineage says."""
    for fetch in plan:
        try:
            chain.check(known[fetch].header, sources.where(fetch.ref, fetch.kind))
        except LineageError as error:
            return fetch, error
    return None
