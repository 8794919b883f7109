"""What the calls of a task leave to its last one: waiting for uploads of deltas that are too large to go inline.

Spark commits a task's state after the last call returned. So a call need not wait for its own uploads, when it is
certain that a later call of the same task will. Python is not told which call is the last, but every batch with a
heartbeat calls each bucket, and bucket *b* goes to partition *b* mod P. P is told by a setting, which `foreachBatch`
may change without Spark's operator noticing. So it is only relied on where an earlier batch of the run has found it
right in every bucket: each call compares *b* mod P with its partition, notes what it found right in its pointer, and
leaves a file where it did not. A batch that was committed without such a file was right for all buckets
(`docs/design/003`).
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
    """Where a process knows whether buckets were found in other partitions than was told."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> bool | None:
        """Whether there is one; None where nobody has looked."""
        return self._found.get(key)

    def note(self, key: str, found: bool) -> None:
        """Remember it."""
        self._found[key] = found
        if len(self._found) > _RUNS_MAX:
            self._found.popitem(last=False)


@dataclass(frozen=True)
class Partitioning:
    """How a task's run spreads buckets over its partitions.

    Parameters
    ----------
    run_id
        The plan that the run was started from; empty where nothing is told.
    partitions
        Number of partitions as told; None where it is not.
    partition
        The task's.
    buckets
        The operator's number of buckets.
    differences
        What the process knows.
    """

    run_id: str
    partitions: int | None
    partition: int
    buckets: int
    differences: Differences = field(default_factory=Differences, compare=False)

    def agrees(self, bucket: int) -> bool:
        """Whether a bucket that is called here belongs here, by what was told."""
        return self.partitions is not None and bucket % self.partitions == self.partition

    @property
    def told(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.run_id) and self.partitions is not None and self.partitions > 0

    def noted(self, bucket: int, query_folder: Folder) -> tuple[str, int] | None:
        """What a call with a heartbeat notes in its pointer; where it found a difference, a file says so."""
        if not self.told or self.partitions is None:
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
        """The buckets that this task calls for certain; empty where nothing is certain."""
        if not self.told or self.partitions is None or pointer.partitioning != (self.run_id, self.partitions):
            return frozenset()
        if not self.agrees(pointer.bucket):
            return frozenset()
        # Remembered for the number that was told: with another one, others may have found a difference since.
        if self.differences.get(self._key(query_folder)) is None:
            try:
                self.differences.note(self._key(query_folder), query_folder.exists(self._file))
            except StorageError as error:
                _LOGGER.warning("this call waits for its own uploads, as %s", error)
                return frozenset()
        if self.differences.get(self._key(query_folder)):
            return frozenset()
        return frozenset(range(self.partition, self.buckets, self.partitions))

    def is_last(self, called: Collection[int]) -> bool:
        """Whether a task with data has called all of its buckets, by what was told; for what need not be certain."""
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
    """One attempt at a task, as far as its calls have come.

    Parameters
    ----------
    called
        Buckets whose call is over.
    left
        Uploads that somebody has to wait for before the task ends.
    inline_bytes
        What has gone inline.
    """

    called: set[int] = field(default_factory=set)
    left: list[Upload] = field(default_factory=list)
    inline_bytes: int = 0

    def may_leave(self, bucket: int, expected: frozenset[int]) -> bool:
        """Whether a later call will wait for what this one leaves."""
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
        """A call is over: wait, where no later one will; returns how long, in seconds."""
        self.left += left
        self.called.add(bucket)
        if not self.left or (bucket in expected and expected - self.called):
            return 0.0
        waiting, self.left = self.left, []
        return await_all(waiting, uploads, options, while_waiting=while_waiting)


class TaskEnds:
    """The attempts of a process at tasks."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[int, TaskEnd] = OrderedDict()

    def of(self, attempt: int | None) -> TaskEnd:
        """That of the present attempt; Spark's number for it, which no other attempt has."""
        if attempt is None:
            return TaskEnd()
        if attempt not in self._attempts:
            self._attempts[attempt] = TaskEnd()
            if len(self._attempts) > _ATTEMPTS_MAX:
                self._attempts.popitem(last=False)
        return self._attempts[attempt]
