"""Reading the pointers in a Spark checkpoint with Spark's own state reader (Spark 4.0 and newer), also over Connect."""

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
from spark_state_ext.spark.client.settings import make_format_setting, open_session_with, refuse_unread_format
from spark_state_ext.spark.compat import SPARK_VERSION, extract_spark_message, is_spark_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["POINTER", "CommittedBatch", "StateReader", "StoreOfState", "use_batch"]

_LOGGER = logging.getLogger("spark_state_ext")
T = TypeVar("T")
# Batches may be short, and Spark may retain only two: the chosen one may be gone before its pointers are read.
_ROUNDS_MAX = 5

# Characters that Java quotes in a URI. Spark's reader quotes a location, and then takes the result for a path again (as
# of Spark 4.3).
_QUOTED = set(' %"#<>?[\\]^`{|}')

POINTER = "value.groupState.pointer"
# Until an imported bucket's first call, Spark's state has an import mark (`arrow_schemas.import_mark`) and no pointer.
_IS_POINTER = f"{POINTER} IS NOT NULL AND substring({POINTER}, 1, {len(MAGIC)}) != X'{MAGIC.hex()}'"


@dataclass(frozen=True)
class StoreOfState:
    """A state store of a query that holds pointers of this package.

    Parameters
    ----------
    operator_id
        Spark's number of the stateful operator.
    store_name
        Name of the operator's store.
    operator
        Name of our operator.
    query_folder
        Name of the query folder, as in the pointers.
    claim
        Id of the query's claim to that folder, as in the pointers; None: the query made the folder itself.
    buckets
        Number of buckets of the state.
    """

    operator_id: int
    store_name: str
    operator: str
    query_folder: str
    claim: str | None = None
    buckets: int = 0


