"""Queryable state: reads the state of a running job from another process on an executor's host.

The job is not asked. Its calls record which committed checkpoint they were handed (`store.committed_record`), and the
rows are read from their local stores. So uncommitted attempts are never seen.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.operator import OperatorFile
from arrow_schemas.row import EXPIRES_MS, RowSchema
from spark_state_ext.errors import (
    ClosedEnvironmentError,
    CorruptStoreError,
    MissingRunError,
    StateGoneError,
    UsageError,
)
from spark_state_ext.reading.columns import ShownColumns
from spark_state_ext.reading.lookup import LookupKey
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.committed_record import CommittedRecord, read_committed_bytes, read_operator_file
from spark_state_ext.store.read_only import ReadOnlyEnvironment
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.local_folders import root_id, stores_path
from spark_state_ext.worker.private_folder import check_private
from spark_state_ext.worker.process import get_pid_namespace

__all__ = ["LiveRows", "LiveState", "open_live"]

T = TypeVar("T")

# How long a read is retried while the bucket's store is rebuilt or restored.
_PATIENCE_S = 1.0
_PAUSE_S = 0.002
# How often an open bucket is checked for a store with a newer schema.
_LOOK_EVERY_S = 1.0
# A folder of an operator's stores: the root's id, then the operator's name.
_STORES_OF = re.compile(r"[0-9a-f]{16}-(.+)")
_SCHEMA = re.compile(r"s(\d+)")


@dataclass(frozen=True)
class LiveRows:
    """State of a bucket.

    Parameters
    ----------
    rows
        The keys, the state columns and ``timeout_ms``.
    bucket
        Number of the bucket.
    batch
        The committed batch after which the bucket has this state; -1: the query began with it. Later batches that did
        not change the bucket may be committed too.
    told_ms
        When a call of the job was handed this state, milliseconds since 1970 by the host's clock.
    """

    rows: pa.Table
    bucket: int
    batch: int
    told_ms: int

    @property
    def age_ms(self) -> int:
        """Milliseconds since a call of the job was handed this state."""
        return max(0, int(time.time() * 1000) - self.told_ms)


def open_live(
    local_dir: str | None = None,
    operator: str = "state",
    *,
    root: str | None = None,
    query_folder: str | None = None,
) -> LiveState:
    """Open the state of a running job on an executor's host, from a process outside the job.

    Parameters
    ----------
    local_dir
        The job's `local_dir`; None: the job's default.
    operator
        Name of the operator.
    root
        The job's root, exactly as the job has it; None: any root.
    query_folder
        Name of the query folder; None: the one that a task of this host used last.

    Returns
    -------
    LiveState
        The open state. Close it, or use it as a context manager.

    Raises
    ------
    StateGoneError
        If no task of this host has worked on such an operator since the machine started.
    UnsafeFolderError
        If the folder of local stores is a symbolic link or belongs to another user.

    Examples
    --------
    >>> from spark_state_ext import open_live
    >>> with open_live("/local", "clicks") as live:  # doctest: +SKIP
    ...     ada = live.get("ada")
    ...     print(ada.batch, ada.age_ms, ada.rows.to_pylist())
    41 820 [{'user': 'ada', 'clicks': 7, 'timeout_ms': None}]
    """
    stores = stores_path(local_dir)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        check_private(stores)
    name_prefix = rf"{re.escape(root_id(root))}-" if root is not None else "[0-9a-f]{16}-"
    folders = [
        (_find_last_use_s(folder), folder)
        for operator_folder in _list_folders(stores)
        if re.fullmatch(name_prefix + re.escape(operator), operator_folder.name)
        for folder in _list_folders(operator_folder)
        if query_folder in (None, folder.name)
    ]
    used = [(used_s, folder) for used_s, folder in folders if used_s > 0]
    if not used:
        others = sorted(
            {
                match[1]
                for operator_folder in _list_folders(stores)
                if (match := _STORES_OF.fullmatch(operator_folder.name))
            }
            - {operator}
        )
        hint = f", which has stores of {', '.join(others)}" if others else ""
        raise StateGoneError(
            f"there is no local store of operator {operator!r} in {stores}{hint}: no task of this host has worked on "
            "it, or local_dir, operator, root or query_folder differ from the job's"
        )
    return LiveState(max(used)[1], operator)


class LiveState:
    """The part of a running job's state that is on this host. It is thread-safe; `open_live` makes it.

    Parameters
    ----------
    folder
        Folder with the local stores of the query folder.
    operator
        Name of the operator.
    """

    def __init__(self, folder: Path, operator: str) -> None:
        self._folder = folder
        self._operator = operator
        self._open: dict[int, _OpenStore] = {}
        # A process must not open an LMDB environment twice.
        self._opening = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"LiveState(operator={self._operator!r}, query_folder={self.query_folder!r})"

    def __enter__(self) -> LiveState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def query_folder(self) -> str:
        """Name of the query folder that the state belongs to."""
        return self._folder.name

    def buckets(self) -> list[int]:
        """List the buckets that have a store on this host; a bucket that moved away may still have its old store.

        Returns
        -------
        list of int
            Their numbers, ascending.
        """
        self._check()
        records = self._folder.glob(f"s*/*/{boot_id()}/committed")
        return sorted({int(path.parts[-3]) for path in records if path.parts[-3].isdigit()})

    def get(self, key: object) -> LiveRows:
        """Return the state of one key: one row or none.

        Parameters
        ----------
        key
            A value, if there is one key column; a tuple of values in the order of the key columns; or a mapping by
            their names. Floats are grouped as in Spark: all NaN are one key, and so are 0.0 and -0.0.

        Returns
        -------
        LiveRows
            The row, and the batch after which the key has this state.

        Raises
        ------
        StateGoneError
            If the key's bucket has no store here, or its store is being rebuilt.
        UsageError
            If this is not a key of the operator, or the state was closed.
        CorruptStoreError, StorageError
            If the store is damaged or cannot be read.
        """
        self._check()
        any_store = self._open_any_store()
        lookup_key = LookupKey.of(key, any_store.columns.key.names, any_store.schema)

        def look_up(view: View) -> pa.RecordBatch:
            return view.row(lookup_key.hash, lambda row: lookup_key.is_in(row, any_store.schema))

        candidates = any_store.operator.bucket_map.candidates(lookup_key.hash)
        for bucket in candidates[:-1]:
            live_rows = self._read(bucket, look_up)
            if live_rows.rows.num_rows:
                return live_rows
        return self._read(candidates[-1], look_up)

    def scan(self, buckets: Iterable[int] | None = None) -> Iterator[LiveRows]:
        """Yield all state of some buckets; each bucket is read when the iterator reaches it.

        Parameters
        ----------
        buckets
            Numbers of buckets; None: all buckets of this host.

        Returns
        -------
        Iterator of LiveRows
            The rows of each bucket, and the batch after which it has this state.

        Raises
        ------
        StateGoneError, UsageError, CorruptStoreError, StorageError
            As for `get`.
        """
        for bucket in self.buckets() if buckets is None else sorted(set(buckets)):
            self._check()
            yield self._read(bucket, lambda view: list(view.scan()))

    def close(self) -> None:
        """Close the stores."""
        with self._opening:
            self._closed = True
            for bucket in list(self._open):
                self._drop(bucket)

    # -- inside ------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"{self!r} was closed: open it again")

    def _open_any_store(self) -> _OpenStore:
        """Return any open store, or open one: all have the same operator, schema and number of buckets."""
        for store in self._open.copy().values():
            return store
        for bucket in self.buckets():
            with contextlib.suppress(StateGoneError):
                return self._open_store_patiently(bucket)
        raise StateGoneError(
            f"no bucket of operator {self._operator!r} has a local store on this host any longer, in {self._folder}"
        )

    def _read(self, bucket: int, work: Callable[[View], pa.RecordBatch | list[pa.RecordBatch]]) -> LiveRows:
        """Work on the state of a bucket at its newest committed checkpoint."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._read_once(bucket, work)
            except _DroppedError:
                continue
            except (ClosedEnvironmentError, CorruptStoreError, MissingRunError, StateGoneError) as error:
                # A call may have pruned the recorded checkpoint, or may be rebuilding the store.
                if time.monotonic() > deadline_s:
                    if isinstance(error, (StateGoneError, CorruptStoreError)):
                        raise
                    raise StateGoneError(
                        f"the local store of bucket {bucket} of operator {self._operator!r} does not have the "
                        f"committed state: {error}. The store is being restored, or the bucket moved: ask again, or on "
                        "another host"
                    ) from error
                time.sleep(_PAUSE_S)

    def _read_once(self, bucket: int, work: Callable[[View], pa.RecordBatch | list[pa.RecordBatch]]) -> LiveRows:
        store = self._open_store(bucket)
        try:
            record = store.read_record()
        except UsageError:
            # Another container uses the store now.
            with self._opening:
                self._drop(bucket)
            raise
        rows_read = store.at(record.ref, work)
        batches = [rows_read] if isinstance(rows_read, pa.RecordBatch) else rows_read
        rows = [
            store.columns.of(_drop_expired(rows, record, store.schema), store.columns.default, bucket)
            for rows in batches
        ]
        return LiveRows(pa.Table.from_batches(rows, store.columns.default), bucket, record.batch, record.called_ms)

    def _open_store_patiently(self, bucket: int) -> _OpenStore:
        """Open a store; retry while its record is being written."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._open_store(bucket)
            except CorruptStoreError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_PAUSE_S)

    def _open_store(self, bucket: int) -> _OpenStore:
        with self._opening:
            return self._open_or_reuse(bucket)

    def _open_or_reuse(self, bucket: int) -> _OpenStore:
        opened, now_s = self._open.get(bucket), time.monotonic()
        if opened is not None and not opened.store.is_replaced():
            if now_s < opened.look_at_s:
                return opened
            opened.look_at_s = now_s + _LOOK_EVERY_S
            if self._find_newest_folder(bucket) == opened.folder:
                return opened
        self._drop(bucket)
        self._check()
        folder = self._find_newest_folder(bucket)
        # Checked before LMDB opens the store, because LMDB would write to a lock file that another container shares.
        _decode_record(folder, read_committed_bytes(folder))
        store = self._open[bucket] = _OpenStore.of(folder, now_s + _LOOK_EVERY_S)
        return store

    def _find_newest_folder(self, bucket: int) -> Path:
        """Return the bucket's folder with the newest schema."""
        folders_by_schema = [
            (int(schema[1]), folder / str(bucket))
            for folder in _list_folders(self._folder)
            if (schema := _SCHEMA.fullmatch(folder.name)) and (folder / str(bucket) / boot_id() / "committed").exists()
        ]
        if not folders_by_schema:
            raise StateGoneError(
                f"bucket {bucket} of operator {self._operator!r} has no local store on this host, in {self._folder}: "
                "ask on the host that works on the bucket"
            )
        return max(folders_by_schema)[1]

    def _drop(self, bucket: int) -> None:
        store = self._open.pop(bucket, None)
        if store is not None:
            store.store.close()


