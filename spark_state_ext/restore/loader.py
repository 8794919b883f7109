"""Load a checkpoint from its files into the local store.

`load_plan.plan_load` decides which files are needed. This module reads and checks them in parallel, and applies them
oldest first. If a file is missing or damaged, the load is planned again without it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar

import pyarrow as pa

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name
from spark_state_ext.errors import (
    CorruptFileError,
    CorruptStoreError,
    LineageError,
    MissingCheckpointError,
    MissingRunError,
)
from spark_state_ext.files.checkpoint import CheckpointFile, LocalCopy, read_checkpoint
from spark_state_ext.files.readable import Making, Readable
from spark_state_ext.files.sealed_file import SealedFile, SealedFiles
from spark_state_ext.restore.lazy import LazyRestore, LazySnapshot
from spark_state_ext.restore.load_plan import Chain, Fetch, plan_load
from spark_state_ext.restore.sources import Sources
from spark_state_ext.restore.trace import Failure, Trace, check_owner
from spark_state_ext.store import LocalStore, View
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["Loader"]

_LOGGER = logging.getLogger("spark_state_ext")
# Object stores answer slowly, so files are read in parallel; small ones are held in memory until they are applied.
_PARALLEL_MAX = 8
# How often a waiting thread checks whether the file is still needed.
_LOOK_S = 0.5

# Errors of the local store: the bucket repairs it and loads again.
_RETRIED_BY_BUCKET = (CorruptStoreError, MissingRunError)

T = TypeVar("T")
_ReadResult: TypeAlias = CheckpointFile | LazySnapshot | Failure
_ReadFuture: TypeAlias = Future[_ReadResult]


class Loader:
    """Loads checkpoint files of one bucket."""

    def __init__(
        self,
        store: LocalStore,
        sources: Sources,
        operators: Sequence[str],
        bucket: int,
        scratch: Path,
        kept_ms: int | None = None,
        while_waiting: Callable[[], None] = lambda: None,
        lazy: LazyRestore | None = None,
    ) -> None:
        self._store = store
        self._kept_ms = kept_ms
        self._sources = sources
        self._operators = tuple(operators)
        self._bucket = bucket
        self._scratch = scratch
        self.fetched_files = 0
        self.fetched_rows = 0
        self._while_waiting = while_waiting
        self._lazy = lazy

    def load(self, chain: Chain) -> None:
        """Fetch what the local store is missing for the last checkpoint of a chain."""
        trace = Trace(self._sources, self._operators[0], self._bucket, self._kept_ms)
        try:
            while True:
                plan = plan_load(chain, self._store.runs(), trace.gone)
                if plan is None:
                    chain = trace.trace_back(chain)
                elif self._fetch_all(chain, plan, trace):
                    return
        except _RETRIED_BY_BUCKET:
            raise
        except BaseException:
            # However the load ended, even by an interrupt: stop the threads that still read, as their files are unused.
            self._sources.close()
            raise
        finally:
            self._sources.report(
                f"bucket {self._bucket} of operator {self._operators[0]!r} at checkpoint {chain.refs[-1]}"
            )

    def ingest(self, snapshot: SealedFile, ref: CheckpointRef) -> None:
        """Replace the local store's runs by a snapshot that was made of them."""
        keep = self._store.incoming()
        try:
            checkpoint = read_checkpoint(
                SealedFiles([snapshot], "just made"), ref, SNAPSHOT, self._store.schema, self._scratch, keep
            )
            if checkpoint.copy is not None:
                self._ingest(checkpoint.copy, ref)
            else:
                self._store.restore(checkpoint.batches, ref, None, snapshot=True)
        finally:
            self._store.end_incoming(keep)

    def replace_runs(self, chain: Chain, ref: CheckpointRef) -> bool:
        """Replace the local store's runs by the snapshot of a checkpoint; False if that cannot be used."""
        trace = Trace(self._sources, self._operators[0], self._bucket, self._kept_ms)
        return self._fetch_all(chain, [Fetch(ref, SNAPSHOT)], trace)

    def complete(self, view: View) -> None:
        """Fetch the missing pieces of a view's runs that a task of this host began to restore lazily."""
        assert self._lazy is not None, "a loader that completes runs has a lazy restore"
        for run in self._store.lazy.among(view.runs):
            self._lazy.complete(run)

    def _fetch_all(self, chain: Chain, plan: list[Fetch], trace: Trace) -> bool:
        """Apply the planned files, oldest first; note the first unusable one, and return False then."""
        is_single = self._sources.in_thread and len(plan) == 1
        with (
            _read_one(plan[0], self._read)
            if is_single
            else _read_in_order(plan, self._read, self._await_result) as results
        ):
            for fetch, result in results:
                if not isinstance(result, (CheckpointFile, LazySnapshot)):
                    trace.note(fetch, result)
                    return False
                try:
                    self._apply(chain, fetch, result)
                except (CorruptFileError, LineageError) as error:
                    trace.note(fetch, error)
                    return False
                finally:
                    if isinstance(result, CheckpointFile) and result.copy is not None:
                        self._store.end_incoming(result.copy.path)
        return True

    def _apply(self, chain: Chain, fetch: Fetch, result: CheckpointFile | LazySnapshot) -> None:
        where = self._sources.where(fetch.ref, fetch.kind)
        header = result.header
        check_owner(header, self._operators, self._bucket, where)
        chain.check(header, where)
        if isinstance(result, LazySnapshot):
            assert self._lazy is not None, "only a lazy restore returns a LazySnapshot"
            self._lazy.ingest(result)
        elif result.copy is None:
            batches = self._count_rows(result.batches)
            self._store.restore(batches, fetch.ref, header.parent, snapshot=fetch.kind == SNAPSHOT)
        else:
            self._ingest(result.copy, fetch.ref)
            self.fetched_rows += result.copy.rows
        self.fetched_files += 1

    def _count_rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.fetched_rows += batch.num_rows
            yield batch

    def _ingest(self, copy: LocalCopy, ref: CheckpointRef) -> None:
        self._store.ingest(copy.path, copy.body_bytes, copy.blocks, copy.rows, ref, copy.index)

    def _await_result(self, future: Future[T], ahead: Iterable[Future[T]]) -> T:
        """Wait for what another thread reads, but only as long as it is needed, even if the backend does not answer."""
        while not wait([future], _LOOK_S).done:
            self._sources.raise_if_closed()
            self._while_waiting()
            for later in ahead:
                if later.done() and not later.cancelled():
                    later.result()  # an error of any file ends the load, as the state needs all of them
        return future.result()

    def _read(self, fetch: Fetch) -> _ReadResult:
        keep = self._store.incoming() if fetch.kind == SNAPSHOT else None
        try:
            result = self._sources.read(fetch.ref, fetch.kind, lambda files: self._read_from(files, fetch, keep))
            # The caller may have given up.
            self._sources.raise_if_closed()
            if keep is not None and (isinstance(result, LazySnapshot) or result.copy is None):
                # The copy is removed; if it is still read, the open file stays readable.
                self._store.end_incoming(keep)
            return result
        except BaseException as error:
            # Remove the copy, in particular if the disk is full: the next try needs the space.
            if keep is not None:
                self._store.end_incoming(keep)
            if isinstance(error, (CorruptFileError, LineageError, MissingCheckpointError)):
                return error
            raise

    def _read_from(self, files: Readable, fetch: Fetch, keep: Path | None) -> CheckpointFile | LazySnapshot:
        if keep is not None and isinstance(files, Making):
            checkpoint = files.make(file_name(fetch.ref, fetch.kind), keep)
            if checkpoint is not None:
                return checkpoint
        snapshot = self._lazy.begin(files, fetch.ref) if self._lazy is not None and fetch.kind == SNAPSHOT else None
        if snapshot is not None:
            return snapshot
        return read_checkpoint(files, fetch.ref, fetch.kind, self._store.schema, self._scratch, keep)


