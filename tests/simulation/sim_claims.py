"""Queries that claim one query folder: as `sim_lease`, with the first query, queries that claim the folder, and releases.

Invariants of the records, in addition to those of leases: A claim stays in every later record, until a query that
continues from the owner's pointers claims the folder, or a user releases it. A release gives the folder back to the query
that it was claimed from. Only a run that knows the claim gets the lease. Other runs clean up for at most a third of a
lease. A claim that was built upon is not released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sim_lease import LEASE_STEPS, THIRD_S, Driver, LateFiles, LeaseWorld, Process, WrongLeaseError, run_lease_world
from sim_parts import Numbers, Step

from spark_state_ext.errors import MissingCheckpointError, OwnershipError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LEASE_FOLDER
from spark_state_ext.ownership import release
from spark_state_ext.ownership.claim_notes import note_handed_over
from spark_state_ext.ownership.lease import Clock
from spark_state_ext.ownership.lease_record import Claim, NumberedRecord, RunIdentity

__all__ = ["CLAIM_STEPS", "ClaimWorld", "simulate_claims"]

CLAIM_STEPS = (
    *LEASE_STEPS,
    "claim",
    "claim",
    "claim",  # a query that claims the folder starts from the pointers of its present owner
    "again",  # a query that has claimed it, or tried to, starts again
    "commit",
    "commit",  # a batch of it is committed
    "clean",  # processes of all drivers clean up late
    "release",
    "release",  # a user releases the claim
    "chain",  # a query claims the folder from one that has claimed it and built upon it; then its claim is released
)


@dataclass
class NewQuery:
    """A query that claims the folder.

    Parameters
    ----------
    claim
        Its claim.
    begun, committed
        Whether it has handed pointers to Spark, and whether a batch with them is committed.
    """

    claim: Claim
    begun: bool = False
    committed: bool = False


class LateFolder:
    """The query folder as a release sees it; its record may arrive late."""

    def __init__(self, world: ClaimWorld, late: bool) -> None:
        self._real = world.query_folder
        self._lease = LateFiles(self._real.child(LEASE_FOLDER), world.late_writes)
        self._lease.next_is_late = late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def child(self, name: str) -> LateFiles | Folder:
        return self._lease if name == LEASE_FOLDER else self._real.child(name)


class ClaimWorld(LeaseWorld):
    """Drivers of several queries around one folder, which belonged to the first query."""

    kinds: ClassVar[tuple[str, ...]] = CLAIM_STEPS
    drivers_max: ClassVar[int] = 8

    def __init__(self) -> None:
        # By plan of a driver; None for the first query.
        self.queries: dict[str, NewQuery | None] = {}
        self._starting: NewQuery | None = None
        self.new_queries: list[NewQuery] = []
        # Claims that were built upon.
        self.built_upon: set[str] = set()
        # When the newest record's claim last changed.
        self.changed_s = 0.0
        # The query that owns the folder, by all claims and releases so far.
        self.rightful: str | None = None
        self.counted: Counter[str] = Counter()
        super().__init__()

    @property
    def claimed(self) -> str | None:
        """The claim in the newest record."""
        return None if self._newest is None else _get_claim_id(self._newest)

    # -- steps -------------------------------------------------------------------------------------

    def _claim(self, numbers: Numbers) -> None:
        if self.owner is not None and numbers.yes():
            # Users should stop the query that has the folder; the new one may run in the same application.
            self.owner.alive = False
        at, begins = len(self.new_queries), numbers.below(4)
        claim = Claim(f"query-{at}", f"the query {at}", at, instead_of=self._find_replaced_claim(numbers))
        self.new_queries.append(NewQuery(claim))
        self._start(self.new_queries[-1], numbers)
        # Usually it begins at once.
        if self.queries[self.drivers[-1].identity.plan] is self.new_queries[-1] and begins:
            self.tick(self.drivers[-1], self.drivers[-1].processes[0])

    def _find_replaced_claim(self, numbers: Numbers) -> str | None:
        """Return the claim of the query whose committed pointers a new query begins with."""
        query = next((query for query in self.new_queries if query.claim.id == self.claimed), None)
        if query is not None and query.begun and (query.committed or numbers.below(4)):
            query.committed = True
        if query is None or query.committed:
            return self.claimed
        return query.claim.instead_of

    def _chain(self, numbers: Numbers) -> None:
        for _ in range(2):
            self._claim(numbers)
        if self.owner is not None:
            self.owner.alive = False
        self._release(numbers)

    def _again(self, numbers: Numbers) -> None:
        if self.new_queries:
            self._start(self.new_queries[-1 - numbers.below(min(3, len(self.new_queries)))], numbers)

    def _start(self, query: NewQuery | None, numbers: Numbers) -> None:
        self._starting = query
        try:
            self._driver(numbers)
        finally:
            self._starting = None

    def _commit(self, numbers: Numbers) -> None:
        for query in [query for query in self.new_queries if query.begun and not query.committed]:
            query.committed = numbers.yes()

    def _clean(self, numbers: Numbers) -> None:
        self.pass_time(THIRD_S)
        for driver in self.drivers:
            for process in driver.processes:
                self.clean_up(driver, process)

    def _release(self, numbers: Numbers) -> None:
        clock = Clock(lambda: self.now_s, lambda: 1e9 + self.now_s, self.pass_time)
        force, late = numbers.yes(), numbers.below(4) == 3
        folder: Any = LateFolder(self, late)
        try:
            release.release_query_folder(folder, force=force, clock=clock)
        except (OwnershipError, MissingCheckpointError):
            self.counted["releases refused"] += 1
        except StorageError:
            self.counted["releases that arrive late"] += 1
        else:
            self.counted["releases"] += 1

    def _begin(self, driver: Driver) -> None:
        super()._begin(driver)
        query = self.queries.setdefault(driver.identity.plan, self._starting)
        if query is not None:
            lease = driver.processes[-1].lease
            # Committed pointers name the claim, but not the claim that it replaced.
            claim = replace(query.claim, instead_of=None) if query.committed else query.claim
            lease._claim, lease._claims = claim, not query.committed

    def _hold(self, driver: Driver, process: Process) -> None:
        query = self.queries[driver.identity.plan]
        if query is None:
            super()._hold(driver, process)
            return
        committed = query.committed
        process.lease.note_task(driver.identity, claims=not committed)
        super()._hold(driver, process)
        if committed:
            self.built_upon.add(query.claim.id)
        else:
            note_handed_over(self.query_folder, query.claim.id)
            query.begun = True

    # -- checks ------------------------------------------------------------------------------------

    def _check_may_delete(self, driver: Driver) -> None:
        super()._check_may_delete(driver)
        if self._find_known_claim(driver) != self.claimed and self.now_s > self.changed_s + THIRD_S:
            raise WrongLeaseError(
                f"{driver.identity.plan} cleans up {self.now_s - self.changed_s:.1f} s after {self.claimed} had claimed it"
            )

    def _find_known_claim(self, driver: Driver) -> str | None:
        query = self.queries[driver.identity.plan]
        return None if query is None else query.claim.id

    def _check_newest_record(self) -> None:
        before, newest = self._newest, self._log.newest()
        if newest is not None and newest != before:
            self._check_record(before, newest)
        super()._check_newest_record()

    def _check_record(self, before: NumberedRecord | None, newest: NumberedRecord) -> None:
        claim_before, claim_now = None if before is None else _get_claim_id(before), _get_claim_id(newest)
        owner = self._driver_of(newest.record.owner)
        if claim_now != claim_before:
            self.changed_s = self.now_s
        if owner is None:
            self._check_release(claim_before, newest)
            return
        if claim_now != claim_before:
            self.counted["claims"] += 1
            self.rightful = claim_now
        query = self.queries[owner.identity.plan]
        if claim_now != self._find_known_claim(owner):
            raise WrongLeaseError(f"{owner.identity.plan} has the lease of a folder that {claim_now} has claimed")
        claimed_from_owner = claim_now != claim_before and claim_before is not None
        if claimed_from_owner and (query is None or query.claim.instead_of != claim_before):
            raise WrongLeaseError(f"{owner.identity.plan} has the lease of a folder that {claim_before} had claimed")
        if claim_now != claim_before and claim_before is not None:
            self.counted["claims in a chain"] += 1
            # Its committed pointers were the input of the new claim.
            self.built_upon.add(claim_before)

    def _check_release(self, claim_before: str | None, newest: NumberedRecord) -> None:
        claim_now = newest.record.claim
        if claim_before in self.built_upon:
            raise WrongLeaseError(f"the claim {claim_before} is released, after it was built upon")
        query = next(query for query in self.new_queries if query.claim.id == claim_before)
        self.rightful = query.claim.instead_of
        self.counted["releases in a chain"] += self.rightful is not None
        if (None if claim_now is None else claim_now.id) != self.rightful:
            raise WrongLeaseError(
                f"{claim_now} has the folder after a release, and it was claimed from {self.rightful}"
            )

    def calm(self) -> None:
        """As for leases, with a run of the query that owns the folder; a claim that was built upon is not released."""
        while self.late_writes:
            self.late_writes.pop()()
            self._check_newest_record()
        if self.rightful in self.built_upon:
            self._release(Numbers(b"\0\0"))
            self._check_newest_record()
        self._starting = next((query for query in self.new_queries if query.claim.id == self.rightful), None)
        super().calm()


def _get_claim_id(newest: NumberedRecord) -> str | None:
    return None if newest.record.claim is None else newest.record.claim.id


def _make_release_identity(*_: Any, **__: Any) -> RunIdentity:
    """Make the identity of a release, which is not a driver."""
    return RunIdentity("a release", "a release", pid=0)


def simulate_claims(steps: Iterable[Step], patches: Iterable[tuple[Any, str, Any]] = ()) -> ClaimWorld:
    """Run a history to its end; raises `WrongLeaseError` if an invariant is violated.

    Parameters
    ----------
    steps, patches
        As for `simulate_lease`.
    """
    world = ClaimWorld()
    run_lease_world(world, steps, [(RunIdentity, "here", lambda _: staticmethod(_make_release_identity)), *patches])
    return world