class _DroppedError(Exception):
    """The job dropped runs of the cached view, most likely after a compaction."""


@dataclass
class _OpenStore:
    """A bucket's local store, open for reading.

    Parameters
    ----------
    folder
        The bucket's folder.
    store
        The store.
    operator, schema, columns
        The format of its rows.
    look_at_s
        When to check next for a store with a newer schema, monotonic.
    """

    folder: Path
    store: LocalStore
    operator: OperatorFile
    schema: RowSchema
    columns: ShownColumns
    look_at_s: float
    # The newest committed record, as bytes and decoded; and the view of one checkpoint.
    _cached_record: tuple[bytes, CommittedRecord] | None = None
    _cached_view: tuple[CheckpointRef | None, View] | None = None

    def read_record(self) -> CommittedRecord:
        """Read the committed record; decode it only if it changed."""
        data = read_committed_bytes(self.folder)
        cached = self._cached_record
        if cached is None or data != cached[0]:
            self._cached_record = cached = data or b"", _decode_record(self.folder, data)
        return cached[1]

    def at(self, ref: CheckpointRef | None, work: Callable[[View], T]) -> T:
        """Work on the state at a checkpoint, whose view is cached."""
        cached = self._cached_view
        if cached is None or cached[0] != ref:
            view = self.store.view(ref)
            self._cached_view = ref, view
            return work(view)
        try:
            return work(cached[1])
        except MissingRunError as error:
            self._cached_view = None
            raise _DroppedError from error

    @staticmethod
    def of(folder: Path, look_at_s: float) -> _OpenStore:
        environment = ReadOnlyEnvironment.of(folder)
        try:
            operator = read_operator_file(folder)
            if operator is None:
                raise StateGoneError(
                    f"no call has recorded the operator of the rows in {folder} yet: ask again, or on another host"
                )
            schema = operator.row_schema()
            return _OpenStore(
                folder, LocalStore(folder, schema, environment), operator, schema, ShownColumns(schema), look_at_s
            )
        except BaseException:
            environment.close()
            raise


