"""Spark's part of a partition's state: what its files hold by batch, what executors have in memory, and what is handed out."""

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
        All of it, as the attempt's executor has it in memory.
    called
        The buckets that were called.
    removed
        Those of them that are no more.
    """

    partition: Partition
    called: frozenset[int]
    removed: frozenset[int] = frozenset()


class StateFiles:
    """Of one partition, as the driver and all executors find them.

    Under checkpoint format 2 each batch has one attempt, whole. Under format 1 each batch has a file, the first
    attempt's or the last one's, and that may hold only what was called; what was not is that of the files before.

    Parameters
    ----------
    config
        What stays the same.
    first
        The partition before the first batch.
    """

    def __init__(self, config: Config, first: Partition) -> None:
        self._whole = config.checkpoint_v2 or not config.changelog
        self._v2 = config.checkpoint_v2
        self._retained = config.retained
        self._base, self._base_batch = dict(first), -1
        # None: the bucket is no more.
        self._files: dict[int, Mapping[int, BucketState | None]] = {}
        self.batch = -1
        self.newest_ever = -1
        # When batches were begun, and how far back one may go by time, milliseconds; 0: as far as there are files.
        self.times_ms: dict[int, int] = {}
        self._window_ms = config.erase_window_ms
        self._newest_ms = 0

    @property
    def oldest(self) -> int:
        """The oldest batch that Spark retains, and to which a query may go back."""
        oldest = max(-1, self.newest_ever - self._retained)
        if not self._window_ms:
            return oldest
        # The one that counted when the window began; not below one that was deleted.
        until = [b for b, time_ms in self.times_ms.items() if time_ms <= self._newest_ms - self._window_ms]
        return max([oldest, self._base_batch, *(b for b in until if b <= self.batch)])

    @property
    def batches(self) -> list[int]:
        """Those at which the query may start again."""
        return list(range(self.oldest, self.batch + 1))

    def at(self, batch: int) -> Partition:
        """The partition as the files of a batch and those before have it."""
        found = dict(self._base)
        for written in range(self._base_batch + 1, batch + 1):
            _lay(self._files[written], found)
        return found

    def handed_out(self, executor: Memory, batch: int) -> Partition:
        """What Spark gives a task of a batch on an executor."""
        if not self._v2 and batch - 1 in executor.loaded:
            return executor.loaded[batch - 1]
        return self.at(batch - 1)

    def commit(self, batch: int, made: TaskResult) -> None:
        """A batch is over, and this is what counts, or whose file is there."""
        self._write(batch, made)
        self.batch = batch
        self.newest_ever = max(self.newest_ever, batch)
        self._newest_ms = max(self._newest_ms, self.times_ms.get(batch, 0))
        # Spark writes a snapshot now and then, and deletes what is older than the oldest batch.
        while self._base_batch < self.oldest - 1:
            self._base_batch += 1
            _lay(self._files.pop(self._base_batch), self._base)

    def overwrite(self, batch: int, made: TaskResult) -> None:
        """A late attempt's file takes the place of another's, whatever has happened since."""
        if self._base_batch < batch <= self.batch:
            self._write(batch, made)

    def go_back(self, batch: int) -> None:
        """The query starts again after a batch."""
        self.batch = batch
        for later in [b for b in self._files if b > batch]:
            del self._files[later]
        for later in [b for b in self.times_ms if b > batch]:
            del self.times_ms[later]

    def reachable(self, executors: Sequence[Memory]) -> list[tuple[int, Partition]]:
        """Every partition that Spark may still hand out, with its batch."""
        found = [(batch, self.at(batch)) for batch in self.batches]
        if not self._v2:
            found += [(self.batch, e.loaded[self.batch]) for e in executors if self.batch in e.loaded]
        return found

    def _write(self, batch: int, made: TaskResult) -> None:
        there = {b: held for b, held in made.partition.items() if self._whole or b in made.called}
        self._files[batch] = {**there, **dict.fromkeys(made.removed)}


def _lay(file: Mapping[int, BucketState | None], partition: dict[int, BucketState]) -> None:
    """Lay what a batch's file has over what was there before."""
    for bucket, held in file.items():
        if held is None:
            partition.pop(bucket, None)
        else:
            partition[bucket] = held
