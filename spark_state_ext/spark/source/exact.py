"""State exactly as of a committed batch: Spark's reader of state tells the pointers, files have the rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spark_state_ext.errors import MissingCheckpointError, UsageError
from spark_state_ext.reading.bodies import Scratch
from spark_state_ext.reading.exact import ExactBatch, Told, open_exact
from spark_state_ext.reading.state import OpenState
from spark_state_ext.spark.client.state_reader import CommittedBatch, StateReader, StoreOfState, with_batch
from spark_state_ext.spark.compat import SPARK_VERSION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["exact_batch", "open_committed", "reader_of", "store_of", "told_of"]


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
    """Open the state of an operator exactly as of a committed batch, which Spark tells; the query may run meanwhile.

    Spark reads which files are committed, in a few small jobs; this process reads the files. What is read is that of
    the last committed batch, no bucket holds the others back, and small deltas that are in Spark's checkpoint only are
    read from there.

    Parameters
    ----------
    spark
        A session, classic or Connect, of PySpark 4.0 or newer. It need not be the query's.
    path
        A root, as `ArrowState` has it; or a query folder, ``<root>/<operator>/<query folder>``.
    checkpoint_location
        The query's Spark checkpoint location.
    operator
        Name of the operator, where the query has several.
    batch
        After which batch, of those that Spark retains; by default the last that is committed.
    hold, memory_map, local_dir, storage_options
        As for `open_state`.

    Returns
    -------
    OpenState
        To be closed, as a context manager does.

    Raises
    ------
    UsageError
        On PySpark 3.5, or when the checkpoint is of another query than the path.
    MissingCheckpointError
        When Spark does not retain the batch, or there is no state in it; it names those that can be read.
    CannotHoldError
        When no hold can be written: open with ``hold=False``.
    CorruptFileError, VersionSkewError, StorageError
        When a file, or Spark's state, cannot be read.

    Examples
    --------
    >>> with open_committed(spark, "/state", "/checkpoints/clicks") as state:  # doctest: +SKIP
    ...     print(state.batch, state.get("ada").to_pylist())
    42 [{'user': 'ada', 'clicks': 8, 'timeout_ms': None}]
    """
    reader = reader_of(spark, checkpoint_location)
    store = store_of(reader, operator)
    return open_exact(
        path,
        told_of(reader, store, batch),
        lambda: with_batch(reader, batch, lambda committed: exact_batch(reader, store, committed)),
        hold=hold,
        scratch=Scratch(local_dir, memory_map),
        storage_options=storage_options,
    )


def reader_of(spark: SparkSession, checkpoint_location: str | os.PathLike[str]) -> StateReader:
    """A reader of a query's checkpoint."""
    if SPARK_VERSION < (4, 0):
        raise UsageError(
            "PySpark 3.5 has no reader of Spark's state, which says what is committed. Read with PySpark 4.0 or newer: "
            "that reads the checkpoint that 3.5 wrote. Or read what files prove to be committed, with open_state, or "
            "read_state without a checkpoint_location"
        )
    return StateReader(spark, os.fspath(checkpoint_location))


def store_of(reader: StateReader, operator: str | None) -> StoreOfState:
    """The store with the pointers of an operator."""
    stores = reader.stores()
    if not stores:
        raise MissingCheckpointError(
            f"{reader.location} has no state of spark_state_ext: give Spark's checkpointLocation of a query that has "
            "committed a batch with data"
        )
    there = ", ".join(sorted(it.operator for it in stores))
    if operator is None and len(stores) > 1:
        raise UsageError(f"the query at {reader.location} has the operators {there}: name one, with operator=…")
    found = next((it for it in stores if operator in (None, it.operator)), None)
    if found is None:
        raise UsageError(f"the query at {reader.location} has no operator {operator!r}; it has {there}")
    return found


def told_of(reader: StateReader, store: StoreOfState, batch: int | None = None) -> Told:
    """Whose state it is, by Spark."""
    folder = store.query_folder
    if batch is not None:
        folder = reader.query_folder_at(store, reader.batch(batch).batch) or folder
    return Told(store.operator, folder, reader.location)


def exact_batch(reader: StateReader, store: StoreOfState, committed: CommittedBatch) -> ExactBatch:
    """A committed batch with its pointers."""
    newest = max((committed.batch, *committed.later))
    return ExactBatch(committed.batch, committed.oldest, newest, reader.by_bucket(store, committed.batch))
