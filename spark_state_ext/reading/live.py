"""Queryable state: the state of a running job, read on the host of an executor, from another process.

Nothing is asked of the job. Its calls tell which checkpoint they were handed (`store.committed`), and the rows are read
from their local stores. What is read is committed: an attempt that may fail is not seen.
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
from spark_state_ext.reading.lookup import WantedKey
from spark_state_ext.reading.shown import ShownColumns
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.committed import CommittedRecord, committed_bytes, operator_of
from spark_state_ext.store.read_only import ReadOnlyEnvironment
from spark_state_ext.worker.boot import boot_id
from spark_state_ext.worker.local_folders import root_id, stores_path
from spark_state_ext.worker.private_folder import check_private
from spark_state_ext.worker.process import namespace

__all__ = ["LiveRows", "LiveState", "open_live"]

T = TypeVar("T")

# While a store is built anew, or restored, its bucket is asked again for so long.
_PATIENCE_S = 1.0
_PAUSE_S = 0.002
# How often it is looked whether a bucket has a store under another schema.
_LOOK_EVERY_S = 1.0
# Folders of operators' stores: the root's id before the name.
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
        The state is so after this batch, which is committed; -1: as the query began. Later batches that left the
        bucket's state as it is may be committed too.
    told_ms
        When a call of the job was handed that state, milliseconds since 1970 by the host's clock.
    """

    rows: pa.Table
    bucket: int
    batch: int
    told_ms: int

    @property
    def age_ms(self) -> int:
        """How long ago that was, milliseconds."""
        return max(0, int(time.time() * 1000) - self.told_ms)


def open_live(
    local_dir: str | None = None,
    operator: str = "state",
    *,
    root: str | None = None,
    query_folder: str | None = None,
) -> LiveState:
    """Open the state of a running job on the host of an executor, in a process that is not the job's.

    Parameters
    ----------
    local_dir
        The job's `local_dir`; None: as the job finds it without one.
    operator
        Name of the operator.
    root
        The job's root, as it is written there; None: any, where operators of one name have several.
    query_folder
        Name of the query folder; None: the one that a task of this host used last.

    Returns
    -------
    LiveState
        To be closed, as a context manager does.

    Raises
    ------
    StateGoneError
        When no task of this host has worked on such an operator since the machine started.
    UnsafeFolderError
        When the folder of local stores is a symbolic link, or another user's.

    Examples
    --------
    >>> from spark_state_ext import open_live
    >>> with open_live("/local", "clicks") as live:  # doctest: +SKIP
    ...     found = live.get("ada")
    ...     print(found.batch, found.age_ms, found.rows.to_pylist())
    41 820 [{'user': 'ada', 'clicks': 7, 'timeout_ms': None}]
    """
    stores = stores_path(local_dir)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        check_private(stores)
    named = rf"{re.escape(root_id(root))}-" if root is not None else "[0-9a-f]{16}-"
    found = [
        (_last_use_s(folder), folder)
        for place in _folders(stores)
        if re.fullmatch(named + re.escape(operator), place.name)
        for folder in _folders(place)
        if query_folder in (None, folder.name)
    ]
    used = [(used_s, folder) for used_s, folder in found if used_s > 0]
    if not used:
        others = sorted({it[1] for place in _folders(stores) if (it := _STORES_OF.fullmatch(place.name))} - {operator})
        there = f", which has those of {', '.join(others)}" if others else ""
        raise StateGoneError(
            f"there is no local store of operator {operator!r} in {stores}{there}: no task of this host has worked on "
            "it, or local_dir (and operator, root, query_folder) are not the job's"
        )
    return LiveState(max(used)[1], operator)


