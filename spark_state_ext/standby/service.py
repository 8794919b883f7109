"""The standby service of a host: it finds buckets, agrees with other hosts on who follows which, and follows its own.

Once per heartbeat it makes a round: list the buckets, see which hosts are alive, compute the assignment, follow what
the host must hold, and write the host's record. A failure in a round is logged, and the next round tries again: only
`stop` ends the service.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.errors import CorruptError, MissingCheckpointError, StateError, StorageError, VersionSkewError
from spark_state_ext.standby.assignment import (
    assign,
    buckets_to_hold,
    describe_shortfall,
    find_active_buckets,
    find_active_hosts,
    find_unfollowed,
)
from spark_state_ext.standby.failovers import Failovers
from spark_state_ext.standby.members import Members, Membership, describe_duplicate, read_settings
from spark_state_ext.standby.roots import RootFollower
from spark_state_ext.standby.values import Followed, FollowedRoot, Lag
from spark_state_ext.timeline.bucket_files import BucketFiles

__all__ = ["RootService", "Round", "StandbyService"]

_LOGGER = logging.getLogger("spark_state_ext")
# A replica counts as in sync for this many heartbeats after it was complete: each batch makes it lag for a moment.
_IN_SYNC_HEARTBEATS = 2
# A service is stuck if it has made no round for this many heartbeats.
_STUCK_HEARTBEATS = 10
# How many failing buckets a record gives reasons for, and the maximum length of a reason.
_REASONS_MAX, _REASON_CHARACTERS_MAX = 20, 400
# How often unused local stores are removed.
_RECLAIM_EVERY_S = 3_600.0


@dataclass(frozen=True)
class Round:
    """The result of a round.

    Parameters
    ----------
    settings
        Standby settings of the root.
    members
        The live hosts, and what they have.
    buckets
        All buckets of the root, with the hosts of their active tasks as far as known.
    assignment
        The hosts that should have each bucket.
    replicas
        This host's replicas, as in its record.
    problems
        Problems, one sentence each.
    """

    settings: StandbySettings = field(default_factory=StandbySettings)
    members: Members = field(default_factory=lambda: Members(()))
    buckets: Mapping[BucketKey, str | None] = field(default_factory=dict)
    assignment: Mapping[BucketKey, tuple[str, ...]] = field(default_factory=dict)
    replicas: tuple[StandbyReplica, ...] = ()
    problems: tuple[str, ...] = ()


class RootService:
    """A host's part in the standby of one root."""

    def __init__(
        self,
        root: FollowedRoot,
        host: str,
        rack: str | None,
        follower: RootFollower,
        clock_s: Callable[[], float] = time.monotonic,
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        self._addresses = dict(addresses or {})
        self.failovers = Failovers(host)
        self.last = Round()
        self.follower = follower
        self._root, self._host, self._rack, self._clock_s = root, host, rack, clock_s
        self._membership: Membership | None = None
        self._looks = 0
        # True if another service has this one's name.
        self._has_duplicate = False
        self._active: Mapping[BucketKey, int] = {}
        # When this host last had all of a bucket.
        self._synced_s: dict[BucketKey, float] = {}

    @property
    def name(self) -> str:
        """The root, for messages."""
        return self._root.folder.root

    @property
    def host(self) -> str:
        """The host's name."""
        return self._host

    def round(self) -> Round:
        """Make a round and return its result."""
        settings = read_settings(self._root.folder)
        buckets_found = self.follower.find()
        if buckets_found.is_bare:
            # Writing a record would create a folder for a mistyped root, or in the place of a disk that is not mounted.
            raise StorageError(
                f"there is nothing in {self.name}: no job has written there yet, or its file system is not mounted. "
                "Use exactly the `root` that ArrowState was given"
            )
        membership = self._join(settings)
        members = membership.look()
        self._has_duplicate = self._host in members.doubled
        self._looks += 1
        followed = self.follower.collect_results()
        own_record = self._make_record(followed, settings)
        records = [*(record for record in members.records if record.host != self._host), own_record]
        buckets = find_active_hosts(buckets_found.operators, records)
        self.failovers.see(buckets, followed, members)
        assignment = assign(buckets, records, settings)
        # Wait until the other hosts have seen this one. What a host has is unknown until its record is read.
        if not settings.enabled:
            self.follower.hold(())
        elif self._looks > 1 and not members.unread:
            kept = self.failovers.unseen(buckets, followed)
            self.follower.hold(buckets_to_hold(self._host, assignment, records) | kept)
        self._active, unread = self._find_active(records)
        written = membership.heartbeat(self._make_record(followed, settings))
        short = describe_shortfall(assignment, settings)
        errors = [f"{name}: {error}" for name, error in buckets_found.errors.items()]
        errors += [f"{key}: {result.error}" for key, result in followed.items() if result.error is not None]
        if not buckets_found.operators:
            errors.append("there is nothing to follow yet: use exactly the `root` that ArrowState was given")
        problems = (*members.problems, *([] if short is None else [short]), *unread, *errors)
        self.last = Round(settings, members, buckets, assignment, written.replicas, problems)
        return self.last

    def close(self) -> None:
        """Stop following. The record stays, so that a restarted service knows what it had."""
        self.follower.close()

    def _join(self, settings: StandbySettings) -> Membership:
        """Return this host's membership; on the first call, hold again what the record of an earlier service lists."""
        if self._membership is None:
            membership = Membership(self._root.folder, self._host, settings.heartbeat_s, self._clock_s)
            before = membership.read_previous()
            if settings.enabled and before is not None:
                self.follower.hold({replica.key for replica in before.replicas} & self.follower.list_known())
            membership.heartbeat(self._make_record({}, settings))
            self._membership = membership
        self._membership.watch.use(settings.heartbeat_s)
        return self._membership

    def _make_record(self, followed: Mapping[BucketKey, Followed], settings: StandbySettings) -> MemberRecord:
        """Return this host's record."""
        now_s = self._clock_s()
        self._synced_s = {key: at_s for key, at_s in self._synced_s.items() if key in followed}
        in_sync_s = _IN_SYNC_HEARTBEATS * settings.heartbeat_s
        # A step is overdue if the store does not answer or there is too much to fetch: the newest file is unknown then.
        overdue = self.follower.overdue(in_sync_s)
        for key, result in followed.items():
            if result.is_caught_up and result.newest is not None and key not in overdue:
                self._synced_s[key] = now_s
        since_s = now_s - in_sync_s
        lags, rate = self.follower.collect_lags(), self.follower.restore_rate()
        replicas = [
            _make_replica(
                followed.get(key, Followed(key)), lags.get(key, Lag()), self._synced_s.get(key, since_s) > since_s
            )
            for key in self.follower.list_held()
        ]
        failing = [key for key, result in sorted(followed.items()) if result.error is not None]
        return MemberRecord(
            self._host,
            self._rack,
            replicas=tuple(replicas),
            addresses=self._addresses,
            active=self._active,
            restore_bytes_per_s=_round_rate(rate.bytes_per_s),
            restore_rows_per_s=_round_rate(rate.rows_per_s),
            failing={
                key: _describe_error(followed[key]) if at < _REASONS_MAX else "" for at, key in enumerate(failing)
            },
            doubled=self._has_duplicate,
        )

    def _find_active(self, records: Sequence[MemberRecord]) -> tuple[dict[BucketKey, int], list[str]]:
        """Return the buckets whose newest file this host wrote, and problems; files of unfollowed buckets are read.

        If a file cannot be read, its bucket stays as the records show it and the problem is returned. An error instead
        would keep the host from writing its record, and the other hosts would take it for dead with all its replicas.
        """
        keys = self.follower.list_known()
        active = find_active_buckets(self._host, keys, records)
        unread = []
        for key in sorted(find_unfollowed(self._host, keys, records)):
            files = BucketFiles.listed(self._root.folder.child(key.operator, key.query_folder), key.bucket)
            last = files.written_last()
            try:
                if last is not None and files.header(last).writer.host != self._host:
                    del active[key]
            except (CorruptError, MissingCheckpointError, VersionSkewError) as error:
                unread.append(f"{key}: {error}")
        return active, unread


class StandbyService:
    """The standby service: makes rounds for all roots until it is stopped."""

    def __init__(
        self, roots: Sequence[RootService], keep_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.roots = tuple(roots)
        self._keep_s = keep_s
        self._reclaimed_s = clock_s()
        # Why the last round of a root failed, by name of the root.
        self.errors: dict[str, str] = {}
        self._clock_s = clock_s
        self._due_s = [clock_s()] * len(self.roots)
        self._alive_s = clock_s()

    def run(self, stop: threading.Event) -> None:
        """Make rounds, and let followers step in between, until `stop` is set."""
        try:
            while not stop.is_set():
                stop.wait(self.turn(stop))
        finally:
            for root in self.roots:
                root.close()

    def turn(self, stop: threading.Event) -> float:
        """Make the rounds and begin the steps that are due; return seconds until something is due again."""
        waits = []
        for at, root in enumerate(self.roots):
            if self._clock_s() >= self._due_s[at] and not stop.is_set():
                self._due_s[at] = self._clock_s() + root.last.settings.heartbeat_s
                self._round(root)
                # The round may have read another heartbeat interval.
                self._due_s[at] = min(self._due_s[at], self._clock_s() + root.last.settings.heartbeat_s)
            waits += [root.follower.tick(), self._due_s[at] - self._clock_s()]
        if self._clock_s() - self._reclaimed_s >= _RECLAIM_EVERY_S:
            self._reclaimed_s = self._clock_s()
            for root in self.roots:
                try:
                    root.follower.reclaim(self._keep_s)
                except OSError as error:
                    _LOGGER.warning("standby of %s: unused local stores cannot be removed: %s", root.name, error)
        self._alive_s = self._clock_s()
        return max(0.0, min(waits, default=1.0))

    def ails(self) -> str:
        """Return the reason to restart the service; empty if healthy. A store that does not answer is not a reason."""
        heartbeat_s = max((root.last.settings.heartbeat_s for root in self.roots), default=1.0)
        stuck_s = self._clock_s() - self._alive_s
        return f"it has stood still for {stuck_s:.0f} s" if stuck_s > _STUCK_HEARTBEATS * heartbeat_s else ""

    def warnings(self) -> list[str]:
        """Return problems with this host's name, which a restart would not solve."""
        doubled = any(root.last.members.doubled.count(root.host) for root in self.roots)
        return [describe_duplicate(self.roots[0].host)] if doubled else []

    def _round(self, root: RootService) -> None:
        before = set(root.last.problems)
        try:
            result = root.round()
        except StateError as error:
            if self.errors.get(root.name) != str(error):
                _LOGGER.warning("standby of %s: %s; trying again", root.name, error)
            self.errors[root.name] = str(error)
            return
        if self.errors.pop(root.name, None) is not None:
            _LOGGER.info("standby of %s works again", root.name)
        for problem in result.problems:
            if problem not in before:
                _LOGGER.warning("standby of %s: %s", root.name, problem)


def _describe_error(followed: Followed) -> str:
    """Return why a bucket could not be followed."""
    return f"{type(followed.error).__name__}: {followed.error}"[:_REASON_CHARACTERS_MAX]


def _round_rate(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 1)


def _make_replica(followed: Followed, lag: Lag, in_sync: bool) -> StandbyReplica:
    return StandbyReplica(
        followed.key,
        version=0 if followed.newest is None else followed.newest.version,
        bytes=followed.size_bytes,
        in_sync=in_sync and followed.newest is not None,
        active=followed.host or None,
        lag_versions=lag.versions,
        lag_bytes=lag.size_bytes,
        lag_s=round(lag.seconds, 3),
    )
