"""A view: the state of a bucket at one checkpoint, read from the runs that make it up."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.equality import HashArray, IndexArray
from arrow_schemas.row import DELETED, KEY_HASH, TIMEOUT_MS, RowSchema
from spark_state_ext.store.lazy_file import FetchPieces
from spark_state_ext.store.runs import Run, find_rows, get_hashes, join_batches, merge_newest

if TYPE_CHECKING:
    from spark_state_ext.store.chunk_checksums import PartlyChecked
    from spark_state_ext.store.local import LocalStore

__all__ = ["Lookup", "View"]

OpenChunk = Callable[[Run, int], pa.RecordBatch]

# About how many bytes of the view's runs are merged at once; merging makes several copies of them.
_SCAN_BYTES = 4 << 20


@dataclass(frozen=True)
class Lookup:
    """Answer of `View.lookup`.

    Parameters
    ----------
    index
        For each wanted key its row in `rows`, or -1 if there is none; int64 (n,).
    rows
        Copies of the rows found, in no particular order.
    """

    index: IndexArray
    rows: pa.RecordBatch


class View:
    """The state at a checkpoint. Get one with `LocalStore.view`; it holds no transaction between calls."""

    def __init__(self, store: LocalStore, runs: Sequence[Run]) -> None:
        self._store = store
        self.runs = list(runs)
        # Fetches absent pieces of lazily restored runs.
        self.fetch: FetchPieces | None = None

    @property
    def rows_max(self) -> int:
        """Upper bound of the number of live rows."""
        return sum(run.rows - run.tombstones for run in self.runs)

    @property
    def rows_min(self) -> int:
        """Lower bound of the number of live rows: one run's live rows, less the tombstones of newer runs."""
        least = removed = 0
        for run in self.runs:
            least = max(least, run.rows - run.tombstones - removed)
            removed += run.tombstones
        return least

    @property
    def size_bytes(self) -> int:
        """Bytes of the view's runs."""
        return sum(run.size_bytes for run in self.runs)

    def lookup(self, hashes: HashArray, keys: Sequence[pa.Array]) -> Lookup:
        """Find many keys at once."""
        n = len(hashes)
        index: IndexArray = np.full(n, -1, dtype=np.int64)
        ascending = n < 2 or bool((hashes[1:] >= hashes[:-1]).all())
        unresolved: IndexArray = (np.arange(n) if ascending else np.argsort(hashes, kind="stable")).astype(np.int64)
        found: list[pa.RecordBatch] = []
        # Outside of the transaction, because fetching may take long.
        positions = self._store.lazy.locate_hashes(self.runs, hashes, self.fetch)
        first = unresolved

        def work(open_chunk: OpenChunk) -> None:
            nonlocal unresolved
            unresolved = first
            found.clear()
            count = 0
            for run in self.runs:
                if not len(unresolved):
                    break
                done = np.zeros(len(unresolved), dtype=np.bool_)
                wanted_hashes = hashes[unresolved]
                lows = np.searchsorted(wanted_hashes, _chunk_values(run, "hash_min"), side="left").tolist()
                highs = np.searchsorted(wanted_hashes, _chunk_values(run, "hash_max"), side="right").tolist()
                for i, (lo, hi) in enumerate(zip(lows, highs, strict=True)):
                    if lo == hi:
                        continue
                    asked = unresolved[lo:hi]
                    at = positions[run.key].rows(i, asked) if run.key in positions else None
                    found_positions, rows = find_rows(
                        open_chunk(run, i), self._schema, wanted_hashes[lo:hi], _take_keys(keys, asked), at
                    )
                    if not len(found_positions):
                        continue
                    done[lo + found_positions] = True
                    if run.chunks[i].tombstones:
                        deleted = rows.column(DELETED)
                        if deleted.true_count:
                            found_positions = found_positions[~deleted.to_numpy(zero_copy_only=False)]
                            rows = rows.filter(pc.invert(deleted))
                    found.append(rows)
                    index[asked[found_positions]] = np.arange(count, count + len(found_positions))
                    count += len(found_positions)
                unresolved = unresolved[~done]

        self._store.read(work)
        return Lookup(index, _concatenate(found, self._schema))

    def row(self, key_hash: int, is_wanted: Callable[[pa.RecordBatch], bool]) -> pa.RecordBatch:
        """Find the row of one key, reading only a few blocks of each chunk; return an empty batch if there is none.

        `is_wanted` compares the key of a row of that hash with the wanted key.
        """
        result: pa.RecordBatch | None = None

        def work(open_partly: Callable[[Run, int], PartlyChecked]) -> None:
            nonlocal result
            result = None
            for run in self.runs:
                for i in range(bisect_left(run.chunks, key_hash, key=lambda stored: stored.hash_max), len(run.chunks)):
                    if run.chunks[i].hash_min > key_hash:
                        break
                    chunk = open_partly(run, i)
                    at = chunk.first_at_least(key_hash)
                    while chunk.hash_at(at) == key_hash:
                        row = chunk.row(at)
                        if is_wanted(row):
                            if not row.column(DELETED)[0].as_py():
                                result = row
                            return
                        at += 1

        self._store.read_partly(work)
        return self._schema.empty() if result is None else result

    def scan(self, *, keep_tombstones: bool = False) -> Iterator[pa.RecordBatch]:
        """Yield all live rows, ascending by hash, in batches of bounded size, each read in a short transaction."""
        for after, upto in self._small_ranges():
            pieces = self._copy_rows(after, upto)
            if pieces:
                merged = merge_newest(pieces, self._schema, drop_tombstones=not keep_tombstones)
                if merged.num_rows:
                    yield merged

    def piece(self, after: int) -> tuple[int, pa.RecordBatch]:
        """Return the upper bound of the next range of hashes beyond `after`, and the range's live rows by hash.

        A slow reader may read the next range from a new view of the same checkpoint.
        """
        upto = next((border for _, border in self.ranges() if border > after), 2**64 - 1)
        pieces = self._copy_rows(after, upto)
        return upto, merge_newest(pieces, self._schema, drop_tombstones=True) if pieces else self._schema.empty()

    def _copy_rows(self, after: int, upto: int) -> list[pa.RecordBatch]:
        """Copy all rows with a hash in (after, upto], newest run first."""
        pieces: list[pa.RecordBatch] = []
        for run in self._store.lazy.among(self.runs):
            if any(chunk.hash_max > after and chunk.hash_min <= upto for chunk in run.chunks):
                self._store.lazy.complete(run, self.fetch)

        def work(open_chunk: OpenChunk) -> None:
            pieces.clear()
            for run in self.runs:
                for i, chunk in enumerate(run.chunks):
                    if chunk.hash_max <= after or chunk.hash_min > upto:
                        continue
                    batch = open_chunk(run, i)
                    hashes = get_hashes(batch)
                    lo = 0 if after < 0 else int(np.searchsorted(hashes, np.uint64(after), side="right"))
                    hi = int(np.searchsorted(hashes, np.uint64(upto), side="right"))
                    if lo < hi:
                        # A copy, because slices of LMDB's memory are valid only within the transaction.
                        pieces.append(batch.slice(lo, hi - lo).take(pa.array(np.arange(hi - lo))))

        self._store.read(work)
        return pieces

    def expired_bytes_max(self, now_ms: int, low_watermark_ms: int = 0, low_watermark_version: int = 0) -> int:
        """Return an upper bound of the bytes that `expired` has to read, from the manifest alone."""
        return sum(
            chunk.size_bytes
            for run in self.runs
            for chunk in run.chunks
            if chunk.timeout_min < now_ms
            and chunk.timeout_max >= _lowest_timeout(run, low_watermark_ms, low_watermark_version)
        )

    def expired(
        self,
        now_ms: int,
        low_watermark_ms: int = 0,
        low_watermark_version: int = 0,
        after: int = -1,
        upto: int = 2**64 - 1,
    ) -> pa.RecordBatch:
        """Return the live rows with a hash in (after, upto] that time out before `now_ms`.

        Rows of checkpoints before `low_watermark_version` that time out before `low_watermark_ms` were processed
        already, and are skipped.
        """

        def chunks(run: Run) -> Iterator[tuple[int, int]]:
            low = _lowest_timeout(run, low_watermark_ms, low_watermark_version)
            for i, chunk in enumerate(run.chunks):
                if chunk.timeout_min < now_ms and chunk.timeout_max >= low:
                    yield i, low

        return self._rows_below(TIMEOUT_MS, now_ms, chunks, after, upto)

    def stale(self, column: str, until: int, after: int, upto: int) -> pa.RecordBatch:
        """Return the live rows with a hash in (after, upto] in which an integer column is at most `until`."""

        def chunks(run: Run) -> Iterator[tuple[int, int]]:
            # Only chunks in this range: each call of a bucket searches one range, and the next call the next range.
            for i, chunk in enumerate(run.chunks):
                if chunk.hash_max > after and chunk.hash_min <= upto:
                    yield i, -(2**63)

        return self._rows_below(column, until + 1, chunks, after, upto)

    def _rows_below(
        self,
        column: str,
        limit: int,
        chunks: Callable[[Run], Iterator[tuple[int, int]]],
        after: int,
        upto: int,
    ) -> pa.RecordBatch:
        """Return the live rows with a hash in (after, upto] in which a column is below a limit."""
        candidates: list[pa.RecordBatch] = []

        def rows_in(run: Run, open_chunk: OpenChunk) -> Iterator[tuple[pa.RecordBatch, IndexArray]]:
            for i, low in chunks(run):
                chunk = run.chunks[i]
                if chunk.hash_max <= after or chunk.hash_min > upto:
                    continue
                batch = open_chunk(run, i)
                # NULL becomes the largest value: never below.
                values = batch.column(column).fill_null(2**63 - 1).to_numpy(zero_copy_only=False)
                is_wanted = (values < limit) & (values >= low)
                if chunk.hash_min <= after or chunk.hash_max > upto:
                    hashes = get_hashes(batch)
                    is_wanted &= hashes <= np.uint64(upto)
                    if after >= 0:
                        is_wanted &= hashes > np.uint64(after)
                rows = np.flatnonzero(is_wanted)
                if len(rows):
                    yield batch, rows

        for run in self._store.lazy.among(self.runs):
            # Fetch all chunks' columns in one request, to save round trips.
            self._store.lazy.fetch_columns(run, [i for i, _ in chunks(run)], (KEY_HASH, column), self.fetch)
            self._fetch_rows(run, rows_in)

        def work(open_chunk: OpenChunk) -> None:
            candidates.clear()
            for run in self.runs:
                candidates.extend(batch.take(pa.array(rows)) for batch, rows in rows_in(run, open_chunk))

        self._store.read(work)
        if not candidates:
            return self._schema.empty()
        newest = merge_newest(candidates, self._schema, drop_tombstones=True)
        # A candidate may have been overwritten by a row that is not below the limit, so look up the current rows.
        current = self.lookup(get_hashes(newest), self._schema.key_columns(newest))
        values = current.rows.column(column).fill_null(2**63 - 1).to_numpy(zero_copy_only=False)
        return current.rows.filter(pa.array(values < limit))

    def _fetch_rows(
        self, run: Run, rows_in: Callable[[Run, OpenChunk], Iterator[tuple[pa.RecordBatch, IndexArray]]]
    ) -> None:
        """Fetch some rows of a lazily restored run, of which the hash column is present."""
        hashes: list[HashArray] = []

        def work(open_chunk: OpenChunk) -> None:
            hashes[:] = [get_hashes(batch)[rows] for batch, rows in rows_in(run, open_chunk)]

        self._store.read(work)
        if hashes:
            self._store.lazy.locate_hashes([run], np.unique(np.concatenate(hashes)), self.fetch)

    def earliest_timeout(self, now_ms: int) -> int | None:
        """Return a lower bound of the live rows' timeouts at or after `now_ms`; None if there are none.

        Rows that were overwritten or removed are included, which is why it is only a bound.
        """
        timeouts: list[int] = []
        for run in self._store.lazy.among(self.runs):
            chunks = [i for i, chunk in enumerate(run.chunks) if chunk.timeout_min < now_ms <= chunk.timeout_max]
            self._store.lazy.fetch_columns(run, chunks, (TIMEOUT_MS,), self.fetch)

        def work(open_chunk: OpenChunk) -> None:
            timeouts.clear()
            for run in self.runs:
                for i, chunk in enumerate(run.chunks):
                    if chunk.timeout_max < now_ms:
                        continue
                    if chunk.timeout_min >= now_ms:
                        timeouts.append(chunk.timeout_min)
                        continue
                    values = open_chunk(run, i).column(TIMEOUT_MS).drop_null().to_numpy()
                    timeouts.append(int(values[values >= now_ms].min()))

        self._store.read(work)
        return min(timeouts) if timeouts else None

    @property
    def _schema(self) -> RowSchema:
        return self._store.schema

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield hash ranges (after, upto] between the chunk borders of the run with most chunks; none without runs."""
        largest = max(self.runs, key=lambda run: len(run.chunks), default=None)
        if largest is None:
            return
        borders = sorted({chunk.hash_max for chunk in largest.chunks[:-1]} | {2**64 - 1})
        yield from zip([-1, *borders], borders, strict=False)

    def _small_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of `ranges`, divided further, so that memory use does not depend on the size of chunks.

        They are divided evenly between the lowest and the highest hash of the bucket, because hashes are spread evenly;
        with a bad hash function, a range may hold more rows.
        """
        chunks = [chunk for run in self.runs for chunk in run.chunks]
        if not chunks:
            return
        lowest, highest = min(chunk.hash_min for chunk in chunks) - 1, max(chunk.hash_max for chunk in chunks)
        ranges = [(max(after, lowest), min(upto, highest)) for after, upto in self.ranges()]
        parts = -(-self.size_bytes // (_SCAN_BYTES * len(ranges)))
        for after, upto in ranges:
            borders = [after + (upto - after) * part // parts for part in range(parts + 1)]
            yield from ((begin, end) for begin, end in itertools.pairwise(borders) if begin < end)


def _lowest_timeout(run: Run, low_watermark_ms: int, low_watermark_version: int) -> int:
    """Return the timeout of a run below which all timeouts were processed already."""
    return low_watermark_ms if run.newest.version < low_watermark_version else -(2**63)


def _chunk_values(run: Run, name: str) -> HashArray:
    return np.fromiter((getattr(chunk, name) for chunk in run.chunks), dtype=np.uint64, count=len(run.chunks))


def _take_keys(keys: Sequence[pa.Array], positions: IndexArray) -> list[pa.Array]:
    if len(positions) and int(positions[-1]) - int(positions[0]) + 1 == len(positions):
        steps = len(positions) < 2 or bool((np.diff(positions) == 1).all())
        if steps:
            return [key.slice(int(positions[0]), len(positions)) for key in keys]
    indices = pa.array(positions)
    return [key.take(indices) for key in keys]


def _concatenate(batches: list[pa.RecordBatch], schema: RowSchema) -> pa.RecordBatch:
    return join_batches(batches) if batches else schema.empty()
