"""Comparing the number of partitions that a Kafka source really has with the plan, by Spark's log of offsets.

Spark writes ``offsets/<batch>`` below the checkpoint location before a batch runs, and its Kafka source names all
partitions there. Tasks are not told the location, so the user gives it.
"""

from __future__ import annotations

import json

from arrow_schemas.damage import damage_in
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.errors import CorruptFileError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.offsets import kafka_partitions
from spark_state_ext.worker.retry import retried

__all__ = ["refuse_uncounted"]

_METADATA, _OFFSETS = "metadata", "offsets"


def refuse_uncounted(job: Job, task: TaskInfo) -> None:
    """Refuse a batch whose source has a number of partitions that the plan cannot follow."""
    source = job.options.source_partition
    if source is None or source.checkpoint_location is None:
        return
    location, options = source.checkpoint_location, job.options
    # Options of an object store are wrong for a local folder.
    folder = Folder(location, options.storage_options if "://" in location else None)
    timeout_s = options.commit.commit_timeout_ms / 1000
    log, where = retried(lambda: _newest_offsets(folder, task.query_id), timeout_s=timeout_s)
    topics, unread = kafka_partitions(log, where)
    source.refuse_counts(topics, unread, where)


def _newest_offsets(folder: Folder, query_id: str) -> tuple[str, str]:
    """The log of offsets that Spark wrote last, and where it is.

    Not the batch's own by its number: a thread of the user's may run with the number of an earlier batch. A late task
    of an earlier batch may get a later log, which is as good, as sources never shrink.
    """
    offsets = folder.child(_OFFSETS)
    batches = [int(name) for name in offsets.names() if name.isdecimal()]
    if not batches:
        raise UsageError(
            f"checkpoint_location={folder.root!r} has no offsets, though a batch runs: give the checkpointLocation of "
            "this query"
        )
    if query_id and (other := _query_id(folder)) != query_id:
        raise UsageError(
            f"checkpoint_location={folder.root!r} is that of the query with id {other}, and this is query {query_id}: "
            "give this query's own checkpointLocation"
        )
    name = str(max(batches))
    return offsets.get(name).decode(), offsets.where(name)


def _query_id(folder: Folder) -> str:
    where = folder.where(_METADATA)
    try:
        return str(json.loads(folder.get(_METADATA))["id"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{where} does not hold a query's id: {damage_in(error)}. Bring the file back"
        ) from error
