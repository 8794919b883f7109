"""Loading: bring what a checkpoint needs from its files into the local store.

Decided in `lineage.plan_load`; here files are read and checked side by side, and applied oldest first. What turns out
to be missing or damaged is added to what is known, and decided again.
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
from spark_state_ext.files.sealed import SealedFile, SealedFiles
from spark_state_ext.restore.lazy import LazyRestore, LazySnapshot
from spark_state_ext.restore.load_plan import Chain, Fetch, plan_load
from spark_state_ext.restore.sources import Sources
from spark_state_ext.restore.trace import Failure, Trace, check_owner
from spark_state_ext.store import LocalStore, View
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["Loader"]

_LOGGER = logging.getLogger("spark_state_ext")
# Object stores answer slowly and in parallel; small files are held in memory meanwhile.
_PARALLEL_MAX = 8
# While a file is waited for, whoever waits looks so often whether it is still wanted.
_LOOK_S = 0.5

# What is wrong with the local store then, the bucket mends, and loads anew.
_LOADED_AGAIN = (CorruptStoreError, MissingRunError)

T = TypeVar("T")
_Found: TypeAlias = CheckpointFile | LazySnapshot | Failure
_Read: TypeAlias = Future[_Found]


class Loader:
    """Fetches checkpoint files of one bucket."""

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
        """Fetch what the local store lacks of the last checkpoint of a chain."""
        trace = Trace(self._sources, self._operators[0], self._bucket, self._kept_ms)
        try:
            while True:
                plan = plan_load(chain, self._store.runs(), trace.gone)
                if plan is None:
                    chain = trace.further_back(chain)
                elif self._fetch_all(chain, plan, trace):
                    return
        except _LOADED_AGAIN:
            raise
        except BaseException:
            # Whatever ends it, an interrupt too: nobody waits for what other threads still read, and they are to stop.
            self._sources.close()
            raise
        finally:
            self._sources.report(
                f"bucket {self._bucket} of operator {self._operators[0]!r} at checkpoint {chain.refs[-1]}"
            )

    def ingest(self, made: SealedFile, ref: CheckpointRef) -> None:
        """Have the local store use a snapshot that was made of its runs in place of these."""
        keep = self._store.incoming()
        try:
            found = read_checkpoint(
                SealedFiles([made], "just made"), ref, SNAPSHOT, self._store.schema, self._scratch, keep
            )
            if found.copy is not None:
                self._ingest(found.copy, ref)
            else:
                self._store.restore(found.batches, ref, None, snapshot=True)
        finally:
            self._store.end_incoming(keep)

    def replace_runs(self, chain: Chain, ref: CheckpointRef) -> bool:
        """Have the local store use the snapshot of a checkpoint in place of the runs that it has."""
        trace = Trace(self._sources, self._operators[0], self._bucket, self._kept_ms)
        return self._fetch_all(chain, [Fetch(ref, SNAPSHOT)], trace)

    def complete(self, view: View) -> None:
        """Fetch what lacks of a view's runs that a task of this host began to restore lazily."""
        assert self._lazy is not None, "only who was given it completes"
        for run in self._store.lazy.among(view.runs):
            self._lazy.complete(run)

    def _fetch_all(self, chain: Chain, plan: list[Fetch], trace: Trace) -> bool:
        """Apply the planned files, oldest first; False when one of them is of no use, which is noted."""
        one = self._sources.in_thread and len(plan) == 1
        with _one(plan[0], self._read) if one else _in_order(plan, self._read, self._result) as results:
            for fetch, found in results:
                if not isinstance(found, (CheckpointFile, LazySnapshot)):
                    trace.note(fetch, found)
                    return False
                try:
                    self._apply(chain, fetch, found)
                except (CorruptFileError, LineageError) as error:
                    trace.note(fetch, error)
                    return False
                finally:
                    if isinstance(found, CheckpointFile) and found.copy is not None:
                        self._store.end_incoming(found.copy.path)
        return True

    def _apply(self, chain: Chain, fetch: Fetch, found: CheckpointFile | LazySnapshot) -> None:
        where = self._sources.where(fetch.ref, fetch.kind)
        header = found.header
        check_owner(header, self._operators, self._bucket, where)
        chain.check(header, where)
        if isinstance(found, LazySnapshot):
            assert self._lazy is not None, "it has decided so"
            self._lazy.ingest(found)
        elif found.copy is None:
            batches = self._counted(found.batches)
            self._store.restore(batches, fetch.ref, header.parent, snapshot=fetch.kind == SNAPSHOT)
        else:
            self._ingest(found.copy, fetch.ref)
            self.fetched_rows += found.copy.rows
        self.fetched_files += 1

    def _counted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.fetched_rows += batch.num_rows
            yield batch

    def _ingest(self, copy: LocalCopy, ref: CheckpointRef) -> None:
        self._store.ingest(copy.path, copy.body_bytes, copy.blocks, copy.rows, ref, copy.index)

    def _result(self, future: Future[T], ahead: Iterable[Future[T]]) -> T:
        """What another thread reads; not waited for any longer than it is wanted, whether or not a backend answers."""
        while not wait([future], _LOOK_S).done:
            self._sources.raise_if_closed()
            self._while_waiting()
            for later in ahead:
                if later.done() and not later.cancelled():
                    later.result()  # an error is that of the load, as none without this file leads to the state
        return future.result()

    def _read(self, fetch: Fetch) -> _Found:
        keep = self._store.incoming() if fetch.kind == SNAPSHOT else None
        try:
            found = self._sources.read(fetch.ref, fetch.kind, lambda files: self._read_from(files, fetch, keep))
            # Nobody may be there any more to take it.
            self._sources.raise_if_closed()
            if keep is not None and (isinstance(found, LazySnapshot) or found.copy is None):
                # Open still where it is needed.
                self._store.end_incoming(keep)
            return found
        except BaseException as error:
            # Above all where the disk is full: the next try needs the room.
            if keep is not None:
                self._store.end_incoming(keep)
            if isinstance(error, (CorruptFileError, LineageError, MissingCheckpointError)):
                return error
            raise

    def _read_from(self, files: Readable, fetch: Fetch, keep: Path | None) -> CheckpointFile | LazySnapshot:
        if keep is not None and isinstance(files, Making):
            made = files.make(file_name(fetch.ref, fetch.kind), keep)
            if made is not None:
                return made
        begun = self._lazy.begun(files, fetch.ref) if self._lazy is not None and fetch.kind == SNAPSHOT else None
        if begun is not None:
            return begun
        return read_checkpoint(files, fetch.ref, fetch.kind, self._store.schema, self._scratch, keep)