class LiveState:
    """The state of a running job, as far as this host has it. Any number of threads may ask; `open_live` makes it.

    Parameters
    ----------
    folder
        Where the local stores of the query folder lie.
    operator
        Name of the operator.
    """

    def __init__(self, folder: Path, operator: str) -> None:
        self._folder = folder
        self._operator = operator
        self._open: dict[int, _OpenStore] = {}
        # LMDB opens no environment twice in a process.
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
        """Name of the query folder whose state this is."""
        return self._folder.name

    def buckets(self) -> list[int]:
        """The buckets that have a store on this host; one that moved away may still have its old one.

        Returns
        -------
        list of int
            Their numbers, ascending.
        """
        self._check()
        told = self._folder.glob(f"s*/*/{boot_id()}/committed")
        return sorted({int(path.parts[-3]) for path in told if path.parts[-3].isdigit()})

    def get(self, key: object) -> LiveRows:
        """The state of one key: one row, or none.

        Parameters
        ----------
        key
            A value, where there is one key column; a tuple of values in the order of the key columns; or a mapping of
            their names. Floats as Spark groups them: NaN is one key, and so are 0.0 and -0.0.

        Returns
        -------
        LiveRows
            The row, and after which batch it is so.

        Raises
        ------
        StateGoneError
            When the key's bucket has no store here, or one that is being built anew.
        UsageError
            When it is no key of this operator, or this was closed.
        CorruptStoreError, StorageError
            When the store is damaged, or cannot be read.
        """
        self._check()
        some = self._some_store()
        wanted = WantedKey.of(key, some.columns.key.names, some.schema)

        def looked_up(view: View) -> pa.RecordBatch:
            return view.row(wanted.hash, lambda row: wanted.is_in(row, some.schema))

        candidates = some.operator.bucket_map.candidates(wanted.hash)
        for bucket in candidates[:-1]:
            found = self._read(bucket, looked_up)
            if found.rows.num_rows:
                return found
        return self._read(candidates[-1], looked_up)

    def scan(self, buckets: Iterable[int] | None = None) -> Iterator[LiveRows]:
        """All state of some buckets, one after the other, each as it is when it is its turn.

        Parameters
        ----------
        buckets
            Numbers of buckets; None: those of this host.

        Returns
        -------
        Iterator of LiveRows
            Each bucket's rows, and after which batch they are so.

        Raises
        ------
        StateGoneError, UsageError, CorruptStoreError, StorageError
            As for `get`.
        """
        for bucket in self.buckets() if buckets is None else sorted(set(buckets)):
            self._check()
            yield self._read(bucket, lambda view: list(view.scan()))

    def close(self) -> None:
        """Let go of the stores."""
        with self._opening:
            self._closed = True
            for bucket in list(self._open):
                self._drop(bucket)

    # -- inside ------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"{self!r} was closed: open it again")

    def _some_store(self) -> _OpenStore:
        """One that is open, or the first that can be opened: all have the operator's schema and number of buckets."""
        for opened in self._open.copy().values():
            return opened
        for bucket in self.buckets():
            with contextlib.suppress(StateGoneError):
                return self._store_once_told(bucket)
        raise StateGoneError(
            f"no bucket of operator {self._operator!r} has a local store on this host any more, in {self._folder}"
        )

    def _read(self, bucket: int, work: Callable[[View], pa.RecordBatch | list[pa.RecordBatch]]) -> LiveRows:
        """Work on the state of a bucket at its newest committed checkpoint."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._once(bucket, work)
            except _DroppedError:
                continue
            except (ClosedEnvironmentError, CorruptStoreError, MissingRunError, StateGoneError) as error:
                # A call may have gone on and pruned what was told before, or builds the store anew.
                if time.monotonic() > deadline_s:
                    if isinstance(error, (StateGoneError, CorruptStoreError)):
                        raise
                    raise StateGoneError(
                        f"the local store of bucket {bucket} of operator {self._operator!r} does not have what is "
                        f"committed: {error}. It is restored just now, or the bucket moved: ask again, or elsewhere"
                    ) from error
                time.sleep(_PAUSE_S)

    def _once(self, bucket: int, work: Callable[[View], pa.RecordBatch | list[pa.RecordBatch]]) -> LiveRows:
        opened = self._store(bucket)
        try:
            record = opened.told()
        except UsageError:
            # The store is another container's by now.
            with self._opening:
                self._drop(bucket)
            raise
        found = opened.at(record.ref, work)
        batches = [found] if isinstance(found, pa.RecordBatch) else found
        rows = [
            opened.columns.of(_live(rows, record, opened.schema), opened.columns.default, bucket) for rows in batches
        ]
        return LiveRows(pa.Table.from_batches(rows, opened.columns.default), bucket, record.batch, record.called_ms)

    def _store_once_told(self, bucket: int) -> _OpenStore:
        """A store whose record may be being written just now."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._store(bucket)
            except CorruptStoreError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_PAUSE_S)

    def _store(self, bucket: int) -> _OpenStore:
        with self._opening:
            return self._opened(bucket)

    def _opened(self, bucket: int) -> _OpenStore:
        opened, now_s = self._open.get(bucket), time.monotonic()
        if opened is not None and not opened.store.is_replaced():
            if now_s < opened.look_at_s:
                return opened
            opened.look_at_s = now_s + _LOOK_EVERY_S
            if self._newest(bucket) == opened.folder:
                return opened
        self._drop(bucket)
        self._check()
        folder = self._newest(bucket)
        # Before it is opened: the lock file that LMDB would write to is the other container's too.
        _told(folder, committed_bytes(folder))
        made = self._open[bucket] = _OpenStore.of(folder, now_s + _LOOK_EVERY_S)
        return made

    def _newest(self, bucket: int) -> Path:
        """The bucket's folder under the newest schema."""
        found = [
            (int(schema[1]), folder / str(bucket))
            for folder in _folders(self._folder)
            if (schema := _SCHEMA.fullmatch(folder.name)) and (folder / str(bucket) / boot_id() / "committed").exists()
        ]
        if not found:
            raise StateGoneError(
                f"bucket {bucket} of operator {self._operator!r} has no local store on this host, in {self._folder}: "
                "ask on the host that works on it"
            )
        return max(found)[1]

    def _drop(self, bucket: int) -> None:
        opened = self._open.pop(bucket, None)
        if opened is not None:
            opened.store.close()


