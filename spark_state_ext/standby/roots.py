"""Followers of many buckets of a root: a few threads share them, and look most often at buckets written most often."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.operator import OperatorFile
from arrow_schemas.standby import BucketKey
from spark_state_ext.errors import UsageError
from spark_state_ext.peers.served_snapshots import SnapshotFile
from spark_state_ext.standby.buckets_below_root import Finder, FoundBuckets
from spark_state_ext.standby.follower import BucketFollower, SharedStores
from spark_state_ext.standby.metered_reads import Bandwidth
from spark_state_ext.standby.recovery import Reading, Readings, RestoreRate
from spark_state_ext.standby.values import Followed, FollowedRoot, Lag
from spark_state_ext.store import LocalStore
from spark_state_ext.store.reclaim import remove_unused
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["Pace", "ReplicaShelf", "RootFollower", "Work", "next_wait_s"]

_LOGGER = logging.getLogger("spark_state_ext")
# A bucket is looked at again after this share of the time since it was last written.
_IDLE_SHARE = 1 / 8
_FAILED_FACTOR = 2.0


@dataclass(frozen=True)
class Pace:
    """How often buckets are looked at, seconds.

    Parameters
    ----------
    poll_s
        Interval for a bucket that is being written.
    idle_s_max
        Longest interval for a bucket that is not being written.
    failed_s_max
        Longest interval for a bucket that fails.
    """

    poll_s: float = 1.0
    idle_s_max: float = 30.0
    failed_s_max: float = 60.0


@dataclass
class Work:
    """What the followers of a root have done since they began.

    Parameters
    ----------
    read_files, read_bytes
        Checkpoint files and bytes that they read.
    step_s
        Duration of steps that read something, summed over all threads, seconds.
    """

    read_files: int = 0
    read_bytes: int = 0
    step_s: float = 0.0

    @property
    def bytes_s(self) -> float | None:
        """Bytes that one thread loads per second; None before it has loaded any."""
        return self.read_bytes / self.step_s if self.step_s > 0 else None


def next_wait_s(pace: Pace, last_wait_s: float, failed: bool, idle_s: float) -> float:
    """Return how long to wait before a bucket's next step, seconds."""
    if failed:
        return min(pace.failed_s_max, max(pace.poll_s, last_wait_s * _FAILED_FACTOR))
    return min(pace.idle_s_max, max(pace.poll_s, idle_s * _IDLE_SHARE))


class _FollowedBucket:
    """A followed bucket."""

    def __init__(self, follower: BucketFollower, now_s: float) -> None:
        self.follower = follower
        self.due_s = now_s
        self.wait_s = 0.0
        self.written_s = now_s
        # When the copy last had rows of the bucket, or when following began.
        self.last_loaded_s = now_s
        # Rows loaded since the copy fell behind, and for how long.
        self.restored_rows, self.restored_s = 0, 0.0
        self.step: Future[Followed] | None = None
        self.last: Followed | None = None
        self.error_text = ""

    @property
    def is_empty(self) -> bool:
        """True if nothing is loaded although the bucket may have state."""
        return self.last is None or (self.last.newest is None and not self.last.is_caught_up)


