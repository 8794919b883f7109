"""Savepoints of queries, taken through Spark: `take_savepoint` and `stop_with_savepoint`."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arrow_schemas.savepoint import CANONICAL, NATIVE
from spark_state_ext.engine.job import BUILD
from spark_state_ext.engine.limits import check_flags
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.errors import MissingCheckpointError, UsageError
from spark_state_ext.files.folder import refuse_relative
from spark_state_ext.savepoints.rows import ANSWER, SAVED, copies_of
from spark_state_ext.spark.client.shim import task_entry
from spark_state_ext.spark.client.state import ArrowState
from spark_state_ext.spark.client.state_reader import CommittedBatch, StateReader, StoreOfState, with_batch
from spark_state_ext.spark.client.tasks import in_a_task, let_go, place_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["TakenSavepoint", "finished", "stop_with_savepoint", "take_savepoint"]

_LOGGER = logging.getLogger("spark_state_ext")


@dataclass(frozen=True)
class TakenSavepoint:
    """A savepoint that was taken.

    Parameters
    ----------
    path, id
        Its folder, and its id.
    form
        ``"native"`` or ``"canonical"``.
    batch
        The batch whose state it has.
    watermark_ms
        That batch's watermark; None: it had none.
    files, size_bytes
        Checkpoint files in it, and their bytes.
    duplicated, streamed, streamed_bytes
        How many of them were linked or copied by the store, how many went through executors, and bytes of the latter.
    """

    path: str
    id: str
    form: str
    batch: int
    watermark_ms: int | None
    files: int
    size_bytes: int
    duplicated: int
    streamed: int
    streamed_bytes: int


def take_savepoint(
    spark: SparkSession,
    path: str | os.PathLike[str],
    checkpoint_location: str | os.PathLike[str],
    state: ArrowState | Sequence[ArrowState],
    *,
    form: str = NATIVE,
    batch: int | None = None,
    verify: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> TakenSavepoint:
    """Take a savepoint of a query, which may be running, in this application or another, or be stopped.

    The query is not touched: it goes on meanwhile, and has no trace of it. Files are linked, or copied by the store,
    where it can; else they go through executors, in a Spark job of one row a bucket.

    Parameters
    ----------
    spark
        A session, classic or Connect, of PySpark 4.0 or newer.
    path
        The savepoint's folder, which does not exist yet: any fsspec URL, or an absolute path, that all executors reach.
    checkpoint_location
        The query's Spark checkpoint location.
    state
        The `ArrowState` of the query's operator, or one for each of several: where their files are.
    form
        ``"native"``: files as they are. ``"canonical"``: one compacted snapshot for each bucket.
    batch
        The batch whose state is saved, of those that Spark retains; by default the last that is committed.
    verify
        Read every file of a native savepoint to the last byte, and take a damaged one from another backend, or what it
        was made of. By default files are linked as they are; who starts from the savepoint reads them all. (A canonical
        one is made of what was read.)
    storage_options
        Options for the path's fsspec file system.

    Returns
    -------
    TakenSavepoint
        What is in it.

    Raises
    ------
    UsageError
        When an argument cannot work, or on PySpark 3.5.
    MissingCheckpointError
        When Spark does not retain the batch.
    PySparkException
        What tasks find comes as Spark's own error, with ours in its text: ``UsageError`` when there is something at the
        path, ``MissingCheckpointError`` when files of the state are gone, ``StorageError`` when a store fails. What was
        copied then is no savepoint.

    Examples
    --------
    >>> taken = take_savepoint(spark, "/savepoints/monday", "/checkpoints/orders", state)  # doctest: +SKIP
    >>> taken.batch  # doctest: +SKIP
    41
    """
    path = _path(path)
    reader, stores = _checked(spark, os.fspath(checkpoint_location), state, form=form, verify=verify)
    return _held(spark, reader, stores, _common(path, storage_options, form, verify), batch)


def _common(path: str, storage_options: Mapping[str, Any] | None, form: str, verify: bool) -> dict[str, Any]:
    """What all tasks are told."""
    return {
        "package_version": BUILD,
        "savepoint": path,
        "savepoint_options": dict(storage_options or {}),
        "form": form,
        "verify": verify,
        "holder": f"a savepoint at {path}",
    }


def _held(
    spark: SparkSession,
    reader: StateReader,
    stores: Sequence[tuple[StoreOfState, StateOptions]],
    common: Mapping[str, Any],
    batch: int | None,
) -> TakenSavepoint:
    """The savepoint, taken while the query's folders are held."""
    parts = [
        {**common, **place_of(options), "operator": store.operator, "query_folder": store.query_folder}
        for store, options in stores
    ]
    try:
        for part in parts:
            part["hold"] = in_a_task(spark, "begin", part)["hold"]
        return _taken(spark, reader, [store for store, _ in stores], parts, common, batch)
    finally:
        for part in parts:
            if "hold" in part:
                let_go(spark, part)


