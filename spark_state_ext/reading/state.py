"""The state of an operator as of one batch, open for reading: what `open_state` gives."""

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
from spark_state_ext.reading.bodies import Body, Scratch, opened
from spark_state_ext.reading.holding import ReaderHold
from spark_state_ext.reading.loading import sources_in
from spark_state_ext.reading.lookup import WantedKey
from spark_state_ext.reading.merging import live_rows, row_of_key
from spark_state_ext.reading.shown import ShownColumns, filtered
from spark_state_ext.reading.table_of_files import files_table
from spark_state_ext.restore.resolving import THREADS_MAX, resolve
from spark_state_ext.savepoints.copying import refuse_other_files
from spark_state_ext.timeline.bucket_files import BucketFiles
from spark_state_ext.worker.threads import ahead

if TYPE_CHECKING:
    import pyarrow.compute as pc

__all__ = ["AsOf", "OpenState", "StateFiles"]

# Buckets that a scan opens before it is asked for them. Checksums are computed without Python's lock.
_AHEAD_MAX = 2
# Files that are kept, and so mapped: a process may map 65,000 pieces by default, its libraries and stores included.
_KEPT_MAX = 10_000


@dataclass(frozen=True)
class AsOf:
    """As of when a state is read.

    Parameters
    ----------
    batch
        The batch after which the state is so; -1: what the query began with.
    unit
        ``"batch"``; or ``"heartbeat"`` where tasks were not told their batch, and batches with data are counted.
    newest, oldest
        The newest batch that can be read, and a function that finds the oldest.
    begun
        The newest batch that has left a file; it may be committed or not.
    proven
        What is read was committed, for certain.
    """

    batch: int
    unit: str
    newest: int
    oldest: Callable[[], int] = field(repr=False)
    begun: int
    proven: bool = True


@dataclass(frozen=True)
class StateFiles:
    """Where a state is.

    Parameters
    ----------
    folder
        A query folder, or the operator's folder in a savepoint.
    operator
        The operator file in force.
    pointers
        By bucket, those of all buckets.
    listed
        What lies in the buckets' folders, as far as that is known.
    saved
        Of a savepoint, the files that its manifest names, by bucket.
    """

    folder: Folder
    operator: OperatorFile
    pointers: Mapping[int, Pointer]
    listed: Mapping[int, BucketFiles] = field(default_factory=dict)
    saved: Mapping[int, Sequence[SavedFile]] = field(default_factory=dict)


