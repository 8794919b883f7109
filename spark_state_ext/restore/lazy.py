"""Lazy restore: a snapshot becomes a run of which batches fetch only what they need, and the rest is fetched meanwhile.

Reading both ends of the file is enough to start. Later pieces are requested from the bucket's backends in their order;
each backend must have the same file, byte for byte. If no backend has the file any longer, the run is lost, and the
load is planned again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from arrow_schemas.blocks import BLOCK_BYTES, PIECE_BYTES
from arrow_schemas.equality import IndexArray
from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader, file_name
from arrow_schemas.snapshot_index import SnapshotIndex
from arrow_schemas.standby import BucketKey
from spark_state_ext.errors import (
    CorruptFileError,
    InterruptedRestoreError,
    LineageError,
    MissingCheckpointError,
    MissingRunError,
    StateError,
    UsageError,
)
from spark_state_ext.files.readable import Readable
from spark_state_ext.files.sealed_body import NOT_ARROW, PADDED_MAGIC, check_form, read_announced_index
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.lazy_file import LazyFile, LazyOptions, PieceSource
from spark_state_ext.store.runs import Run
from spark_state_ext.worker.background import Foreground, Runner
from spark_state_ext.worker.threads import map_in_parallel

if TYPE_CHECKING:
    from spark_state_ext.restore.sources import Sources

__all__ = [
    "BYTES_MIN",
    "FILL_BYTES_PER_S_MAX",
    "LazyRestore",
    "LazySnapshot",
    "lazy_bytes_min",
    "lazy_options",
    "read_ends",
    "read_pieces",
    "group_pieces",
]

_LOGGER = logging.getLogger("spark_state_ext")
BYTES_MIN = 32 << 20
FILL_BYTES_PER_S_MAX = 64_000_000
_BYTES_MIN_NAME = "SPARK_STATE_EXT_LAZY_RESTORE_BYTES_MIN"
_FILL_NAME = "SPARK_STATE_EXT_LAZY_FILL_BYTES_PER_S_MAX"
# A request costs about as much as fetching _GAP_PIECES pieces, and fetches at most _REQUEST_PIECES of them.
_GAP_PIECES = 4
_REQUEST_PIECES = BLOCK_BYTES // PIECE_BYTES
_REQUESTS_MAX = 32
# Background fetching waits until batches have fetched no pieces for _QUIET_S, but no longer than _STAND_BACK_S_MAX.
_QUIET_S, _STAND_BACK_S_MAX = 0.25, 1.0


def lazy_options(
    runner: Runner,
    environ: Mapping[str, str] = os.environ,
    peers: PieceSource | None = None,
    foreground: Foreground | None = None,
) -> LazyOptions:
    """Return the options of lazy restore, from the environment variables."""
    fill = _read_bytes_option(environ, _FILL_NAME, FILL_BYTES_PER_S_MAX)
    return LazyOptions(lazy_bytes_min(environ), fill, runner, peers, foreground or Foreground())


def lazy_bytes_min(environ: Mapping[str, str] = os.environ) -> int:
    """Return the size in bytes of the smallest snapshot that is restored lazily, from the environment variables."""
    return _read_bytes_option(environ, _BYTES_MIN_NAME, BYTES_MIN)


def _read_bytes_option(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name} is {text!r}: give a whole number of bytes above 0, or leave it out")
    return int(text)


@dataclass(frozen=True)
class LazySnapshot:
    """A snapshot file whose both ends were read.

    Parameters
    ----------
    header
        Its header.
    index
        Its index.
    schema
        The schema of its rows in the file.
    """

    header: LineageHeader
    index: SnapshotIndex
    schema: pa.Schema


def read_ends(files: Readable, ref: CheckpointRef, size: int) -> LazySnapshot | None:
    """Read and check both ends of a snapshot file of the given size; None if it has no index, or no rows."""
    name = file_name(ref, SNAPSHOT)
    where = files.where(name)
    record, index = read_announced_index(lambda start, end: files.get_range(name, start, end), size, where)
    if index is None or not index.chunks:
        return None
    end = -(-index.chunks[0].offset // PIECE_BYTES) * PIECE_BYTES
    front = files.get_range(name, 0, min(end, index.body_bytes))
    index.check(0, front, where)
    try:
        if not front.startswith(PADDED_MAGIC):
            raise CorruptFileError(f"{where} is not an Arrow file")
        schema = pa.ipc.read_schema(pa.py_buffer(front[len(PADDED_MAGIC) :]))
    except NOT_ARROW as error:
        raise CorruptFileError(f"the schema of {where} cannot be read: {error}") from error
    header = LineageHeader.decode(schema.metadata, where)
    if (header.ref, header.kind) != (ref, SNAPSHOT):
        raise LineageError(f"{where} holds the {header.kind} of checkpoint {header.ref}")
    check_form(header, record, index, where)
    return LazySnapshot(header, index, schema.remove_metadata())


def read_pieces(files: Readable, ref: CheckpointRef, index: SnapshotIndex, request: tuple[int, int]) -> bytes:
    """Read a range of pieces of a snapshot file; the caller must compare them with their checksums."""
    name = file_name(ref, SNAPSHOT)
    start, stop = request[0] * PIECE_BYTES, min(request[1] * PIECE_BYTES, index.body_bytes)
    data = files.get_range(name, start, stop)
    if len(data) != stop - start:
        # Otherwise the checksums of the remaining whole pieces would match, even if there are no pieces.
        raise CorruptFileError(
            f"{files.where(name)} has only {len(data)} bytes between byte {start} and {stop}: it was cut short"
        )
    return data


class _UnwantedError(Exception):
    """The pieces are no longer waited for. This is not an error of the backend that was asked for them."""

    def __init__(self, why: StateError) -> None:
        super().__init__(str(why))
        self.why = why


class LazyRestore:
    """Lazy restore of one bucket during one call."""

    def __init__(
        self,
        store: LocalStore,
        sources: Sources,
        key: BucketKey,
        options: LazyOptions | None,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._while_waiting = while_waiting
        self._key = key
        self._sources = sources
        self._options = options
        self._lock = threading.Lock()
        # By checkpoint: the places whose file is known to be the one that the run was made from.
        self._same: dict[CheckpointRef, set[str]] = {}
        # Bytes fetched from backends, without the two ends of files.
        self.fetched_bytes = 0

    # -- starting a lazy restore --------------------------------------------------------------------

    def begin(self, files: Readable, ref: CheckpointRef) -> LazySnapshot | None:
        """Read both ends of a snapshot that is to be restored lazily; None if it is to be loaded whole."""
        # If a part of it could not be fetched, it is loaded whole, which reports what is wrong.
        if self._options is None or ref in self._store.lazy.lost:
            return None
        with self._options.foreground.awaited():
            return self._read_both_ends(files, ref, self._options.bytes_min)

    def _read_both_ends(self, files: Readable, ref: CheckpointRef, bytes_min: int) -> LazySnapshot | None:
        name = file_name(ref, SNAPSHOT)
        size, where = files.size(name), files.where(name)
        if size < bytes_min:
            return None
        local = files.open_local(name)
        if local is not None:
            local.close()
            return None
        snapshot = read_ends(files, ref, size)
        if snapshot is None or not snapshot.schema.equals(self._store.schema.arrow):
            return None
        with self._lock:
            self._same[ref] = {where}
        return snapshot

    def ingest(self, snapshot: LazySnapshot) -> None:
        """Add a snapshot to the local store without any of its rows."""
        ref = snapshot.header.ref
        _LOGGER.info(
            "checkpoint %s is restored lazily: %d rows, %d bytes", ref, snapshot.index.rows, snapshot.index.body_bytes
        )
        self._store.lazy.ingest(snapshot.index, ref)

    # -- fetching pieces ----------------------------------------------------------------------------

    def attach(self, view: View) -> None:
        """Let a view's lookups fetch missing pieces, and start fetching the other pieces in the background."""
        view.fetch = self.fetch
        if self._options is not None:
            for run in self._store.lazy.among(view.runs):
                # Do not submit a run that is already being filled.
                if not self._options.runner.busy(self._name(run)):
                    self._options.runner.submit(self._name(run), partial(self.fill, run))

    def _name(self, run: Run) -> str:
        return f"filling {self._store.folder} {run.newest}"

    def fetch(self, lazy: LazyFile, pieces: IndexArray) -> None:
        """Fetch pieces of a file and write them to it: from peers if they have them, the others from backends."""
        with nullcontext() if self._options is None else self._options.foreground.awaited():
            self._fetch(lazy, pieces, in_background=False)

    def _fetch(self, lazy: LazyFile, pieces: IndexArray, in_background: bool) -> None:
        peers = None if self._options is None else self._options.peers
        if peers is not None:
            ranges = group_pieces(lazy.lacking(pieces))
            peers.give(self._key, lazy, ranges, in_background, self._sources.raise_if_closed)
            pieces = lazy.lacking(pieces)
            if not len(pieces):
                return
        started_s = time.monotonic()
        self._fetch_from_backends(lazy, pieces, in_background)
        if peers is not None and in_background:
            peers.note_store(len(group_pieces(pieces)), len(pieces) * PIECE_BYTES, time.monotonic() - started_s)

    def _fetch_from_backends(self, lazy: LazyFile, pieces: IndexArray, in_background: bool) -> None:
        ref = lazy.run.newest
        while_waiting = None if in_background else self._wait_or_abandon
        try:
            self._sources.read(ref, SNAPSHOT, lambda files: self._fetch_from(files, lazy, pieces, while_waiting))
        except _UnwantedError as unwanted:
            raise unwanted.why from None
        except (MissingCheckpointError, CorruptFileError, LineageError) as error:
            if not len(lazy.lacking(pieces)):
                return  # another process fetched them from elsewhere
            _LOGGER.warning("the rest of checkpoint %s, which is restored lazily, is gone: %s", ref, error)
            self._store.lazy.lose(lazy.run)
            raise MissingRunError(f"run {ref} cannot be completed: {error}", ref) from error

    def _wait_or_abandon(self) -> None:
        try:
            self._while_waiting()
        except StateError as error:
            raise _UnwantedError(error) from error

    def _fetch_from(
        self, files: Readable, lazy: LazyFile, pieces: IndexArray, while_waiting: Callable[[], None] | None
    ) -> None:
        name = file_name(lazy.run.newest, SNAPSHOT)
        where = files.where(name)
        self._refuse_other_file(files, lazy, name, where)

        def fetch_range(request: tuple[int, int]) -> int:
            self._sources.raise_if_closed()
            data = read_pieces(files, lazy.run.newest, lazy.index, request)
            lazy.put(request[0], data, where)
            return len(data)

        # Another backend may already have given some of them.
        requests = group_pieces(lazy.lacking(pieces))
        threads = min(_REQUESTS_MAX, max(1, len(requests)))
        fetched = sum(map_in_parallel("fetch", threads, fetch_range, requests, while_waiting))
        with self._lock:
            self.fetched_bytes += fetched

    def _refuse_other_file(self, files: Readable, lazy: LazyFile, name: str, where: str) -> None:
        """Raise an error unless a backend has the same file that the run was made from: another's layout may differ."""
        with self._lock:
            if where in self._same.get(lazy.run.newest, ()):
                return
        _, index = read_announced_index(lambda start, end: files.get_range(name, start, end), files.size(name), where)
        if index is None or index.encode() != lazy.index.encode():
            raise CorruptFileError(f"{where} is another file than the one that the restore began with")
        with self._lock:
            self._same.setdefault(lazy.run.newest, set()).add(where)

    # -- in the background --------------------------------------------------------------------------

    def fill(self, run: Run) -> None:
        """Fetch all missing pieces of a run, in order and at a limited rate, until it is whole or no longer needed."""
        assert self._options is not None, "runs are filled only with options of lazy restore"
        try:
            self._fill(run, self._options)
        except InterruptedRestoreError:
            # The end of a query is not a failure to warn of.
            if not self._sources.is_closed:
                raise
        finally:
            if self._store.is_closed:
                # Fetching may have opened the store again.
                self._store.close()

    def _fill(self, run: Run, options: LazyOptions) -> None:
        for lazy, pieces in self._iterate_missing(run, lambda: not (self._store.is_closed or self._sources.is_closed)):
            options.foreground.stand_back(_QUIET_S, _STAND_BACK_S_MAX)
            started_s = time.monotonic()
            self._fetch(lazy, pieces, in_background=True)
            took_s = time.monotonic() - started_s
            time.sleep(max(0.0, len(pieces) * PIECE_BYTES / options.fill_bytes_per_s_max - took_s))

    def complete(self, run: Run) -> None:
        """Fetch all missing pieces of a run, in order, one request after another, without a rate limit."""
        # A closed store does not end this: the process closes stores that are idle for long, and they open again.
        for lazy, pieces in self._iterate_missing(run, lambda: True):
            self._sources.raise_if_closed()
            self._while_waiting()
            self._fetch(lazy, pieces, in_background=True)

    def _iterate_missing(self, run: Run, is_wanted: Callable[[], bool]) -> Iterator[tuple[LazyFile, IndexArray]]:
        """Iterate over the missing pieces of a run, one request at a time; mark the run whole when all are there."""
        while is_wanted():
            lazy = self._store.lazy.file(run)
            if lazy is None:
                return
            absent = lazy.absent()
            if not len(absent):
                self._store.lazy.finish(lazy)
                return
            yield lazy, absent[absent < absent[0] + _REQUEST_PIECES]


def group_pieces(pieces: IndexArray) -> list[tuple[int, int]]:
    """Group ascending pieces into ranges of bounded size; pieces near each other share a range."""
    if not len(pieces):
        return []
    starts = np.flatnonzero(np.diff(pieces, prepend=pieces[0] - _GAP_PIECES - 2) > _GAP_PIECES + 1)
    ends = np.append(starts[1:], len(pieces))
    ranges = zip(pieces[starts].tolist(), (pieces[ends - 1] + 1).tolist(), strict=True)
    return [(at, min(at + _REQUEST_PIECES, end)) for start, end in ranges for at in range(start, end, _REQUEST_PIECES)]
