"""State exactly as of a committed batch: Spark's reader of state gives the pointers, and checkpoint files the rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spark_state_ext.errors import MissingCheckpointError, UsageError
from spark_state_ext.reading.bodies import Scratch
from spark_state_ext.reading.exact_batch import ExactBatch, QueryOfOperator, open_exact
from spark_state_ext.reading.state import OpenState
from spark_state_ext.spark.client.state_reader import CommittedBatch, StateReader, StoreOfState, use_batch
from spark_state_ext.spark.compat import SPARK_VERSION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["read_exact_batch", "open_committed", "make_reader", "choose_store", "identify_query"]


def open_committed(
    spark: SparkSession,
    path: str | os.PathLike[str],
    checkpoint_location: str | os.PathLike[str],
    *,
    operator: str | None = None,
    batch: int | None = None,
    hold: bool = True,
    memory_map: bool = True,
    local_dir: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> OpenState:
    """Open the state of an operator exactly as of a committed batch; the query may run meanwhile.

    Spark reads, in a few small jobs, which files are committed; this process reads the files. By default the state is
    as of the last committed batch for all buckets. Small deltas that are only in Spark's checkpoint are read there.

    Parameters
    ----------
    spark
        A session, classic or Connect, of PySpark 4.0 or newer. It need not be the query's.
    path
        A root, as given to `ArrowState`, or a query folder, ``<root>/<operator>/<query folder>``.
    checkpoint_location
        The query's Spark checkpoint location.
    operator
        Name of the operator, required if the query has several.
    batch
        The batch after which the state is read, one that Spark retains; by default the last committed one.
    hold, memory_map, local_dir, storage_options
        See `open_state`.

    Returns
    -------
    OpenState
        The state, which you have to close; it is a context manager.

    Raises
    ------
    UsageError
        On PySpark 3.5, or when the checkpoint belongs to another query than the path.
    MissingCheckpointError
        When Spark does not retain the batch, or it has no state; the message names the batches that can be read.
    CannotHoldError
        When a hold cannot be written: open with ``hold=False``.
    CorruptFileError, VersionSkewError, StorageError
        When a file, or Spark's state, cannot be read.

    Examples
    --------
    >>> with open_committed(spark, "/state", "/checkpoints/clicks") as state:  # doctest: +SKIP
    ...     print(state.batch, state.get("ada").to_pylist())
    42 [{'user': 'ada', 'clicks': 8, 'timeout_ms': None}]
    """
    reader = make_reader(spark, checkpoint_location)
    store = choose_store(reader, operator)
    return open_exact(
        path,
        identify_query(reader, store, batch),
        lambda: use_batch(reader, batch, lambda committed: read_exact_batch(reader, store, committed)),
        hold=hold,
        scratch=Scratch(local_dir, memory_map),
        storage_options=storage_options,
    )


def make_reader(spark: SparkSession, checkpoint_location: str | os.PathLike[str]) -> StateReader:
    """Return a reader of a query's checkpoint."""
    if SPARK_VERSION < (4, 0):
        raise UsageError(
            "PySpark 3.5 has no reader of Spark's state, which is needed to find out what is committed. Read with "
            "PySpark 4.0 or newer, which reads the checkpoint that 3.5 wrote. Or read the last batch that files prove "
            "to be committed, with open_state, or with read_state without a checkpoint_location"
        )
    return StateReader(spark, os.fspath(checkpoint_location))


def choose_store(reader: StateReader, operator: str | None) -> StoreOfState:
    """Return the store with an operator's pointers."""
    stores = reader.stores()
    if not stores:
        raise MissingCheckpointError(
            f"{reader.location} has no state of spark_state_ext: give the Spark checkpointLocation of a query that has "
            "committed a batch with data"
        )
    names = ", ".join(sorted(store.operator for store in stores))
    if operator is None and len(stores) > 1:
        raise UsageError(f"the query at {reader.location} has the operators {names}: choose one with operator=…")
    chosen = next((store for store in stores if operator in (None, store.operator)), None)
    if chosen is None:
        raise UsageError(f"the query at {reader.location} has no operator {operator!r}; it has {names}")
    return chosen


def identify_query(reader: StateReader, store: StoreOfState, batch: int | None = None) -> QueryOfOperator:
    """Return which operator and query folder Spark names for the state."""
    folder = store.query_folder
    if batch is not None:
        folder = reader.query_folder_at(store, reader.batch(batch).batch) or folder
    return QueryOfOperator(store.operator, folder, reader.location)


def read_exact_batch(reader: StateReader, store: StoreOfState, committed: CommittedBatch) -> ExactBatch:
    """Return a committed batch with its pointers."""
    newest = max((committed.batch, *committed.later))
    return ExactBatch(committed.batch, committed.oldest, newest, reader.by_bucket(store, committed.batch))