class OpenState:
    """The state of one operator as of one batch. A context manager; `open_state` makes it.

    Parameters
    ----------
    files
        Where the state is.
    as_of
        As of when it is read.
    hold
        What keeps clean-up away; None: nothing does.
    scratch
        For copies of large files that lie elsewhere.
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
        """Let clean-ups go on. Tables and batches that were read stay as they are.

        Raises
        ------
        StorageError
            When the hold cannot be removed: it ends by itself.
        """
        self._closed = True
        self._bodies.clear()
        if self._hold is not None:
            self._hold.release()

    @property
    def files(self) -> StateFiles:
        """Where it is, for those that read it in other processes."""
        return self._files

    def leave_hold(self) -> str | None:
        """End using the state here, and leave its hold to other processes, which renew it.

        Returns
        -------
        str or None
            Id of the hold; None where there is none.
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
        """Spark's id of the query, as the operator file has it; empty where it has none."""
        return self._files.operator.query_id

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return self._files.operator.buckets

    @property
    def bucket_map(self) -> BucketMap:
        """Which bucket a row belongs to."""
        return self._files.operator.bucket_map

    @property
    def batch(self) -> int:
        """The batch after which the state is so; -1: what the query, or a table's savepoint, began with."""
        return self._as_of.batch

    @property
    def unit(self) -> str:
        """``"batch"``; or ``"heartbeat"``, where tasks were not told their batch and batches with data are counted."""
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
        """The newest batch that has left a file. It may be committed, and files alone do not tell; later ones, whose
        deltas are in Spark's checkpoint only, may have left none."""
        return self._as_of.begun

    @property
    def proven(self) -> bool:
        """Whether all that is read was committed for certain."""
        return self._as_of.proven

    @property
    def held(self) -> bool:
        """Whether a hold keeps the query's clean-up away from the files."""
        return self._hold is not None and not self._closed

    @property
    def schema(self) -> pa.Schema:
        """What `scan` gives where no columns are named: keys, state, and ``timeout_ms``."""
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
        """The checkpoint that is read of each bucket; None where it has no state."""
        return {bucket: pointer.ref for bucket, pointer in self._files.pointers.items()}

    def bucket_of(self, key: Any) -> int:
        """The bucket that a key is in.

        Parameters
        ----------
        key
            As for `get`.

        Returns
        -------
        int
            Its number.

        Raises
        ------
        UsageError
            When it is no key of this operator, or its bucket is told by the source's partition and not by the key.
        """
        wanted = WantedKey.of(key, self._columns.key.names, self._row_schema)
        if not self.bucket_map.by_hash:
            raise UsageError(
                f"operator {self.operator!r} has its rows in {self.bucket_map}, so no key tells its bucket: get() "
                "looks in all of them, and scan() has a column 'bucket'"
            )
        return self.bucket_map.candidates(wanted.hash)[0]

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,  # noqa: A002 (as in PyArrow)
        buckets: Iterable[int] | None = None,
    ) -> pa.RecordBatchReader:
        """All keys and their state, bucket by bucket, ascending by hash within each.

        Files are opened, and compared with their checksums, shortly before the reader gets to them; those on a disk
        of this machine once while the state is open. Columns of a local snapshot are read in place, without a copy.

        Parameters
        ----------
        columns
            Names of columns; by default those of `schema`. Beside these there are ``defined`` (false: the key has only
            a timeout), ``key_hash``, ``bucket``, and, where the state has a time to live, ``__expires_ms``.
        filter
            A `pyarrow.compute` expression over any of these columns.
        buckets
            Numbers of buckets; by default all.

        Returns
        -------
        pyarrow.RecordBatchReader
            To be read while the state is open.

        Raises
        ------
        UsageError
            When there is no such column or bucket, or the state was closed.
        MissingCheckpointError, CorruptFileError, LineageError, StorageError
            While it is read: when a file is gone or damaged, or the store fails.

        Examples
        --------
        >>> import pyarrow.compute as pc
        >>> with open_state("/state") as state:  # doctest: +SKIP
        ...     state.scan(["user", "clicks"], filter=pc.field("clicks") > 10).read_all()
        """
        self._check()
        fields = self._columns.fields(columns)
        return pa.RecordBatchReader.from_batches(fields, self._scanned(fields, filter, self._wanted(buckets)))

    def _scanned(
        self, fields: pa.Schema, condition: pc.Expression | None, buckets: Sequence[int]
    ) -> Iterator[pa.RecordBatch]:
        for bucket, bodies in self._opened_ahead(buckets):
            for rows in live_rows(bodies, self._row_schema):
                self._check()
                if condition is None:
                    yield self._columns.of(rows, fields, bucket)
                    continue
                found = filtered(self._columns.of(rows, self._columns.all, bucket), condition)
                yield from found.select(fields.names).cast(fields).to_batches()

    def _opened_ahead(self, buckets: Sequence[int]) -> Iterator[tuple[int, list[Body]]]:
        """The files of each bucket, opened and checked while those before are read."""
        known = ahead("scan", _AHEAD_MAX, lambda bucket: self._known(bucket, self._keeps), buckets)
        yield from zip(buckets, known, strict=True)

    def get(self, key: Any) -> pa.Table:
        """The state of one key: one row, or none. Reads the files of one bucket.

        Where buckets go by the source's partitions it reads those of all buckets, and there is a row for each bucket
        that has the key: more than one only where the source had the key in partitions that do not belong together.

        Parameters
        ----------
        key
            A value, where there is one key column; a tuple of values in the order of the key columns; or a mapping of
            their names. Floats as Spark groups them: NaN is one key, and so are 0.0 and -0.0.

        Returns
        -------
        pyarrow.Table
            With the columns of `schema`.

        Raises
        ------
        UsageError
            When it is no key of this operator, or the state was closed.
        MissingCheckpointError, CorruptFileError, LineageError, StorageError
            When a file is gone or damaged, or the store fails.

        Examples
        --------
        >>> with open_state("/state") as state:  # doctest: +SKIP
        ...     state.get("ada").to_pylist()
        [{'user': 'ada', 'clicks': 7, 'timeout_ms': None}]
        """
        self._check()
        wanted = WantedKey.of(key, self._columns.key.names, self._row_schema)
        return pa.Table.from_batches(
            self._columns.of(
                row_of_key(self._known(bucket, True), wanted, self._row_schema), self._columns.default, bucket
            )
            for bucket in self.bucket_map.candidates(wanted.hash)
        )

    def timeouts(self, buckets: Iterable[int] | None = None) -> pa.RecordBatchReader:
        """Keys that have a timeout, and when: the key columns and ``timeout_ms``, milliseconds since 1970.

        Parameters
        ----------
        buckets
            Numbers of buckets; by default all.

        Returns
        -------
        pyarrow.RecordBatchReader
            To be read while the state is open.

        Raises
        ------
        UsageError, MissingCheckpointError, CorruptFileError, LineageError, StorageError
            As for `scan`.
        """
        import pyarrow.compute as pc

        return self.scan([*self._columns.key.names, TIMEOUT_MS], pc.field(TIMEOUT_MS).is_valid(), buckets)

    def lineage(self, buckets: Iterable[int] | None = None) -> pa.Table:
        """What checkpoint files there are, from their headers and footers; their rows are not read.

        Parameters
        ----------
        buckets
            Numbers of buckets; by default all.

        Returns
        -------
        pyarrow.Table
            A row for each file: its ``bucket``, ``version``, ``id``, ``kind``, ``parent_version``, ``parent_id``,
            ``batch``, ``heartbeat``, ``query_id``, ``run_id``, ``rows``, ``tombstones``, ``size_bytes``, ``name``, and
            ``state``: ``"read"`` for the checkpoint that is read, ``"ancestor"`` for those it was built on, and NULL
            for others, as are later ones and attempts that failed.

        Raises
        ------
        UsageError
            When there is no such bucket, or the state was closed.
        CorruptFileError, LineageError, StorageError
            When a file is damaged at one of its ends, or the store fails.
        """
        self._check()
        return files_table([self._listed(bucket) for bucket in self._wanted(buckets)], self.checkpoints)

    def rows(self, bucket: int) -> Iterator[pa.RecordBatch]:
        """Live rows of a bucket as they are in files, hash and marks included, ascending by hash.

        Parameters
        ----------
        bucket
            Its number.

        Returns
        -------
        Iterator of pyarrow.RecordBatch
            To be read while the state is open.

        Raises
        ------
        MissingCheckpointError, CorruptFileError, LineageError, StorageError
            As for `scan`.
        """
        self._check()
        return live_rows(self._loaded(bucket), self._row_schema)

    @property
    def columns(self) -> ShownColumns:
        """Names of columns, and where they are in a row of a file."""
        return self._columns

    def _known(self, bucket: int, keep: bool) -> list[Body]:
        """A bucket's files, opened and checked; once for as long as the state is open, where they are kept."""
        bodies = self._bodies.get(bucket)
        if bodies is None:
            bodies = self._loaded(bucket)
            if keep and not self._closed and sum(map(len, self._bodies.copy().values())) < _KEPT_MAX:
                self._bodies[bucket] = bodies
        return bodies

    @property
    def _keeps(self) -> bool:
        """Whether a scan keeps files: those that are mapped take no memory."""
        return self._files.folder.is_local and self._scratch.memory_map

    def _loaded(self, bucket: int) -> list[Body]:
        pointer = self._files.pointers[bucket]
        folder = self._files.folder.child(str(bucket))
        schema, scratch = self._row_schema, self._scratch
        refuse_other_files(folder, self._files.saved.get(bucket, ()))

        def load(*beside: Restorable) -> list[Body]:
            return resolve(
                pointer,
                sources_in(folder, pointer, *beside),
                lambda files, fetch: opened(files, fetch, folder, schema, scratch),
                1 if folder.is_local else THREADS_MAX,
            )

        try:
            return load()
        except MissingCheckpointError:
            # Imported where it is needed, as it brings much along.
            from spark_state_ext.rescale.origin import Origin

            origin = Origin(self._files.folder, pointer, self.bucket_map, schema, scratch.folder())
            with closing(origin):
                if not origin.is_there():
                    raise
                return load(origin)

    def _listed(self, bucket: int) -> BucketFiles:
        found = self._files.listed.get(bucket)
        return found or BucketFiles.listed(self._files.folder, bucket)

    def _wanted(self, buckets: Iterable[int] | None) -> Sequence[int]:
        if buckets is None:
            return sorted(self._files.pointers)
        wanted = sorted(set(buckets))
        unknown = [bucket for bucket in wanted if bucket not in self._files.pointers]
        if unknown:
            raise UsageError(f"there is no bucket {unknown[0]!r}: there are {self.buckets}, from 0")
        return wanted

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"{self!r} was closed: open it again")
        if self._hold is not None:
            self._hold.check()
