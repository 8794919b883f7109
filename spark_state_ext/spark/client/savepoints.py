"""Taking savepoints of queries through Spark: `take_savepoint` and `stop_with_savepoint`."""

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
from spark_state_ext.savepoints.task_rows import ANSWER, SAVED, parse_copies
from spark_state_ext.spark.client.state import ArrowState
from spark_state_ext.spark.client.state_reader import CommittedBatch, StateReader, StoreOfState, use_batch
from spark_state_ext.spark.client.task_functions import task_entry
from spark_state_ext.spark.client.tasks import release_hold, request_for, run_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["TakenSavepoint", "finish_savepoint", "stop_with_savepoint", "take_savepoint"]

_LOGGER = logging.getLogger("spark_state_ext")


@dataclass(frozen=True)
class TakenSavepoint:
    """A savepoint that was taken.

    Parameters
    ----------
    path, id
        The savepoint's folder and id.
    form
        ``"native"`` or ``"canonical"``.
    batch
        The batch after which the state was saved.
    watermark_ms
        That batch's watermark; None if it had no watermark.
    files, size_bytes
        Number of checkpoint files in the savepoint, and their bytes.
    duplicated, streamed, streamed_bytes
        How many files the store linked or copied, how many executors copied, and the bytes that executors copied.
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
    """Take a savepoint of a query, which may be running, in this application or another, or stopped.

    The query is not affected and goes on meanwhile. Files are linked, or copied by the store, if the store can do that;
    otherwise executors copy them, in a Spark job with one row per bucket.

    Parameters
    ----------
    spark
        A session, classic or Connect, of PySpark 4.0 or newer.
    path
        The savepoint's folder, which does not exist yet: any fsspec URL, or an absolute path, that all executors reach.
    checkpoint_location
        The query's Spark checkpoint location.
    state
        The `ArrowState` of the query's operator, or a list with one for each of its operators. It says where files are.
    form
        ``"native"``: files are copied unchanged. ``"canonical"``: one compacted snapshot for each bucket.
    batch
        The batch after which the state is saved, one that Spark retains; by default the last committed one.
    verify
        Read every file of a native savepoint to the last byte, and replace a damaged one by another backend's copy or
        by the files from which it was made. By default files are linked unread; a query that starts from the savepoint
        reads them all. (For a canonical savepoint all files are read anyway.)
    storage_options
        Options for the path's fsspec file system.

    Returns
    -------
    TakenSavepoint
        The savepoint that was taken.

    Raises
    ------
    UsageError
        When an argument cannot work, or on PySpark 3.5.
    MissingCheckpointError
        When Spark does not retain the batch.
    PySparkException
        Errors in tasks arrive as Spark's own error, with ours in its text: ``UsageError`` when the path is not empty,
        ``MissingCheckpointError`` when files of the state are missing, ``StorageError`` when a store fails. Files that
        were copied before the error are not a savepoint.

    Examples
    --------
    >>> taken = take_savepoint(spark, "/savepoints/monday", "/checkpoints/orders", state)  # doctest: +SKIP
    >>> taken.batch  # doctest: +SKIP
    41
    """
    path = _check_path(path)
    reader, stores = _open_reader(spark, os.fspath(checkpoint_location), state, form=form, verify=verify)
    return _take_under_hold(spark, reader, stores, _make_request(path, storage_options, form, verify), batch)


def _make_request(path: str, storage_options: Mapping[str, Any] | None, form: str, verify: bool) -> dict[str, Any]:
    """Return the part of a request that all tasks get."""
    return {
        "package_version": BUILD,
        "savepoint": path,
        "savepoint_options": dict(storage_options or {}),
        "form": form,
        "verify": verify,
        "holder": f"a savepoint at {path}",
    }


def _take_under_hold(
    spark: SparkSession,
    reader: StateReader,
    stores: Sequence[tuple[StoreOfState, StateOptions]],
    common: Mapping[str, Any],
    batch: int | None,
) -> TakenSavepoint:
    """Take the savepoint while the query's folders are held."""
    parts = [
        {**common, **request_for(options), "operator": store.operator, "query_folder": store.query_folder}
        for store, options in stores
    ]
    try:
        for part in parts:
            part["hold"] = run_task(spark, "savepoint_tasks.begin", part)["hold"]
        return _take(spark, reader, [store for store, _ in stores], parts, common, batch)
    finally:
        for part in parts:
            if "hold" in part:
                release_hold(spark, part)


def _take(
    spark: SparkSession,
    reader: StateReader,
    stores: Sequence[StoreOfState],
    parts: Sequence[dict[str, Any]],
    common: Mapping[str, Any],
    batch: int | None,
) -> TakenSavepoint:
    """Take the savepoint of the last batch that is committed now that the holds are in place."""

    def save(committed: CommittedBatch) -> tuple[CommittedBatch, list[Any]]:
        return committed, _save(reader, stores, parts, committed)

    committed, rows = use_batch(reader, batch, save)
    ours = {store.operator_id for store in stores}
    others = [name for number, name in sorted(committed.operators.items()) if number not in ours]
    if others:
        _LOGGER.warning(
            "the savepoint at %s does not have the state of the query's other stateful operators, which are Spark's "
            "own: %s. In a query that starts from it they start without state",
            common["savepoint"],
            ", ".join(others),
        )
    request = {
        **common,
        "id": uuid.uuid4().hex,
        "made_ms": int(time.time() * 1000),
        "query_id": committed.query_id,
        "batch": committed.batch,
        "offsets": committed.offsets,
        "parts": list(parts),
    }
    return finish_savepoint(spark, request, rows)