@contextlib.contextmanager
def _one(fetch: Fetch, read: Callable[[Fetch], _Found]) -> Iterator[Iterator[tuple[Fetch, _Found]]]:
    """The result of a plan of one file, read by whoever asks for it."""
    yield ((it, read(it)) for it in (fetch,))


@contextlib.contextmanager
def _in_order(
    plan: list[Fetch],
    read: Callable[[Fetch], _Found],
    result: Callable[[_Read, Iterable[_Read]], _Found],
) -> Iterator[Iterator[tuple[Fetch, _Found]]]:
    """Results in the order of the plan, read a bounded number of files ahead, in threads that keep no process alive."""
    pool = DaemonPool("load")
    pool.threads_max = _PARALLEL_MAX
    fetches = iter(plan)
    ahead: deque[tuple[Fetch, _Read]] = deque()

    def begin(files: int) -> None:
        ahead.extend((fetch, pool.submit(read, fetch)) for fetch in islice(fetches, files))

    def results() -> Iterator[tuple[Fetch, _Found]]:
        begin(_PARALLEL_MAX)
        while ahead:
            fetch, future = ahead.popleft()
            yield fetch, result(future, [later for _, later in ahead])
            begin(1)

    def read_out() -> None:
        """The load goes on, with another plan or another store: no thread must read on for this one."""
        for _, future in ahead:
            if not future.cancel():
                result(future, ())

    try:
        yield results()
        read_out()
    except _LOADED_AGAIN:
        read_out()
        raise
    finally:
        pool.close()
