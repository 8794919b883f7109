"""Followers of many buckets of a root: a few threads, and each bucket as often as it is worth it."""

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
from spark_state_ext.peers.serving import Found
from spark_state_ext.standby.finding import Finder, FoundBuckets
from spark_state_ext.standby.following import BucketFollower, FollowedStores
from spark_state_ext.standby.metered import Bandwidth
from spark_state_ext.standby.recovery import Reading, Readings, RestoreRate
from spark_state_ext.standby.values import Followed, FollowedRoot, Lag
from spark_state_ext.store import LocalStore
from spark_state_ext.store.reclaim import reclaim
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["Pace", "ReplicaShelf", "RootFollower", "Work", "next_wait_s"]

_LOGGER = logging.getLogger("spark_state_ext")
# A bucket is asked for so much of the time for which nobody has written it.
_OF_IDLE = 1 / 8
_FAILED_FACTOR = 2.0


@dataclass(frozen=True)
class Pace:
    """How often buckets are looked at.

    Parameters
    ----------
    poll_s
        One that is written.
    idle_s_max
        One that nobody writes, at least so often.
    failed_s_max
        One that fails, at least so often.
    """

    poll_s: float = 1.0
    idle_s_max: float = 30.0
    failed_s_max: float = 60.0


@dataclass
class Work:
    """What followers of a root have done since they began.

    Parameters
    ----------
    read_files, read_bytes
        What they read of checkpoint files.
    step_s
        How long steps took that read something, all threads together, seconds.
    """

    read_files: int = 0
    read_bytes: int = 0
    step_s: float = 0.0

    @property
    def bytes_s(self) -> float | None:
        """Bytes that one thread has brought per second; None before it has brought any."""
        return self.read_bytes / self.step_s if self.step_s > 0 else None


def next_wait_s(pace: Pace, last_wait_s: float, failed: bool, idle_s: float) -> float:
    """How long a bucket is left alone after a step."""
    if failed:
        return min(pace.failed_s_max, max(pace.poll_s, last_wait_s * _FAILED_FACTOR))
    return min(pace.idle_s_max, max(pace.poll_s, idle_s * _OF_IDLE))


class _Held:
    """A bucket that is followed."""

    def __init__(self, follower: BucketFollower, now_s: float) -> None:
        self.follower = follower
        self.due_s = now_s
        self.wait_s = 0.0
        self.written_s = now_s
        # When it had rows of the bucket last, or was begun with.
        self.had_s = now_s
        # Rows that were loaded, and for how long, since it was behind.
        self.restored_rows, self.restored_s = 0, 0.0
        self.step: Future[Followed] | None = None
        self.last: Followed | None = None
        self.told = ""

    @property
    def lacks_all(self) -> bool:
        """Whether nothing is loaded although there is something, as far as is known."""
        return self.last is None or (self.last.newest is None and not self.last.is_caught_up)