def _taken(
    spark: SparkSession,
    reader: StateReader,
    stores: Sequence[StoreOfState],
    parts: Sequence[dict[str, Any]],
    common: Mapping[str, Any],
    batch: int | None,
) -> TakenSavepoint:
    """The savepoint, of the last batch that is committed now that the holds are there."""

    def saved(committed: CommittedBatch) -> tuple[CommittedBatch, list[Any]]:
        return committed, _saved(reader, stores, parts, committed)

    committed, rows = with_batch(reader, batch, saved)
    ours = {it.operator_id for it in stores}
    others = [name for number, name in sorted(committed.operators.items()) if number not in ours]
    if others:
        _LOGGER.warning(
            "the savepoint at %s has no state of the query's other stateful operators, which are Spark's own: %s. A "
            "query that starts from it begins there without state",
            common["savepoint"],
            ", ".join(others),
        )
    told = {
        **common,
        "id": uuid.uuid4().hex,
        "made_ms": int(time.time() * 1000),
        "query_id": committed.query_id,
        "batch": committed.batch,
        "offsets": committed.offsets,
        "parts": list(parts),
    }
    return finished(spark, told, rows)


def finished(spark: SparkSession, told: Mapping[str, Any], rows: Sequence[Any]) -> TakenSavepoint:
    """Have a task write the manifest of what was saved."""
    frame = spark.createDataFrame([(row.saved, bytes(row.pointer)) for row in rows], SAVED).coalesce(1)
    answer = json.loads(frame.mapInArrow(task_entry("finish", dict(told)), ANSWER).collect()[0].answer)
    copies = copies_of((row.saved, row.pointer) for row in rows)
    sizes = [file.size_bytes for copy in copies for file in copy.saved.files]
    return TakenSavepoint(
        path=told["savepoint"],
        id=told["id"],
        form=told["form"],
        batch=told["batch"],
        watermark_ms=answer["watermark_ms"],
        files=len(sizes),
        size_bytes=sum(sizes),
        duplicated=sum(copy.duplicated for copy in copies),
        streamed=sum(copy.streamed for copy in copies),
        streamed_bytes=sum(copy.streamed_bytes for copy in copies),
    )


def _saved(
    reader: StateReader, stores: Sequence[StoreOfState], parts: Sequence[dict[str, Any]], committed: CommittedBatch
) -> list[Any]:
    rows: list[Any] = []
    for store, part in zip(stores, parts, strict=True):
        told = {**part, "query_id": committed.query_id, "batch": committed.batch, "parts": list(parts)}
        with reader.pointers(store, committed.batch) as pointers:
            rows += pointers.mapInArrow(task_entry("save", told), SAVED).collect()
    return rows


def stop_with_savepoint(
    query: Any,
    path: str | os.PathLike[str],
    checkpoint_location: str | os.PathLike[str],
    state: ArrowState | Sequence[ArrowState],
    *,
    form: str = NATIVE,
    verify: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    spark: SparkSession | None = None,
) -> TakenSavepoint:
    """Stop a query, and take the savepoint of its last committed batch, after which there is no other.

    Parameters
    ----------
    query
        The running query.
    path, checkpoint_location, state, form, verify, storage_options
        As for `take_savepoint`.
    spark
        The session; by default the active one.

    Returns
    -------
    TakenSavepoint
        What is in it.

    Raises
    ------
    StateError
        As `take_savepoint`. What can be known before is refused while the query runs on. Else the query is stopped all
        the same, and `take_savepoint` can be called again.
    StreamingQueryException
        When the query has failed: then none is taken, and `take_savepoint` takes that of its last committed batch.
    """
    if spark is None:
        from pyspark.sql import SparkSession as Session

        spark = Session.active()
    # What can be refused is refused while the query still runs.
    common = _common(_path(path), storage_options, form, verify)
    reader, stores = _checked(spark, os.fspath(checkpoint_location), state, form=form, verify=verify)
    in_a_task(spark, "refuse", common)
    query.stop()
    query.awaitTermination()
    return _held(spark, reader, stores, common, None)


def _checked(
    spark: SparkSession,
    checkpoint_location: str,
    state: ArrowState | Sequence[ArrowState],
    *,
    form: str,
    verify: bool,
) -> tuple[StateReader, list[tuple[StoreOfState, StateOptions]]]:
    """A reader of the query's state, and each of its operators with the options that tell where its files are."""
    states = [state] if isinstance(state, ArrowState) else list(state)
    _check(states, form)
    check_flags(verify=verify)
    reader = StateReader(spark, checkpoint_location)
    return reader, _matched(reader.stores(), states, checkpoint_location)


def _check(states: Sequence[ArrowState], form: str) -> None:
    if form not in (NATIVE, CANONICAL):
        raise UsageError(f"form must be {NATIVE!r} or {CANONICAL!r}, not {form!r}")
    if not states or not all(isinstance(it, ArrowState) for it in states):
        raise UsageError(f"state must be the ArrowState of the query's operator, or a list of them, not {states!r}")
    names = [it.options.operator for it in states]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two ArrowState are of operator {name!r}")


def _matched(
    stores: Sequence[StoreOfState], states: Sequence[ArrowState], location: str
) -> list[tuple[StoreOfState, StateOptions]]:
    """Each operator of the query with the options that tell where its files are."""
    by_name = {it.options.operator: it.options for it in states}
    there = {it.operator for it in stores}
    if not stores:
        raise MissingCheckpointError(
            f"{location} has no state of spark_state_ext: give Spark's checkpointLocation of a query that has "
            "committed a batch with data"
        )
    if there != by_name.keys():
        raise UsageError(
            f"the query at {location} has the operators {', '.join(sorted(there))}, and state is given of "
            f"{', '.join(sorted(by_name))}: give the ArrowState of each of the query's operators"
        )
    return [(it, by_name[it.operator]) for it in stores]


def _path(path: str | os.PathLike[str]) -> str:
    found = os.fspath(path)
    refuse_relative(found, "the path of a savepoint")
    return found.rstrip("/") or found