def finish_savepoint(spark: SparkSession, request: Mapping[str, Any], rows: Sequence[Any]) -> TakenSavepoint:
    """Run a task that writes the manifest of the saved buckets; return the savepoint."""
    frame = spark.createDataFrame([(row.saved, bytes(row.pointer)) for row in rows], SAVED).coalesce(1)
    finish = task_entry("savepoint_tasks.finish", dict(request))
    answer = json.loads(frame.mapInArrow(finish, ANSWER).collect()[0].answer)
    copies = parse_copies((row.saved, row.pointer) for row in rows)
    sizes = [file.size_bytes for copy in copies for file in copy.saved.files]
    return TakenSavepoint(
        path=request["savepoint"],
        id=request["id"],
        form=request["form"],
        batch=request["batch"],
        watermark_ms=answer["watermark_ms"],
        files=len(sizes),
        size_bytes=sum(sizes),
        duplicated=sum(copy.duplicated for copy in copies),
        streamed=sum(copy.streamed for copy in copies),
        streamed_bytes=sum(copy.streamed_bytes for copy in copies),
    )


def _save(
    reader: StateReader, stores: Sequence[StoreOfState], parts: Sequence[dict[str, Any]], committed: CommittedBatch
) -> list[Any]:
    rows: list[Any] = []
    for store, part in zip(stores, parts, strict=True):
        request = {**part, "query_id": committed.query_id, "batch": committed.batch, "parts": list(parts)}
        with reader.pointers(store, committed.batch) as pointers:
            rows += pointers.mapInArrow(task_entry("savepoint_tasks.save", request), SAVED).collect()
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
    """Stop a query, and take the savepoint of its last committed batch.

    Parameters
    ----------
    query
        The running query.
    path, checkpoint_location, state, form, verify, storage_options
        See `take_savepoint`.
    spark
        The session; by default the active one.

    Returns
    -------
    TakenSavepoint
        The savepoint that was taken.

    Raises
    ------
    StateError
        See `take_savepoint`. Errors that can be detected beforehand are raised while the query still runs. After a
        later error the query is stopped, and you can call `take_savepoint` again.
    StreamingQueryException
        When the query has failed: no savepoint is taken. `take_savepoint` can still save its last committed batch.
    """
    if spark is None:
        from pyspark.sql import SparkSession as Session

        spark = Session.active()
    # Detect as many errors as possible while the query still runs.
    common = _make_request(_check_path(path), storage_options, form, verify)
    reader, stores = _open_reader(spark, os.fspath(checkpoint_location), state, form=form, verify=verify)
    run_task(spark, "savepoint_tasks.refuse", common)
    query.stop()
    query.awaitTermination()
    return _take_under_hold(spark, reader, stores, common, None)


def _open_reader(
    spark: SparkSession,
    checkpoint_location: str,
    state: ArrowState | Sequence[ArrowState],
    *,
    form: str,
    verify: bool,
) -> tuple[StateReader, list[tuple[StoreOfState, StateOptions]]]:
    """Return a reader of the query's state, and each of its stores with the options that say where its files are."""
    states = [state] if isinstance(state, ArrowState) else list(state)
    _check_arguments(states, form)
    check_flags(verify=verify)
    reader = StateReader(spark, checkpoint_location)
    return reader, _match_stores(reader.stores(), states, checkpoint_location)


def _check_arguments(states: Sequence[ArrowState], form: str) -> None:
    if form not in (NATIVE, CANONICAL):
        raise UsageError(f"form must be {NATIVE!r} or {CANONICAL!r}, not {form!r}")
    if not states or not all(isinstance(state, ArrowState) for state in states):
        raise UsageError(f"state must be the ArrowState of the query's operator, or a list of them, not {states!r}")
    names = [state.options.operator for state in states]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"state has two ArrowState for the operator {name!r}: give one for each operator")


def _match_stores(
    stores: Sequence[StoreOfState], states: Sequence[ArrowState], location: str
) -> list[tuple[StoreOfState, StateOptions]]:
    """Pair each of the query's stores with the options that say where its files are."""
    by_name = {state.options.operator: state.options for state in states}
    operators = {store.operator for store in stores}
    if not stores:
        raise MissingCheckpointError(
            f"{location} has no state of spark_state_ext: give the Spark checkpointLocation of a query that has "
            "committed a batch with data"
        )
    if operators != by_name.keys():
        raise UsageError(
            f"the query at {location} has the operators {', '.join(sorted(operators))}, but state names "
            f"{', '.join(sorted(by_name))}: give the ArrowState of each of the query's operators"
        )
    return [(store, by_name[store.operator]) for store in stores]


def _check_path(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    refuse_relative(text, "the path of a savepoint")
    return text.rstrip("/") or text
