"""Importing a job: the state of a stopped job on Spark's own operator becomes a savepoint and a new checkpoint.

Spark reads the state into the savepoint. The new checkpoint location continues where the old one ends: the offsets, the
last commit and the records of sources are copied. Instead of Spark's state each bucket has a mark that names the
savepoint (`docs/operating/importing.md`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arrow_schemas.import_mark import ImportMark
from arrow_schemas.operator import OperatorFile
from arrow_schemas.spark_types import key_fields, state_fields
from spark_state_ext.engine.job import BUILD
from spark_state_ext.engine.limits import check_sizes
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.errors import CorruptFileError, LiveRunError, UsageError
from spark_state_ext.files.folder import refuse_relative
from spark_state_ext.savepoints.batch_logs import LoggedBatch, parse_batch
from spark_state_ext.spark.client.savepoints import TakenSavepoint
from spark_state_ext.spark.client.settings import make_format_setting, open_session_with, refuse_unread_format
from spark_state_ext.spark.client.tables import TableSavepoint, read_saved_table, save_table
from spark_state_ext.spark.client.tasks import run_task
from spark_state_ext.spark.native.checksums import TableSum, observe_sum, sum_table
from spark_state_ext.spark.native.marks import write_marks
from spark_state_ext.spark.native.spark_state import read_state, refuse_old_spark, translate_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["IDLE_S", "ImportedJob", "import_native"]

_LOGGER = logging.getLogger("spark_state_ext")
# A job counts as stopped if it has not written for this long, seconds.
IDLE_S = 60.0
# Folder in the new checkpoint location for the query that writes the marks; `executor.import_tasks` uses the same name.
_IMPORTING = "importing"


@dataclass(frozen=True)
class ImportedJob:
    """A job that was imported.

    Parameters
    ----------
    savepoint
        The savepoint with the job's state.
    checkpoint_location
        The new checkpoint location.
    query_id
        Spark's id of the query that continues there.
    batch
        The last batch that the state includes.
    replays
        Whether the next batch was planned but not committed: Spark then repeats it with the same input.
    watermark_ms
        The last batch's watermark; None if it had no watermark.
    rows, states, timeouts
        Number of keys, and how many of them have a state and a timeout.
    checksum
        Sum of Spark's hashes of all rows: equal in the old state and in the savepoint.
    """

    savepoint: TakenSavepoint
    checkpoint_location: str
    query_id: str
    batch: int
    replays: bool
    watermark_ms: int | None
    rows: int
    states: int
    timeouts: int
    checksum: int


def import_native(
    spark: SparkSession,
    checkpoint_location: str | os.PathLike[str],
    savepoint: Savepoint | str | os.PathLike[str],
    new_checkpoint_location: str | os.PathLike[str],
    *,
    buckets: int = 16,
    operator: str = "state",
    idle_s: float = IDLE_S,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportedJob:
    """Import a stopped job on Spark's own ``applyInPandasWithState``, with its state and its offsets.

    The old checkpoint location is only read, so the old job can still continue from it. To continue with the next
    batch, start the same query on an `ArrowState` with ``start_from=Savepoint(…)`` and the new checkpoint location.

    Parameters
    ----------
    spark
        A session, classic or Connect, of PySpark 4.0 or newer.
    checkpoint_location
        The stopped job's Spark checkpoint location: an absolute path or a URL that means the same to Spark and fsspec.
    savepoint
        Folder of the savepoint to be made, which must not exist yet; a `Savepoint` if it needs other storage options.
    new_checkpoint_location
        Folder of the new checkpoint location, which must not exist yet or be empty.
    buckets, operator
        As in the `ArrowState` of the new query.
    idle_s
        Refuse a job that wrote to its checkpoint location less than this long ago, seconds: it may still run elsewhere.
    storage_options
        Options for the fsspec file systems of the paths.

    Returns
    -------
    ImportedJob
        The imported job.

    Raises
    ------
    UsageError
        When an argument cannot work, on PySpark 3.5, or on 4.0 when the checkpoint has format 2.
    UnsupportedPlanError
        When the job has several stateful operators, or one of another kind.
    UnsupportedTypeError
        When a key or state column has a type that cannot be stored.
    LiveRunError
        When the job runs or may run.
    CorruptFileError, VersionSkewError
        When a log of the checkpoint is damaged, or newer than this release; when the savepoint's rows differ from
        Spark's state.
    StorageError
        When Spark cannot read the old state, or cannot write the new query's state.
    PySparkException
        Errors in tasks arrive as Spark's own error, with ours in its text: ``UsageError`` when a folder that must be
        new is not empty, ``MissingCheckpointError`` when no batch is committed, ``CorruptFileError`` when files of
        the checkpoint are missing, ``LiveRunError`` when the job continued meanwhile, ``StorageError`` when a store
        fails.
        Files that were written before the error are useless: remove them.

    Examples
    --------
    >>> job = import_native(  # doctest: +SKIP
    ...     spark, "/checkpoints/orders", "/savepoints/orders", "/checkpoints/orders-2", buckets=16, operator="orders"
    ... )
    >>> job.rows  # doctest: +SKIP
    1000000
    """
    refuse_old_spark()
    target = (
        savepoint
        if isinstance(savepoint, Savepoint)
        else Savepoint(os.fspath(savepoint).rstrip("/"), storage_options=storage_options or {})
    )
    # Check the operator's name and the number of buckets as ArrowState does.
    options = StateOptions(root="/", operator=operator)
    check_sizes(buckets, options.memory_bytes_max, 0, 0)
    request = _make_request(checkpoint_location, new_checkpoint_location, storage_options)
    job = run_task(spark, "import_tasks.look", request)
    _refuse_running(spark, request["checkpoint"], job, idle_s)
    offsets = {int(number): text for number, text in job["offsets"].items()}
    logged = parse_batch(job["batch"], job["planned"], offsets, job["commit"], request["checkpoint"])
    refuse_unread_format(request["checkpoint"], logged.checkpoint_format)
    with open_session_with(spark, make_format_setting(logged.checkpoint_format)) as session:
        result, table_sum, checkpoint = _import(session, request, job, logged, _Target(target, operator, buckets))
    return ImportedJob(
        savepoint=result,
        checkpoint_location=request["new_checkpoint"],
        query_id=checkpoint["query_id"],
        batch=logged.batch,
        replays=logged.planned,
        watermark_ms=logged.watermark_ms,
        rows=table_sum.rows,
        states=table_sum.states,
        timeouts=table_sum.timeouts,
        checksum=table_sum.checksum,
    )


@dataclass(frozen=True)
class _Target:
    """The savepoint to be made, and its operator and number of buckets."""

    savepoint: Savepoint
    operator: str
    buckets: int


def _import(
    spark: SparkSession, request: Mapping[str, Any], job: Mapping[str, Any], logged: LoggedBatch, target: _Target
) -> tuple[TakenSavepoint, TableSum, dict[str, Any]]:
    """Write the savepoint and then the checkpoint; return the savepoint, its sums, and the last task's answer."""
    location, path = request["checkpoint"], target.savepoint.path
    state = read_state(spark, location, logged.batch)
    file = OperatorFile(target.operator, "", target.buckets, state.keys.json(), state.state.json())
    key_fields(file.key_schema)
    state_fields(file.state_schema)
    rows, get_sum = observe_sum(state.rows)
    with translate_errors(location):
        savepoint = _save_rows(rows, file, target.savepoint, logged, job)
    run_task(spark, "import_tasks.reserve", dict(request))
    before, after = get_sum(), sum_table(read_saved_table(spark, target.savepoint, with_defined=True))
    if before != after:
        # A task that ran twice may have been counted twice by the observation; a separate count is exact.
        with translate_errors(location):
            before = sum_table(state.rows)
    if before != after:
        raise CorruptFileError(
            f"the savepoint at {path} differs from Spark's state: it has {after} instead of {before}. The new "
            "checkpoint location is not complete. Remove both, and report this"
        )
    places = f"{location}/commits", f"{request['new_checkpoint']}/{_IMPORTING}"
    write_marks(spark, ImportMark(path, savepoint.id), target.buckets, logged, state.has_timeout, places)
    answer = run_task(spark, "import_tasks.write_checkpoint", {**request, **job})
    if answer["unknown"]:
        _LOGGER.warning(
            "%s has files in sources/ that are not logs of Spark; they were copied unchanged: %s",
            location,
            ", ".join(answer["unknown"]),
        )
    return savepoint, before, answer


