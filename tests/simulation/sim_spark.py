"""Spark's part of a partition's state: its files by batch, the memory of executors, and what Spark hands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim_parts import BucketState, Config, Memory, Partition

__all__ = ["TaskResult", "StateFiles"]


@dataclass(frozen=True)
class TaskResult:
    """What an attempt at a batch made of a partition.

    Parameters
    ----------
    partition
        The whole partition, as the attempt's executor has it in memory.
    called
        The buckets that were called.
    removed
        Buckets that no longer exist after the attempt.
    """

    partition: Partition
    called: frozenset[int]
    removed: frozenset[int] = frozenset()


class StateFiles:
    """Spark's state files of one partition, as the driver and all executors see them.

    Under checkpoint format 2, each batch has the whole result of one attempt. Under format 1 each batch has a file, which
    the first attempt or the last one wrote. It may hold only the called buckets; the others are in earlier batches' files.

    Parameters
    ----------
    config
        Configuration of the history.
    first
        The partition before the first batch.
    """

    def __init__(self, config: Config, first: Partition) -> None:
        self._whole = config.checkpoint_v2 or not config.changelog
        self._v2 = config.checkpoint_v2
        self._retained = config.retained
        self._base, self._base_batch = dict(first), -1
        # None: the bucket no longer exists.
        self._files: dict[int, Mapping[int, BucketState | None]] = {}
        self.batch = -1
        self.newest_ever = -1
        # When batches began, milliseconds; and how far back in time a query may go: 0 for as far as there are files.
        self.times_ms: dict[int, int] = {}
        self._window_ms = config.erase_window_ms
        self._newest_ms = 0

    @property
    def oldest(self) -> int:
        """The oldest batch that Spark retains and that a query may go back to."""
        oldest = max(-1, self.newest_ever - self._retained)
        if not self._window_ms:
            return oldest
        # The batch that was committed when the window began; but no batch whose files were deleted.
        candidates = [b for b, time_ms in self.times_ms.items() if time_ms <= self._newest_ms - self._window_ms]
        return max([oldest, self._base_batch, *(b for b in candidates if b <= self.batch)])

    @property
    def batches(self) -> list[int]:
        """The batches at which the query may start again."""
        return list(range(self.oldest, self.batch + 1))

    def at(self, batch: int) -> Partition:
        """Return the partition according to the files of a batch and earlier batches."""
        partition = dict(self._base)
        for file_batch in range(self._base_batch + 1, batch + 1):
            _apply_file(self._files[file_batch], partition)
        return partition

    def hand_out(self, executor: Memory, batch: int) -> Partition:
        """Return the partition that Spark gives to a task of a batch on an executor."""
        if not self._v2 and batch - 1 in executor.loaded:
            return executor.loaded[batch - 1]
        return self.at(batch - 1)

    def commit(self, batch: int, result: TaskResult) -> None:
        """Commit a batch with the result that counts, or whose file exists."""
        self._write(batch, result)
        self.batch = batch
        self.newest_ever = max(self.newest_ever, batch)
        self._newest_ms = max(self._newest_ms, self.times_ms.get(batch, 0))
        # Spark writes snapshots and deletes files before the oldest batch that it retains.
        while self._base_batch < self.oldest - 1:
            self._base_batch += 1
            _apply_file(self._files.pop(self._base_batch), self._base)

    def overwrite(self, batch: int, result: TaskResult) -> None:
        """Overwrite a batch's file with that of a late attempt."""
        if self._base_batch < batch <= self.batch:
            self._write(batch, result)

    def go_back(self, batch: int) -> None:
        """Start the query again after a batch."""
        self.batch = batch
        for later_batch in [b for b in self._files if b > batch]:
            del self._files[later_batch]
        for later_batch in [b for b in self.times_ms if b > batch]:
            del self.times_ms[later_batch]

    def list_reachable(self, executors: Sequence[Memory]) -> list[tuple[int, Partition]]:
        """Return every partition that Spark may still hand out, with its batch."""
        partitions = [(batch, self.at(batch)) for batch in self.batches]
        if not self._v2:
            partitions += [(self.batch, e.loaded[self.batch]) for e in executors if self.batch in e.loaded]
        return partitions

    def _write(self, batch: int, result: TaskResult) -> None:
        written_states = {b: state for b, state in result.partition.items() if self._whole or b in result.called}
        self._files[batch] = {**written_states, **dict.fromkeys(result.removed)}


def _apply_file(file: Mapping[int, BucketState | None], partition: dict[int, BucketState]) -> None:
    """Apply a batch's file to the partition of earlier files."""
    for bucket, state in file.items():
        if state is None:
            partition.pop(bucket, None)
        else:
            partition[bucket] = state