@dataclass(frozen=True)
class CommittedBatch:
    """A committed batch of a query.

    Parameters
    ----------
    query_id
        Spark's id of the query.
    batch
        Its number.
    later
        Later committed batches.
    offsets
        Spark's offset log of the batch: where its input ended.
    operators
        Names of the query's stateful operators, ours and Spark's own, by Spark's operator number.
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
    """Reads the state in one checkpoint location."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        if SPARK_VERSION < (4, 0):
            raise UsageError(
                "PySpark 3.5 has no reader of Spark's state, which is needed to take a snapshot of a query. Stop the "
                "query, and take the snapshot with PySpark 4.0 or newer, which reads the checkpoint that 3.5 wrote. "
                "Afterwards the query can continue with 3.5."
            )
        self._spark = spark
        self._location = location.rstrip("/")
        # By batch; only batches whose commit log was read.
        self._formats: dict[int, int] = {}

    @property
    def location(self) -> str:
        """The checkpoint location."""
        return self._location

    def stores(self) -> list[StoreOfState]:
        """Return the stores with our pointers; empty if the query has no operator of ours, or no state yet."""
        stores = []
        with self._open_tables() as tables:
            for operator_id, store_name, pointers in tables:
                first = pointers.head()
                if first is not None:
                    pointer = Pointer.decode(bytes(first.pointer))
                    identity = pointer.operator, pointer.query_folder, pointer.claim, pointer.buckets
                    stores.append(StoreOfState(operator_id, store_name, *identity))
        return stores

    def query_folders(self) -> frozenset[str]:
        """Return the query folders that pointers name; empty if the query has no operator of ours."""
        folders: set[str] = set()
        with self._open_tables() as tables:
            for _, _, pointers in tables:
                folders.update(Pointer.decode(bytes(row.pointer)).query_folder for row in pointers.toLocalIterator())
        return frozenset(folders)

    @contextmanager
    def _open_tables(self) -> Iterator[list[tuple[int, str, DataFrame]]]:
        """Yield the stores with our pointers, each with a table of its pointers after the last batch."""
        with self._translate_errors():
            rows = self._read_metadata()
            if not rows:
                yield []
                return
            stores = sorted({(row.operatorId, row.stateStoreName) for row in rows})
            with self._open_session(min(row.maxBatchId for row in rows)) as spark:
                tables = [(*store, self._read_state(spark, *store)) for store in stores]
                # The other stores belong to Spark's own operators.
                yield [
                    (operator_id, store_name, state.where(_IS_POINTER).select(POINTER))
                    for operator_id, store_name, state in tables
                    if "groupState.pointer" in _list_field_names(state.schema["value"].dataType)
                ]

    def batch(self, batch: int | None = None) -> CommittedBatch:
        """Return a committed batch whose state can be read; the last one by default."""
        with self._translate_errors():
            rows = self._read_metadata()
            if not rows:
                raise MissingCheckpointError(
                    f"{self._location} has no state of a query: give the Spark checkpointLocation of a query whose "
                    "first batch with data is committed"
                )
            oldest, newest = max(row.minBatchId for row in rows), min(row.maxBatchId for row in rows)
            number = newest if batch is None else batch
            if not oldest <= number <= newest:
                raise MissingCheckpointError(
                    f"batch {number} of {self._location} cannot be read: only batches {oldest} to {newest} are "
                    "committed and retained (spark.sql.streaming.minBatchesToRetain). Choose one of these."
                )
            metadata, offsets, commit = self._read_texts("metadata", f"offsets/{number}", f"commits/{number}")
        self._note_format(number, commit)
        query_id = str(json.loads(metadata)["id"])
        operators = {int(row.operatorId): str(row.operatorName) for row in rows}
        return CommittedBatch(query_id, number, tuple(range(number + 1, newest + 1)), offsets, operators, oldest)

    def has(self, batch: int) -> bool:
        """True if a batch's state can still be read."""
        try:
            return self.batch(batch).batch == batch
        except MissingCheckpointError:
            return False

    @contextmanager
    def pointers(self, store: StoreOfState, batch: int) -> Iterator[DataFrame]:
        """Yield a table of a batch's pointers, one column ``pointer``; it is read when used, within the context."""
        with self._open_session(batch) as spark:
            with self._translate_errors():
                state = self._read_state(spark, store.operator_id, store.store_name, batch)
                table = state.where(_IS_POINTER).select(POINTER)
            yield table

    def query_folder_at(self, store: StoreOfState, batch: int) -> str | None:
        """Return the query folder that the pointers of a batch name; None if the batch has no pointers."""
        with self.pointers(store, batch) as table, self._translate_errors():
            first = table.head()
        return None if first is None else Pointer.decode(bytes(first.pointer)).query_folder

    def by_bucket(self, store: StoreOfState, batch: int) -> dict[int, Pointer]:
        """Read the pointers of a batch now, and return them by bucket."""
        with self.pointers(store, batch) as table, self._translate_errors():
            rows = table.collect()
        pointers = [Pointer.decode(bytes(row.pointer)) for row in rows]
        return {pointer.bucket: pointer for pointer in pointers}

    @contextmanager
    def _open_session(self, batch: int) -> Iterator[SparkSession]:
        """Yield a session that is set to the checkpoint format of a batch."""
        if batch not in self._formats:
            with self._translate_errors():
                (commit,) = self._read_texts(f"commits/{batch}")
            self._note_format(batch, commit)
        refuse_unread_format(self._location, self._formats[batch])
        with open_session_with(self._spark, make_format_setting(self._formats[batch])) as session:
            yield session

    def _note_format(self, batch: int, commit: str) -> None:
        self._formats[batch] = checkpoint_format_of(commit, f"{self._location}/commits/{batch}")

    def _read_metadata(self) -> list[Any]:
        """Return what Spark records of each store; empty if the query has not begun."""
        rows: list[Any] = self._spark.read.format("state-metadata").load(self._location).collect()
        # Spark records stores as soon as the first batch begins.
        if rows and min(row.maxBatchId for row in rows) < 0:
            self._refuse_quoted("it finds no committed batch")
            raise MissingCheckpointError(
                f"the query at {self._location} has not committed a batch yet, so it has no state: try again after its "
                "first batch with data"
            )
        return rows

    def _read_state(
        self, spark: SparkSession, operator_id: int, store_name: str, batch: int | None = None
    ) -> DataFrame:
        reader = spark.read.format("statestore").option("operatorId", operator_id).option("storeName", store_name)
        if batch is not None:
            reader = reader.option("batchId", batch)
        return reader.load(self._location)

    def _read_texts(self, *names: str) -> list[str]:
        """Read files of the checkpoint in one Spark job; "" for a missing file."""
        paths = [f"{self._location}/{name}" for name in names]
        rows = self._spark.read.text(paths, wholetext=True).select("value", "_metadata.file_path").collect()
        return [next((str(row.value) for row in rows if row.file_path.endswith(f"/{name}")), "") for name in names]

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_spark_error(error):
                raise
            reason = extract_spark_message(str(error))
            if "COMMITTED_BATCH_UNAVAILABLE" in reason:
                self._refuse_quoted(reason, error)
            raise StorageError(f"Spark cannot read the state of {self._location}: {reason}") from error

    def _refuse_quoted(self, reason: str, error: Exception | None = None) -> None:
        """Raise an error if the location has characters because of which Spark looks for another location."""
        quoted = "".join(sorted(_QUOTED & set(self._location)))
        if quoted:
            raise StorageError(
                f"Spark's reader of state does not find {self._location}: it looks for a name in which {quoted!r} is "
                f"quoted. Stop the query, copy its checkpoint to a location without these characters, and start it "
                f"there. Spark reports: {reason}"
            ) from error


def _list_field_names(value: Any) -> set[str]:
    """Return the names of the fields of a state's value, and of the fields within them."""
    return {f"{field.name}.{part.name}" for field in value for part in getattr(field.dataType, "fields", [])}


def use_batch(reader: StateReader, batch: int | None, use: Callable[[CommittedBatch], T]) -> T:
    """Call `use` with a committed batch. If Spark drops the last batch meanwhile, try again with the new last one."""
    for rounds_left in reversed(range(_ROUNDS_MAX)):
        committed = None
        try:
            committed = reader.batch(batch)
            return use(committed)
        except Exception as error:
            if not rounds_left or batch is not None or not _is_dropped(reader, committed, error):
                raise
            _LOGGER.info("a batch was dropped while it was read; trying again with the last batch: %s", error)
    raise AssertionError("unreachable: the last round returns or raises")


def _is_dropped(reader: StateReader, committed: CommittedBatch | None, error: Exception) -> bool:
    """True if Spark may have dropped the batch, also if its files vanished while Spark listed them."""
    if committed is None:
        return isinstance(error, StorageError)
    try:
        return not reader.has(committed.batch)
    except StorageError:
        return True