def _make_request(
    old: str | os.PathLike[str], new: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the request that all tasks get."""
    places = []
    for name, location in (("the checkpoint location", old), ("the new checkpoint location", new)):
        refuse_relative(os.fspath(location), name)
        places.append(os.fspath(location).rstrip("/"))
    if places[0] == places[1]:
        raise UsageError(f"both checkpoint locations are {places[0]}: give the new query a location of its own")
    return {
        "package_version": BUILD,
        "checkpoint": places[0],
        "new_checkpoint": places[1],
        "checkpoint_options": dict(storage_options or {}),
    }


def _refuse_running(spark: SparkSession, location: str, job: Mapping[str, Any], idle_s: float) -> None:
    # Using `spark.streams` also starts what Spark's state reader needs, which is missing in a new session.
    if any(str(query.id) == job["query_id"] for query in spark.streams.active):
        raise LiveRunError(f"the query of {location} runs in this application: stop it, and wait until it has ended")
    ago_s = job["written_ago_s"]
    if ago_s is not None and ago_s < idle_s:
        raise LiveRunError(
            f"the query of {location} may be running: it wrote there {ago_s:.0f} s ago. Stop it and wait until "
            f"{idle_s:g} s have passed, or give idle_s=0 if you know that it has ended"
        )


def _save_rows(
    rows: DataFrame, file: OperatorFile, target: Savepoint, logged: LoggedBatch, job: Mapping[str, Any]
) -> TakenSavepoint:
    table = TableSavepoint(
        file,
        target.path,
        target.storage_options,
        has_timeout=True,
        has_defined=True,
        watermark_ms=logged.watermark_ms,
        query_id=job["query_id"],
        batch=logged.batch,
        offsets=job["offsets"][str(logged.batch)],
    )
    return save_table(rows, table)
