"""What a task knows of its query and batch."""

from __future__ import annotations

from dataclasses import dataclass

from spark_state_ext.commit.context import BATCHES_RETAINED

__all__ = ["TaskInfo"]


@dataclass(frozen=True)
class TaskInfo:
    """Query and batch of a streaming task, as far as Spark tells.

    An action in a thread that the user's code made is told nothing, and every action inside `foreachBatch` over Spark
    Connect is one. So nothing that state depends on may need to be told.

    Parameters
    ----------
    query_id
        Spark's id of the query; empty where tasks are not told it.
    run_id
        For people only: Spark's id of the run, or what `foreachBatch` set as the job group; empty where not told.
    batch
        Number of the micro-batch; None where tasks are not told it.
    batches_retained
        How many batches Spark retains, or more.
    partition
        The task's partition.
    partitions
        Over how many partitions Spark's stateful operator spreads its keys, as far as settings tell; None where not.
    attempt
        Spark's number of the attempt, which no other attempt at any task has.
    state_has_ids
        Spark's own state has checkpoint format 2 or above: what an attempt writes of a partition has an id, and the
        next batch goes on from the one that was committed.
    stage
        Spark's number of the stage: all attempts at a task have the same, later ones in the application larger ones.
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
