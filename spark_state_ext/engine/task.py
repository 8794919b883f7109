"""`TaskInfo`: what a task knows about its query and batch."""

from __future__ import annotations

from dataclasses import dataclass

from spark_state_ext.commit.context import BATCHES_RETAINED

__all__ = ["TaskInfo"]


@dataclass(frozen=True)
class TaskInfo:
    """Query and batch of a streaming task, as far as Spark provides them.

    An action in a thread of the user's code knows neither, and every action inside `foreachBatch` over Spark Connect is
    one. So state must not depend on them.

    Parameters
    ----------
    query_id
        Spark's id of the query; empty if unknown.
    run_id
        For log readers only: Spark's id of the run, or the job group that `foreachBatch` set; empty if unknown.
    batch
        Number of the micro-batch; None if unknown.
    batches_retained
        Number of batches that Spark retains, or a larger number.
    partition
        The task's partition.
    partitions
        Number of partitions of Spark's stateful operator, according to the settings; None if unknown.
    attempt
        Spark's number of the attempt; unique over all attempts at all tasks.
    state_has_ids
        Spark's own state has checkpoint format 2 or above: what an attempt writes has an id, and the next batch
        continues from the committed attempt.
    stage
        Spark's number of the stage: the same for all attempts at a task, larger for later stages of the application.
    """

    query_id: str
    run_id: str
    batch: int | None
    batches_retained: int = BATCHES_RETAINED
    partition: int = 0
    partitions: int | None = None
    attempt: int | None = None
    state_has_ids: bool = False
    stage: int = 0
