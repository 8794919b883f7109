"""The open state of an operator as of one batch, which `open_state` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import TIMEOUT_MS
from arrow_schemas.savepoint import SavedFile
from spark_state_ext.backends.replication import Restorable
from spark_state_ext.errors import MissingCheckpointError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.bodies import Body, Scratch, open_body
from spark_state_ext.reading.columns import ShownColumns, filter_rows
from spark_state_ext.reading.file_table import list_files
from spark_state_ext.reading.lookup import LookupKey
from spark_state_ext.reading.merge import find_row, merge_live_rows
from spark_state_ext.reading.reader_hold import ReaderHold
from spark_state_ext.reading.sources import make_sources
from spark_state_ext.restore.resolution import THREADS_MAX, resolve
from spark_state_ext.savepoints.file_copy import refuse_other_files
from spark_state_ext.timeline.bucket_files import BucketFiles
from spark_state_ext.worker.threads import map_ahead

if TYPE_CHECKING:
    import pyarrow.compute as pc

__all__ = ["AsOf", "OpenState", "StateFiles"]

# Buckets that a scan opens in advance; checksums are computed without Python's lock.
_AHEAD_MAX = 2
# Files kept open, and so mapped: by default a process has 65,000 maps, including its libraries and stores.
_KEPT_MAX = 10_000


@dataclass(frozen=True)
class AsOf:
    """The batch after which a state is read.

    Parameters
    ----------
    batch
        The batch; -1: the state that the query began with.
    unit
        ``"batch"``; or ``"heartbeat"`` if tasks did not know their batch, so that batches with data are counted.
    newest, oldest
        The newest readable batch, and a function that finds the oldest one.
    newest_with_file
        The newest batch that has a file; it may not be committed.
    proven
        True if all of the state is certainly committed.
    """

    batch: int
    unit: str
    newest: int
    oldest: Callable[[], int] = field(repr=False)
    newest_with_file: int
    proven: bool = True


@dataclass(frozen=True)
class StateFiles:
    """The files of a state.

    Parameters
    ----------
    folder
        A query folder, or the operator's folder in a savepoint.
    operator
        The operator file in force.
    pointers
        The pointer of every bucket.
    listed
        The listed files of buckets; not all buckets need to be listed.
    saved
        For a savepoint: the files of each bucket, by its manifest.
    """

    folder: Folder
    operator: OperatorFile
    pointers: Mapping[int, Pointer]
    listed: Mapping[int, BucketFiles] = field(default_factory=dict)
    saved: Mapping[int, Sequence[SavedFile]] = field(default_factory=dict)


class OpenState:
    """The state of one operator as of one batch: a context manager that `open_state` returns.

    Parameters
    ----------
    files
        The files of the state.
    as_of
        The batch that is read.
    hold
        The hold that keeps clean-up from deleting the files; None: there is no hold.
    scratch
        Settings for copies of large remote files.
    """

    def __init__(self, files: StateFiles, as_of: AsOf, hold: ReaderHold | None, scratch: Scratch) -> None:
        self._files = files
        self._as_of = as_of
        self._hold = hold
        self._scratch = scratch
        self._row_schema = files.operator.row_schema()
        self._columns = ShownColumns(self._row_schema)
        self._bodies: dict[int, list[Body]] = {}
        self._closed = False

    def __enter__(self) -> OpenState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<state of operator {self.operator!r} after {self.unit} {self.batch}, in {self.path}>"

    def close(self) -> None:
        """Release the hold and the files. Tables and batches that were read stay valid.

        Raises
        ------
        StorageError
            If the hold cannot be removed; it then expires by itself.
        """
        self._closed = True
        self._bodies.clear()
        if self._hold is not None:
            self._hold.release()

    @property
    def files(self) -> StateFiles:
        """The files of the state, for reading them in other processes."""
        return self._files

    def leave_hold(self) -> str | None:
        """Close the state, but leave its hold to other processes, which renew it.

        Returns
        -------
        str or None
            Id of the hold; None if there is none.
        """
        self._closed = True
        return None if self._hold is None else self._hold.leave()

    @property
    def path(self) -> str:
        """The query folder, or the operator's folder in a savepoint."""
        return self._files.folder.root

    @property
    def operator(self) -> str:
        """Name of the operator."""
        return self._files.operator.operator

    @property
    def query_id(self) -> str:
        """Spark's id of the query, from the operator file; empty if that has none."""
        return self._files.operator.query_id

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return self._files.operator.buckets

    @property
    def bucket_map(self) -> BucketMap:
        """The operator's bucket map."""
        return self._files.operator.bucket_map

    @property
    def batch(self) -> int:
        """The batch after which the state is read; -1: the state that the query, or a table's savepoint, began with."""
        return self._as_of.batch

    @property
    def unit(self) -> str:
        """``"batch"``; or ``"heartbeat"`` if tasks did not know their batch, so that batches with data are counted."""
        return self._as_of.unit

    @property
    def newest_batch(self) -> int:
        """The newest batch that can be read."""
        return self._as_of.newest

    @property
    def oldest_batch(self) -> int:
        """The oldest batch that can be read; finding it reads the headers of many files."""
        self._check()
        return self._as_of.oldest()

    @property
    def begun_batch(self) -> int:
        """The newest batch that has a file. Files alone do not show whether it is committed. Later batches may have no
        file, because their deltas are only in Spark's checkpoint."""
        return self._as_of.newest_with_file

    @property
    def proven(self) -> bool:
        """True if all of the state is certainly committed."""
        return self._as_of.proven

    @property
    def held(self) -> bool:
        """True if a hold keeps the query's clean-up from deleting the files."""
        return self._hold is not None and not self._closed

    @property
    def schema(self) -> pa.Schema:
        """The columns that `scan` reads by default: keys, state and ``timeout_ms``."""
        return self._columns.default

    @property
    def key_schema(self) -> pa.Schema:
        """The key columns."""
        return self._columns.key

    @property
    def state_schema(self) -> pa.Schema:
        """The state columns."""
        return self._columns.state

    @property
    def checkpoints(self) -> dict[int, CheckpointRef | None]:
        """The checkpoint that is read of each bucket; None if the bucket has no state."""
        return {bucket: pointer.ref for bucket, pointer in self._files.pointers.items()}

    def bucket_of(self, key: Any) -> int:
        """Return the bucket that a key is in.

        Parameters
        ----------
        key
            As for `get`.

        Returns
        -------
        int
            The bucket's number.

        Raises
        ------
        UsageError
            If this is not a key of the operator, or buckets are chosen by source partition, not by key.
        """
        lookup_key = LookupKey.of(key, self._columns.key.names, self._row_schema)
        if not self.bucket_map.by_hash:
            raise UsageError(
                f"operator {self.operator!r} has its rows in {self.bucket_map}, so a key does not determine its "
                "bucket: get() reads all buckets, and scan() has a column 'bucket'"
            )
        return self.bucket_map.candidates(lookup_key.hash)[0]

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,  # noqa: A002 (as in PyArrow)
        buckets: Iterable[int] | None = None,
    ) -> pa.RecordBatchReader:
        """Read all keys and their state, bucket by bucket, by ascending hash within each bucket.

        Files are opened and their checksums verified shortly before the reader gets to them; local files are opened
        once while the state is open. Columns of a local snapshot are read in place, without a copy.

        Parameters
        ----------
        columns
            Names of columns; by default the columns of `schema`. Further columns: ``defined`` (false: the key has only
            a timeout), ``key_hash``, ``bucket`` and, if the state has a time to live, ``__expires_ms``.
        filter
            A `pyarrow.compute` expression over any of these columns.
        buckets
            Numbers of buckets; by default all.

        Returns
        -------
        pyarrow.RecordBatchReader
            Read it while the state is open.

        Raises
        ------
        UsageError
            If there is no such column or bucket, or the state was closed.
        MissingCheckpointError, CorruptFileError, LineageError, StorageError
            By the reader: if a file is missing or damaged, or the storage fails.

        Examples
        --------
        >>> import pyarrow.compute as pc
        >>> with open_state("/state") as state:  # doctest: +SKIP
        ...     state.scan(["user", "clicks"], filter=pc.field("clicks") > 10).read_all()
        """
        self._check()
        fields = self._columns.fields(columns)
        return pa.RecordBatchReader.from_batches(fields, self._scan(fields, filter, self._check_buckets(buckets)))

    def _scan(
        self, fields: pa.Schema, condition: pc.Expression | None, buckets: Sequence[int]
    ) -> Iterator[pa.RecordBatch]:
        for bucket, bodies in self._open_ahead(buckets):
            for rows in merge_live_rows(bodies, self._row_schema):
                self._check()
                if condition is None:
                    yield self._columns.of(rows, fields, bucket)
                    continue
                table = filter_rows(self._columns.of(rows, self._columns.all, bucket), condition)
                yield from table.select(fields.names).cast(fields).to_batches()

    def _open_ahead(self, buckets: Sequence[int]) -> Iterator[tuple[int, list[Body]]]:
        """Yield the files of each bucket, opened and checked while earlier buckets are read."""
        opened = map_ahead("scan", _AHEAD_MAX, lambda bucket: self._open_or_reuse(bucket, self._caches_files), buckets)
        yield from zip(buckets, opened, strict=True)

    def get(self, key: Any) -> pa.Table:
        """Return the state of one key: one row or none. Reads the files of one bucket.

        If buckets are chosen by source partition, the files of all buckets are read and the table has a row for each
        bucket that has the key: more than one only if the source had the key in partitions that do not belong together.

        Parameters
        ----------
        key
            A value, if there is one key column; a tuple of values in the order of the key columns; or a mapping by
            their names. Floats are grouped as in Spark: all NaN are one key, and so are 0.0 and -0.0.

        Returns
        -------
        pyarrow.Table
            A table with the columns of `schema`.

        Raises
        ------
        UsageError
            If this is not a key of the operator, or the state was closed.
        MissingCheckpointError, CorruptFileError, LineageError, StorageError
            If a file is missing or damaged, or the storage fails.

        Examples
        --------
        >>> with open_state("/state") as state:  # doctest: +SKIP
        ...     state.get("ada").to_pylist()
        [{'user': 'ada', 'clicks': 7, 'timeout_ms': None}]
        """
        self._check()
        lookup_key = LookupKey.of(key, self._columns.key.names, self._row_schema)
        return pa.Table.from_batches(
            self._columns.of(
                find_row(self._open_or_reuse(bucket, True), lookup_key, self._row_schema), self._columns.default, bucket
            )
            for bucket in self.bucket_map.candidates(lookup_key.hash)
        )

    def timeouts(self, buckets: Iterable[int] | None = None) -> pa.RecordBatchReader:
        """Read the keys that have a timeout: the key columns and ``timeout_ms``, milliseconds since 1970.

        Parameters
        ----------
        buckets
            Numbers of buckets; by default all.

        Returns
        -------
        pyarrow.RecordBatchReader
            Read it while the state is open.

        Raises
        ------
        UsageError, MissingCheckpointError, CorruptFileError, LineageError, StorageError
            As for `scan`.
        """
        import pyarrow.compute as pc

        return self.scan([*self._columns.key.names, TIMEOUT_MS], pc.field(TIMEOUT_MS).is_valid(), buckets)

    def lineage(self, buckets: Iterable[int] | None = None) -> pa.Table:
        """List the checkpoint files, from their headers and footers; rows are not read.

        Parameters
        ----------
        buckets
            Numbers of buckets; by default all.

        Returns
        -------
        pyarrow.Table
            A row for each file: its ``bucket``, ``version``, ``id``, ``kind``, ``parent_version``, ``parent_id``,
            ``batch``, ``heartbeat``, ``query_id``, ``run_id``, ``rows``, ``tombstones``, ``size_bytes``, ``name``, and
            ``state``: ``"read"`` for the checkpoint that is read, ``"ancestor"`` for its ancestors, and NULL for
            others, such as later checkpoints and failed attempts.

        Raises
        ------
        UsageError
            If there is no such bucket, or the state was closed.
        CorruptFileError, LineageError, StorageError
            If a header or footer is damaged, or the storage fails.
        """
        self._check()
        return list_files([self._list_files(bucket) for bucket in self._check_buckets(buckets)], self.checkpoints)

    def rows(self, bucket: int) -> Iterator[pa.RecordBatch]:
        """Return the live rows of a bucket by ascending hash, with the hash and the marks that files have.

        Parameters
        ----------
        bucket
            The bucket's number.

        Returns
        -------
        Iterator of pyarrow.RecordBatch
            Read it while the state is open.

        Raises
        ------
        MissingCheckpointError, CorruptFileError, LineageError, StorageError
            As for `scan`.
        """
        self._check()
        return merge_live_rows(self._load(bucket), self._row_schema)

    @property
    def columns(self) -> ShownColumns:
        """Names of columns, and their positions in a row of a file."""
        return self._columns

    def _open_or_reuse(self, bucket: int, keep: bool) -> list[Body]:
        """Return a bucket's files, opened and checked; `keep` caches them until the state is closed."""
        bodies = self._bodies.get(bucket)
        if bodies is None:
            bodies = self._load(bucket)
            if keep and not self._closed and sum(map(len, self._bodies.copy().values())) < _KEPT_MAX:
                self._bodies[bucket] = bodies
        return bodies

    @property
    def _caches_files(self) -> bool:
        """True if a scan caches files: mapped files take no memory."""
        return self._files.folder.is_local and self._scratch.memory_map

    def _load(self, bucket: int) -> list[Body]:
        pointer = self._files.pointers[bucket]
        folder = self._files.folder.child(str(bucket))
        schema, scratch = self._row_schema, self._scratch
        refuse_other_files(folder, self._files.saved.get(bucket, ()))

        def load_with(*others: Restorable) -> list[Body]:
            return resolve(
                pointer,
                make_sources(folder, pointer, *others),
                lambda files, fetch: open_body(files, fetch, folder, schema, scratch),
                1 if folder.is_local else THREADS_MAX,
            )

        try:
            return load_with()
        except MissingCheckpointError:
            # Imported here because it imports a lot.
            from spark_state_ext.rescale.origin import Origin

            origin = Origin(self._files.folder, pointer, self.bucket_map, schema, scratch.folder())
            with closing(origin):
                if not origin.is_there():
                    raise
                return load_with(origin)

    def _list_files(self, bucket: int) -> BucketFiles:
        listed = self._files.listed.get(bucket)
        return listed or BucketFiles.listed(self._files.folder, bucket)

    def _check_buckets(self, buckets: Iterable[int] | None) -> Sequence[int]:
        if buckets is None:
            return sorted(self._files.pointers)
        numbers = sorted(set(buckets))
        unknown = [bucket for bucket in numbers if bucket not in self._files.pointers]
        if unknown:
            raise UsageError(f"there is no bucket {unknown[0]!r}: there are {self.buckets}, from 0")
        return numbers

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"{self!r} was closed: open it again")
        if self._hold is not None:
            self._hold.check()
