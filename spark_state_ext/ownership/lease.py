"""The lease on a query folder, which says which run may write there; the run renews it while it is alive.

A copied Spark checkpoint keeps its query id, so two runs may use one folder. Immutable files keep their states apart,
but clean-up does not, and the user does not want it: the second live run is refused, and a run that was replaced stops.
Tasks renew the lease while they run, and the driver renews it while the query is idle (`spark.client.lease_keeper`).

A new run watches the record for a whole lease by its own clock before it takes over: clocks of two machines are never
compared. A restart does not wait if the run before is known to be over: Spark itself never has one query active twice
in an application, the driver releases the lease when a query ends, and in local mode the driver's process can be looked
for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace

from spark_state_ext.errors import ClaimedError, LiveRunError, OwnershipError, StateError, StorageError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import (
    Claim,
    Decision,
    LeaseRecord,
    NumberedRecord,
    RunIdentity,
    Watch,
    decide,
    knows_claim,
    may_replace,
    refuse_written_since,
)
from spark_state_ext.ownership.lease_states import (
    LEASE,
    REQUEST,
    LeaseEvent,
    LeaseState,
    RequestEvent,
    RequestState,
)
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["LEASE_MS_MIN", "Clock", "Lease", "LeaseRegistry", "LeaseState"]

_LOGGER = logging.getLogger("spark_state_ext")
LEASE_MS_MIN = 100
_POLL_S = 0.2
# Two threads, to be able to look while a renewal hangs. Requests that hang get additional threads; from _HUNG_OFTEN
# such requests on, the time before the next one doubles.
_THREADS, _HUNG_OFTEN = 2, 6
_STOP_ONE = ". Stop one of the two."
_COPY_TOO = " To run a copied checkpoint on its own, copy the state too: copy {} to the same place below another "
_COPY_TOO += "root, and use that root."
_NOT_DONE = "; the run's remaining work in the background is not done."


@dataclass(frozen=True)
class Clock:
    """The clocks of a lease.

    Parameters
    ----------
    monotonic_s
        A clock that only goes forward; all decisions use it.
    wall_s
        Seconds since 1970, for the times in records, which are only for messages.
    sleep_s
        Waits.
    """

    monotonic_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
    sleep_s: Callable[[float], None] = time.sleep


@dataclass(eq=False)
class _Request:
    """A request in a separate thread, with the time at which it began."""

    begun_s: float
    state: RequestState = RequestState.UNDER_WAY

    @property
    def over(self) -> bool:
        return self.state is RequestState.OVER

    def move(self, event: RequestEvent) -> RequestState:
        """Apply an event; return the state before it."""
        before, self.state = self.state, REQUEST.next_state(self.state, event)
        return before


class Lease:
    """A process's part in the lease of one run on one query folder."""

    def __init__(
        self,
        files: Folder,
        me: RunIdentity,
        lease_ms: int,
        clock: Clock | None = None,
        *,
        format_1_too: bool = False,
        claim: Claim | None = None,
        claims: bool = False,
    ) -> None:
        if lease_ms < LEASE_MS_MIN:
            raise UsageError(f"lease_ms must be at least {LEASE_MS_MIN}, not {lease_ms}")
        self._files = files
        self._log = LeaseLog(files)
        self._me = me
        self._lease_ms = lease_ms
        self._format_1_too = format_1_too
        self._claim = claim
        self._claims = claims
        self._third_s = lease_ms / 3000
        self._clock = clock or Clock()
        self._state = LeaseState.NEW
        self._newest: NumberedRecord | None = None
        self._renew_at_s = -math.inf
        # After the store did not answer: no request before this time.
        self._not_before_s = -math.inf
        # `hold` is called after each key, and returns at once until this time.
        self._quiet_until_s = -math.inf
        # When the run was last known to hold the lease.
        self._known_at_s = -math.inf
        self._hold_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._renewal = self._lookup = _Request(0.0, RequestState.OVER)
        # Each lease has its own threads, so that a store that hangs does not block the renewal of other leases.
        self._pool = DaemonPool("leases")
        self._pool.threads_max = _THREADS
        self._successor: RunIdentity | None = None
        self._claimed: Claim | None = None
        self._released, self._times_removed = False, 0

    def is_of(self, me: RunIdentity, claim: Claim | None = None) -> bool:
        """True if this is the lease of a run with this claim to the folder, or without one."""
        same = (self._me.application, self._me.plan) == (me.application, me.plan)
        return same and _id_of(self._claim) == _id_of(claim)

    def note_task(self, me: RunIdentity, claims: bool = False) -> None:
        """Note which task of the run uses the lease now; tasks that know their query and others may alternate."""
        if me.query:
            self._me = me
        # After a pointer is committed, the claim is not made again.
        self._claims = claims
        self._quiet_until_s = -math.inf

    @property
    def state(self) -> LeaseState:
        """The state of the lease for this process."""
        return self._state

    @property
    def age_s(self) -> float:
        """Seconds since this process last knew that the run holds the lease; infinite if it never did."""
        return self._clock.monotonic_s() - self._known_at_s

    @property
    def times_removed(self) -> int:
        """Number of times that this process found the lease's files gone, as the query folder was removed."""
        return self._times_removed

    def hold(self) -> None:
        """Take or renew the lease if that is due; otherwise this is cheap.

        A lease that this process holds is renewed in the background, so that calls do not wait for a slow store. If it
        was not renewed for long, as batches are rare or a renewal hangs, the call first checks that the run still
        holds it; it waits for that at most a third of the lease.
        """
        if self._successor is None and self._clock.monotonic_s() < self._quiet_until_s:
            return
        self._stop_if_lost(_STOP_ONE)
        if not self._state.asked:
            with self._hold_lock:
                if not self._state.asked:
                    self._take()
        else:
            self._renew_in_time()
        if self._claim is not None and not self._claims and self._state is LeaseState.HELD:
            self._record_building()
        self._quiet_until_s = max(self._renew_at_s, self._not_before_s)

    def _renew_in_time(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s < max(self._renew_at_s, self._not_before_s):
            return
        if now_s >= self._known_at_s + 2 * self._third_s and self._may_begin(self._lookup, now_s):
            self._lookup = _Request(now_s)
            self._do_in_background(self._look_in_background, self._lookup, self._third_s)
            self._stop_if_lost(_STOP_ONE)
        if self._may_begin(self._renewal, now_s):
            if not self._renewal.over:
                # The renewal that hangs has the lock.
                self._hold_lock = threading.Lock()
            self._renewal = _Request(now_s)
            self._do_in_background(self._renew_in_background, self._renewal, 0.0)

    def check(self) -> None:
        """Raise an error if another run has the lease; for work after the run's last task, which must not renew it."""
        self._stop_if_lost(_NOT_DONE)
        if self._clock.monotonic_s() >= self._known_at_s + self._third_s:
            self._look(_NOT_DONE)

    def look(self) -> None:
        """Read the lease now, and raise an error if another run holds it."""
        self._stop_if_lost(_STOP_ONE)
        self._look(_STOP_ONE)

    # -- taking the lease --------------------------------------------------------------------------

    def _take(self) -> None:
        watch: Watch | None = None
        while True:
            begun_s = self._clock.monotonic_s()
            newest = self._log.newest(first=True)
            is_over = newest is not None and newest.record.owner.is_over()
            decision = decide(
                newest, self._me, watch, begun_s, self._lease_ms, is_over, self._find_expected_claim(newest)
            )
            if decision in (Decision.CLAIMED, Decision.REPLACED):
                assert newest is not None, "only a record leads to this decision"
                copy_too = _COPY_TOO.format(self._log.root) if decision is Decision.REPLACED else ""
                raise self._note_loss(newest.record, _STOP_ONE + copy_too)
            if decision is Decision.LIVE:
                assert newest is not None, "a record was renewed"
                raise LiveRunError(
                    f"the state at {self._log.root} is being written by {newest.record.owner}, and {self._me} must not "
                    "write it too. Stop the other run." + _COPY_TOO.format(self._log.root)
                )
            if self._claims:
                refuse_written_since(self._claim, newest, self._log.root)
            if decision is Decision.WATCH:
                assert newest is not None, "there is a record to watch"
                if watch is None:
                    watch = Watch(newest, begun_s)
                    self._log_waiting(newest)
                self._clock.sleep_s(min(_POLL_S, self._third_s))
            elif self._append(newest, decision, begun_s, verify=True) or self._is_renewed_since(newest):
                return

    def _find_expected_claim(self, newest: NumberedRecord | None) -> str | None:
        """Return the claim that the record must have: the run's own, or the one that its new claim replaces, if any."""
        replaces_claim = self._claims and newest is not None and may_replace(self._claim, newest.record)
        return _id_of(newest.record.claim if newest is not None and replaces_claim else self._claim)

    def _is_renewed_since(self, old: NumberedRecord | None) -> bool:
        """True if another process of this run was faster, for example as many workers begin at once.

        The driver renews the newest record while its query is active. Until a task of a restarted query has taken the
        lease, that is the record of the run before, with that run's plan, and possibly without a copy in format 1.
        """
        begun_s = self._clock.monotonic_s()
        newest = self._log.newest()
        if newest is None or newest == old or newest.record.released or self._is_held_by_other(newest.record):
            return False
        if (newest.record.owner.plan, newest.record.format_1_too) != (self._me.plan, self._format_1_too):
            return False
        self._note_record(newest, begun_s)
        return True

    def _log_waiting(self, newest: NumberedRecord) -> None:
        lasts_s = max(self._lease_ms, newest.record.lease_ms) / 1000
        _LOGGER.warning(
            "the state at %s was last written by %s, which did not record its end: this run waits for %.1f s to see "
            "whether it is still alive",
            self._log.root,
            newest.record.owner,
            lasts_s,
        )

    def _append(
        self, before: NumberedRecord | None, decision: Decision, begun_s: float, *, verify: bool = False
    ) -> bool:
        now_ms = int(self._clock.wall_s() * 1000)
        if before is None:
            record = LeaseRecord(self._me, 0, 0).renew_by(self._me, now_ms, self._lease_ms)
        elif decision is Decision.TAKE_OVER:
            record = before.record.take_over(self._me, now_ms, self._lease_ms)
        else:
            record = before.record.renew_by(self._me, now_ms, self._lease_ms)
        # Keep the first claimant's timestamp.
        claim = self._claim if self._claims and may_replace(self._claim, record) else record.claim or self._claim
        if claim is not None and not self._claims:
            claim = replace(claim, built=True)
        record = replace(record, format_1_too=self._format_1_too, claim=claim)
        if not self._log.append(before, record):
            return False
        written: NumberedRecord | None = NumberedRecord(1 if before is None else before.number + 1, record)
        if verify or self._clock.monotonic_s() > begun_s + self._third_s:
            # If it took long, others may have gone on, and removed the record with this number. When taking the lease,
            # read it back in any case, to be sure that the store kept it.
            written = self._log.newest()
        if written is None or written.record != record:
            return False
        self._note_record(written, begun_s)
        return True

    def _note_record(self, newest: NumberedRecord, at_s: float) -> None:
        self._newest, self._known_at_s, self._renew_at_s = newest, at_s, at_s + self._third_s
        self._apply_event(LeaseEvent.KNOWN)

    def _apply_event(self, event: LeaseEvent) -> None:
        with self._state_lock:
            self._state = LEASE.next_state(self._state, event)

    # -- keeping the lease -------------------------------------------------------------------------

    def _may_begin(self, request: _Request, now_s: float) -> bool:
        """True if no request is under way; one that takes as long as the lease lasts hangs, and is written off."""
        if request.over:
            return True
        hung = self._pool.threads_max - _THREADS
        if now_s < request.begun_s + self._lease_ms / 1000 * 2 ** max(0, hung - _HUNG_OFTEN):
            return False
        _LOGGER.warning("the store of the lease of %s does not answer: another request is made", self._log.root)
        with self._state_lock:
            if request.move(RequestEvent.WRITE_OFF) is RequestState.UNDER_WAY:
                self._pool.threads_max += 1
        return True

    def _do_in_background(self, work: Callable[[], None], request: _Request, timeout_s: float) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._state_lock:
                    if request.move(RequestEvent.END) is RequestState.HUNG:
                        self._pool.threads_max -= 1

        try:
            wait([self._pool.submit(run)], timeout_s)
        except StorageError as error:  # no thread could be started
            with self._state_lock:
                request.move(RequestEvent.END)
            self._note_no_answer(error)

    def _look_in_background(self) -> None:
        try:
            self._look(_STOP_ONE)
        except OwnershipError:
            pass  # `_successor` keeps it, and the next call raises it
        except StateError as error:
            # Do not stop a run that holds the lease only because a store does not answer. (Clean-up looks itself.)
            self._note_no_answer(error)

    def _look(self, advice: str) -> NumberedRecord | None:
        begun_s, before = self._clock.monotonic_s(), self._newest
        newest = self._log.newest()
        if newest is not None and self._is_held_by_other(newest.record):
            raise self._note_loss(newest.record, advice)
        # Numbers only ascend. A lower one means that the files were removed, and another process of the run was faster
        # to write again.
        if before is not None and (newest is None or newest.number < before.number) and self._newest is before:
            self._newest = None
            self._times_removed += 1
            _LOGGER.error(
                "%s, or the lease in it, was removed under a running query: its files are looked for again",
                self._log.root,
            )
        self._known_at_s = begun_s
        return newest

    def _is_held_by_other(self, record: LeaseRecord) -> bool:
        if not knows_claim(record, _id_of(self._claim)):
            return True
        return self._me.plan in record.replaced or not record.owner.is_same_run(self._me)

    def _renew_in_background(self) -> None:
        try:
            with self._hold_lock:
                # Not after the run has ended, and not while this process works for another run, which may have it.
                if self._state is LeaseState.HELD and self._clock.monotonic_s() >= self._renew_at_s:
                    self._renew()
        except OwnershipError:
            pass  # `_successor` keeps it, and the next call raises it
        except StateError as error:
            self._note_no_answer(error)

    def _renew(self) -> None:
        begun_s = self._clock.monotonic_s()
        newest = self._look(_STOP_ONE)
        if newest is not None and newest != self._newest and not newest.record.released:
            # Another process of the run has renewed it since.
            self._note_record(newest, begun_s)
        elif not self._append(newest, Decision.RENEW, begun_s):
            # Another process has just written a record: one of this run, or the lease is lost.
            newest = self._look(_STOP_ONE)
            if newest is not None:
                self._note_record(newest, begun_s)

    def _is_building_recorded(self) -> bool:
        return self._newest is not None and self._newest.record.claim is not None and self._newest.record.claim.built

    def _record_building(self) -> None:
        """Record in the lease that the run builds, before a call goes on from a committed pointer.

        From then on, the claim cannot be released.
        """
        while not self._is_building_recorded():
            with self._hold_lock:
                begun_s = self._clock.monotonic_s()
                newest = self._look(_STOP_ONE)
                claim = None if newest is None or newest.record.released else newest.record.claim
                if newest is not None and claim is not None and claim.built:
                    self._note_record(newest, begun_s)
                else:
                    self._append(newest, Decision.RENEW, begun_s)

    def set_aside(self) -> None:
        """Note that this process works for another run on the same folder from now on."""
        self._apply_event(LeaseEvent.SET_ASIDE)

    def _note_no_answer(self, error: StateError) -> None:
        self._not_before_s = self._clock.monotonic_s() + self._third_s / 2
        _LOGGER.warning("the lease of %s could not be renewed yet: %s", self._log.root, error)

    # -- losing the lease --------------------------------------------------------------------------

    def _stop_if_lost(self, advice: str) -> None:
        if self._successor is not None:
            raise self._make_lost_error(self._successor, advice)

    def _note_loss(self, record: LeaseRecord, advice: str) -> OwnershipError:
        lost_claim = not knows_claim(record, _id_of(self._claim))
        self._released = lost_claim and (record.claim is None or may_replace(self._claim, record))
        self._claimed = record.claim if lost_claim and not self._released else None
        self._successor = record.owner
        self._apply_event(LeaseEvent.SUPERSEDED)
        return self._make_lost_error(record.owner, advice)

    def _make_lost_error(self, owner: RunIdentity, advice: str) -> OwnershipError:
        if self._claimed is not None:
            return ClaimedError(
                f"the state at {self._log.root} belongs to {self._claimed}, which claimed it; {self._me} must no "
                "longer write it. Take the old query out of service. To run both, start one of them from a savepoint "
                "with mode='no_claim'. If the new query has ended for good without committing a batch, release the "
                f"claim: spark-state-ext savepoint release {self._log.root}"
            )
        if self._released:
            return ClaimedError(
                f"the claim {_id_of(self._claim)} to the state at {self._log.root} was released, and {owner} has the "
                f"lease; {self._me} must no longer write the state. Start the query again from a snapshot"
            )
        return LiveRunError(
            f"the state at {self._log.root} was taken over by {owner}, which started later; {self._me} must no longer "
            f"write it{advice}"
        )


def _id_of(claim: Claim | None) -> str | None:
    return None if claim is None else claim.id


class LeaseRegistry:
    """The leases of a process: for each query folder, the current run's lease, as a worker outlives queries."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()

    def of(
        self,
        files: Folder,
        me: RunIdentity,
        lease_ms: int,
        *,
        format_1_too: bool = False,
        claim: Claim | None = None,
        claims: bool = False,
    ) -> Lease:
        """Return the lease of a run on a folder."""
        with self._lock:
            lease = self._leases.get(files.identity)
            if lease is None or not lease.is_of(me, claim):
                new_lease = Lease(files, me, lease_ms, format_1_too=format_1_too, claim=claim, claims=claims)
                if lease is not None:
                    lease.set_aside()
                lease = self._leases[files.identity] = new_lease
            else:
                lease.note_task(me, claims)
            return lease
