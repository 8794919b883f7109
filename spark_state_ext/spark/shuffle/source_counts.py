"""Checking the number of partitions of a Kafka source against the plan, by Spark's log of offsets.

Spark writes ``offsets/<batch>`` below the checkpoint location before a batch runs, and its Kafka source lists all
partitions there. Tasks do not know the location, so the user gives it.
"""

from __future__ import annotations

import json

from arrow_schemas.damage import describe_damage
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.errors import CorruptFileError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.offsets import kafka_partitions
from spark_state_ext.worker.retry import call_with_retries

__all__ = ["check_partition_counts"]

_METADATA, _OFFSETS = "metadata", "offsets"


def check_partition_counts(job: Job, task: TaskInfo) -> None:
    """Raise if the source has a number of partitions that the plan cannot handle."""
    source = job.options.source_partition
    if source is None or source.checkpoint_location is None:
        return
    location, options = source.checkpoint_location, job.options
    # Options of an object store would be wrong for a local folder.
    folder = Folder(location, options.storage_options if "://" in location else None)
    timeout_s = options.commit.commit_timeout_ms / 1000
    log, log_name = call_with_retries(lambda: _read_newest_offsets(folder, task.query_id), timeout_s=timeout_s)
    topics, unknown = kafka_partitions(log, log_name)
    source.refuse_counts(topics, unknown, log_name)


def _read_newest_offsets(folder: Folder, query_id: str) -> tuple[str, str]:
    """Return the newest log of offsets and its location.

    It may not be the batch's own: the batch number cannot be trusted, as a user's thread may run with the number of an
    earlier batch. A later log is as good, because sources never shrink.
    """
    offsets = folder.child(_OFFSETS)
    batches = [int(name) for name in offsets.names() if name.isdecimal()]
    if not batches:
        raise UsageError(
            f"checkpoint_location={folder.root!r} has no offsets although a batch is running: give the "
            "checkpointLocation of this query"
        )
    if query_id and (other := _read_query_id(folder)) != query_id:
        raise UsageError(
            f"checkpoint_location={folder.root!r} belongs to the query {other}, but this is query {query_id}: give "
            "this query's own checkpointLocation"
        )
    name = str(max(batches))
    return offsets.get(name).decode(), offsets.where(name)


def _read_query_id(folder: Folder) -> str:
    name = folder.where(_METADATA)
    try:
        return str(json.loads(folder.get(_METADATA))["id"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{name} does not hold a query's id: {describe_damage(error)}. Restore the file"
        ) from error