class RootFollower:
    """Follows buckets of a root on this host. `tick` is to be called again and again, by one thread."""

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
        self._stores = FollowedStores()
        self._pool = DaemonPool("standby")
        self._pool.threads_max = threads_max
        self._finder = Finder(root.folder)
        self._operators: Mapping[BucketKey, OperatorFile] = {}
        self._held: dict[BucketKey, _Held] = {}
        # Steps of buckets that are not held any more.
        self._left: list[Future[Followed]] = []

    def find(self) -> FoundBuckets:
        """Look for buckets to follow, and for newer operator files of those that are."""
        found = self._finder.find()
        self._operators = found.operators
        return found

    def known(self) -> frozenset[BucketKey]:
        """The buckets that `find` told last."""
        return frozenset(self._operators)

    def held(self) -> list[BucketKey]:
        """The buckets that are followed, ascending."""
        return sorted(self._held)

    def store(self, key: BucketKey) -> LocalStore | None:
        """The local store of a bucket that is followed; None: it is not. Several threads may ask."""
        held = self._held.get(key)
        return None if held is None or self._stop.is_set() else held.follower.store()

    def hold(self, keys: Collection[BucketKey]) -> None:
        """Follow these buckets, and no others. The copies of others stay until they are reclaimed."""
        wanted = set(keys)
        for key in self._held.keys() - wanted:
            gone = self._held.pop(key)
            if gone.step is not None:
                self._left.append(gone.step)
        for key in sorted(wanted - self._held.keys()):
            if key not in self._operators:
                raise UsageError(f"{key} is not known under {self._root.root}: look for buckets first")
            follower = BucketFollower(
                self._root,
                key,
                self._operators[key],
                self._stores,
                self._bandwidth,
                self._stop,
                self._clock,
            )
            self._held[key] = _Held(follower, self._clock())

    def tick(self) -> float:
        """Begin the steps that are due, and take in those that are done; waits for nothing."""
        for step in self._left:
            if step.done():
                step.result()
        self._left = [step for step in self._left if not step.done()]
        now_s = self._clock()
        for key, held in self._held.items():
            if held.step is not None and held.step.done():
                # What is no error of a file or a store is one of ours, and is not to be lost.
                self._take_in(held, held.step.result(), now_s)
                held.step = None
            if held.step is None and held.due_s <= now_s:
                if key in self._operators:
                    held.follower.use(self._operators[key])
                held.step = self._pool.submit(held.follower.step)
        waiting = [held.due_s - now_s for held in self._held.values() if held.step is None]
        return max(0.0, min([*waiting, self._pace.poll_s]))

    def drain(self, timeout_s: float) -> bool:
        """Wait until no step is under way; False when one still is."""
        steps = [held.step for held in self._held.values() if held.step is not None]
        return not wait([*steps, *self._left], timeout_s).not_done

    def followed(self) -> dict[BucketKey, Followed]:
        """What became of the last step of each bucket that is held; one that has had none yet is missing."""
        held = dict(self._held)  # a copy, as metrics are collected in a thread of their own
        return {key: it.last for key, it in held.items() if it.last is not None}

    def lags(self) -> dict[BucketKey, Lag]:
        """What each bucket that is held lacks by now, as of its last listing.

        The seconds of one that has nothing yet are those since it is held.
        """
        found = {key: it.lag for key, it in self.followed().items()}
        found.update((key, lag) for key, (_, lag) in self._under_way().items() if lag != Lag())
        now_s = self._clock()
        lacking = {key: held.had_s for key, held in dict(self._held).items() if held.lacks_all}
        return found | {key: replace(found.get(key, Lag()), seconds=now_s - at_s) for key, at_s in lacking.items()}

    def restore_rate(self) -> RestoreRate:
        """What was restored in a second lately, while anything was; with the steps that are under way."""
        return self._readings.rate([reading for reading, _ in self._under_way().values()])

    def _under_way(self) -> dict[BucketKey, tuple[Reading, Lag]]:
        found = {key: held.follower.under_way() for key, held in dict(self._held).items()}
        return {key: it for key, it in found.items() if it is not None}

    def overdue(self, longer_than_s: float) -> frozenset[BucketKey]:
        """Buckets whose step was due so long ago and has not ended: what `followed` tells of them may be old."""
        since_s = self._clock() - longer_than_s
        return frozenset(
            key
            for key, held in self._held.items()
            if held.step is not None and not held.step.done() and held.due_s < since_s
        )

    def reclaim(self, keep_s: float) -> list[Path]:
        """Remove local stores that no task and no follower of this host has used for so long, as tasks do."""
        return reclaim(self._root.stores, self._root.scratch, keep_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Have steps end, and close the local stores."""
        self._stop.set()
        self.drain(timeout_s)
        self._pool.close()
        self._stores.close()

    def _note_restored(self, held: _Held, found: Followed) -> None:
        """Log when a copy that had nothing, or has failed, is in sync again."""
        if held.last is not None and held.last.is_caught_up and held.last.newest is not None:
            return
        held.restored_rows += found.rows_read
        held.restored_s += found.spent_s
        if found.is_caught_up and found.newest is not None:
            if held.restored_rows:
                said = "the copy of %s is restored up to version %d: %d rows in %.1f s"
                _LOGGER.info(said, found.key, found.newest.version, held.restored_rows, held.restored_s)
            held.restored_rows, held.restored_s = 0, 0.0

    def _take_in(self, held: _Held, found: Followed, now_s: float) -> None:
        if found.is_new:
            held.written_s = now_s
        self._note_restored(held, found)
        held.last = found
        if found.newest is not None:
            held.had_s = now_s
        if found.files_read:
            self.work.read_files += found.files_read
            self.work.read_bytes += found.bytes_read
            self.work.step_s += found.spent_s
            ended_s = found.begun_s + found.spent_s
            self._readings.add(Reading(found.begun_s, ended_s, found.bytes_read, found.rows_read))
        held.wait_s = next_wait_s(self._pace, held.wait_s, found.error is not None, now_s - held.written_s)
        held.due_s = now_s + held.wait_s
        told = "" if found.error is None else f"{type(found.error).__name__}: {found.error}"
        if told and told != held.told:
            _LOGGER.warning("the copy of %s is not as new as its files: %s", found.key, found.error)
        elif held.told and not told:
            _LOGGER.info("the copy of %s is followed again", found.key)
        held.told = told


class ReplicaShelf:
    """The snapshots in local stores of this host's replicas that a `PeerServer` gives."""

    def __init__(self, followers: Sequence[RootFollower]) -> None:
        self._followers = tuple(followers)

    def find(self, key: BucketKey, ref: CheckpointRef, body_digest: str) -> Found | None:
        """As `Shelf.find`."""
        for follower in self._followers:
            store = follower.store(key)
            found = None if store is None else store.lazy.whole_file(ref, body_digest)
            if found is not None:
                return Found(*found)
        return None
