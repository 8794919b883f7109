"""Read the query and batch of a task on an executor, as far as Spark passes them."""

from __future__ import annotations

from pyspark import TaskContext

from spark_state_ext.commit.context import BATCHES_RETAINED
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.task import TaskInfo

__all__ = [
    "current_task",
]


_RETAINED = "spark.sql.streaming.minBatchesToRetain"
# Since Spark 4.1 stateful operators use the first setting, if it is set.
_PARTITIONS = ("spark.sql.streaming.internal.stateStore.partitions", "spark.sql.shuffle.partitions")
_STATE_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"


def current_task(job: Job) -> TaskInfo:
    """Return the query and batch of the task that runs in this process."""
    context = TaskContext.get()
    query_id = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
    batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
    # The value when the query started, which may differ from the planned one. Spark passes only settings that are not
    # its defaults. Without a value, the larger of its default and the planned value is safe.
    setting = context.getLocalProperty(_RETAINED) if context is not None else None
    retained = int(setting) if setting else max(BATCHES_RETAINED, job.batches_retained)
    if context is None:
        return TaskInfo("", "", None, retained)
    stage = context.stageId()
    if not query_id or batch is None:
        attempt = context.taskAttemptId()
        return TaskInfo("", "", None, retained, context.partitionId(), attempt=attempt, stage=stage)
    counts = [context.getLocalProperty(name) for name in _PARTITIONS]
    return TaskInfo(
        query_id,
        context.getLocalProperty("spark.jobGroup.id") or "",
        int(batch),
        retained,
        context.partitionId(),
        next((int(count) for count in counts if count), None),
        context.taskAttemptId(),
        # If it is not set: Spark's default, which is 1 in all releases so far, or a Spark before 4.0.
        int(context.getLocalProperty(_STATE_FORMAT) or 1) >= 2,
        stage,
    )
