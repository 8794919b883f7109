"""The pointers in a Spark checkpoint, read with Spark's own reader of state (Spark 4.0 and newer), over Connect too."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from arrow_schemas.import_mark import MAGIC
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import MissingCheckpointError, StorageError, UsageError
from spark_state_ext.savepoints.batch_logs import checkpoint_format_of
from spark_state_ext.spark.client.settings import format_setting, refuse_unread_format, session_with
from spark_state_ext.spark.compat import SPARK_VERSION, is_of_spark, said_by_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["POINTER", "CommittedBatch", "StateReader", "StoreOfState", "with_batch"]

_LOGGER = logging.getLogger("spark_state_ext")
T = TypeVar("T")
# Batches may be short, and two retained: the one that was chosen is gone before its pointers are read.
_ROUNDS_MAX = 5

# What Java's URIs quote in a path. Spark's reader quotes a location, and takes the result for a path once more
# (as of Spark 4.3).
_QUOTED = set(' %"#<>?[\\]^`{|}')

POINTER = "value.groupState.pointer"
# Until an imported bucket's first call Spark's state has no pointer of it, but a mark (`arrow_schemas.import_mark`).
_IS_POINTER = f"{POINTER} IS NOT NULL AND substring({POINTER}, 1, {len(MAGIC)}) != X'{MAGIC.hex()}'"


@dataclass(frozen=True)
class StoreOfState:
    """One of a query's stores that holds pointers of ours.

    Parameters
    ----------
    operator_id
        Spark's number of the stateful operator.
    store_name
        Name of its store.
    operator
        Name of our operator.
    query_folder
        Folder of its state, as pointers name it.
    claim
        Id of the query's claim to that folder, as pointers name it; None: it began it itself.
    buckets
        How many buckets the state has.
    """

    operator_id: int
    store_name: str
    operator: str
    query_folder: str
    claim: str | None = None
    buckets: int = 0


@dataclass(frozen=True)
class CommittedBatch:
    """A batch of a query.

    Parameters
    ----------
    query_id
        Spark's id of the query.
    batch
        Its number.
    later
        Later batches that are committed.
    offsets
        Spark's log of where its input ended.
    operators
        Names of the query's stateful operators, ours and Spark's own, by Spark's number.
    oldest
        The oldest committed batch that Spark retains.
    """

    query_id: str
    batch: int
    later: tuple[int, ...]
    offsets: str
    operators: Mapping[int, str]
    oldest: int = 0


class StateReader:
    """Reads one checkpoint location."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        if SPARK_VERSION < (4, 0):
            raise UsageError(
                "PySpark 3.5 has no reader of Spark's state, which a snapshot of a query is taken from. Stop the "
                "query, and take it with PySpark 4.0 or newer: that reads the checkpoint that 3.5 wrote, and the "
                "query goes on with 3.5 afterwards."
            )
        self._spark = spark
        self._location = location.rstrip("/")
        # By batch, of those whose log was read.
        self._formats: dict[int, int] = {}

    @property
    def location(self) -> str:
        """The checkpoint location."""
        return self._location

    def stores(self) -> list[StoreOfState]:
        """The stores with pointers of ours; none where the query has no operator of ours, or no state yet."""
        found = []
        with self._tables() as tables:
            for operator_id, store_name, pointers in tables:
                first = pointers.head()
                if first is not None:
                    pointer = Pointer.decode(bytes(first.pointer))
                    whose = pointer.operator, pointer.query_folder, pointer.claim, pointer.buckets
                    found.append(StoreOfState(operator_id, store_name, *whose))
        return found

    def query_folders(self) -> frozenset[str]:
        """The query folders that pointers name; none where the query has no operator of ours."""
        found: set[str] = set()
        with self._tables() as tables:
            for _, _, pointers in tables:
                found.update(Pointer.decode(bytes(row.pointer)).query_folder for row in pointers.toLocalIterator())
        return frozenset(found)

    @contextmanager
    def _tables(self) -> Iterator[list[tuple[int, str, DataFrame]]]:
        """Stores that hold pointers of ours, each with a table of those of the last batch."""
        with self._translated():
            rows = self._metadata()
            if not rows:
                yield []
                return
            stores = sorted({(row.operatorId, row.stateStoreName) for row in rows})
            with self._session(min(row.maxBatchId for row in rows)) as spark:
                tables = [(*store, self._state(spark, *store)) for store in stores]
                # The others are of other operators of the query, which are none of ours.
                yield [
                    (operator_id, store_name, state.where(_IS_POINTER).select(POINTER))
                    for operator_id, store_name, state in tables
                    if "groupState.pointer" in _fields(state.schema["value"].dataType)
                ]

    def batch(self, batch: int | None = None) -> CommittedBatch:
        """A committed batch whose state can be read; the last one by default."""
        with self._translated():
            rows = self._metadata()
            if not rows:
                raise MissingCheckpointError(
                    f"{self._location} has no state of a query: give Spark's checkpointLocation of one whose first "
                    "batch with data is committed"
                )
            oldest, newest = max(row.minBatchId for row in rows), min(row.maxBatchId for row in rows)
            wanted = newest if batch is None else batch
            if not oldest <= wanted <= newest:
                raise MissingCheckpointError(
                    f"batch {wanted} of {self._location} cannot be read: its committed batches are {oldest} to "
                    f"{newest}. Spark keeps spark.sql.streaming.minBatchesToRetain of them: choose one of these."
                )
            metadata, offsets, commit = self._texts("metadata", f"offsets/{wanted}", f"commits/{wanted}")
        self._note_format(wanted, commit)
        query_id = str(json.loads(metadata)["id"])
        operators = {int(row.operatorId): str(row.operatorName) for row in rows}
        return CommittedBatch(query_id, wanted, tuple(range(wanted + 1, newest + 1)), offsets, operators, oldest)

    def has(self, batch: int) -> bool:
        """Whether a batch's state can still be read."""
        try:
            return self.batch(batch).batch == batch
        except MissingCheckpointError:
            return False

    @contextmanager
    def pointers(self, store: StoreOfState, batch: int) -> Iterator[DataFrame]:
        """A table of the pointers that a batch made, one column ``pointer``; read when used, within the context."""
        with self._session(batch) as spark:
            with self._translated():
                state = self._state(spark, store.operator_id, store.store_name, batch)
                table = state.where(_IS_POINTER).select(POINTER)
            yield table

    def query_folder_at(self, store: StoreOfState, batch: int) -> str | None:
        """The query folder that the pointers of a batch name; None where the batch has none."""
        with self.pointers(store, batch) as table, self._translated():
            first = table.head()
        return None if first is None else Pointer.decode(bytes(first.pointer)).query_folder

    def by_bucket(self, store: StoreOfState, batch: int) -> dict[int, Pointer]:
        """The pointers that a batch made, read now."""
        with self.pointers(store, batch) as table, self._translated():
            rows = table.collect()
        pointers = [Pointer.decode(bytes(row.pointer)) for row in rows]
        return {it.bucket: it for it in pointers}

    @contextmanager
    def _session(self, batch: int) -> Iterator[SparkSession]:
        """Give a session that reads the state of a batch, in whichever format that is."""
        if batch not in self._formats:
            with self._translated():
                (commit,) = self._texts(f"commits/{batch}")
            self._note_format(batch, commit)
        refuse_unread_format(self._location, self._formats[batch])
        with session_with(self._spark, format_setting(self._formats[batch])) as session:
            yield session

    def _note_format(self, batch: int, commit: str) -> None:
        self._formats[batch] = checkpoint_format_of(commit, f"{self._location}/commits/{batch}")

    def _metadata(self) -> list[Any]:
        """Read what Spark notes of each store; nothing where a query has not begun."""
        rows: list[Any] = self._spark.read.format("state-metadata").load(self._location).collect()
        # Spark notes stores as soon as the first batch begins.
        if rows and min(row.maxBatchId for row in rows) < 0:
            self._refuse_quoted("it finds no committed batch")
            raise MissingCheckpointError(
                f"the query at {self._location} has not committed a batch yet, so it has no state: wait until its "
                "first batch with data is committed, and try again"
            )
        return rows

    def _state(self, spark: SparkSession, operator_id: int, store_name: str, batch: int | None = None) -> DataFrame:
        reader = spark.read.format("statestore").option("operatorId", operator_id).option("storeName", store_name)
        if batch is not None:
            reader = reader.option("batchId", batch)
        return reader.load(self._location)

    def _texts(self, *names: str) -> list[str]:
        """Read files of the checkpoint, in one job."""
        paths = [f"{self._location}/{name}" for name in names]
        rows = self._spark.read.text(paths, wholetext=True).select("value", "_metadata.file_path").collect()
        return [next((str(row.value) for row in rows if row.file_path.endswith(f"/{name}")), "") for name in names]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_of_spark(error):
                raise
            said = said_by_spark(str(error))
            if "COMMITTED_BATCH_UNAVAILABLE" in said:
                self._refuse_quoted(said, error)
            raise StorageError(f"Spark cannot read the state of {self._location}: {said}") from error

    def _refuse_quoted(self, said: str, error: Exception | None = None) -> None:
        """Raise an error where Spark may look for a location of another name."""
        quoted = "".join(sorted(_QUOTED & set(self._location)))
        if quoted:
            raise StorageError(
                f"Spark's reader of state does not find {self._location}: it looks for a name in which {quoted!r} is "
                f"quoted. Stop the query, copy its checkpoint to a location without, and start it there. Spark says: "
                f"{said}"
            ) from error


def _fields(value: Any) -> set[str]:
    """Names of the fields of a state's value, and of fields in these."""
    return {f"{field.name}.{part.name}" for field in value for part in getattr(field.dataType, "fields", [])}


def with_batch(reader: StateReader, batch: int | None, use: Callable[[CommittedBatch], T]) -> T:
    """Do something with a committed batch. The last one is looked for anew where Spark dropped it meanwhile."""
    for left in reversed(range(_ROUNDS_MAX)):
        committed = None
        try:
            committed = reader.batch(batch)
            return use(committed)
        except Exception as error:
            if not left or batch is not None or not _is_dropped(reader, committed, error):
                raise
            _LOGGER.info("a batch was dropped while it was read; the last one is read anew: %s", error)
    raise AssertionError("unreachable: the last round returns or raises")


def _is_dropped(reader: StateReader, committed: CommittedBatch | None, error: Exception) -> bool:
    """Whether Spark may have dropped the batch: its files may also vanish while Spark lists them, and looks for one."""
    if committed is None:
        return isinstance(error, StorageError)
    try:
        return not reader.has(committed.batch)
    except StorageError:
        return True
