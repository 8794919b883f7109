"""Deferred uploads: a task's last call waits for uploads of deltas that are too large to go inline.

Spark commits a task's state after the task's last call returned. So a call need not wait for its own uploads if a later
call of the same task certainly will. Python does not know which call is the last, but every batch with a heartbeat
calls each bucket, and bucket *b* goes to partition *b* mod P. P comes from a setting, which `foreachBatch` may change
without Spark's operator noticing. So P is relied on only after an earlier batch of the run confirmed it for every
bucket: each call compares *b* mod P with its partition. If they agree, the call notes that in its pointer; if not, it
writes a file. If a batch was committed without such a file, P was right for all buckets (`docs/design/003`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from arrow_schemas.pointer import Pointer
from spark_state_ext.commit.committer import await_all
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.uploads import Upload, Uploads
from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder

__all__ = ["Differences", "Partitioning", "TaskEnd", "TaskEnds"]

_LOGGER = logging.getLogger("spark_state_ext")
_ATTEMPTS_MAX = 16
_RUNS_MAX = 256


class Differences:
    """A process's memory of whether buckets were found in other partitions than the setting says."""

    def __init__(self) -> None:
        self._differs: OrderedDict[str, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._differs)

    def get(self, key: str) -> bool | None:
        """True if there is a difference, False if not, None if that is unknown."""
        return self._differs.get(key)

    def note(self, key: str, differs: bool) -> None:
        """Remember whether there is a difference."""
        self._differs[key] = differs
        if len(self._differs) > _RUNS_MAX:
            self._differs.popitem(last=False)


@dataclass(frozen=True)
class Partitioning:
    """How a task's run spreads buckets over its partitions.

    Parameters
    ----------
    run_id
        Id of the plan that the run was started from; empty if unknown.
    partitions
        Number of partitions according to the setting; None if unknown.
    partition
        The task's partition.
    buckets
        The operator's number of buckets.
    differences
        Differences that the process knows of.
    """

    run_id: str
    partitions: int | None
    partition: int
    buckets: int
    differences: Differences = field(default_factory=Differences, compare=False)

    def agrees(self, bucket: int) -> bool:
        """True if a bucket belongs to this partition according to the setting."""
        return self.partitions is not None and bucket % self.partitions == self.partition

    @property
    def is_comparable(self) -> bool:
        """True if the run and its number of partitions are known, so that partitions can be compared."""
        return bool(self.run_id) and self.partitions is not None and self.partitions > 0

    def noted(self, bucket: int, query_folder: Folder) -> tuple[str, int] | None:
        """Return what a call with a heartbeat notes in its pointer; write a file instead if there is a difference."""
        if not self.is_comparable or self.partitions is None:
            return None
        if self.agrees(bucket):
            return self.run_id, self.partitions
        if not self.differences.get(self._key(query_folder)):
            query_folder.create(
                self._file, f"bucket {bucket} is in partition {self.partition} of {self.partitions}".encode()
            )
            self.differences.note(self._key(query_folder), True)
        return None

    def expected(self, pointer: Pointer, query_folder: Folder) -> frozenset[int]:
        """Return the buckets that this task certainly calls; empty if that is not certain."""
        if not self.is_comparable or self.partitions is None or pointer.partitioning != (self.run_id, self.partitions):
            return frozenset()
        if not self.agrees(pointer.bucket):
            return frozenset()
        # Remembered per number of partitions: with another number, other tasks may have found a difference since.
        if self.differences.get(self._key(query_folder)) is None:
            try:
                self.differences.note(self._key(query_folder), query_folder.exists(self._file))
            except StorageError as error:
                _LOGGER.warning("this call waits for its own uploads because a file could not be looked up: %s", error)
                return frozenset()
        if self.differences.get(self._key(query_folder)):
            return frozenset()
        return frozenset(range(self.partition, self.buckets, self.partitions))

    def is_last(self, called: Collection[int]) -> bool:
        """True if a task with data has probably called all of its buckets; relies on the unconfirmed setting."""
        if self.partitions is None or self.partitions <= 0:
            return False
        return set(range(self.partition, self.buckets, self.partitions)) <= set(called)

    @property
    def _file(self) -> str:
        return f"spread-{self.run_id}"

    def _key(self, query_folder: Folder) -> str:
        return f"{query_folder.identity} {self.run_id} {self.partitions}"


@dataclass
class TaskEnd:
    """The progress of one attempt at a task.

    Parameters
    ----------
    called
        Buckets whose call has ended.
    left
        Uploads that a later call must wait for before the task ends.
    inline_bytes
        Size of the task's inline deltas.
    """

    called: set[int] = field(default_factory=set)
    left: list[Upload] = field(default_factory=list)
    inline_bytes: int = 0

    def may_leave(self, bucket: int, expected: frozenset[int]) -> bool:
        """True if a later call will wait for uploads that this call defers."""
        return bucket in expected and bool(expected - self.called - {bucket})

    def over(
        self,
        bucket: int,
        left: Iterable[Upload],
        expected: frozenset[int],
        uploads: Uploads,
        options: CommitOptions,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> float:
        """End a call: wait for deferred uploads if no later call will; return the seconds waited."""
        self.left += left
        self.called.add(bucket)
        if not self.left or (bucket in expected and expected - self.called):
            return 0.0
        uploads_to_await, self.left = self.left, []
        return await_all(uploads_to_await, uploads, options, while_waiting=while_waiting)


class TaskEnds:
    """The attempts at tasks that run in a process."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[int, TaskEnd] = OrderedDict()

    def of(self, attempt: int | None) -> TaskEnd:
        """Return the progress of an attempt, by Spark's number for it, which is unique; None: a new one."""
        if attempt is None:
            return TaskEnd()
        if attempt not in self._attempts:
            self._attempts[attempt] = TaskEnd()
            if len(self._attempts) > _ATTEMPTS_MAX:
                self._attempts.popitem(last=False)
        return self._attempts[attempt]
