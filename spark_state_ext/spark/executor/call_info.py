"""The input of a call from Spark: the job, the bucket, its pointer, the batch and the batch's clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspark.sql.streaming.state import GroupState

from arrow_schemas.import_mark import ImportMark
from arrow_schemas.pointer import Pointer
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.spark.executor.key_work import Times

__all__ = ["CallInfo"]


@dataclass(frozen=True)
class CallInfo:
    """The input of a call.

    Parameters
    ----------
    job, bucket
        The job, and the number of the bucket.
    task
        The query and the batch, as far as Spark passes them to the task.
    times
        The batch's clock.
    stored
        The pointer that Spark hands out; None if the bucket has no state yet.
    imported
        What Spark hands out instead of a pointer until the first call of a bucket whose state was imported.
    """

    job: Job
    bucket: int
    task: TaskInfo
    times: Times
    stored: Pointer | None
    imported: ImportMark | None = None

    @staticmethod
    def of(job: Job, bucket: int, state: GroupState, task: TaskInfo) -> CallInfo:
        """Return the input of a call, from a bucket's state in Spark and from the task."""
        times, stored = Times.of(state), state.getOption
        value = bytes(stored[0]) if stored is not None else b""
        imported = ImportMark.decode(value)
        is_pointer = stored is not None and imported is None
        pointer = Pointer.decode(value, job.options.pointer_read) if is_pointer else None
        info = CallInfo(job, bucket, task, times, pointer, imported)
        return info if pointer is None else info.with_later_watermark(pointer)

    def with_later_watermark(self, pointer: Pointer) -> CallInfo:
        """Return the same input, with the pointer's watermark if it is later than Spark's.

        The watermark of a query that starts from a snapshot begins again at 0.
        """
        times = self.times
        if not times.watermark_present or (pointer.watermark_ms or 0) <= times.watermark_ms:
            return self
        return replace(self, times=replace(times, watermark_ms=pointer.watermark_ms or 0))

    @property
    def batch(self) -> int:
        """Number of the batch; the number of earlier calls if Spark does not pass it to the task."""
        before = self.stored.batch if self.stored is not None else -1
        # A thread from an earlier batch may pass the number of that batch (`_refuse_later_pointer`).
        return max(before + 1, -1 if self.task.batch is None else self.task.batch)