class _DroppedError(Exception):
    """The job has dropped runs of a view that was remembered: they were merged, most likely."""


@dataclass
class _OpenStore:
    """A bucket's local store, open for reading.

    Parameters
    ----------
    folder
        The bucket's.
    store
        The store.
    operator, schema, columns
        What its rows are.
    look_at_s
        When to look whether there is one under a newer schema, monotonic.
    """

    folder: Path
    store: LocalStore
    operator: OperatorFile
    schema: RowSchema
    columns: ShownColumns
    look_at_s: float
    # What was told last, as it stood there and as it was understood; and the view of one checkpoint.
    _said: tuple[bytes, CommittedRecord] | None = None
    _view: tuple[CheckpointRef | None, View] | None = None

    def told(self) -> CommittedRecord:
        """As `_told`; what is there as it was before is not looked at again."""
        data = committed_bytes(self.folder)
        said = self._said
        if said is None or data != said[0]:
            self._said = said = data or b"", _told(self.folder, data)
        return said[1]

    def at(self, ref: CheckpointRef | None, work: Callable[[View], T]) -> T:
        """Work on the state at a checkpoint."""
        known = self._view
        if known is None or known[0] != ref:
            view = self.store.view(ref)
            self._view = ref, view
            return work(view)
        try:
            return work(known[1])
        except MissingRunError as error:
            self._view = None
            raise _DroppedError from error

    @staticmethod
    def of(folder: Path, look_at_s: float) -> _OpenStore:
        environment = ReadOnlyEnvironment.of(folder)
        try:
            operator = operator_of(folder)
            if operator is None:
                raise StateGoneError(f"no call has told what the rows in {folder} are: ask again, or elsewhere")
            schema = operator.row_schema()
            return _OpenStore(
                folder, LocalStore(folder, schema, environment), operator, schema, ShownColumns(schema), look_at_s
            )
        except BaseException:
            environment.close()
            raise


def _told(folder: Path, data: bytes | None) -> CommittedRecord:
    """What is committed in a bucket's folder, where this process may read it."""
    if data is None:
        raise StateGoneError(f"no call has told what is committed in {folder}: ask again, or elsewhere")
    record = CommittedRecord.decode(data, str(folder))
    if record.namespace != namespace():
        raise UsageError(
            f"the job runs in another container ({record.namespace}) than this process ({namespace()}): LMDB tells "
            "processes apart by their numbers. Ask from within the job's"
        )
    return record


def _live(rows: pa.RecordBatch, record: CommittedRecord, schema: RowSchema) -> pa.RecordBatch:
    """The rows that have not expired by the clock of the call that told."""
    if record.clock_ms is None or not schema.expires or not rows.num_rows:
        return rows
    ends = rows.column(rows.schema.get_field_index(f"state.{EXPIRES_MS}"))
    return rows.filter(pc.greater(ends.fill_null(2**63 - 1), record.clock_ms))


def _folders(folder: Path) -> list[Path]:
    """Folders in a folder; none where it is gone."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _last_use_s(query_folder: Path) -> float:
    """When a call told last; 0 where none has since the machine started."""
    times = [0.0]
    for path in query_folder.glob(f"s*/*/{boot_id()}/committed"):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)
