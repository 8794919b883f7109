"""Parts of the simulated world in which queries are rescaled: keys at the borders of buckets, and what attempts make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from sim_parts import Attempt, Changes, Config, Model, Numbers, Partition
from sim_spark import StateFiles, TaskResult

from arrow_schemas import BucketMap
from spark_state_ext.engine.job import Job

__all__ = [
    "COUNTS",
    "HASHES",
    "ALL_KEYS",
    "MovedResult",
    "MovingFiles",
    "PlannedAttempt",
    "RescaleConfig",
    "changes_in",
    "keys_of",
    "of_bucket",
    "only",
    "whole",
]

COUNTS = (1, 2, 3, 4)


def _hashes() -> dict[int, int]:
    """Of keys to both sides of each border between buckets, as near to it as there are hashes; and of two others."""
    borders = sorted({BucketMap(count).range_of(bucket)[0] for count in COUNTS for bucket in range(count)} - {0})
    beside = [(border << 32, (border << 32) - 1) for border in borders]
    return dict(enumerate([*(it for both in beside for it in both), 0, 2**64 - 1]))


HASHES = _hashes()
ALL_KEYS = frozenset(HASHES)


def keys_of(bucket_map: BucketMap, bucket: int) -> list[int]:
    """Those of a bucket, by the one border below and the one above."""
    low, high = bucket_map.range_of(bucket)
    return [key for key, it in HASHES.items() if low <= it >> 32 < high]


def of_bucket(model: Model, bucket_map: BucketMap, bucket: int) -> Model:
    """The rows of a state that are a bucket's."""
    return {key: model[key] for key in keys_of(bucket_map, bucket) if key in model}


def changes_in(numbers: Numbers, bucket_map: BucketMap, bucket: int) -> Changes:
    """Some of a bucket's keys change."""
    keys, changes = keys_of(bucket_map, bucket), Changes()
    for _ in range(numbers.below(3) if keys else 0):
        value = numbers.below(100)
        changes[keys[numbers.below(len(keys))]] = None if value < 20 else value
    return changes


def whole(models: Iterable[Model]) -> Model:
    """One state of those of all buckets."""
    found: Model = {}
    for model in models:
        assert not found.keys() & model.keys(), "each key is in one bucket"
        found |= model
    return found


@dataclass(frozen=True)
class RescaleConfig(Config):
    """As `Config`; `buckets` is how many there are at first.

    Parameters
    ----------
    partitions
        How many Spark has: of each it takes another attempt, as it likes.
    two
        The query has two backends.
    """

    partitions: int = 1
    two: bool = False


@dataclass(frozen=True)
class PlannedAttempt(Attempt):
    """As `Attempt`, of a query as it was planned.

    Parameters
    ----------
    job
        The job.
    handed_out
        Of an attempt that moves the state to other buckets, what Spark handed out; `partition` has no state.
    """

    job: Job | None = None
    handed_out: Partition | None = None

    @property
    def planned(self) -> Job:
        """The job."""
        assert self.job is not None, "every attempt here is planned"
        return self.job


@dataclass(frozen=True)
class MovedResult(TaskResult):
    """What an attempt made that moved the state to other buckets.

    Parameters
    ----------
    handed_out
        What Spark had handed to it.
    changes
        By new bucket.
    groups
        Partitions of which its task succeeded.
    plan_id
        Of the query as it was planned.
    """

    handed_out: Partition = field(default_factory=dict)
    changes: Mapping[int, Changes] = field(default_factory=dict)
    groups: frozenset[int] = frozenset()
    plan_id: str = ""


def only(made: TaskResult, labels: Iterable[int]) -> TaskResult:
    """What an attempt made of some of the labels."""
    mine = frozenset(labels)
    partition = {bucket: held for bucket, held in made.partition.items() if bucket in mine}
    return replace(made, partition=partition, called=made.called & mine, removed=made.removed & mine)


class MovingFiles(StateFiles):
    """Under format 1 a late attempt's file takes another one's place only where both went on with the same folder.

    An attempt of a run that is over, which moved the state elsewhere, is one of those that Spark keeps apart: each run
    has its own state stores.
    """

    def overwrite(self, batch: int, made: TaskResult) -> None:
        if batch < 0 or _folders(self.at(batch)) != _folders(made.partition):
            return
        # Files of partitions whose tasks did not succeed again stay, with what they say is no more.
        there, written = self.at(batch), made.called | made.partition.keys() | made.removed
        kept = {bucket: there[bucket] for bucket in there.keys() - written}
        ended = {bucket for bucket, held in self._files.get(batch, {}).items() if held is None} - written
        partition = {**kept, **made.partition}
        super().overwrite(
            batch, replace(made, partition=partition, called=made.called | kept.keys(), removed=made.removed | ended)
        )


def _folders(partition: Partition) -> set[tuple[str, int]]:
    return {(held.pointer.query_folder, held.pointer.buckets) for held in partition.values()}