@contextlib.contextmanager
def _read_one(fetch: Fetch, read: Callable[[Fetch], _ReadResult]) -> Iterator[Iterator[tuple[Fetch, _ReadResult]]]:
    """Yield the result of a plan of one file, which is read in the caller's thread."""
    yield ((planned, read(planned)) for planned in (fetch,))


@contextlib.contextmanager
def _read_in_order(
    plan: list[Fetch],
    read: Callable[[Fetch], _ReadResult],
    await_result: Callable[[_ReadFuture, Iterable[_ReadFuture]], _ReadResult],
) -> Iterator[Iterator[tuple[Fetch, _ReadResult]]]:
    """Yield results in the order of the plan; daemon threads read a bounded number of files ahead."""
    pool = DaemonPool("load")
    pool.threads_max = _PARALLEL_MAX
    fetches = iter(plan)
    ahead: deque[tuple[Fetch, _ReadFuture]] = deque()

    def submit(files: int) -> None:
        ahead.extend((fetch, pool.submit(read, fetch)) for fetch in islice(fetches, files))

    def results() -> Iterator[tuple[Fetch, _ReadResult]]:
        submit(_PARALLEL_MAX)
        while ahead:
            fetch, future = ahead.popleft()
            yield fetch, await_result(future, [later for _, later in ahead])
            submit(1)

    def drain() -> None:
        """Wait until no thread reads for this plan: the load goes on with another plan or another store."""
        for _, future in ahead:
            if not future.cancel():
                await_result(future, ())

    try:
        yield results()
        drain()
    except _RETRIED_BY_BUCKET:
        drain()
        raise
    finally:
        pool.close()
