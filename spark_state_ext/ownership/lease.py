"""Who may write an operator's state: a lease that a run renews while it lives.

A copied Spark checkpoint keeps its query id, so two runs can claim one folder. Immutable files keep their states apart,
but clean-up and the user's intent do not allow it: the second live run is refused, and a run that another has replaced
stops. Tasks renew the lease while they run, and the driver while the query is idle (`spark.client.lease_keeper`).

A newcomer watches the record for a whole lease on its own clock before it takes over: clocks of two machines are never
compared. A restart does not wait where the run before is known to be over: Spark itself never has one query active
twice in an application, the driver says so when a query ends, and in local mode a driver's process can be looked for.
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
    Found,
    LeaseRecord,
    RunIdentity,
    Watch,
    decide,
    knows_claim,
    refuse_written_since,
    takes_place,
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
# To look while a renewal hangs. More are made for requests that hang, from so many on ever more seldom.
_THREADS, _HUNG_OFTEN = 2, 6
_STOP_ONE = ". Stop one of the two."
_COPY_TOO = " A copied checkpoint that is to run on its own needs a copy of the state too: copy {} to the same place "
_COPY_TOO += "below another root, and name that root."
_NOT_DONE = "; what this run had left to do in the background is not done."


@dataclass(frozen=True)
class Clock:
    """Where a lease has the time from.

    Parameters
    ----------
    monotonic_s
        A clock that only goes forward: all is decided by it.
    wall_s
        Seconds since 1970, which people read in the record.
    sleep_s
        Waits.
    """

    monotonic_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
    sleep_s: Callable[[float], None] = time.sleep


@dataclass(eq=False)
class _Request:
    """A request that a thread of its own makes, since a time."""

    begun_s: float
    state: RequestState = RequestState.UNDER_WAY

    @property
    def over(self) -> bool:
        return self.state is RequestState.OVER

    def move(self, event: RequestEvent) -> RequestState:
        """Note an event; returns how it stood before."""
        before, self.state = self.state, REQUEST.next_state(self.state, event)
        return before


class Lease:
    """This process's hold on one query folder for one run."""

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
        self._newest: Found | None = None
        self._renew_at_s = -math.inf
        # After a store did not answer.
        self._not_before_s = -math.inf
        # Until then a call has nothing to do: it is made after each key.
        self._quiet_until_s = -math.inf
        # When it was known last that the run holds it.
        self._known_at_s = -math.inf
        self._holding = threading.Lock()
        self._moving = threading.Lock()
        self._renewing = self._looking = _Request(0.0, RequestState.OVER)
        # Each its own threads: a store that hangs does not keep the others' leases from being renewed.
        self._beside = DaemonPool("leases")
        self._beside.threads_max = _THREADS
        self._successor: RunIdentity | None = None
        self._claimed: Claim | None = None
        self._released, self._times_removed = False, 0

    def is_of(self, me: RunIdentity, claim: Claim | None = None) -> bool:
        """Whether it is the lease of a run, which goes by a claim to the folder or by none."""
        same = (self._me.application, self._me.plan) == (me.application, me.plan)
        return same and _id_of(self._claim) == _id_of(claim)

    def told(self, me: RunIdentity, claims: bool = False) -> None:
        """A task of the run asks. Tasks that are not told their query take turns with tasks that are."""
        if me.query:
            self._me = me
        # Once a pointer is committed, nobody makes the claim anew.
        self._claims = claims
        self._quiet_until_s = -math.inf

    @property
    def state(self) -> LeaseState:
        """How this process stands to the lease."""
        return self._state

    @property
    def age_s(self) -> float:
        """How long ago this process knew last that the run holds it; infinite where it never did."""
        return self._clock.monotonic_s() - self._known_at_s

    @property
    def times_removed(self) -> int:
        """How often this process found that the files of the lease were gone: somebody has removed the query folder."""
        return self._times_removed

    def hold(self) -> None:
        """Take or renew the lease when that is due; cheap otherwise.

        A lease that this process holds is renewed beside what it does, so that nobody waits for a slow store. Only
        where that did not come to pass for long, as batches are far between or a renewal hangs, does a call see first
        that it is held; it waits for a third of the lease at most.
        """
        if self._successor is None and self._clock.monotonic_s() < self._quiet_until_s:
            return
        self._stop_if_lost(_STOP_ONE)
        if not self._state.asked:
            with self._holding:
                if not self._state.asked:
                    self._take()
        else:
            self._renew_in_time()
        if self._claim is not None and not self._claims and self._state is LeaseState.HELD:
            self._say_that_it_builds()
        self._quiet_until_s = max(self._renew_at_s, self._not_before_s)

    def _renew_in_time(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s < max(self._renew_at_s, self._not_before_s):
            return
        if now_s >= self._known_at_s + 2 * self._third_s and self._may_begin(self._looking, now_s):
            self._looking = _Request(now_s)
            self._do_beside(self._look_beside, self._looking, self._third_s)
            self._stop_if_lost(_STOP_ONE)
        if self._may_begin(self._renewing, now_s):
            if not self._renewing.over:
                # The one that hangs has it.
                self._holding = threading.Lock()
            self._renewing = _Request(now_s)
            self._do_beside(self._renew_beside, self._renewing, 0.0)

    def check(self) -> None:
        """See that nobody has taken the lease over; for work after the run's last task, which must not renew it."""
        self._stop_if_lost(_NOT_DONE)
        if self._clock.monotonic_s() >= self._known_at_s + self._third_s:
            self._look(_NOT_DONE)

    def look(self) -> None:
        """Read the lease now, and raise if another run holds it."""
        self._stop_if_lost(_STOP_ONE)
        self._look(_STOP_ONE)

    # -- taking it ---------------------------------------------------------------------------------

    def _take(self) -> None:
        watch: Watch | None = None
        while True:
            begun_s = self._clock.monotonic_s()
            found = self._log.newest(first=True)
            over = found is not None and found.record.owner.is_over()
            decision = decide(found, self._me, watch, begun_s, self._lease_ms, over, self._expected(found))
            if decision in (Decision.CLAIMED, Decision.REPLACED):
                assert found is not None, "a record says so"
                copy_too = _COPY_TOO.format(self._log.root) if decision is Decision.REPLACED else ""
                raise self._lost_to(found.record, _STOP_ONE + copy_too)
            if decision is Decision.LIVE:
                assert found is not None, "somebody has renewed it"
                raise LiveRunError(
                    f"the state at {self._log.root} is being written by {found.record.owner}, and {self._me} must not "
                    "write it too. Stop the other run." + _COPY_TOO.format(self._log.root)
                )
            if self._claims:
                refuse_written_since(self._claim, found, self._log.root)
            if decision is Decision.WATCH:
                assert found is not None, "there is something to watch"
                if watch is None:
                    watch = Watch(found, begun_s)
                    self._tell_of_waiting(found)
                self._clock.sleep_s(min(_POLL_S, self._third_s))
            elif self._append(found, decision, begun_s, verify=True) or self._is_renewed_since(found):
                return

    def _expected(self, found: Found | None) -> str | None:
        """The claim that the record must have: the run's own, or where it makes that now the other query's, if any."""
        anew = self._claims and found is not None and takes_place(self._claim, found.record)
        return _id_of(found.record.claim if found is not None and anew else self._claim)

    def _is_renewed_since(self, found: Found | None) -> bool:
        """Whether another process of this run was faster, as when many workers begin at once.

        The driver renews the newest record while its query is active. Until a task of a restarted query has taken the
        lease, that is the record of the run before, with that run's plan, and perhaps without a copy in format 1.
        """
        begun_s = self._clock.monotonic_s()
        newest = self._log.newest()
        if newest is None or newest == found or newest.record.released or self._is_anothers(newest.record):
            return False
        if (newest.record.owner.plan, newest.record.format_1_too) != (self._me.plan, self._format_1_too):
            return False
        self._known(newest, begun_s)
        return True

    def _tell_of_waiting(self, found: Found) -> None:
        lasts_s = max(self._lease_ms, found.record.lease_ms) / 1000
        _LOGGER.warning(
            "the state at %s was last written by %s, which did not say that it has ended: this run waits for %.1f s "
            "to see whether it still lives",
            self._log.root,
            found.record.owner,
            lasts_s,
        )

    def _append(self, found: Found | None, decision: Decision, begun_s: float, *, verify: bool = False) -> bool:
        now_ms = int(self._clock.wall_s() * 1000)
        if found is None:
            record = LeaseRecord(self._me, 0, 0).renewed(self._me, now_ms, self._lease_ms)
        elif decision is Decision.TAKE_OVER:
            record = found.record.taken_over(self._me, now_ms, self._lease_ms)
        else:
            record = found.record.renewed(self._me, now_ms, self._lease_ms)
        # Whoever of the run claimed it first said when.
        claim = self._claim if self._claims and takes_place(self._claim, record) else record.claim or self._claim
        if claim is not None and not self._claims:
            claim = replace(claim, built=True)
        record = replace(record, format_1_too=self._format_1_too, claim=claim)
        if not self._log.append(found, record):
            return False
        made: Found | None = Found(1 if found is None else found.number + 1, record)
        if verify or self._clock.monotonic_s() > begun_s + self._third_s:
            # Where it took long, others may have gone on, and have removed the number that was free. And who begins
            # makes sure that the store does what it says.
            made = self._log.newest()
        if made is None or made.record != record:
            return False
        self._known(made, begun_s)
        return True

    def _known(self, newest: Found, at_s: float) -> None:
        self._newest, self._known_at_s, self._renew_at_s = newest, at_s, at_s + self._third_s
        self._move(LeaseEvent.KNOWN)

    def _move(self, event: LeaseEvent) -> None:
        with self._moving:
            self._state = LEASE.next_state(self._state, event)

    # -- keeping it --------------------------------------------------------------------------------

    def _may_begin(self, before: _Request, now_s: float) -> bool:
        """Whether there is none under way. One that takes as long as the lease lasts hangs, and does not count."""
        if before.over:
            return True
        hung = self._beside.threads_max - _THREADS
        if now_s < before.begun_s + self._lease_ms / 1000 * 2 ** max(0, hung - _HUNG_OFTEN):
            return False
        _LOGGER.warning("the store of the lease of %s does not answer: another request is made", self._log.root)
        with self._moving:
            if before.move(RequestEvent.WRITE_OFF) is RequestState.UNDER_WAY:
                self._beside.threads_max += 1
        return True

    def _do_beside(self, work: Callable[[], None], which: _Request, timeout_s: float) -> None:
        def done() -> None:
            try:
                work()
            finally:
                with self._moving:
                    if which.move(RequestEvent.END) is RequestState.HUNG:
                        self._beside.threads_max -= 1

        try:
            wait([self._beside.submit(done)], timeout_s)
        except StorageError as error:  # no thread
            with self._moving:
                which.move(RequestEvent.END)
            self._not_answered(error)

    def _look_beside(self) -> None:
        try:
            self._look(_STOP_ONE)
        except OwnershipError:
            pass  # kept as the successor
        except StateError as error:
            # That a store does not answer is no reason to stop a run that holds it. (Clean-up looks itself.)
            self._not_answered(error)

    def _look(self, and_so: str) -> Found | None:
        begun_s, before = self._clock.monotonic_s(), self._newest
        found = self._log.newest()
        if found is not None and self._is_anothers(found.record):
            raise self._lost_to(found.record, and_so)
        # Numbers only ascend. A lower one is of another process of the run that was faster to write anew.
        if before is not None and (found is None or found.number < before.number) and self._newest is before:
            self._newest = None
            self._times_removed += 1
            _LOGGER.error(
                "somebody has removed %s, or the lease in it, under a running query: its files are looked for again",
                self._log.root,
            )
        self._known_at_s = begun_s
        return found

    def _is_anothers(self, record: LeaseRecord) -> bool:
        if not knows_claim(record, _id_of(self._claim)):
            return True
        return self._me.plan in record.replaced or not record.owner.is_same_run(self._me)

    def _renew_beside(self) -> None:
        try:
            with self._holding:
                # Not after its run, nor where this process works for another one: the next one may have taken it.
                if self._state is LeaseState.HELD and self._clock.monotonic_s() >= self._renew_at_s:
                    self._renew()
        except OwnershipError:
            pass  # kept as the successor
        except StateError as error:
            self._not_answered(error)

    def _renew(self) -> None:
        begun_s = self._clock.monotonic_s()
        found = self._look(_STOP_ONE)
        if found is not None and found != self._newest and not found.record.released:
            # Another process of the run has renewed it since.
            self._known(found, begun_s)
        elif not self._append(found, Decision.RENEW, begun_s):
            # So somebody else has, just now: of this run, or it is lost.
            found = self._look(_STOP_ONE)
            if found is not None:
                self._known(found, begun_s)

    def _is_said_to_build(self) -> bool:
        return self._newest is not None and self._newest.record.claim is not None and self._newest.record.claim.built

    def _say_that_it_builds(self) -> None:
        """Before the first call that has a committed pointer goes on: from then on nobody may release the claim."""
        while not self._is_said_to_build():
            with self._holding:
                begun_s = self._clock.monotonic_s()
                found = self._look(_STOP_ONE)
                claim = None if found is None or found.record.released else found.record.claim
                if found is not None and claim is not None and claim.built:
                    self._known(found, begun_s)
                else:
                    self._append(found, Decision.RENEW, begun_s)

    def set_aside(self) -> None:
        """This process works for another run on the same folder from now on."""
        self._move(LeaseEvent.SET_ASIDE)

    def _not_answered(self, error: StateError) -> None:
        self._not_before_s = self._clock.monotonic_s() + self._third_s / 2
        _LOGGER.warning("the lease of %s could not be renewed yet: %s", self._log.root, error)

    # -- losing it ---------------------------------------------------------------------------------

    def _stop_if_lost(self, and_so: str) -> None:
        if self._successor is not None:
            raise self._lost_error(self._successor, and_so)

    def _lost_to(self, record: LeaseRecord, and_so: str) -> OwnershipError:
        lost_claim = not knows_claim(record, _id_of(self._claim))
        self._released = lost_claim and (record.claim is None or takes_place(self._claim, record))
        self._claimed = record.claim if lost_claim and not self._released else None
        self._successor = record.owner
        self._move(LeaseEvent.SUPERSEDED)
        return self._lost_error(record.owner, and_so)

    def _lost_error(self, owner: RunIdentity, and_so: str) -> OwnershipError:
        if self._claimed is not None:
            return ClaimedError(
                f"the state at {self._log.root} belongs to {self._claimed}, which claimed it; {self._me} must not "
                "write it any more. Take the old query out of service. To have both, start one of them from a "
                "savepoint with mode='no_claim'. Where the new query is gone for good before a batch of it was "
                f"committed, free the claim: spark-state-ext savepoint release {self._log.root}"
            )
        if self._released:
            return ClaimedError(
                f"the claim {_id_of(self._claim)} to the state at {self._log.root} was released, and {owner} has the "
                f"lease; {self._me} must not write it any more. Start the query anew from a snapshot"
            )
        return LiveRunError(
            f"the state at {self._log.root} was taken over by {owner}, which started later; {self._me} must not write "
            f"it any more{and_so}"
        )


def _id_of(claim: Claim | None) -> str | None:
    return None if claim is None else claim.id


class LeaseRegistry:
    """The lease objects of a process, one for each query folder: the current run's, as a worker outlives queries."""

    def __init__(self) -> None:
        self._held: dict[str, Lease] = {}
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
        """The lease object of a folder."""
        with self._lock:
            held = self._held.get(files.identity)
            if held is None or not held.is_of(me, claim):
                made = Lease(files, me, lease_ms, format_1_too=format_1_too, claim=claim, claims=claims)
                if held is not None:
                    held.set_aside()
                held = self._held[files.identity] = made
            else:
                held.told(me, claims)
            return held
