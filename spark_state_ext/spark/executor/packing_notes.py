"""Notes from the packing stage to a bucket's call: the heartbeat, and the batch's new source partitions."""

from __future__ import annotations

from collections import OrderedDict

from arrow_schemas.partitions import PartitionAssignment
from spark_state_ext.engine.job import Job
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.partition_files import record_growth
from spark_state_ext.spark.shuffle.payload import decode_partitions, heartbeat_nonce
from spark_state_ext.worker.retry import call_with_retries

__all__ = ["KnownCounts", "PackingNotes"]


class KnownCounts:
    """The partition counts of streams that a process has recorded already, by query folder and run."""

    _MAX = 64

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], PartitionAssignment] = OrderedDict()

    def record_growth(self, job: Job, files: Folder, largest: dict[str, int]) -> None:
        """Record the partition counts that new partitions prove, unless they are recorded."""
        place = files.root, job.plan_id
        assignment = self._known.get(place)
        if assignment is not None and assignment.knows(largest):
            return
        timeout_s = job.options.commit.commit_timeout_ms / 1000
        self._known[place] = call_with_retries(lambda: record_growth(files, largest), timeout_s=timeout_s)
        while len(self._known) > self._MAX:
            self._known.popitem(last=False)


class PackingNotes:
    """The notes among the payloads of one call."""

    def __init__(self) -> None:
        # The number that came with the heartbeat; None without a heartbeat.
        self.heartbeat: bytes | None = None
        # Largest partition of each stream. Every bucket gets the same note, whichever rows it has.
        self._largest: dict[str, int] = {}

    def take(self, payload: bytes) -> bool:
        """Keep a payload if it is a note; return False if it holds rows."""
        nonce = heartbeat_nonce(payload)
        if nonce is not None:
            self.heartbeat = nonce
            return True
        largest = decode_partitions(payload)
        if largest is None:
            return False
        for stream, index in largest.items():
            self._largest[stream] = max(index, self._largest.get(stream, 0))
        return True

    def record_growth(self, known_counts: KnownCounts, job: Job, files: Folder) -> None:
        """Record the partition counts that new partitions prove; refuse the batch if they prove no declared count."""
        if self._largest:
            known_counts.record_growth(job, files, self._largest)
