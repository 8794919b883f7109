"""Parts of the simulated world in which queries are rescaled: keys at the borders of buckets, and results of attempts."""

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
    "draw_changes_of_bucket",
    "list_keys",
    "select_rows",
    "restrict_to",
    "merge_models",
]

COUNTS = (1, 2, 3, 4)


def _hashes() -> dict[int, int]:
    """Hashes of keys on both sides of each border between buckets, as close as possible, and of the extremes, by key."""
    borders = sorted({BucketMap(count).range_of(bucket)[0] for count in COUNTS for bucket in range(count)} - {0})
    neighbours = [(border << 32, (border << 32) - 1) for border in borders]
    return dict(enumerate([*(key_hash for pair in neighbours for key_hash in pair), 0, 2**64 - 1]))


HASHES = _hashes()
ALL_KEYS = frozenset(HASHES)


def list_keys(bucket_map: BucketMap, bucket: int) -> list[int]:
    """Return the keys of a bucket, given by its lower and upper border."""
    low, high = bucket_map.range_of(bucket)
    return [key for key, key_hash in HASHES.items() if low <= key_hash >> 32 < high]


def select_rows(model: Model, bucket_map: BucketMap, bucket: int) -> Model:
    """Return a bucket's rows of a state."""
    return {key: model[key] for key in list_keys(bucket_map, bucket) if key in model}


def draw_changes_of_bucket(numbers: Numbers, bucket_map: BucketMap, bucket: int) -> Changes:
    """Draw changes of some of a bucket's keys."""
    keys, changes = list_keys(bucket_map, bucket), Changes()
    for _ in range(numbers.below(3) if keys else 0):
        value = numbers.below(100)
        changes[keys[numbers.below(len(keys))]] = None if value < 20 else value
    return changes


def merge_models(models: Iterable[Model]) -> Model:
    """Merge the states of all buckets."""
    merged: Model = {}
    for model in models:
        assert not merged.keys() & model.keys(), "each key is in one bucket"
        merged |= model
    return merged


@dataclass(frozen=True)
class RescaleConfig(Config):
    """Configuration of a history; `buckets` is the initial number.

    Parameters
    ----------
    partitions
        Number of Spark's partitions; the attempt that counts may differ between them.
    two
        Whether the query has two backends.
    """

    partitions: int = 1
    two: bool = False


@dataclass(frozen=True)
class PlannedAttempt(Attempt):
    """An attempt of a planned query.

    Parameters
    ----------
    job
        The job that was planned.
    handed_out
        For an attempt that moves the state to other buckets: what Spark handed out; `partition` has no state then.
    """

    job: Job | None = None
    handed_out: Partition | None = None

    @property
    def planned(self) -> Job:
        """The job, which every attempt here has."""
        assert self.job is not None, "every attempt here is planned"
        return self.job


@dataclass(frozen=True)
class MovedResult(TaskResult):
    """The result of an attempt that moved the state to other buckets.

    Parameters
    ----------
    handed_out
        What Spark had handed out to the attempt.
    changes
        Changes by new bucket.
    groups
        Partitions whose tasks succeeded.
    plan_id
        Plan of the query.
    """

    handed_out: Partition = field(default_factory=dict)
    changes: Mapping[int, Changes] = field(default_factory=dict)
    groups: frozenset[int] = frozenset()
    plan_id: str = ""


def restrict_to(result: TaskResult, labels: Iterable[int]) -> TaskResult:
    """Restrict an attempt's result to some labels."""
    labels_kept = frozenset(labels)
    partition = {bucket: state for bucket, state in result.partition.items() if bucket in labels_kept}
    return replace(
        result, partition=partition, called=result.called & labels_kept, removed=result.removed & labels_kept
    )


class MovingFiles(StateFiles):
    """State files that a late attempt overwrites under format 1 only if the folder and the number of buckets are the same.

    In reality each run has its own state stores, so Spark keeps the files of an earlier run apart from a later run that has
    moved the state elsewhere.
    """

    def overwrite(self, batch: int, result: TaskResult) -> None:
        if batch < 0 or _folders(self.at(batch)) != _folders(result.partition):
            return
        # Files of partitions whose tasks did not succeed stay, including their removed buckets.
        states, written = self.at(batch), result.called | result.partition.keys() | result.removed
        unchanged = {bucket: states[bucket] for bucket in states.keys() - written}
        removed = {bucket for bucket, state in self._files.get(batch, {}).items() if state is None} - written
        partition = {**unchanged, **result.partition}
        super().overwrite(
            batch,
            replace(
                result, partition=partition, called=result.called | unchanged.keys(), removed=result.removed | removed
            ),
        )


def _folders(partition: Partition) -> set[tuple[str, int]]:
    return {(state.pointer.query_folder, state.pointer.buckets) for state in partition.values()}
