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
    """Reads one checkpoint location.

    Parameters
    ----------
    spark
        A session, classic or Connect.
    location
        The checkpoint location, as Spark knows it.

    Raises
    ------
    UsageError
        On PySpark 3.5, which has no reader of state.
    """

    def __init__(self, spark: SparkSession, location: str) -> None:
        if SPARK_VERSION < (4, 0):
            raise UsageError(
                "PySpark 3.5 has no reader of Spark's state, which a snapshot of a query is taken from. Stop the "
                "query, and take it with PySpark 4.0 or newer: that reads the checkpoint that 3.5 wrote, and the "
                "query goes on with 3.5 afterwards."
            )
        self._spark = spark
        self._location = location.rstrip("/")

    @property
    def location(self) -> str:
        """The checkpoint location."""
        return self._location

    def stores(self) -> list[StoreOfState]:
        """The stores with pointers of ours; none where the query has no operator of ours, or no state yet.

        Raises
        ------
        StorageError
            When Spark cannot read its state.
        """
        found = []
        for operator_id, store_name, pointers in self._tables():
            with self._translated():
                first = pointers.head()
            if first is not None:
                pointer = Pointer.decode(bytes(first.pointer))
                found.append(
                    StoreOfState(
                        operator_id, store_name, pointer.operator, pointer.query_folder, pointer.claim, pointer.buckets
                    )
                )
        return found

    def query_folders(self) -> frozenset[str]:
        """The query folders that pointers name; none where the query has no operator of ours.

        Raises
        ------
        StorageError
            When Spark cannot read its state.
        """
        found: set[str] = set()
        for _, _, pointers in self._tables():
            with self._translated():
                found.update(Pointer.decode(bytes(row.pointer)).query_folder for row in pointers.toLocalIterator())
        return frozenset(found)

    def _tables(self) -> list[tuple[int, str, DataFrame]]:
        """Stores that hold pointers of ours, each with a table of those of the last batch."""
        with self._translated():
            metadata = self._spark.read.format("state-metadata").load(self._location)
            stores = {(row.operatorId, row.stateStoreName) for row in metadata.collect()}
            tables = [(*store, self._state(*store)) for store in sorted(stores)]
            # The others are of other operators of the query, which are none of ours.
            return [
                (operator_id, store_name, state.where(_IS_POINTER).select(POINTER))
                for operator_id, store_name, state in tables
                if "groupState.pointer" in _fields(state.schema["value"].dataType)
            ]

    def batch(self, batch: int | None = None) -> CommittedBatch:
        """A committed batch whose state can be read; the last one by default.

        Raises
        ------
        MissingCheckpointError
            When there is none, or Spark has dropped it.
        StorageError
            When Spark cannot read its checkpoint.
        """
        with self._translated():
            rows = self._spark.read.format("state-metadata").load(self._location).collect()
            if not rows:
                raise MissingCheckpointError(
                    f"{self._location} has no state of a query: give Spark's checkpointLocation of one that has run"
                )
            oldest, newest = max(row.minBatchId for row in rows), min(row.maxBatchId for row in rows)
            wanted = newest if batch is None else batch
            if not oldest <= wanted <= newest:
                raise MissingCheckpointError(
                    f"batch {wanted} of {self._location} cannot be read: its committed batches are {oldest} to "
                    f"{newest}. Spark keeps spark.sql.streaming.minBatchesToRetain of them: choose one of these."
                )
            query_id = str(json.loads(self._text("metadata"))["id"])
            offsets = self._text(f"offsets/{wanted}")
        operators = {int(row.operatorId): str(row.operatorName) for row in rows}
        return CommittedBatch(query_id, wanted, tuple(range(wanted + 1, newest + 1)), offsets, operators, oldest)

    def has(self, batch: int) -> bool:
        """Whether a batch's state can still be read.

        Raises
        ------
        StorageError
            When Spark cannot read its checkpoint.
        """
        try:
            return self.batch(batch).batch == batch
        except MissingCheckpointError:
            return False

    def pointers(self, store: StoreOfState, batch: int) -> DataFrame:
        """A table of the pointers that a batch made, one column ``pointer``; read when it is used.

        Raises
        ------
        StorageError
            When Spark cannot read its state.
        """
        with self._translated():
            state = self._state(store.operator_id, store.store_name, batch)
            return state.where(_IS_POINTER).select(POINTER)

    def by_bucket(self, store: StoreOfState, batch: int) -> dict[int, Pointer]:
        """The pointers that a batch made, read now.

        Raises
        ------
        StorageError
            When Spark cannot read its state.
        CorruptPointerError, VersionSkewError
            When what looks like a pointer cannot be read.
        """
        with self._translated():
            rows = self.pointers(store, batch).collect()
        pointers = [Pointer.decode(bytes(row.pointer)) for row in rows]
        return {it.bucket: it for it in pointers}

    def _state(self, operator_id: int, store_name: str, batch: int | None = None) -> DataFrame:
        reader = self._spark.read.format("statestore").option("operatorId", operator_id).option("storeName", store_name)
        if batch is not None:
            reader = reader.option("batchId", batch)
        return reader.load(self._location)

    def _text(self, name: str) -> str:
        rows = self._spark.read.text(f"{self._location}/{name}", wholetext=True).collect()
        return str(rows[0].value) if rows else ""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_of_spark(error):
                raise
            said = said_by_spark(str(error))
            quoted = "".join(sorted(_QUOTED & set(self._location)))
            if quoted and "COMMITTED_BATCH_UNAVAILABLE" in said:
                raise StorageError(
                    f"Spark's reader of state does not find {self._location}: it looks for a name in which {quoted!r} "
                    "is quoted. Stop the query, copy its checkpoint to a location without, and start it there. "
                    f"Spark says: {said}"
                ) from error
            raise StorageError(f"Spark cannot read the state of {self._location}: {said}") from error


def _fields(value: Any) -> set[str]:
    """Names of the fields of a state's value, and of fields in these."""
    return {f"{field.name}.{part.name}" for field in value for part in getattr(field.dataType, "fields", [])}


def with_batch(reader: StateReader, batch: int | None, use: Callable[[CommittedBatch], T]) -> T:
    """Do something with a committed batch. The last one is looked for anew where Spark dropped it meanwhile.

    Parameters
    ----------
    reader
        Reads the checkpoint.
    batch
        The batch; None: the last one.
    use
        What is done; repeated with a later batch.

    Raises
    ------
    MissingCheckpointError, StorageError
        As `StateReader.batch`; and whatever else ``use`` raises.
    """
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
