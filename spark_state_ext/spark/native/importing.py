"""Bringing an existing job: what a stopped job on Spark's own operator has left becomes a savepoint and a checkpoint.

The state becomes a savepoint, read by Spark. The new checkpoint location goes on where the old one ends: offsets, the
last commit and what sources keep are copied, and in the place of Spark's state each bucket has a mark that names the
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
from spark_state_ext.savepoints.batch_logs import LoggedBatch, parsed_batch
from spark_state_ext.spark.client.savepoints import TakenSavepoint
from spark_state_ext.spark.client.settings import format_setting, refuse_unread_format, session_with
from spark_state_ext.spark.client.tables import TableSavepoint, save_table, saved_table
from spark_state_ext.spark.client.tasks import in_a_task
from spark_state_ext.spark.native.checksums import TableSum, observed, table_sum
from spark_state_ext.spark.native.marks import write_marks
from spark_state_ext.spark.native.spark_state import read_state, refuse_old_spark, translated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["IDLE_S", "ImportedJob", "import_native"]

_LOGGER = logging.getLogger("spark_state_ext")
# Seconds in which a stopped job has written nothing.
IDLE_S = 60.0
# Folder in the new checkpoint location, in which a query of Spark's writes the marks; the task knows it too.
_IMPORTING = "importing"


@dataclass(frozen=True)
class ImportedJob:
    """A job that was imported.

    Parameters
    ----------
    savepoint
        The savepoint with its state.
    checkpoint_location
        The new checkpoint location.
    query_id
        Spark's id of the query that goes on there.
    batch
        The last batch whose results the state has.
    replays
        Whether the next batch was planned and not committed: Spark runs it again, with the same input.
    watermark_ms
        The last batch's watermark; None: it had none.
    rows, states, timeouts
        Keys, and how many of them have a state and a timeout.
    checksum
        Sum of the hashes of all rows, by Spark: equal in the old state and in the savepoint.
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
    """Bring a stopped job on Spark's own ``applyInPandasWithState`` to this package, with its state and its offsets.

    The old checkpoint location is only read, so that the old job can go on from it. The same query goes on with the
    next batch, given an `ArrowState` with ``start_from=Savepoint(…)``, and the new checkpoint location.

    Parameters
    ----------
    spark
        A session, classic or Connect, of PySpark 4.0 or newer.
    checkpoint_location
        The stopped job's Spark checkpoint location: an absolute path or a URL, that Spark and fsspec call alike.
    savepoint
        Folder of the savepoint that the state becomes, which does not exist yet; as a `Savepoint` where it has other
        storage options.
    new_checkpoint_location
        Folder of the new checkpoint location, which does not exist yet or is empty.
    buckets, operator
        As the `ArrowState` of the new query has them.
    idle_s
        Refuse a job that has written to its checkpoint location this recently, as it may run in another application.
    storage_options
        Options for the fsspec file systems of the paths.

    Returns
    -------
    ImportedJob
        What was imported.

    Raises
    ------
    UsageError
        When an argument cannot work, on PySpark 3.5, or on 4.0 when the checkpoint has format 2.
    UnsupportedPlanError
        When the job has another stateful operator, or several.
    UnsupportedTypeError
        When a key or state column has a type that cannot be stored.
    LiveRunError
        When the job runs, or may.
    CorruptFileError, VersionSkewError
        When a log of the checkpoint is damaged, or newer than this release; when the savepoint has other rows than
        Spark's state.
    StorageError
        When Spark cannot read its state, or cannot write the new query's.
    PySparkException
        What tasks find comes as Spark's own error, with ours in its text: ``UsageError`` when there is something at a
        place that must be free, ``MissingCheckpointError`` when no batch is committed, ``CorruptFileError`` when files
        of the checkpoint are missing, ``LiveRunError`` when the job went on meanwhile, ``StorageError`` when a store
        fails.
        What was written then is of no use: remove it.

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
    # Names of operators and numbers of buckets are refused as an ArrowState refuses them.
    options = StateOptions(root="/", operator=operator)
    check_sizes(buckets, options.memory_bytes_max, 0, 0)
    told = _told(checkpoint_location, new_checkpoint_location, storage_options)
    found = in_a_task(spark, "look", told, "native")
    _refuse_running(spark, told["checkpoint"], found, idle_s)
    offsets = {int(number): text for number, text in found["offsets"].items()}
    logged = parsed_batch(found["batch"], found["planned"], offsets, found["commit"], told["checkpoint"])
    refuse_unread_format(told["checkpoint"], logged.checkpoint_format)
    with session_with(spark, format_setting(logged.checkpoint_format)) as session:
        taken, total, written = _imported(session, told, found, logged, _Target(target, operator, buckets))
    return ImportedJob(
        savepoint=taken,
        checkpoint_location=told["new_checkpoint"],
        query_id=written["query_id"],
        batch=logged.batch,
        replays=logged.planned,
        watermark_ms=logged.watermark_ms,
        rows=total.rows,
        states=total.states,
        timeouts=total.timeouts,
        checksum=total.checksum,
    )


@dataclass(frozen=True)
class _Target:
    """What the state becomes: a savepoint for an operator of so many buckets."""

    savepoint: Savepoint
    operator: str
    buckets: int


def _imported(
    spark: SparkSession, told: Mapping[str, Any], found: Mapping[str, Any], logged: LoggedBatch, target: _Target
) -> tuple[TakenSavepoint, TableSum, dict[str, Any]]:
    """The savepoint, what is in it, and what the task answers that wrote the checkpoint: the last of all."""
    location, path = told["checkpoint"], target.savepoint.path
    state = read_state(spark, location, logged.batch)
    file = OperatorFile(target.operator, "", target.buckets, state.keys.json(), state.state.json())
    key_fields(file.key_schema)
    state_fields(file.state_schema)
    rows, its_sum = observed(state.rows)
    with translated(location):
        taken = _saved(rows, file, target.savepoint, logged, found)
    in_a_task(spark, "reserve", dict(told), "native")
    before, after = its_sum(), table_sum(saved_table(spark, target.savepoint, with_defined=True))
    if before != after:
        # Perhaps rows were counted twice, of a task that ran twice: counted again by themselves, they are not.
        with translated(location):
            before = table_sum(state.rows)
    if before != after:
        raise CorruptFileError(
            f"the savepoint at {path} does not have what Spark's state had: {after} in place of {before}. The new "
            "checkpoint location was not finished. Remove both, and report this"
        )
    places = f"{location}/commits", f"{told['new_checkpoint']}/{_IMPORTING}"
    write_marks(spark, ImportMark(path, taken.id), target.buckets, logged, state.has_timeout, places)
    written = in_a_task(spark, "write_checkpoint", {**told, **found}, "native")
    if written["unknown"]:
        _LOGGER.warning(
            "%s has files in sources/ that are no logs of Spark's, which were copied as they are: %s",
            location,
            ", ".join(written["unknown"]),
        )
    return taken, before, written


def _told(
    old: str | os.PathLike[str], new: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What all tasks are told."""
    places = []
    for name, given in (("the checkpoint location", old), ("the new checkpoint location", new)):
        refuse_relative(os.fspath(given), name)
        places.append(os.fspath(given).rstrip("/"))
    if places[0] == places[1]:
        raise UsageError(f"both checkpoint locations are {places[0]}: give the new query one of its own")
    return {
        "package_version": BUILD,
        "checkpoint": places[0],
        "new_checkpoint": places[1],
        "checkpoint_options": dict(storage_options or {}),
    }


def _refuse_running(spark: SparkSession, where: str, found: Mapping[str, Any], idle_s: float) -> None:
    # Besides, this has Spark start what its reader of state asks for, which in a new session nothing else has.
    if any(str(query.id) == found["query_id"] for query in spark.streams.active):
        raise LiveRunError(f"the query of {where} runs in this application: stop it, and wait for its end")
    ago_s = found["written_ago_s"]
    if ago_s is not None and ago_s < idle_s:
        raise LiveRunError(
            f"the query of {where} may run: it wrote there {ago_s:.0f} s ago. Stop it, and wait until {idle_s:g} s "
            "have passed, or give idle_s=0 where it is known to have ended"
        )


def _saved(
    rows: DataFrame, file: OperatorFile, target: Savepoint, logged: LoggedBatch, found: Mapping[str, Any]
) -> TakenSavepoint:
    wanted = TableSavepoint(
        file,
        target.path,
        target.storage_options,
        has_timeout=True,
        has_defined=True,
        watermark_ms=logged.watermark_ms,
        query_id=found["query_id"],
        batch=logged.batch,
        offsets=found["offsets"][str(logged.batch)],
    )
    return save_table(rows, wanted)