class RootFollower:
    """Follows buckets of a root on this host. One thread must call `tick` again and again."""

    def __init__(
        self,
        root: FollowedRoot,
        *,
        threads_max: int = 2,
        bandwidth_max_bytes_s: float | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if threads_max < 1:
            raise UsageError(f"threads_max must be 1 or more, not {threads_max!r}")
        if bandwidth_max_bytes_s is not None and not bandwidth_max_bytes_s > 0:
            raise UsageError(f"bandwidth_max_bytes_s must be a number of bytes above 0, not {bandwidth_max_bytes_s!r}")
        self.work = Work()
        self._readings = Readings()
        self._root = root
        self._clock = clock
        self._pace = pace or Pace()
        self._stop = threading.Event()
        self._bandwidth = Bandwidth(bandwidth_max_bytes_s, clock, self._stop.wait)
        self._stores = SharedStores()
        self._pool = DaemonPool("standby")
        self._pool.threads_max = threads_max
        self._finder = Finder(root.folder)
        self._operators: Mapping[BucketKey, OperatorFile] = {}
        self._held: dict[BucketKey, _FollowedBucket] = {}
        # Steps of buckets that are no longer held.
        self._leaving_steps: list[Future[Followed]] = []

    def find(self) -> FoundBuckets:
        """Look for buckets to follow, and for newer operator files of known buckets."""
        buckets = self._finder.find()
        self._operators = buckets.operators
        return buckets

    def list_known(self) -> frozenset[BucketKey]:
        """Return the buckets that `find` returned last."""
        return frozenset(self._operators)

    def list_held(self) -> list[BucketKey]:
        """Return the followed buckets, ascending."""
        return sorted(self._held)

    def store(self, key: BucketKey) -> LocalStore | None:
        """Return the local store of a followed bucket; None if it is not followed. Thread-safe."""
        bucket = self._held.get(key)
        return None if bucket is None or self._stop.is_set() else bucket.follower.store()

    def hold(self, keys: Collection[BucketKey]) -> None:
        """Follow exactly these buckets. The copies of others stay until they are reclaimed."""
        new_keys = set(keys)
        for key in self._held.keys() - new_keys:
            bucket = self._held.pop(key)
            if bucket.step is not None:
                self._leaving_steps.append(bucket.step)
        for key in sorted(new_keys - self._held.keys()):
            if key not in self._operators:
                raise UsageError(f"bucket {key} was not found under {self._root.root}: call find() first")
            follower = BucketFollower(
                self._root,
                key,
                self._operators[key],
                self._stores,
                self._bandwidth,
                self._stop,
                self._clock,
            )
            self._held[key] = _FollowedBucket(follower, self._clock())

    def tick(self) -> float:
        """Begin the steps that are due and take in finished ones; return seconds until the next. Does not block."""
        for step in self._leaving_steps:
            if step.done():
                step.result()
        self._leaving_steps = [step for step in self._leaving_steps if not step.done()]
        now_s = self._clock()
        for key, bucket in self._held.items():
            if bucket.step is not None and bucket.step.done():
                # `result` raises an unexpected error again: it is a bug, and must not be lost.
                self._take_result(bucket, bucket.step.result(), now_s)
                bucket.step = None
            if bucket.step is None and bucket.due_s <= now_s:
                if key in self._operators:
                    bucket.follower.use(self._operators[key])
                bucket.step = self._pool.submit(bucket.follower.step)
        waiting = [bucket.due_s - now_s for bucket in self._held.values() if bucket.step is None]
        return max(0.0, min([*waiting, self._pace.poll_s]))

    def drain(self, timeout_s: float) -> bool:
        """Wait until no step is running; return False if one still is after the timeout."""
        steps = [bucket.step for bucket in self._held.values() if bucket.step is not None]
        return not wait([*steps, *self._leaving_steps], timeout_s).not_done

    def collect_results(self) -> dict[BucketKey, Followed]:
        """Return the last step's result of each held bucket that has had a step."""
        buckets = dict(self._held)  # a copy, because another thread collects metrics
        return {key: bucket.last for key, bucket in buckets.items() if bucket.last is not None}

    def collect_lags(self) -> dict[BucketKey, Lag]:
        """Return what each held bucket is missing by now, as of its last listing.

        Before anything of a bucket is loaded, the seconds are the time since it is held.
        """
        lags = {key: result.lag for key, result in self.collect_results().items()}
        lags.update((key, lag) for key, (_, lag) in self._collect_running().items() if lag != Lag())
        now_s = self._clock()
        empty = {key: bucket.last_loaded_s for key, bucket in dict(self._held).items() if bucket.is_empty}
        return lags | {key: replace(lags.get(key, Lag()), seconds=now_s - at_s) for key, at_s in empty.items()}

    def restore_rate(self) -> RestoreRate:
        """Return the recent restore rate of the time in which steps read, including running steps."""
        return self._readings.rate([reading for reading, _ in self._collect_running().values()])

    def _collect_running(self) -> dict[BucketKey, tuple[Reading, Lag]]:
        readings = {key: bucket.follower.under_way() for key, bucket in dict(self._held).items()}
        return {key: reading for key, reading in readings.items() if reading is not None}

    def overdue(self, longer_than_s: float) -> frozenset[BucketKey]:
        """Return buckets whose running step was due more than `longer_than_s` ago: their last result may be old."""
        since_s = self._clock() - longer_than_s
        return frozenset(
            key
            for key, bucket in self._held.items()
            if bucket.step is not None and not bucket.step.done() and bucket.due_s < since_s
        )

    def reclaim(self, keep_s: float) -> list[Path]:
        """Remove local stores that no task and no follower of this host has used for `keep_s` seconds."""
        return remove_unused(self._root.stores, self._root.scratch, keep_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop all steps, and close the local stores."""
        self._stop.set()
        self.drain(timeout_s)
        self._pool.close()
        self._stores.close()

    def _note_restored(self, bucket: _FollowedBucket, result: Followed) -> None:
        """Log when a copy that was empty or had failed is in sync again."""
        if bucket.last is not None and bucket.last.is_caught_up and bucket.last.newest is not None:
            return
        bucket.restored_rows += result.rows_read
        bucket.restored_s += result.spent_s
        if result.is_caught_up and result.newest is not None:
            if bucket.restored_rows:
                message = "the copy of %s is restored up to version %d: %d rows in %.1f s"
                _LOGGER.info(message, result.key, result.newest.version, bucket.restored_rows, bucket.restored_s)
            bucket.restored_rows, bucket.restored_s = 0, 0.0

    def _take_result(self, bucket: _FollowedBucket, result: Followed, now_s: float) -> None:
        if result.is_new:
            bucket.written_s = now_s
        self._note_restored(bucket, result)
        bucket.last = result
        if result.newest is not None:
            bucket.last_loaded_s = now_s
        if result.files_read:
            self.work.read_files += result.files_read
            self.work.read_bytes += result.bytes_read
            self.work.step_s += result.spent_s
            ended_s = result.begun_s + result.spent_s
            self._readings.add(Reading(result.begun_s, ended_s, result.bytes_read, result.rows_read))
        bucket.wait_s = next_wait_s(self._pace, bucket.wait_s, result.error is not None, now_s - bucket.written_s)
        bucket.due_s = now_s + bucket.wait_s
        error_text = "" if result.error is None else f"{type(result.error).__name__}: {result.error}"
        if error_text and error_text != bucket.error_text:
            _LOGGER.warning("the copy of %s is not as new as its files: %s", result.key, result.error)
        elif bucket.error_text and not error_text:
            _LOGGER.info("the copy of %s can be followed again", result.key)
        bucket.error_text = error_text


class ReplicaShelf:
    """The snapshots in local stores of this host's replicas that a `PeerServer` serves."""

    def __init__(self, followers: Sequence[RootFollower]) -> None:
        self._followers = tuple(followers)

    def find(self, key: BucketKey, ref: CheckpointRef, body_digest: str) -> SnapshotFile | None:
        """Return a snapshot file, as `Shelf.find` requires."""
        for follower in self._followers:
            store = follower.store(key)
            file = None if store is None else store.lazy.whole_file(ref, body_digest)
            if file is not None:
                return SnapshotFile(*file)
        return None