def _decode_record(folder: Path, data: bytes | None) -> CommittedRecord:
    """Decode a bucket's committed record; raise if there is none or the job runs in another container."""
    if data is None:
        raise StateGoneError(f"no call has recorded what is committed in {folder} yet: ask again, or on another host")
    record = CommittedRecord.decode(data, str(folder))
    if record.namespace != get_pid_namespace():
        raise UsageError(
            f"the job runs in another container ({record.namespace}) than this process ({get_pid_namespace()}), but "
            "LMDB distinguishes processes by their ids. Ask from within the job's container"
        )
    return record


def _drop_expired(rows: pa.RecordBatch, record: CommittedRecord, schema: RowSchema) -> pa.RecordBatch:
    """Drop the rows that had expired by the clock of the call that wrote the record."""
    if record.clock_ms is None or not schema.expires or not rows.num_rows:
        return rows
    ends = rows.column(rows.schema.get_field_index(f"state.{EXPIRES_MS}"))
    return rows.filter(pc.greater(ends.fill_null(2**63 - 1), record.clock_ms))


def _list_folders(folder: Path) -> list[Path]:
    """List the folders in a folder; none if it is gone."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _find_last_use_s(query_folder: Path) -> float:
    """Return when a call wrote a committed record last; 0 if none has since the machine started."""
    times = [0.0]
    for path in query_folder.glob(f"s*/*/{boot_id()}/committed"):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)
